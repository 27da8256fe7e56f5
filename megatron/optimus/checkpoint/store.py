"""Saving and loading checkpoints: any layout out, any layout in.

Save (saver.py): the ranks of a node write the slices they own into one safetensors file of a fresh directory; when all
have succeeded, rank 0 writes the manifest and renames the directory. Load (reader.py): every rank asks for the slices
it needs; they are put together from whatever pieces overlap. Both speak only of places in global tensors, so no layout
is special.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.optimus.checkpoint import chunks, commit, reader
from megatron.optimus.checkpoint.errors import CheckpointError, DamagedError, UnknownVersionError
from megatron.optimus.checkpoint.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    parse_manifest,
    read_manifest,
)
from megatron.optimus.checkpoint.saver import Saver
from megatron.optimus.checkpoint.shards import check_regular, read_small_file
from megatron.optimus.checkpoint.slices import TensorSlice
from megatron.optimus.platform.ranks import Ranks

log = logging.getLogger("optimus")

_FOREIGN = ("config.json", "latest_checkpointed_iteration.txt", "latest_universal", "latest")

Requests = Callable[[Manifest], Sequence[TensorSlice]]


def save(
    root: Path,
    step: int,
    slices: Iterable[TensorSlice],
    *,
    kind: str,
    consumed_samples: int,
    config: dict[str, Any],
    metadata: dict[str, Any],
    ranks: Ranks | None = None,
    retain: int | None = 2,
) -> Path:
    """Writes and commits one checkpoint; returns its directory. Collective over ``ranks`` (None: all, on the CPU).

    The arguments, and what is raised, are those of ``saver.Saver``, which a training loop uses instead. ``kind``:
    "full" or "model". ``config``, ``metadata``: JSON objects, taken from rank 0. A step that is already there is saved
    again beside it and then replaces it.
    """
    header = Manifest(kind, step, consumed_samples, config, metadata, {}, {})
    saver = Saver(Path(root), ranks=ranks, asynchronous=False)
    return saver.start(list(slices), header, retain=retain)[-1].path


def load_manifest(path: Path) -> Manifest:
    """The validated manifest of one checkpoint directory, whose files are there with the right sizes."""
    path = Path(path)
    manifest = read_manifest(path)
    _check_directory(path, manifest)
    return manifest


def _check_directory(path: Path, manifest: Manifest) -> None:
    """The files are there, and the manifest is this directory's own."""
    named = commit.parse_name(path.name)
    if named is not None and (named.step, named.kind) != (manifest.step, manifest.kind):
        found = f"{manifest.kind!r} checkpoint of step {manifest.step}"
        raise CheckpointError(f"{path / MANIFEST_NAME}: is of a {found}, not of this directory")
    for name, size in manifest.files.items():
        try:
            check_regular(path / name, size)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; it holds {chunks.contents(manifest, name)}") from error


def latest(root: Path, kind: str = "full") -> Path | None:
    """The newest committed checkpoint that is complete (manifest valid, files there); None when there is none.

    Hashes are not checked here: loading does. Incomplete ones are logged and passed over; one of another version of the
    format raises CheckpointError.
    """
    for item in reversed(commit.list_committed(Path(root), kind)):
        path = Path(root) / item.name
        try:
            load_manifest(path)
        except UnknownVersionError:
            raise
        except CheckpointError as error:
            log.warning("checkpoint %s is not usable: %s", path, error)
        else:
            return path
    return None


def resolve(path: Path) -> Path:
    """The checkpoint meant by ``path``: itself, or the newest complete one of a checkpoints or run folder.

    A model-only one is taken where no full one is. Raises CheckpointError.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such folder; name a checkpoint, or the folder of a run or its checkpoints")
    if (path / MANIFEST_NAME).exists():
        return path
    for kind in ("full", "model"):
        for root in (path, path / "checkpoints"):
            found = latest(root, kind)
            if found is not None:
                return found
    foreign = [name for name in _FOREIGN if (path / name).exists()]
    remedy = f"; {foreign[0]} is of another format: convert it first, tools/convert_checkpoint.py" if foreign else ""
    raise CheckpointError(
        f"{path}: holds no complete checkpoint (neither {MANIFEST_NAME} nor step-* folders with one){remedy}"
    )


def load(path: Path, requests: Iterable[TensorSlice], *, cast: bool = False, manifest: Manifest | None = None) -> None:
    """Fills every request's tensor from the checkpoint directory ``path``. Local: each rank calls it for itself.

    Reads the pieces that overlap a request, each once, and checks their hashes. ``cast``: convert between
    floating-point dtypes instead of refusing them. ``manifest``: what ``load_manifest(path)`` gave, to spare a second
    reading. Raises CheckpointError for a tensor that is not there, has another shape or dtype, or is damaged; tensors
    may then be partly filled.
    """
    path = Path(path)
    reader.read(path, manifest or load_manifest(path), list(requests), Ranks.alone(), cast=cast)


def load_together(
    path: Path,
    requests: Requests,
    *,
    cast: bool = False,
    ranks: Ranks | None = None,
) -> Manifest:
    """Like ``load`` for all ``ranks`` at once (None: all ranks, on the CPU), each byte read by one of them. Collective.

    ``requests``: from the manifest, what this rank wants; local. Raises CheckpointError on every rank.
    """
    ranks = ranks or Ranks(None, "cpu")
    path = Path(path)
    manifest = _manifest_together(path, ranks)
    wanted = ranks.together(lambda: requests(manifest), f"loading {path}", CheckpointError)
    reader.read(path, manifest, wanted, ranks, cast=cast)
    return manifest


def load_newest(
    root: Path,
    requests: Requests,
    *,
    cast: bool = False,
    ranks: Ranks | None = None,
) -> tuple[Path, Manifest] | None:
    """Loads the newest full checkpoint of which every wanted byte is good; None when ``root`` never had one.

    Collective, as ``load_together``. A damaged checkpoint is logged with the tensor's name and the one before it is
    tried. Raises CheckpointError when there are checkpoints and none is good (starting anew would hide that), when the
    newest good one is of another version of the format, or when what is asked for does not fit the checkpoint.
    """
    root = Path(root)
    ranks = ranks or Ranks(None, "cpu")
    candidates = commit.list_committed(root) if ranks.rank == 0 else []
    [count] = ranks.broadcast([len(candidates)])
    for index in range(count):
        step, revision = ranks.broadcast(list(candidates[-1 - index][:2]) if candidates else [0, 0])
        path = root / commit.Committed(step, revision).name
        try:
            return path, load_together(path, requests, cast=cast, ranks=ranks)
        except DamagedError as error:
            if ranks.rank == 0 or error.__cause__ is not None:
                log.warning("checkpoint %s is damaged, trying the one before: %s", path, error)
    if count:
        raise CheckpointError(f"{root}: none of its {count} checkpoints can be loaded; the log names the damage")
    return None


def _manifest_together(path: Path, ranks: Ranks) -> Manifest:
    """The manifest as rank 0 read it, on every rank. Raises DamagedError on every rank."""

    def read() -> bytes:
        if ranks.rank > 0:
            return b""
        data = read_small_file(path / MANIFEST_NAME, MAX_MANIFEST_BYTES)
        with contextlib.suppress(UnknownVersionError):  # which is no damage; all ranks meet it below
            _check_directory(path, parse_manifest(data, str(path / MANIFEST_NAME)))
        return data

    data = ranks.together(read, f"loading {path}", DamagedError)
    return parse_manifest(ranks.broadcast_bytes(data), str(path / MANIFEST_NAME))


def everything(manifest: Manifest) -> list[TensorSlice]:
    """Requests for every tensor of a checkpoint, whole, in host memory; for tools and tests."""
    return [
        TensorSlice(e.name, e.kind, e.shape, 0, e.numel, torch.empty(e.numel, dtype=reader.torch_dtype(e.dtype)))
        for e in manifest.tensors.values()
    ]
