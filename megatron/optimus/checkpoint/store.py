"""Saves, finds and loads checkpoints: written at any layout of ranks, read at any other.

A save (saver.py) lets the ranks of a node write the slices they own into a few safetensors files of a fresh directory;
when all have succeeded, rank 0 writes the manifest and renames the directory. A load (reader.py) fills the slices that
every rank asks for from whatever stored pieces overlap them. Both speak only of regions of global tensors (slices.py),
so no layout is special.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.optimus.checkpoint import commit, reader
from megatron.optimus.checkpoint.errors import CheckpointError, DamagedError, UnknownVersionError
from megatron.optimus.checkpoint.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    TensorEntry,
    parse_manifest,
    read_manifest,
)
from megatron.optimus.checkpoint.saver import Saver
from megatron.optimus.checkpoint.shards import torch_dtype
from megatron.optimus.checkpoint.slices import TensorSlice
from megatron.optimus.checkpoint.untrusted import check_regular, read_small_file
from megatron.optimus.checkpoint.values import warnings_of
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
    """Writes and commits one checkpoint. Collective over ``ranks``. A training loop uses ``saver.Saver`` instead.

    Args:
        root: the folder of checkpoints, seen by all ranks.
        step: a step that is already there is saved again beside it and then replaces it.
        slices: what this rank writes. Over all ranks they cover every element of every tensor exactly once.
        kind: "full" or "model".
        consumed_samples: training sequences seen so far.
        config: the run's configuration, plain JSON; that of rank 0 is written.
        metadata: plain JSON of the caller's; that of rank 0 is written.
        ranks: None: all ranks, on the CPU. ``ranks.device`` is where the slices are.
        retain: how many of the newest checkpoints of this kind stay; None keeps all.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: on every rank when any rank fails.
    """
    header = Manifest(kind, step, consumed_samples, config, metadata, {}, {})
    saver = Saver(Path(root), ranks=ranks, asynchronous=False)
    return saver.start(list(slices), header, retain=retain)[-1].path


def load_manifest(path: Path) -> Manifest:
    """Reads and validates the manifest of a checkpoint directory, and checks that its files have the right sizes.

    Raises:
        CheckpointError: the manifest or a file is missing or wrong; the message names it.
    """
    path = Path(path)
    manifest = read_manifest(path)
    _check_directory(path, manifest)
    return manifest


def _check_directory(path: Path, manifest: Manifest) -> None:
    """Checks that the files are there and that the manifest belongs to this directory."""
    named = commit.parse_name(path.name)
    if named is not None and (named.step, named.kind) != (manifest.step, manifest.kind):
        found = f"{manifest.kind!r} checkpoint of step {manifest.step}"
        raise CheckpointError(f"{path / MANIFEST_NAME}: is of a {found}, not of this directory")
    for name, size in manifest.files.items():
        try:
            check_regular(path / name, size)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; it holds {manifest.contents_of(name)}") from error


def latest(root: Path, kind: str = "full") -> Path | None:
    """Finds the newest committed checkpoint that is complete: its manifest is valid and its files are there.

    Hashes are not checked here but when it is loaded. Incomplete checkpoints are logged and passed over.

    Args:
        root: the folder of checkpoints.
        kind: "full" or "model".

    Returns:
        Its directory; None when there is none.

    Raises:
        CheckpointError: the newest is of another version of the format.
    """
    _warn_of_links(Path(root), kind)
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


def newest_manifest(root: Path, other: Path | None) -> Manifest | None:
    """Reads the manifest of the full checkpoint that a run will probably resume from. Nothing is logged or raised.

    Args:
        root: the folder of the run's checkpoints.
        other: a checkpoint or run to start from where ``root`` has none.

    Returns:
        The manifest; None where there is no checkpoint, or none that can be read.
    """
    with contextlib.suppress(OSError):
        for item in reversed(commit.list_committed(Path(root))):
            with contextlib.suppress(CheckpointError, OSError):
                return load_manifest(Path(root) / item.name)
    with contextlib.suppress(CheckpointError, OSError):
        return None if other is None else load_manifest(resolve(other))
    return None


def resolve(path: Path) -> Path:
    """Finds the checkpoint that ``path`` means: itself, or the newest complete one of a run or of its checkpoints.

    A model-only checkpoint is taken where there is no full one.

    Raises:
        CheckpointError: there is none.
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
    remedy = f"; {foreign[0]} is of another format: convert it first with `optimus convert`" if foreign else ""
    raise CheckpointError(
        f"{path}: holds no complete checkpoint (neither {MANIFEST_NAME} nor step-* folders with one){remedy}"
    )


def load(path: Path, requests: Iterable[TensorSlice], *, cast: bool = False, manifest: Manifest | None = None) -> None:
    """Fills the tensors of requests from a checkpoint. Local: each rank calls it for itself.

    Every piece that overlaps a request is read once, whole, and its hash is checked.

    Args:
        path: the checkpoint's directory.
        requests: what is wanted; their tensors are written into.
        cast: convert between floating-point dtypes instead of refusing them.
        manifest: what ``load_manifest(path)`` returned, which saves reading it again.

    Raises:
        CheckpointError: a tensor is not there, has another shape or dtype, or is damaged; requests may then be partly
            filled.
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
    """Fills the requests of all ranks; each stored piece that they need is read by one rank. Collective over ``ranks``.

    Args:
        path: the checkpoint's directory, seen by all ranks.
        requests: returns what this rank wants of the checkpoint with this manifest. It must not communicate.
        cast: convert between floating-point dtypes instead of refusing them.
        ranks: None: all ranks, on the CPU.

    Returns:
        The manifest.

    Raises:
        CheckpointError: on every rank, when a request does not fit the checkpoint, or its format has another version.
        DamagedError: on every rank, when bytes are missing or wrong; requests may then be partly filled.
    """
    ranks = ranks or Ranks(None, "cpu")
    path = Path(path)
    manifest = _manifest_together(path, ranks)
    if ranks.rank == 0:
        log_warnings(path, manifest)
    wanted = ranks.run_on_all_ranks(lambda: requests(manifest), f"loading {path}", CheckpointError)
    reader.read(path, manifest, wanted, ranks, cast=cast)
    return manifest


def load_newest(
    root: Path,
    requests: Requests,
    *,
    cast: bool = False,
    ranks: Ranks | None = None,
    below: int | None = None,
) -> tuple[Path, Manifest] | None:
    """Loads the newest full checkpoint of which every wanted byte is good. Collective over ``ranks``.

    A damaged checkpoint is logged with the tensor's name, and the one before it is tried.

    Args:
        root: the folder of checkpoints.
        requests: as for ``load_together``; called again for every checkpoint that is tried.
        cast: convert between floating-point dtypes instead of refusing them.
        ranks: None: all ranks, on the CPU.
        below: only checkpoints of earlier steps count; None: all.

    Returns:
        Directory and manifest; None when ``root`` has no checkpoint that counts.

    Raises:
        CheckpointError: on every rank when there are checkpoints and none is good (a fresh start would hide that), when
            the newest good one is of another version of the format, or when a request does not fit it.
    """
    root = Path(root)
    ranks = ranks or Ranks(None, "cpu")
    candidates = [item for item in list_together(root, ranks) if below is None or item.step < below]
    for item in candidates:
        path = root / item.name
        try:
            return path, load_together(path, requests, cast=cast, ranks=ranks)
        except DamagedError as error:
            if ranks.rank == 0 or error.__cause__ is not None:
                log.warning("checkpoint %s is damaged, trying the one before: %s", path, error)
    if candidates:
        raise CheckpointError(
            f"{root}: none of its {len(candidates)} checkpoints can be loaded; the log names the damage. To begin "
            "again at step 0 and keep them and the old metrics.jsonl aside, add --from-scratch"
        )
    return None


def list_together(root: Path, ranks: Ranks) -> list[commit.Committed]:
    """Lists the committed full checkpoints of ``root``, newest first, as rank 0 sees them. Collective over ``ranks``.

    Raises CheckpointError on every rank where rank 0 cannot read the folder.
    """

    def names() -> str:
        if ranks.rank > 0:
            return ""
        _warn_of_links(root)
        return " ".join(item.name for item in reversed(commit.list_committed(root)))

    text = ranks.run_on_all_ranks(names, f"listing {root}", CheckpointError)
    found = map(commit.parse_name, ranks.broadcast_bytes(text.encode()).decode().split())
    return [item for item in found if item is not None]


def log_warnings(path: Path, manifest: Manifest) -> None:
    """Logs how a checkpoint was marked when it was saved. For those that load it."""
    for line in warnings_of(manifest.metadata):
        log.warning("checkpoint %s was marked when it was saved: %s", path, line)


def _warn_of_links(root: Path, kind: str = "full") -> None:
    """Logs names of checkpoints that are links, newer than all that can be read."""
    links, committed = commit.list_links(root, kind), commit.list_committed(root, kind)
    for item in links:
        if not committed or item > committed[-1]:
            log.warning("checkpoint %s is a link or a file, not a directory, and is not read", root / item.name)


def _manifest_together(path: Path, ranks: Ranks) -> Manifest:
    """Reads the manifest on rank 0 and gives it to every rank. Raises DamagedError on every rank."""

    def read() -> bytes:
        if ranks.rank > 0:
            return b""
        data = read_small_file(path / MANIFEST_NAME, MAX_MANIFEST_BYTES)
        with contextlib.suppress(UnknownVersionError):  # no damage: all ranks raise it below
            _check_directory(path, parse_manifest(data, str(path / MANIFEST_NAME)))
        return data

    data = ranks.run_on_all_ranks(read, f"loading {path}", DamagedError)
    return parse_manifest(ranks.broadcast_bytes(data), str(path / MANIFEST_NAME))


def request_for(entry: TensorEntry) -> TensorSlice:
    """Makes a request for a whole tensor of a checkpoint, in new host memory."""
    tensor = torch.empty(entry.numel, dtype=torch_dtype(entry.dtype))
    return TensorSlice(entry.name, entry.kind, entry.shape, 0, entry.numel, tensor)


def everything(manifest: Manifest) -> list[TensorSlice]:
    """Makes requests for every tensor of a checkpoint, whole. For tools and tests."""
    return [request_for(entry) for entry in manifest.tensors.values()]
