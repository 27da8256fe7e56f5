"""Verify the hashes of checkpoints, list their tensors, or compare two checkpoints.

    optimus verify runs/demo/checkpoints
    optimus verify runs/demo/checkpoints/step-00000300 --list
    optimus verify FIRST --compare SECOND

A comparison is of the tensors that both have. A model-only checkpoint has no moments; its weights are compared with the
masters of a full one.

Exit code: 0 where all are good or equal, 1 where one is damaged, different or lacks a parameter, or 2 after one line
that says what is wrong with the command line.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron.optimus.checkpoint import CheckpointError, Manifest, commit, load_manifest, resolve
from megatron.optimus.checkpoint.manifest import MANIFEST_NAME
from megatron.optimus.checkpoint.values import warnings_of
from megatron.optimus.checkpoint.verify import compare, find_damage
from megatron.optimus.config.load import Parser, whole_number
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.platform.log import printable, prints_errors
from megatron.optimus.platform.progress import Progress

_OF_THE_MODEL = ("weight", "master", "buffer")  # kinds without which a checkpoint is of another model


@prints_errors(ConfigError)
@prints_errors(CheckpointError, code=1)
def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``optimus verify``; returns the exit code."""
    parser = Parser("verify", __doc__ or "", usage="optimus verify PATH [options]")
    parser.add_argument("path", type=Path, help="a checkpoint, a folder of them, or a run")
    parser.add_argument("--list", action="store_true", help="also print every tensor")
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="OTHER",
        help="print the largest difference of every tensor to another checkpoint",
    )
    parser.add_argument(
        "--jobs", type=whole_number(), default=min(8, os.cpu_count() or 1), help="files to read at a time"
    )
    options = parser.parse(argv)
    for path in filter(None, (options.path, options.compare)):
        if not path.exists():
            raise ConfigError(f"{path}: no such file or folder")
    if options.compare is not None:
        return _compare(resolve(options.path), resolve(options.compare), options.jobs)
    return max([_verify(path, options.jobs, options.list) for path in _checkpoints(options.path)])


def _checkpoints(path: Path) -> list[Path]:
    """Returns the checkpoints of a path, oldest first."""
    if (path / MANIFEST_NAME).exists():
        return [path]
    for root in (path, path / "checkpoints"):
        found = [root / item.name for kind in ("model", "full") for item in commit.list_committed(root, kind)]
        if found:
            return found
    return [resolve(path)]  # raises with the reason


def _verify(path: Path, jobs: int, is_listing: bool) -> int:
    started = time.perf_counter()
    try:
        manifest = load_manifest(path)
    except CheckpointError as error:
        print(printable(f"{path}: DAMAGED\n  {error}"))
        return 1
    size, read = sum(manifest.files.values()), 0

    def show(num_bytes: int) -> None:
        nonlocal read
        read += num_bytes  # a count lost between two threads would not matter
        progress.update(read / size, f"{_size(read)} of {path.name}")

    with Progress("verify") as progress:
        damage = find_damage(path, manifest, jobs=jobs, show_progress=show)
    seconds = time.perf_counter() - started
    layout = " ".join(f"{axis}={n}" for axis, n in manifest.layout.items())
    summary = (
        f"{path}: {'DAMAGED' if damage else 'good'}, {manifest.kind}, step {manifest.step}, "
        f"{manifest.consumed_samples} samples, {len(manifest.tensors)} tensors, {_size(size)} in {len(manifest.files)} "
        f"files{', saved at ' + layout if layout else ''}; {_size(round(size / max(seconds, 1e-9)))}/s"
    )
    for line in [summary, *(f"  {line}" for line in damage)]:
        print(printable(line))
    for line in warnings_of(manifest.metadata):
        print(printable(f"  marked when it was saved: {line}"))
    if is_listing:
        _list(manifest)
    return 1 if damage else 0


def _list(manifest: Manifest) -> None:
    for entry in manifest.tensors.values():
        shape = "x".join(map(str, entry.shape)) or "scalar"
        print(f"  {entry.name} {entry.kind} {entry.dtype} {shape} {len(entry.pieces)} pieces")
    for name, version in manifest.packages.items():
        print(printable(f"  {name} {version}"))


def _compare(first: Path, second: Path, jobs: int) -> int:
    with Progress("compare") as progress:
        show = partial(progress.update, text=f"{first.name} and {second.name}")
        differences = compare(first, second, jobs=jobs, show_progress=show)
    compared = [one for one in differences if one.only_in is None]
    for one in compared:
        if one.reason is not None:
            print(printable(f"{one.name} {one.kind}: {one.reason}"))
        elif not one.is_same:
            count = f"{one.num_different} of {one.numel} elements"
            print(f"{one.name} {one.kind}: {count} differ, by {one.max_abs:.3e} at most")
    for path in (first, second):
        alone = [one for one in differences if one.only_in == path]
        if alone:
            kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(Counter(one.kind for one in alone).items()))
            example = next((one for one in alone if one.kind in _OF_THE_MODEL), alone[0])
            print(f"only in {path}: {kinds}, such as {example.name} {example.kind}")
    different = sum(not one.is_same for one in compared)
    print(f"{len(compared) - different} of {len(compared)} tensors that both have are bit-identical")
    both = {one.name for one in compared if one.kind in _OF_THE_MODEL}
    lacks = any(one.kind in _OF_THE_MODEL and one.name not in both for one in differences)
    return 1 if different or lacks or not compared else 0


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
