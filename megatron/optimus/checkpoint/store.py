"""Saving and loading checkpoints: any layout out, any layout in.

Save: every rank writes the slices it owns into one safetensors file of a fresh directory; when all have succeeded,
rank 0 writes the manifest and renames the directory. Load: every rank asks for the slices it needs; they are put
together from whatever pieces overlap. Both speak only of ranges of global tensors, so no layout is special.
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from megatron.optimus.checkpoint import commit
from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    Piece,
    TensorEntry,
    parse_json,
    parse_tensors,
    read_manifest,
    tensor_to_json,
)
from megatron.optimus.checkpoint.shards import (
    ShardItem,
    ShardReader,
    check_regular,
    dtype_name,
    read_small_file,
    tensor_bytes,
    write_shard,
)
from megatron.optimus.checkpoint.slices import TensorSlice
from megatron.optimus.runtime.agreement import Ranks, attempt

log = logging.getLogger("optimus")


def save(
    root: Path,
    step: int,
    slices: Iterable[TensorSlice],
    *,
    kind: str,
    consumed_samples: int,
    config: dict[str, Any],
    metadata: dict[str, Any],
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    retain: int = 2,
) -> Path:
    """Writes and commits one checkpoint; returns its directory. Collective over ``group`` (None: all ranks).

    ``slices``: what this rank writes; over all ranks they must cover every element of every tensor exactly once.
    ``kind``: "full" or "model". ``config``, ``metadata``: JSON objects, taken from rank 0. ``device``: for the group's
    own small tensors. ``retain``: newest checkpoints to keep, this one included; older ones go after the commit.
    A step that is already there is saved again beside it and then replaces it.

    Raises CheckpointError on *every* rank when any rank fails (disk full, missing elements, ...), naming the rank;
    the unfinished directory is removed and the earlier checkpoints stay as they were.
    """
    if kind not in ("full", "model"):
        raise CheckpointError(f"kind={kind!r}: must be 'full' or 'model'")
    if retain < 1:
        raise CheckpointError(f"save_retain={retain}: must be at least 1")
    if not 0 <= step < 10**12:
        raise CheckpointError(f"step={step}: must be in 0 ... 10^12-1")
    root = Path(root)
    ranks = Ranks(group, device)
    [nonce] = ranks.broadcast([secrets.randbits(62)])
    temporary = commit.temporary_path(root, step, nonce)
    task = f"saving step {step} to {root}"
    try:
        ranks.together(lambda: _write_own_shard(temporary, ranks.rank, slices), task, CheckpointError)
        header = (kind, step, consumed_samples, config, metadata)
        commit_all = lambda: _commit(root, temporary, ranks, *header) if ranks.rank == 0 else None  # noqa: E731
        committed = ranks.together(commit_all, task, CheckpointError)
    except CheckpointError:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    [revision] = ranks.broadcast([committed.revision if committed else 0])
    saved = commit.Committed(step, revision)
    if ranks.rank == 0:
        commit.prune(root, saved, retain)
        newest = commit.list_committed(root)[-1]
        if newest > saved:
            log.warning(
                "%s also holds the newer %s, from which an automatic resume would continue; move it away if this run "
                "should replace it",
                root,
                newest.name,
            )
    return root / saved.name


def load_manifest(path: Path) -> Manifest:
    """The validated manifest of one checkpoint directory, whose files are there with the right sizes."""
    path = Path(path)
    manifest = read_manifest(path)
    for name, size in manifest.files.items():
        try:
            check_regular(path / name, size)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; it holds {_contents(manifest, name)}") from error
    return manifest


def latest(root: Path) -> Path | None:
    """The newest committed checkpoint that is complete (manifest valid, files there); None when there is none.

    Hashes are not checked here: ``find_loadable`` does. Incomplete ones are logged and passed over.
    """
    for item in reversed(commit.list_committed(Path(root))):
        path = Path(root) / item.name
        try:
            load_manifest(path)
        except CheckpointError as error:
            log.warning("checkpoint %s is not usable: %s", path, error)
        else:
            return path
    return None


def find_loadable(
    root: Path, *, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> Path | None:
    """The newest checkpoint of which every byte verifies; None when ``root`` has never had one. Collective.

    The ranks of ``group`` share the reading. A damaged checkpoint is logged with the tensor's name and the one before
    it is tried. Raises CheckpointError when there are checkpoints and none is good (starting anew would hide that).
    """
    root = Path(root)
    ranks = Ranks(group, device)
    candidates = commit.list_committed(root) if ranks.rank == 0 else []
    [count] = ranks.broadcast([len(candidates)])
    for index in range(count):
        step, revision = ranks.broadcast(list(candidates[-1 - index]) if candidates else [0, 0])
        path = root / commit.Committed(step, revision).name
        _, error = attempt(lambda path=path: verify(path, part=ranks.rank, parts=ranks.size))  # type: ignore[misc]
        failure = ranks.first_failure(error)
        if failure is None:
            return path
        if error is not None:
            log.warning("checkpoint %s is damaged, trying the one before: %s", path, error)
        elif ranks.rank == 0:
            log.warning("checkpoint %s is damaged (found by rank %d), trying the one before", path, failure[0])
    if count:
        raise CheckpointError(f"{root}: none of its {count} checkpoints can be loaded; the log names the damage")
    return None


def resolve(path: Path) -> Path:
    """The checkpoint meant by ``path``: itself, or the newest complete one of a checkpoints or run folder."""
    path = Path(path)
    if (path / MANIFEST_NAME).exists():
        return path
    for root in (path, path / "checkpoints"):
        found = latest(root)
        if found is not None:
            return found
    raise CheckpointError(f"{path}: holds no complete checkpoint (neither {MANIFEST_NAME} nor step-* folders with one)")


def verify(path: Path, *, part: int = 0, parts: int = 1) -> None:
    """Checks the hash of every piece of a checkpoint, or of one of ``parts`` shares of about equal bytes.

    Raises CheckpointError naming the tensor and the file.
    """
    manifest = load_manifest(path)
    everything = sorted(
        ((entry, piece) for entry in manifest.tensors.values() for piece in entry.pieces),
        key=lambda pair: (pair[1].file, pair[1].key),
    )
    total = sum(piece.stop - piece.start for _, piece in everything)
    wanted, position = [], 0
    for entry, piece in everything:
        if position * parts // total == part:
            wanted.append((entry, piece))
        position += piece.stop - piece.start
    for _ in _read_pieces(Path(path), manifest, wanted, verify=True):
        pass


def load(
    path: Path,
    requests: Iterable[TensorSlice],
    *,
    verify: bool = True,
    cast: bool = False,
    manifest: Manifest | None = None,
) -> None:
    """Fills every request's tensor from the checkpoint directory ``path``. Local: each rank calls it for itself.

    Reads only pieces that overlap a request, each once, through memory maps. ``verify``: check the whole hash of every
    piece read. ``cast``: convert between floating-point dtypes instead of refusing them. ``manifest``: what
    ``load_manifest(path)`` gave, to spare a second reading. Raises CheckpointError for a tensor that is not there, has
    another shape or dtype, or is damaged; tensors may then be partly filled.
    """
    path = Path(path)
    manifest = manifest or load_manifest(path)
    targets: dict[Piece, list[TensorSlice]] = defaultdict(list)
    wanted: dict[Piece, TensorEntry] = {}
    for request in requests:
        if request.start == request.stop:
            continue
        entry = _matching_entry(path, manifest, request, cast)
        first = bisect_right(entry.pieces, request.start, key=lambda piece: piece.start) - 1
        for piece in entry.pieces[first:]:
            if piece.start >= request.stop:
                break
            targets[piece].append(request)
            wanted[piece] = entry
    pairs = sorted(((entry, piece) for piece, entry in wanted.items()), key=lambda pair: (pair[1].file, pair[1].key))
    for piece, stored in _read_pieces(path, manifest, pairs, verify=verify):
        for request in targets[piece]:
            start, stop = max(piece.start, request.start), min(piece.stop, request.stop)
            with torch.no_grad():
                request.tensor[start - request.start : stop - request.start].copy_(
                    stored[start - piece.start : stop - piece.start]
                )


def _write_own_shard(directory: Path, rank: int, slices: Iterable[TensorSlice]) -> None:
    """This rank's safetensors file, and beside it an index of its pieces for rank 0."""
    directory.mkdir(parents=True, exist_ok=True)  # every rank: on a network disk rank 0's may not be visible yet
    own = [piece for piece in slices if piece.stop > piece.start]
    file = f"rank-{rank:05d}.safetensors"
    items = [ShardItem(_key(s), s.tensor.dtype, (s.stop - s.start,), lambda s=s: s.tensor) for s in own]  # type: ignore[misc]
    hashes = write_shard(directory / file, items)
    index = {
        "bytes": (directory / file).stat().st_size,
        "tensors": [
            tensor_to_json(
                TensorEntry(
                    s.name,
                    s.kind,
                    dtype_name(s.tensor.dtype),
                    s.global_shape,
                    (Piece(file, _key(s), s.start, s.stop, hashes[_key(s)]),),
                )
            )
            for s in own
        ],
    }
    commit.write_synced(directory / _index_name(rank), json.dumps(index).encode())


def _commit(
    root: Path,
    temporary: Path,
    ranks: Ranks,
    kind: str,
    step: int,
    consumed_samples: int,
    config: dict[str, Any],
    metadata: dict[str, Any],
) -> commit.Committed:
    """Rank 0: merges the indices into the manifest, which checks that they cover everything, and commits."""
    files: dict[str, int] = {}
    tensors: dict[tuple[str, str], TensorEntry] = {}
    for rank in range(ranks.size):
        path = temporary / _index_name(rank)
        if not path.exists():
            raise CheckpointError(f"rank {rank}'s files are not in {temporary}: all ranks must see one file system")
        index = parse_json(read_small_file(path, MAX_MANIFEST_BYTES), str(path))
        files[f"rank-{rank:05d}.safetensors"] = index["bytes"]
        for item in index["tensors"]:
            [entry] = parse_tensors([item], str(path)).values()
            known = tensors.get((entry.name, entry.kind))
            if known is not None:
                if (known.dtype, known.shape) != (entry.dtype, entry.shape):
                    raise CheckpointError(
                        f"{entry.name} ({entry.kind}) is {entry.dtype} {entry.shape} on rank {rank}, "
                        f"{known.dtype} {known.shape} on a rank before"
                    )
                entry = TensorEntry(entry.name, entry.kind, entry.dtype, entry.shape, known.pieces + entry.pieces)
            tensors[entry.name, entry.kind] = entry
        path.unlink()
    manifest = Manifest(kind, step, consumed_samples, config, metadata, files, tensors)
    commit.write_synced(temporary / MANIFEST_NAME, manifest.to_bytes())
    return commit.commit(root, temporary, step)


def _read_pieces(
    path: Path, manifest: Manifest, pairs: list[tuple[TensorEntry, Piece]], *, verify: bool
) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Yields the 1-D content of the given pieces (sorted by file), one file open at a time."""
    reader: ShardReader | None = None
    for entry, piece in pairs:
        where = f"tensor {entry.name} ({entry.kind}) elements [{piece.start}, {piece.stop}) in {path / piece.file}"
        if reader is None or reader.path.name != piece.file:
            try:
                reader = ShardReader(path / piece.file)
            except CheckpointError as error:
                raise CheckpointError(f"{error}; it holds {_contents(manifest, piece.file)}") from error
        if piece.key not in reader.keys:
            raise CheckpointError(f"{where}: key {piece.key!r} is missing: header is damaged")
        described = reader.describe(piece.key)
        if described != (entry.dtype, (piece.stop - piece.start,)):
            raise CheckpointError(f"{where}: header is damaged: it says {described}")
        stored = reader.read(piece.key)
        if verify:
            found = xxhash.xxh3_128_hexdigest(tensor_bytes(stored))
            if found != piece.xxh3_128:
                raise CheckpointError(f"{where}: damaged: xxh3_128 is {found}, the manifest says {piece.xxh3_128}")
        yield piece, stored


def _matching_entry(path: Path, manifest: Manifest, request: TensorSlice, cast: bool) -> TensorEntry:
    where = f"{path}: tensor {request.name} ({request.kind})"
    entry = manifest.tensors.get((request.name, request.kind))
    if entry is None:
        kinds = sorted(kind for name, kind in manifest.tensors if name == request.name)
        there = f"this {manifest.kind!r} checkpoint has it as {', '.join(kinds)}" if kinds else "no tensor of that name"
        raise CheckpointError(f"{where}: not in the checkpoint ({there})")
    if entry.shape != tuple(request.global_shape):
        raise CheckpointError(f"{where}: shape is {entry.shape} in the checkpoint, {request.global_shape} in this run")
    wanted = dtype_name(request.tensor.dtype)
    both_float = entry.dtype in _FLOATS and wanted in _FLOATS
    if entry.dtype != wanted and not (cast and both_float):
        raise CheckpointError(f"{where}: dtype is {entry.dtype} in the checkpoint, {wanted} in this run")
    return entry


_FLOATS = ("F64", "F32", "F16", "BF16")


def _key(piece: TensorSlice) -> str:
    return f"{piece.name}/{piece.kind}/{piece.start}"


def _index_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _contents(manifest: Manifest, file: str) -> str:
    """Which tensors a file holds, for the message about its loss."""
    names = [e.name for e in manifest.tensors.values() if any(p.file == file for p in e.pieces)]
    names = list(dict.fromkeys(names))
    return f"{', '.join(names[:3])}" + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")
