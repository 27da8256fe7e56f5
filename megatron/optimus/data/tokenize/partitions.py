"""Cuts the input of preprocessing into partitions, assigns them to processes, records which are done, and joins them.

A partition is an input file, or a range of lines of a large one. It becomes a pair of its own in the folder
``<output_prefix>.parts``, with a small JSON file beside it that is written last: by this mark a restarted run, or
another rank, sees that the partition is done, and of which input and options it is. One of an input file that has
changed since, such as a repaired one, is done again; the others are kept. The folder also holds plan.json, the options:
others in the same folder are refused, as somebody's work would be lost. A single partition (one small file, one
process) needs no folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.optimus.config.schema import ConfigError, TokenizerType
from megatron.optimus.config.tokenizer_files import definition_file
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.indexed import IndexedDatasetWriter
from megatron.optimus.data.splits import to_json
from megatron.optimus.data.tokenize.corpus import COMPRESSED, SUFFIXES, FileRange, split_file
from megatron.optimus.data.tokenize.shuffle import merge_runs
from megatron.optimus.platform.files import write_atomically

MAX_PARTITION_BYTES = 1 << 30  # of an uncompressed file: what a killed run repeats at most


@dataclass(frozen=True)
class Partition:
    """An input file, or a range of one, that becomes a pair of its own."""

    number: int  # in the order of the output
    source: FileRange
    name: str  # of its pair, below the folder of the partitions

    @property
    def num_bytes(self) -> int:
        """Bytes of the input, compressed as they are."""
        return self.source.stop - self.source.start


class PartitionPlan:
    """All partitions of the input, in the order of the output, and the record of which are done.

    Args:
        paths: input files
        output_prefix: path of the output, without key and suffix; with ``per_file`` a folder
        keys: of the texts, each of which becomes a pair
        recipe: options that the tokens depend on; a partition made with others is not taken for done
        skip_malformed: whether a partition in which malformed lines were skipped is taken for done
        partitions: least number of partitions to cut the input into, where it can be cut
        per_file: whether each input file becomes a pair of the output
        shared: whether several processes work on the output
        shuffle_seed: seed of the order of documents; None: that of the input
        hash_splits: whether a shuffled pair gets a file that says where its splits by hash begin

    Raises:
        ConfigError: the options are impossible.
        DataError: two input files would become one pair.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        output_prefix: str,
        *,
        keys: Sequence[str],
        recipe: dict[str, Any],
        skip_malformed: bool,
        partitions: int | None,
        per_file: bool,
        shared: bool,
        shuffle_seed: int | None = None,
        hash_splits: bool = False,
    ) -> None:
        if partitions is not None and (partitions < 1 or per_file):
            raise ConfigError(f"partitions={partitions} must be at least 1, and does not go with a pair per file")
        self.output_prefix, self.per_file, self.keys = output_prefix, per_file, list(keys)
        self._skip_malformed, self._shared = skip_malformed, shared
        self._shuffle_seed, self._hash_splits = shuffle_seed, hash_splits
        self._folder = Path(output_prefix) if per_file else Path(f"{output_prefix}.parts")
        self.partitions: list[Partition] = []
        if per_file:
            for name, path in zip(_pair_names(paths), paths, strict=True):
                self.partitions.append(
                    Partition(len(self.partitions), FileRange(str(path), 0, path.stat().st_size), name)
                )
        else:
            total = sum(path.stat().st_size for path in paths)
            limit = min(MAX_PARTITION_BYTES, max(1, -(-total // (partitions or 1))))
            for path in paths:
                for source in split_file(path, limit):
                    self.partitions.append(Partition(len(self.partitions), source, f"{len(self.partitions):06}"))
        self.uses_folder = per_file or shared or shuffle_seed is not None or len(self.partitions) > 1
        self._recipe = {key: str(value) for key, value in recipe.items()}
        times = [Path(partition.source.path).stat().st_mtime_ns for partition in self.partitions]
        self._sources = [
            [partition.source.path, partition.source.start, partition.source.stop, time]
            for partition, time in zip(self.partitions, times, strict=True)
        ]
        self._counts: dict[int, dict[str, Any]] = {}  # of finished partitions, by number

    def begin(self, protected: Sequence[Partition] = ()) -> None:
        """Writes plan.json, or compares it with an earlier run's.

        Args:
            protected: partitions of this process whose output must not replace an earlier one

        Raises:
            DataError: inputs or options differ, or there is earlier output.
        """
        if protected:
            self._refuse_existing(protected)
        if not self.uses_folder or self.per_file:
            return
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            self._folder.mkdir(exist_ok=True)
            path = self._folder / "plan.json"
            if path.exists():
                found = _of_tokens(json.loads(path.read_text(encoding="utf-8"))["recipe"])
                if changed := [
                    name for name in found.keys() | self._recipe if found.get(name) != self._recipe.get(name)
                ]:
                    raise DataError(
                        f"{self._folder}: was begun with other options ({', '.join(sorted(changed))}); remove the "
                        "folder to start anew, or use another --output-prefix"
                    )
            else:
                write_atomically(path, json.dumps({"recipe": self._recipe}))
        except (FileExistsError, NotADirectoryError) as error:
            raise DataError(
                f"{self._folder}: cannot write: {error.filename} is a file, not a folder; choose another "
                "--output-prefix"
            ) from error
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{self._folder}: cannot be used: {error}") from error

    def _refuse_existing(self, mine: Sequence[Partition]) -> None:
        """Raises DataError where a pair of an earlier run would be replaced; what was begun may be gone on with."""
        if self.uses_folder and not self.per_file and self._folder.exists():
            return
        partitions = [one for one in mine if not self._has_valid_mark(one)] if self.per_file else self.partitions[:1]
        for index in (Path(f"{self.final_prefix(one, key)}.idx") for one in partitions for key in self.keys):
            if index.exists():
                raise DataError(
                    f"{index}: is there already; add --overwrite to replace it, or use another --output-prefix"
                )

    def share(self, rank: int, world_size: int) -> list[Partition]:
        """Returns the partitions of one process: they are dealt out in turn, the largest first."""
        by_size = sorted(self.partitions, key=lambda partition: (-partition.num_bytes, partition.number))
        return by_size[rank::world_size]

    def prefix(self, partition: Partition, key: str) -> str:
        """Returns the prefix of a partition's own pair, if it is not shuffled."""
        if not self.uses_folder:
            return self.final_prefix(partition, key)
        return f"{self._folder / partition.name}_{key}_document"

    def runs_folder(self, partition: Partition) -> Path:
        """Returns the folder of a partition's sorted runs, if it is shuffled."""
        return Path(f"{self._folder / partition.name}.runs")

    def final_prefix(self, partition: Partition, key: str) -> str:
        """Returns the prefix of the output that a partition belongs to."""
        return f"{self._folder / partition.name if self.per_file else self.output_prefix}_{key}_document"

    def is_done(self, partition: Partition) -> bool:
        """Whether a partition is done. If it is not, removes the temporary files that a killed process left of it."""
        if not self.uses_folder:
            return False
        if self._has_valid_mark(partition):
            return True
        self._mark(partition).unlink(missing_ok=True)
        for key in self.keys:
            for left in self._mark(partition).parent.glob(f"{Path(partition.name).name}_{key}_document.*.tmp"):
                left.unlink(missing_ok=True)
        return False

    def mark_done(self, partition: Partition, counts: dict[str, Any]) -> None:
        """Records that a partition is done, with its counts of documents and tokens."""
        if not self.uses_folder:
            self._counts[partition.number] = counts
            return
        plan = [self._recipe, self._sources[partition.number]]
        write_atomically(self._mark(partition), json.dumps({**counts, "plan": plan}))

    def counts(self, partition: Partition) -> dict[str, Any]:
        """Returns the counts that ``mark_done`` recorded of a partition."""
        if partition.number not in self._counts:
            self._counts[partition.number] = json.loads(self._mark(partition).read_text(encoding="utf-8"))
        return self._counts[partition.number]

    def all_done(self) -> bool:
        """Whether every partition is done. If so, reads all counts, before another process joins and removes them."""
        if not all(self._has_valid_mark(partition) for partition in self.partitions):
            return False
        for partition in self.partitions:
            self.counts(partition)
        return True

    def merge(self, dtype: np.dtype[Any], show_progress: Callable[[float], None] = lambda fraction: None) -> None:
        """Joins the partitions into the final pairs and removes them.

        Args:
            dtype: element type of the pairs
            show_progress: called with the fraction of a pair that has been written

        Raises:
            DataError: a partition cannot be read, or the disk refuses.
        """
        try:
            if self._shuffle_seed is not None:
                num_runs = [self.counts(partition)["runs"] for partition in self.partitions]
                self.merge_shuffled(self.partitions, num_runs, dtype, show_progress)
            for key in self.keys if self._shuffle_seed is None else ():
                with IndexedDatasetWriter(f"{self.output_prefix}_{key}_document", dtype) as writer:
                    for partition in self.partitions:
                        writer.add_pair(self.prefix(partition, key))
                        show_progress((partition.number + 1) / len(self.partitions))
        except DataError:
            if self._folder.exists():
                raise
            return  # another process has joined them in the meantime
        self._remove()

    def merge_shuffled(
        self,
        partitions: Sequence[Partition],
        num_runs: Sequence[int],
        dtype: np.dtype[Any],
        show_progress: Callable[[float], None] = lambda fraction: None,
    ) -> None:
        """Merges the runs of partitions that belong to one output into its final pairs. Raises DataError."""
        folders = [self.runs_folder(partition) for partition in partitions]
        for i, key in enumerate(self.keys):
            with IndexedDatasetWriter(self.final_prefix(partitions[0], key), dtype) as writer:
                bucket_starts = merge_runs(folders, num_runs, i, writer, show_progress)
                if self._hash_splits and self._shuffle_seed is not None:
                    writer.splits = to_json(self._shuffle_seed, bucket_starts)

    def abandon(self) -> None:
        """Removes the folder after an error, where it holds no partition that another start could go on from."""
        if self.uses_folder and not self.per_file and not self._shared and len(self.partitions) == 1:
            self._remove()

    def _remove(self) -> None:
        """Removes the folder; another process may have done so."""
        gone = self._folder.with_name(f"{self._folder.name}.{secrets.token_hex(4)}.tmp")
        try:
            os.rename(self._folder, gone)
        except FileNotFoundError:
            return
        shutil.rmtree(gone, ignore_errors=True)

    def _mark(self, partition: Partition) -> Path:
        return Path(f"{self._folder / partition.name}.json")

    def _has_valid_mark(self, partition: Partition) -> bool:
        """Whether the partition was done from this input with these options."""
        try:
            mark = json.loads(self._mark(partition).read_text(encoding="utf-8"))
            recipe, source = mark["plan"]
            is_same = _of_tokens(recipe) == self._recipe and source == self._sources[partition.number]
            return is_same and (self._skip_malformed or not mark["malformed"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError):  # none, or not one of ours
            return False


def _of_tokens(recipe: dict[str, str]) -> dict[str, str]:
    """The options that tokens depend on; earlier versions also recorded whether malformed lines are skipped."""
    return {name: value for name, value in recipe.items() if name != "skip_malformed"}


def hash_tokenizer(kind: TokenizerType, model: str | None) -> str:
    """Hashes a tokenizer's files: a partition made with another tokenizer must not be taken for done.

    Args:
        kind: its type
        model: its file or folder; None gives the empty string
    """
    if model is None:
        return ""
    file = definition_file(kind, model) or Path(model)
    files = [file, Path(f"{file}.json")]  # tiktoken's pattern and special tokens are in a file beside its ranks
    files += [file.with_name("merges.txt")] if file.name == "vocab.json" else []
    files += [Path(model, "tokenizer_config.json")] if Path(model).is_dir() else []
    content = b"".join(file.read_bytes() for file in files if file.is_file())
    return hashlib.sha256(content).hexdigest()


def _pair_names(paths: Sequence[Path]) -> list[str]:
    """Names of the files' pairs: their paths below the folder that all have in common, without suffixes."""
    common = os.path.commonpath([path.resolve().parent for path in paths])
    names = []
    for path in paths:
        name = os.path.relpath(path.resolve(), common)
        for suffix in (*COMPRESSED, *SUFFIXES):
            name = name.removesuffix(suffix)
        names.append(name)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"two input files would both become {twice}; rename one")
    return names
