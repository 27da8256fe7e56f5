"""Checks a checkpoint without loading it, and compares two checkpoints, one piece or tensor at a time a thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import xxhash

from megatron.optimus.checkpoint.errors import CheckpointError, DamagedError
from megatron.optimus.checkpoint.manifest import Manifest, StoredPiece, TensorEntry
from megatron.optimus.checkpoint.reader import CHUNK_BYTES, ShardFiles, chunks_of, pages
from megatron.optimus.checkpoint.store import list_together, load, load_manifest, request_for
from megatron.optimus.platform.ranks import Ranks

log = logging.getLogger("optimus")


def verify(path: Path, *, jobs: int = 1) -> Manifest:
    """Checks every byte of a checkpoint.

    Args:
        path: its directory.
        jobs: threads.

    Returns:
        Its manifest.

    Raises:
        CheckpointError: something is wrong; the message names the first bad tensor.
    """
    manifest = load_manifest(path)
    damage = find_damage(path, manifest, jobs=jobs)
    if damage:
        raise DamagedError(damage[0])
    return manifest


def has_good(root: Path, ranks: Ranks) -> bool:
    """Whether ``root`` has a full checkpoint of which every byte is good; the ranks share the reading. Collective."""

    def check(path: Path) -> None:
        manifest = load_manifest(path)
        if damage := find_damage(path, manifest, part=(ranks.rank, ranks.size)):
            raise DamagedError(damage[0])

    for item in list_together(root, ranks):
        path = root / item.name
        try:
            ranks.run_on_all_ranks(partial(check, path), f"reading {path}", CheckpointError)
        except CheckpointError as error:
            if ranks.rank == 0 or error.__cause__ is not None:
                log.warning("checkpoint %s cannot be read: %s", path, error)
        else:
            return True
    return False


def find_damage(
    path: Path,
    manifest: Manifest,
    *,
    jobs: int = 1,
    part: tuple[int, int] = (0, 1),
    show_progress: Callable[[int], None] = lambda num_bytes: None,
) -> list[str]:
    """Returns one line for every piece whose bytes are not what the manifest says, naming tensor and file.

    Args:
        path: the checkpoint's directory.
        manifest: its manifest.
        jobs: threads.
        part: (i, n) checks the i-th of n shares of the pieces.
        show_progress: called by these threads with the bytes of each chunk that has been read.
    """
    files = ShardFiles(Path(path), manifest)

    def check(piece: StoredPiece) -> str | None:
        digest = xxhash.xxh3_128()
        try:
            buffer = pages(min(CHUNK_BYTES, piece.num_bytes))
            for chunk in chunks_of(piece):
                digest.update(files.read(chunk, buffer, is_paged=True).numpy().data)
                show_progress(chunk.num_bytes)
            files.check(piece, digest.hexdigest())
        except DamagedError as error:
            return str(error)
        return None

    pieces = [piece for entry in manifest.tensors.values() for piece in entry.pieces]
    pieces.sort(key=lambda piece: (piece.file, piece.key))
    pieces = pieces[part[0] :: part[1]]
    try:
        with ThreadPoolExecutor(jobs) as threads:
            return [line for line in threads.map(check, pieces) if line is not None]
    finally:
        files.close()


@dataclass(frozen=True)
class Difference:
    """How a tensor differs between two checkpoints. ``reason`` says why where it cannot be compared."""

    name: str
    kind: str
    reason: str | None = None
    max_abs: float = 0.0
    num_different: int = 0  # elements that are not bit-identical (NaN included)
    numel: int = 0
    only_in: Path | None = None  # the checkpoint that has it, where the other does not

    @property
    def is_same(self) -> bool:
        """Whether all elements were compared and are equal."""
        return self.reason is None and self.num_different == 0


def compare(
    first: Path, second: Path, *, jobs: int = 1, show_progress: Callable[[float], None] = lambda fraction: None
) -> list[Difference]:
    """Compares every tensor of two checkpoints; hashes are checked on the way.

    The weights of a model-only checkpoint are compared with the masters of a full one, cast as a save casts them.

    Args:
        first: a checkpoint's directory.
        second: the other's.
        jobs: threads.
        show_progress: called with the fraction of the tensors that have been compared.

    Returns:
        One Difference for every tensor of either checkpoint.

    Raises:
        CheckpointError: one of them is damaged.
    """
    manifests = load_manifest(first), load_manifest(second)
    tensors = [dict(manifest.tensors) for manifest in manifests]
    if manifests[0].kind != manifests[1].kind:
        for entries in tensors:
            for name, kind in [key for key in entries if key[1] == "master" and (key[0], "weight") not in entries]:
                entries[name, "weight"] = entries.pop((name, kind))
    sides = list(zip((Path(first), Path(second)), manifests, tensors, strict=True))
    keys = list(dict.fromkeys([*tensors[0], *tensors[1]]))
    found: list[Difference] = []
    with ThreadPoolExecutor(jobs) as threads:
        for one in threads.map(lambda key: _compare_one(key, sides), keys):
            found.append(one)
            show_progress(len(found) / len(keys))
    return found


_Side = tuple[Path, Manifest, dict[tuple[str, str], TensorEntry]]  # a checkpoint, and its tensors by name and kind


def _compare_one(key: tuple[str, str], sides: Sequence[_Side]) -> Difference:
    there = [entries.get(key) for _, _, entries in sides]
    for entry, (path, _, _), (other, _, _) in zip(there, sides, reversed(sides), strict=True):
        if entry is None:
            return Difference(*key, f"not in {path}", only_in=other)
    first, second = there
    assert first is not None and second is not None
    is_same_dtype = first.dtype == second.dtype or first.kind != second.kind
    if first.shape != second.shape or not is_same_dtype:
        return Difference(*key, f"{first.dtype} {first.shape} against {second.dtype} {second.shape}")
    a, b = (_whole(path, manifest, entry) for (path, manifest, _), entry in zip(sides, (first, second), strict=True))
    dtype = b.dtype if first.kind == "master" else a.dtype  # a master against a weight is cast to the weight's
    a, b = a.to(dtype), b.to(dtype)
    bits_differ = a.view(torch.uint8).view(first.numel, -1) != b.view(torch.uint8).view(first.numel, -1)
    count = int(bits_differ.any(dim=1).sum()) if first.numel else 0
    if count == 0:
        return Difference(*key, numel=first.numel)
    return Difference(*key, None, float((a.double() - b.double()).abs().max()), count, first.numel)


def _whole(path: Path, manifest: Manifest, entry: TensorEntry) -> torch.Tensor:
    request = request_for(entry)
    load(path, [request], manifest=manifest)
    return request.tensor
