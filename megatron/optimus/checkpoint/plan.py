"""Where every rank's pieces go: one safetensors file per node, and a rank's places in it.

The ranks tell each other once what they will write; the answer serves every later save of the same slices, so a save
needs no more communication than "are you done". The hashes, which only the writing gives, reach rank 0 through one
small file per node, each rank's at its own place.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.optimus.checkpoint.coverage import check_coverage
from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.manifest import Piece, TensorEntry
from megatron.optimus.checkpoint.shards import DTYPE_BYTES, dtype_name, shard_header
from megatron.optimus.checkpoint.slices import Box, Place, TensorSlice
from megatron.optimus.runtime.agreement import Ranks

HASH_BYTES = 16


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
class NodePlan:
    """One node's file: the pieces of its ranks, ``pieces[i]`` at byte ``offsets[i]``, in the order of their hashes."""

    number: int
    pieces: list[OwnPiece]
    offsets: list[int]
    header: bytes
    num_bytes: int

    @property
    def file(self) -> str:
        return f"node-{self.number:05d}.safetensors"

    @property
    def hashes(self) -> str:
        return f"node-{self.number:05d}.hashes"


@dataclass(frozen=True)
class SavePlan:
    """What one rank does in a save, and on rank 0 what all do."""

    node: NodePlan
    first: int  # of this rank's pieces among the node's
    count: int
    writes_header: bool
    nodes: list[NodePlan]  # of everyone; on ranks above 0 empty

    def own(self) -> list[tuple[OwnPiece, int]]:
        """This rank's pieces and where each begins in the node's file."""
        last = self.first + self.count
        return list(zip(self.node.pieces[self.first : last], self.node.offsets[self.first : last], strict=True))

    def entries(self, directory: Path) -> tuple[dict[str, int], dict[tuple[str, str], TensorEntry]]:
        """The manifest's ``files`` and ``tensors``, with the hashes that the ranks left in ``directory``."""
        pieces: dict[tuple[str, str], list[Piece]] = {}
        kinds: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
        for node in self.nodes:
            raw = _hashes(directory / node.hashes, len(node.pieces))
            for index, own in enumerate(node.pieces):
                digest = raw[index * HASH_BYTES : (index + 1) * HASH_BYTES].hex()
                start, stop, box = own.place.start, own.place.stop, own.place.box
                pieces.setdefault((own.name, own.kind), []).append(Piece(node.file, own.key, start, stop, digest, box))
                kinds[own.name, own.kind] = own.dtype, own.place.shape
        tensors = {key: TensorEntry(*key, *kinds[key], tuple(pieces[key])) for key in pieces}
        return {node.file: node.num_bytes for node in self.nodes}, tensors


def node_name() -> str:
    """What the ranks of one machine share and no other machine has."""
    return socket.gethostname()


def own_pieces(slices: Iterable[TensorSlice]) -> list[OwnPiece]:
    """What a rank will write. Empty slices are left out."""
    return [OwnPiece(s.name, s.kind, dtype_name(s.dtype), s.place) for s in slices if s.start < s.stop]


def make_plan(own: Sequence[OwnPiece], ranks: Ranks, node: str, task: str) -> SavePlan:
    """Exchanges what every rank will write. Collective. Raises CheckpointError on every rank when the pieces of some
    tensor do not cover it exactly once; ``task`` opens the message."""
    text = json.dumps({"node": node, "pieces": [_to_json(piece) for piece in own]})
    everyone = [json.loads(data) for data in ranks.all_gather_bytes(text.encode())]
    members: dict[str, list[int]] = {}
    for rank, said in enumerate(everyone):
        members.setdefault(said["node"], []).append(rank)

    def plan() -> SavePlan:
        names = list(members) if ranks.rank == 0 else [node]
        nodes = [_plan_node(list(members).index(n), [everyone[rank] for rank in members[n]]) for n in names]
        if ranks.rank == 0:
            _check_all(everyone)
        mine = nodes[names.index(node)]
        before = [rank for rank in members[node] if rank < ranks.rank]
        first = sum(len(everyone[rank]["pieces"]) for rank in before)
        return SavePlan(mine, first, len(own), not before, nodes if ranks.rank == 0 else [])

    return ranks.together(plan, task, CheckpointError)


def _plan_node(number: int, said: list[dict[str, Any]]) -> NodePlan:
    pieces = [_from_json(item) for one in said for item in one["pieces"]]
    # Widest first (the sort is stable), so that every tensor is aligned to its dtype, as safetensors' readers like it.
    order = sorted(range(len(pieces)), key=lambda index: -DTYPE_BYTES[pieces[index].dtype])
    header = shard_header([(pieces[i].key, pieces[i].dtype, (pieces[i].numel,)) for i in order])
    offsets, position = [0] * len(pieces), len(header)
    for index in order:
        offsets[index] = position
        position += pieces[index].num_bytes
    return NodePlan(number, pieces, offsets, header, position)


def _check_all(everyone: list[dict[str, Any]]) -> None:
    """Dtypes and shapes agree between ranks, and every tensor is covered exactly once."""
    known: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
    places: dict[tuple[str, str], list[Place]] = {}
    for rank, said in enumerate(everyone):
        for piece in map(_from_json, said["pieces"]):
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


def remove_hashes(directory: Path, nodes: Sequence[NodePlan]) -> None:
    """Removes the small files through which the hashes came."""
    for node in nodes:
        if node.pieces:
            os.unlink(directory / node.hashes)
