"""Where every rank's pieces go: a few safetensors files per node, and a rank's places in one of them.

A node writes ``FILES_PER_NODE`` files, however many ranks it has: writers of one file wait for each other in the
kernel, and more than a few files gain nothing and cost a shared file system's metadata server.

The ranks tell each other once what they will write; the answer serves every later save of the same slices, so a save
needs no more communication than "are you done". The hashes, which only the writing gives, reach rank 0 through a small
file beside each, every rank's at its own place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.optimus.checkpoint.coverage import check_coverage
from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.manifest import Piece, TensorEntry
from megatron.optimus.checkpoint.shards import DTYPE_BYTES, dtype_name, shard_header
from megatron.optimus.checkpoint.slices import Box, Place, TensorSlice
from megatron.optimus.platform.ranks import Ranks

HASH_BYTES = 16
FILES_PER_NODE = 4  # a node of fewer ranks writes one each


@dataclass(frozen=True)
class OwnPiece:
    """One piece as its writer sees it."""

    name: str
    kind: str
    dtype: str
    place: Place

    @property
    def key(self) -> str:
        box = "" if self.place.box is None else "/" + ",".join(f"{a}:{b}" for a, b in self.place.box)
        return f"{self.name}/{self.kind}/{self.place.start}{box}"

    @property
    def numel(self) -> int:
        return self.place.stop - self.place.start

    @property
    def num_bytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class FilePlan:
    """A file: the pieces of its ranks, ``pieces[i]`` at byte ``offsets[i]``, in the order of their hashes."""

    node: int
    number: int  # among the node's
    pieces: list[OwnPiece]
    offsets: list[int]
    header: bytes
    num_bytes: int

    @property
    def name(self) -> str:
        return f"node-{self.node:05d}-{self.number}.safetensors"

    @property
    def hashes(self) -> str:
        return f"node-{self.node:05d}-{self.number}.hashes"


@dataclass(frozen=True)
class SavePlan:
    """What one rank does in a save, and on rank 0 what all do."""

    file: FilePlan
    first: int  # of this rank's pieces among the file's
    count: int
    writes_header: bool
    tidies_node: bool  # removes what the node's ranks leave on its own disk
    files: list[FilePlan]  # of everyone; on ranks above 0 empty

    def own(self) -> list[tuple[OwnPiece, int]]:
        """This rank's pieces and where each begins in the file."""
        last = self.first + self.count
        return list(zip(self.file.pieces[self.first : last], self.file.offsets[self.first : last], strict=True))

    def entries(self, directory: Path) -> tuple[dict[str, int], dict[tuple[str, str], TensorEntry]]:
        """The manifest's ``files`` and ``tensors``, with the hashes that the ranks left in ``directory``."""
        pieces: dict[tuple[str, str], list[Piece]] = {}
        kinds: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
        for file in self.files:
            raw = _hashes(directory / file.hashes, len(file.pieces))
            for index, own in enumerate(file.pieces):
                digest = raw[index * HASH_BYTES : (index + 1) * HASH_BYTES].hex()
                start, stop, box = own.place.start, own.place.stop, own.place.box
                pieces.setdefault((own.name, own.kind), []).append(Piece(file.name, own.key, start, stop, digest, box))
                kinds[own.name, own.kind] = own.dtype, own.place.shape
        tensors = {key: TensorEntry(*key, *kinds[key], tuple(pieces[key])) for key in pieces}
        return {file.name: file.num_bytes for file in self.files}, tensors


def own_pieces(slices: Iterable[TensorSlice]) -> list[OwnPiece]:
    """What a rank will write. Empty slices are left out."""
    return [OwnPiece(s.name, s.kind, dtype_name(s.dtype), s.place) for s in slices if s.start < s.stop]


def make_plan(
    own: Sequence[OwnPiece], ranks: Ranks, node: str, task: str, files_per_node: int = FILES_PER_NODE
) -> SavePlan:
    """Exchanges what every rank will write. Collective. Raises CheckpointError on every rank when the pieces of some
    tensor do not cover it exactly once; ``task`` opens the message."""
    text = json.dumps({"node": node, "pieces": [_to_json(piece) for piece in own]})
    everyone = [json.loads(data) for data in ranks.all_gather_bytes(text.encode())]
    nodes: dict[str, list[int]] = {}
    for rank, share in enumerate(everyone):
        nodes.setdefault(share["node"], []).append(rank)
    members: dict[tuple[int, int], list[int]] = {}  # (node, file of it) -> ranks
    for number, on_node in enumerate(nodes.values()):
        count = min(files_per_node, len(on_node))
        for index, rank in enumerate(on_node):
            members.setdefault((number, index * count // len(on_node)), []).append(rank)

    def plan() -> SavePlan:
        [(mine, sharing)] = [(key, found) for key, found in members.items() if ranks.rank in found]
        keys = list(members) if ranks.rank == 0 else [mine]
        files = [_plan_file(*key, [everyone[rank] for rank in members[key]]) for key in keys]
        if ranks.rank == 0:
            _check_all(everyone)
        before = [rank for rank in sharing if rank < ranks.rank]
        first = sum(len(everyone[rank]["pieces"]) for rank in before)
        is_first_of_node = nodes[node][0] == ranks.rank
        return SavePlan(
            files[keys.index(mine)], first, len(own), not before, is_first_of_node, files if ranks.rank == 0 else []
        )

    return ranks.run_on_all_ranks(plan, task, CheckpointError)


def _plan_file(node: int, number: int, shares: list[dict[str, Any]]) -> FilePlan:
    pieces = [_from_json(item) for one in shares for item in one["pieces"]]
    # Widest first (the sort is stable), so that every tensor is aligned to its dtype, as safetensors' readers like it.
    order = sorted(range(len(pieces)), key=lambda index: -DTYPE_BYTES[pieces[index].dtype])
    header = shard_header([(pieces[i].key, pieces[i].dtype, (pieces[i].numel,)) for i in order])
    offsets, position = [0] * len(pieces), len(header)
    for index in order:
        offsets[index] = position
        position += pieces[index].num_bytes
    return FilePlan(node, number, pieces, offsets, header, position)


def _check_all(everyone: list[dict[str, Any]]) -> None:
    """Dtypes and shapes agree between ranks, and every tensor is covered exactly once."""
    known: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
    places: dict[tuple[str, str], list[Place]] = {}
    for rank, share in enumerate(everyone):
        for piece in map(_from_json, share["pieces"]):
            found = piece.dtype, piece.place.shape
            before = known.setdefault((piece.name, piece.kind), found)
            if before != found:
                raise CheckpointError(
                    f"{piece.name} ({piece.kind}) is {found[0]} {found[1]} on rank {rank}, "
                    f"{before[0]} {before[1]} on a rank before"
                )
            places.setdefault((piece.name, piece.kind), []).append(piece.place)
    for (name, kind), parts in places.items():
        check_coverage(f"tensor {name} ({kind})", parts[0].shape, parts)


def _to_json(piece: OwnPiece) -> list[Any]:
    return [piece.name, piece.kind, piece.dtype, *piece.place]


def _from_json(item: list[Any]) -> OwnPiece:
    name, kind, dtype, shape, start, stop, box = item
    return OwnPiece(name, kind, dtype, Place(tuple(shape), start, stop, _box(box)))


def _box(value: list[list[int]] | None) -> Box | None:
    return None if value is None else tuple((start, stop) for start, stop in value)


def _hashes(path: Path, count: int) -> bytes:
    if count == 0:
        return b""
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not there: all ranks must see one file system") from error
    if len(raw) != count * HASH_BYTES:
        raise CheckpointError(f"{path} has {len(raw)} bytes, {count} hashes were expected")
    return raw


def remove_hashes(directory: Path, files: Sequence[FilePlan]) -> None:
    """Removes the small files through which the hashes came."""
    for file in files:
        if file.pieces:
            os.unlink(directory / file.hashes)
