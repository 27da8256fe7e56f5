"""Reads the options that name the data of a run: corpora, their files, and the weights they are mixed by.

There are three ways to name them:

- ``data_path``: prefixes (one corpus, each file in proportion to its size), or ``weight prefix weight prefix ...``
  (Megatron's form: each prefix is a corpus of its own).
- ``data_file_list``, a text file with lines ``weight prefix corpus``, the form of AuroraGPT's lists. Files of one
  corpus are drawn in proportion to their sizes; its weight is the sum of theirs. Without a third word the prefix is a
  corpus of its own. Empty lines and lines that begin with # are skipped.
- ``data_file_list``, a YAML or JSON file, for globs, and for weights that change during the run:

      corpora:
        web:  {paths: [web/*], weight: 0.8}
        code: {paths: [code/part-0, code/part-1], weight: 0.2}
      stages:                              # optional
        - start_tokens: 1_900_000_000_000  # or start_samples
          weights: {web: 0.5, code: 0.5}

  Where no corpus has a weight, each has its share of all tokens.

Prefixes in such a file are relative to its folder; an ending .bin or .idx is dropped.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from pathlib import Path
from typing import Any

from megatron.optimus.config.schema import ConfigError, DataConfig
from megatron.optimus.config.serialize import read_plain

_MAX_EXPONENT = 100  # of a weight: an integer with millions of digits would fill the memory


@dataclass(frozen=True)
class Corpus:
    """A named set of .bin/.idx pairs."""

    name: str
    prefixes: tuple[str, ...]  # paths without suffix


@dataclass(frozen=True)
class MixtureStage:
    """Weights of all corpora from a point of the run on; exactly one of the two starts is set."""

    weights: tuple[Fraction, ...]
    start_tokens: int | None = None
    start_samples: int | None = 0

    def first_sample(self, seq_length: int) -> int:
        """Returns the position of the first sample that begins at or after the start."""
        return -(-self.start_tokens // seq_length) if self.start_tokens is not None else self.start_samples or 0


@dataclass(frozen=True)
class Sources:
    """The data of a run: corpora, and the stages of their weights. Without stages each has its share of all tokens."""

    corpora: tuple[Corpus, ...]
    stages: tuple[MixtureStage, ...] = ()

    @property
    def is_blend(self) -> bool:
        """True if a ``Mixture`` is needed: there are several corpora, or weights that could change."""
        return bool(self.stages) or len(self.corpora) > 1

    @property
    def prefixes(self) -> list[str]:
        """Prefixes of all corpora."""
        return [prefix for corpus in self.corpora for prefix in corpus.prefixes]


def read_sources(config: DataConfig) -> Sources:
    """Reads the corpora and weights that ``data_path`` or ``data_file_list`` name.

    Raises:
        ConfigError: the list cannot be read, a weight is impossible, or a file is named twice.
    """
    if config.data_file_list is None:
        sources = _from_data_path(config.data_path)
    elif Path(config.data_file_list).suffix.lower() in (".yaml", ".yml", ".json"):
        sources = _from_yaml(config.data_file_list)
    else:
        sources = _from_text_file(config.data_file_list)
    seen: dict[str, str] = {}
    for corpus in sources.corpora:
        for prefix in corpus.prefixes:
            path = os.path.abspath(prefix)  # however it is spelled
            if path in seen:
                where = f"in corpora {seen[path]} and {corpus.name}" if seen[path] != corpus.name else "twice"
                raise ConfigError(f"{prefix} is named {where}; name each file once and raise its weight instead")
            seen[path] = corpus.name
    return sources


def _number(text: object) -> Fraction | None:
    try:
        value = Decimal(str(text))
        is_number = not isinstance(text, bool) and abs(value.adjusted()) <= _MAX_EXPONENT
        return Fraction(value) if is_number else None
    except (InvalidOperation, ValueError, OverflowError):  # no number, NaN, infinity
        return None


def _weight(text: object, where: str, *, zero: bool = False) -> Fraction:
    weight = _number(text)
    if weight is None or weight < 0 or (not weight and not zero):
        limit = "0 or more" if zero else "above 0; leave out what is not to be read"
        raise ConfigError(f"{where}: weight {text} must be a finite number, {limit}")
    return weight


def _prefix(word: str, folder: Path | None = None) -> str:
    for suffix in (".bin", ".idx"):
        word = word.removesuffix(suffix)
    return str(folder / word) if folder is not None else word


def _from_data_path(words: list[str]) -> Sources:
    weights = [_number(word) for word in words[::2]]
    if not words or len(words) % 2 or None in weights:
        if len(words) > 1 and weights[0] is not None and not _exists(words[0]):
            raise ConfigError(
                f"data_path begins with the weight {words[0]} but does not go on as pairs of weight and prefix "
                f"({len(words)} words); use 'weight prefix weight prefix ...', or prefixes alone"
            )
        return Sources((Corpus("all", tuple(map(_prefix, words))),))
    corpora = tuple(Corpus(_prefix(word), (_prefix(word),)) for word in words[1::2])
    checked = tuple(_weight(word, f"data_path, {path}") for word, path in zip(words[::2], words[1::2], strict=True))
    return Sources(corpora, (MixtureStage(checked),))


def _exists(prefix: str) -> bool:
    return Path(f"{_prefix(prefix)}.idx").exists()


def _from_text_file(path: str) -> Sources:
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()  # some editors write a byte-order mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"data_file_list={path} is no UTF-8 text, at byte {error.start}") from error
    except OSError as error:
        raise ConfigError(f"data_file_list={path} cannot be read: {error.strerror}") from error
    prefixes: dict[str, list[str]] = {}
    weights: dict[str, Fraction] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) not in (2, 3):
            raise ConfigError(
                f"{path}:{number}: expected 'weight prefix corpus', got {len(words)} words: {line[:60]!r}"
            )
        prefix = _prefix(words[1], Path(path).parent)
        name = words[2] if len(words) == 3 else prefix
        weights[name] = weights.get(name, Fraction(0)) + _weight(words[0], f"{path}:{number}")
        prefixes.setdefault(name, []).append(prefix)
    if not prefixes:
        raise ConfigError(f"data_file_list={path} names no files")
    corpora = tuple(Corpus(name, tuple(files)) for name, files in prefixes.items())
    return Sources(corpora, (MixtureStage(tuple(weights.values())),))


def _from_yaml(path: str) -> Sources:
    data = _mapping(read_plain(path), path, {"corpora", "stages"})
    if not data.get("corpora"):
        raise ConfigError(f"{path}: has no corpora")
    corpora, weights = [], []
    for name, value in _mapping(data["corpora"], f"{path}: corpora").items():
        where = f"{path}: corpus {name}"
        entry = _mapping(value, where, {"paths", "weight"})
        corpora.append(Corpus(str(name), _expand(entry.get("paths"), Path(path).parent, where)))
        weights.append(entry.get("weight"))
    stages = data.get("stages") or []
    if not isinstance(stages, list):
        raise ConfigError(f"{path}: stages must be a list")
    names = [corpus.name for corpus in corpora]
    if weights == [None] * len(weights):
        if stages:
            raise ConfigError(f"{path}: stages change weights, so every corpus needs a weight to begin with")
        return Sources(tuple(corpora))
    first = tuple(
        _weight(weight, f"{path}: corpus {name}", zero=bool(stages))
        for name, weight in zip(names, weights, strict=True)
    )
    parsed = [
        MixtureStage(first),
        *(_stage(stage, names, f"{path}: stage {i}") for i, stage in enumerate(stages, start=1)),
    ]
    for i, stage in enumerate(parsed):
        if not any(stage.weights):
            raise ConfigError(f"{path}: {f'stage {i}' if i else 'corpora'}: all weights are 0")
    for i, name in enumerate(names):
        if not any(stage.weights[i] for stage in parsed):
            raise ConfigError(f"{path}: corpus {name} has weight 0 in every stage; leave it out")
    return Sources(tuple(corpora), tuple(parsed))


def _stage(value: object, names: list[str], where: str) -> MixtureStage:
    entry = _mapping(value, where, {"start_tokens", "start_samples", "weights"})
    weights = _mapping(entry.get("weights"), f"{where}, weights", set(names))
    if missing := [name for name in names if name not in weights]:
        raise ConfigError(f"{where}: no weight for {', '.join(missing)}; name every corpus, 0 where it pauses")
    starts = {key: entry[key] for key in ("start_tokens", "start_samples") if key in entry}
    if len(starts) != 1 or any(isinstance(at, bool) or not isinstance(at, int) or at < 1 for at in starts.values()):
        raise ConfigError(f"{where}: give either start_tokens or start_samples, a whole number above 0; got {starts}")
    return MixtureStage(
        tuple(_weight(weights[name], f"{where}, {name}", zero=True) for name in names),
        starts.get("start_tokens"),
        starts.get("start_samples"),
    )


def _expand(paths: object, folder: Path, where: str) -> tuple[str, ...]:
    if not isinstance(paths, list) or not paths or not all(isinstance(path, str) for path in paths):
        raise ConfigError(f"{where}: paths must be a list of prefixes or globs, got {paths!r}")
    found: list[str] = []
    for path in paths:
        prefix = _prefix(path, folder)
        if glob.has_magic(path):
            matches = sorted(_prefix(match) for match in glob.glob(f"{prefix}.idx", recursive=True))
            if not matches:
                raise ConfigError(f"{where}: no file matches {prefix}.idx")
            found += matches
        else:
            found.append(prefix)
    return tuple(found)


def _mapping(value: Any, where: str, keys: set[str] | None = None) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected names with values, got {value!r}")
    if keys is not None and (unknown := [str(key) for key in value if key not in keys]):
        raise ConfigError(f"{where}: unknown {', '.join(unknown)}; it takes {', '.join(sorted(keys))}")
    return value
