"""The parts that preprocessing is cut into: which there are, whose they are, which are done, and joining them.

A part is an input file, or a range of lines of a large one. It becomes a pair of its own in ``<output_prefix>.parts``,
with a small JSON file next to it that appears last: that mark is what a restarted run, or another rank, goes by. The
folder also holds plan.json, the inputs and options; other inputs or options in the same folder are refused, as the
result would be a mixture of two corpora. A single part (one small file, one process) needs no folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.indexed import IndexedDatasetWriter
from megatron.optimus.data.tokenize.corpus import FileRange, split_file

PART_BYTES = 1 << 30  # of an uncompressed file: what a killed run does again at most


@dataclass(frozen=True)
class Part:
    number: int
    source: FileRange
    name: str  # of its pair, below the folder of parts or (per file) of the output

    @property
    def num_bytes(self) -> int:
        return self.source.stop - self.source.start


class PartPlan:
    """Parts of ``paths`` in the order of the output.

    Raises ConfigError for impossible options; DataError if earlier work under this name was of another kind.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        output_prefix: str,
        *,
        keys: Sequence[str],
        recipe: dict[str, Any],
        partitions: int | None,
        per_file: bool,
        shared: bool,
    ) -> None:
        if partitions is not None and (partitions < 1 or per_file):
            raise ConfigError(f"partitions={partitions} must be at least 1, and does not go with a pair per file")
        self.output_prefix, self.per_file, self.keys = output_prefix, per_file, list(keys)
        self._folder = Path(output_prefix) if per_file else Path(f"{output_prefix}.parts")
        self.parts: list[Part] = []
        if per_file:
            for name, path in zip(_names(paths), paths, strict=True):
                self.parts.append(Part(len(self.parts), FileRange(str(path), 0, path.stat().st_size), name))
        else:
            total = sum(path.stat().st_size for path in paths)
            limit = min(PART_BYTES, max(1, -(-total // (partitions or 1))))
            for path in paths:
                for source in split_file(path, limit):
                    self.parts.append(Part(len(self.parts), source, f"{len(self.parts):06}"))
        self.in_parts = per_file or shared or len(self.parts) > 1
        described = {key: str(value) for key, value in recipe.items()}
        times = [Path(part.source.path).stat().st_mtime_ns for part in self.parts]
        sources = [
            [part.source.path, part.source.start, part.source.stop, time]
            for part, time in zip(self.parts, times, strict=True)
        ]
        self._plan: dict[str, Any] = {"recipe": described, "sources": sources}
        self._counts: dict[int, dict[str, Any]] = {}  # of a single part, which has no file of marks

    def begin(self) -> None:
        """Writes down, or compares, what the parts are made from."""
        if not self.in_parts or self.per_file:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / "plan.json"
            if path.exists():
                found = json.loads(path.read_text(encoding="utf-8"))
                if found != self._plan:
                    what = "options" if found.get("recipe") != self._plan["recipe"] else "input files"
                    raise DataError(
                        f"{self._folder}: was begun with other {what}; remove the folder to start anew, or use another "
                        "--output-prefix"
                    )
            else:
                _write_json(path, self._plan)
        except (OSError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{self._folder}: cannot be used: {error}") from error

    def share(self, rank: int, world_size: int) -> list[Part]:
        """Parts of one of the processes that share the work: the largest first, round among them."""
        by_size = sorted(self.parts, key=lambda part: (-part.num_bytes, part.number))
        return by_size[rank::world_size]

    def prefix(self, part: Part, key: str) -> str:
        """Where a part's pair is written."""
        return f"{self._folder / part.name}_{key}_document" if self.in_parts else self.final_prefix(part, key)

    def final_prefix(self, part: Part, key: str) -> str:
        """The output that the part belongs to."""
        return f"{self._folder / part.name if self.per_file else self.output_prefix}_{key}_document"

    def is_done(self, part: Part) -> bool:
        """Removes what a killed process left of a part that is not done."""
        if not self.in_parts:
            return False
        if self._mark(part).exists():
            # the folder's plan vouches for its parts; in per-file mode each mark holds its own
            if not self.per_file or json.loads(self._mark(part).read_text())["plan"] == self._own_plan(part):
                return True
            self._mark(part).unlink()
        for key in self.keys:
            for left in self._mark(part).parent.glob(f"{Path(part.name).name}_{key}_document.*.tmp"):
                left.unlink(missing_ok=True)
        return False

    def mark_done(self, part: Part, counts: dict[str, Any]) -> None:
        if not self.in_parts:
            self._counts[part.number] = counts
            return
        _write_json(self._mark(part), {**counts, **({"plan": self._own_plan(part)} if self.per_file else {})})

    def counts(self, part: Part) -> dict[str, Any]:
        """What ``mark_done`` noted of a part."""
        if part.number not in self._counts:
            self._counts[part.number] = json.loads(self._mark(part).read_text(encoding="utf-8"))
        return self._counts[part.number]

    def all_done(self) -> bool:
        """Also reads all counts: they must be known when another process, which joins the parts, removes them."""
        if not all(self._mark(part).exists() for part in self.parts):
            return False
        for part in self.parts:
            self.counts(part)
        return True

    def merge(self, dtype: np.dtype[Any]) -> None:
        """Joins the parts into the final pairs and removes them."""
        try:
            for key in self.keys:
                with IndexedDatasetWriter(f"{self.output_prefix}_{key}_document", dtype) as writer:
                    for part in self.parts:
                        writer.add_pair(self.prefix(part, key))
        except DataError:
            if self._folder.exists():
                raise
            return  # another process has joined them meanwhile
        gone = self._folder.with_name(f"{self._folder.name}.{secrets.token_hex(4)}.tmp")
        try:
            os.rename(self._folder, gone)
        except FileNotFoundError:
            return
        shutil.rmtree(gone, ignore_errors=True)

    def _mark(self, part: Part) -> Path:
        return Path(f"{self._folder / part.name}.json")

    def _own_plan(self, part: Part) -> list[Any]:
        return [self._plan["recipe"], self._plan["sources"][part.number]]


def fingerprint(model: str | None) -> str:
    """Path and content of a tokenizer's files: a part made with another tokenizer must not be taken for done."""
    if model is None:
        return ""
    path = Path(model)
    files = [path] if path.is_file() else [path / name for name in ("tokenizer.json", "tokenizer_config.json")]
    content = b"".join(file.read_bytes() for file in files if file.is_file())
    return hashlib.sha256(content).hexdigest()


def _names(paths: Sequence[Path]) -> list[str]:
    """Names of the pairs of each file: its path below the folder all have in common, without the format's suffixes."""
    common = os.path.commonpath([path.resolve().parent for path in paths])
    names = []
    for path in paths:
        name = os.path.relpath(path.resolve(), common)
        for suffix in (".gz", ".zst", ".jsonl", ".json", ".ndjson", ".parquet", ".txt", ".md"):
            name = name.removesuffix(suffix)
        names.append(name)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"two input files would both become {twice}; rename one")
    return names


def _write_json(path: Path, value: Any) -> None:
    """Appears at once and whole."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    with open(temporary, "w", encoding="utf-8") as stream:
        json.dump(value, stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
