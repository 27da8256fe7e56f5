"""The plan of a save: which rank writes which pieces, at which bytes of which file.

A node writes ``FILES_PER_NODE`` safetensors files, however many ranks it has: writers of one file wait for each other
in the kernel, while more than a few files gain nothing and cost a shared file system's metadata server.

The ranks exchange once what each will write. The plan then serves every later save of the same slices, so that a save
communicates no more than "are you done". The hashes, which are known only after writing, reach rank 0 through a small
file beside each safetensors file, where every rank has a place of its own.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.manifest import StoredPiece, TensorEntry
from megatron.optimus.checkpoint.shards import DTYPE_BYTES, dtype_name, shard_header
from megatron.optimus.checkpoint.slices import Region, TensorSlice, check_coverage
from megatron.optimus.platform.ranks import Ranks

# What a rank leaves for each piece: its hash, and the largest magnitude of its values, which may be NaN.
PIECE_VALUE = struct.Struct("<d")
RECORD_BYTES = 16 + PIECE_VALUE.size
FILES_PER_NODE = 4  # a node of fewer ranks writes one each


@dataclass(frozen=True)
class FilePlan:
    """A safetensors file of several ranks. ``pieces[i]`` is at byte ``offsets[i]``, its hash the i-th of the hashes."""

    name: str
    pieces: list[StoredPiece]
    offsets: list[int]
    header: bytes
    num_bytes: int

    @property
    def hashes_name(self) -> str:
        """The small file through which the hashes reach rank 0."""
        return self.name.removesuffix(".safetensors") + ".hashes"


@dataclass(frozen=True)
class SavePlan:
    """What one rank does in a save, and on rank 0 what all ranks do."""

    file: FilePlan  # that this rank writes to
    first: int  # index of this rank's first piece among the file's
    count: int
    writes_header: bool
    cleans_local_disk: bool  # removes what the node's ranks leave on its own disk
    files: list[FilePlan]  # of all ranks; empty on ranks above 0

    def own(self) -> list[tuple[StoredPiece, int]]:
        """This rank's pieces, each with the byte of the file at which it begins."""
        last = self.first + self.count
        return list(zip(self.file.pieces[self.first : last], self.file.offsets[self.first : last], strict=True))

    def entries(
        self, directory: Path
    ) -> tuple[dict[str, int], dict[tuple[str, str], TensorEntry], dict[tuple[str, str], list[float]]]:
        """Builds the manifest's ``files`` and ``tensors``, with the hashes that the ranks left in ``directory``.

        Returns these and, by tensor, the largest magnitude of every piece.
        """
        pieces: dict[tuple[str, str], list[StoredPiece]] = {}
        largest: dict[tuple[str, str], list[float]] = {}
        for file in self.files:
            records = _read_records(directory / file.hashes_name, len(file.pieces))
            for piece, (digest, value) in zip(file.pieces, records, strict=True):
                pieces.setdefault((piece.name, piece.kind), []).append(replace(piece, xxh3_128=digest))
                largest.setdefault((piece.name, piece.kind), []).append(value)
        tensors = {
            key: TensorEntry(*key, held[0].dtype, held[0].region.shape, tuple(held)) for key, held in pieces.items()
        }
        return {file.name: file.num_bytes for file in self.files}, tensors, largest

    def remove_hashes(self, directory: Path) -> None:
        """Deletes the small files of hashes."""
        for file in self.files:
            if file.pieces:
                os.unlink(directory / file.hashes_name)


def pieces_of(slices: Iterable[TensorSlice]) -> list[StoredPiece]:
    """The pieces that a rank with these slices will write, not yet in a file. Empty slices are left out."""
    return [_piece(s.name, s.kind, dtype_name(s.dtype), s.region) for s in slices if s.start < s.stop]


def _piece(name: str, kind: str, dtype: str, region: Region, file: str = "") -> StoredPiece:
    box = "" if region.box is None else "/" + ",".join(f"{start}:{stop}" for start, stop in region.box)
    return StoredPiece(name, kind, dtype, region, f"{name}/{kind}/{region.start}{box}", file)


def make_plan(
    own: Sequence[StoredPiece], ranks: Ranks, node: str, task: str, files_per_node: int = FILES_PER_NODE
) -> SavePlan:
    """Exchanges what every rank will write and plans the files. Collective over ``ranks``.

    Args:
        own: this rank's pieces.
        ranks: that save together.
        node: ranks that give the same name share ``files_per_node`` files.
        task: opens the error's message.
        files_per_node: at most; neighbouring ranks share a file.

    Raises:
        CheckpointError: on every rank when the pieces of a tensor do not cover it exactly once, or ranks disagree about
            its dtype or shape.
    """
    text = json.dumps({"node": node, "pieces": [_to_json(piece) for piece in own]})
    everyone = [json.loads(data) for data in ranks.all_gather_bytes(text.encode())]
    nodes: dict[str, list[int]] = {}
    for rank, answer in enumerate(everyone):
        nodes.setdefault(answer["node"], []).append(rank)
    members: dict[str, list[int]] = {}  # file -> ranks
    for number, on_node in enumerate(nodes.values()):
        count = min(files_per_node, len(on_node))
        for index, rank in enumerate(on_node):
            name = f"node-{number:05d}-{index * count // len(on_node)}.safetensors"
            members.setdefault(name, []).append(rank)

    def plan() -> SavePlan:
        [(mine, sharing)] = [(name, found) for name, found in members.items() if ranks.rank in found]
        names = list(members) if ranks.rank == 0 else [mine]
        files = [_plan_file(name, [everyone[rank]["pieces"] for rank in members[name]]) for name in names]
        if ranks.rank == 0:
            _check_all(everyone)
        before = [rank for rank in sharing if rank < ranks.rank]
        return SavePlan(
            file=files[names.index(mine)],
            first=sum(len(everyone[rank]["pieces"]) for rank in before),
            count=len(own),
            writes_header=not before,
            cleans_local_disk=nodes[node][0] == ranks.rank,
            files=files if ranks.rank == 0 else [],
        )

    return ranks.run_on_all_ranks(plan, task, CheckpointError)


def _plan_file(name: str, written: list[list[Any]]) -> FilePlan:
    """``written``: of each rank that shares the file, its pieces as JSON."""
    pieces = [_from_json(item, name) for of_rank in written for item in of_rank]
    # Widest first (the sort is stable), so that every tensor is aligned to its dtype, as safetensors' readers like it.
    order = sorted(range(len(pieces)), key=lambda index: -DTYPE_BYTES[pieces[index].dtype])
    header = shard_header([(pieces[i].key, pieces[i].dtype, (pieces[i].numel,)) for i in order])
    offsets, position = [0] * len(pieces), len(header)
    for index in order:
        offsets[index] = position
        position += pieces[index].num_bytes
    return FilePlan(name, pieces, offsets, header, position)


def _check_all(everyone: list[dict[str, Any]]) -> None:
    """Checks that ranks agree about dtypes and shapes, and that every tensor is covered exactly once."""
    known: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
    regions: dict[tuple[str, str], list[Region]] = {}
    for rank, answer in enumerate(everyone):
        for piece in map(_from_json, answer["pieces"]):
            found = piece.dtype, piece.region.shape
            before = known.setdefault((piece.name, piece.kind), found)
            if before != found:
                raise CheckpointError(
                    f"{piece.name} ({piece.kind}) is {found[0]} {found[1]} on rank {rank}, "
                    f"{before[0]} {before[1]} on a rank before"
                )
            regions.setdefault((piece.name, piece.kind), []).append(piece.region)
    for (name, kind), covering in regions.items():
        check_coverage(f"tensor {name} ({kind})", covering[0].shape, covering)


def _to_json(piece: StoredPiece) -> list[Any]:
    return [piece.name, piece.kind, piece.dtype, *piece.region]


def _from_json(item: list[Any], file: str = "") -> StoredPiece:
    name, kind, dtype, *region = item
    return _piece(name, kind, dtype, Region.from_json(*region), file)


def _read_records(path: Path, count: int) -> list[tuple[str, float]]:
    """What the ranks left in ``path`` of each piece: the hash in hex digits, and the largest magnitude."""
    if count == 0:
        return []
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not there: all ranks must see one file system") from error
    if len(raw) != count * RECORD_BYTES:
        raise CheckpointError(f"{path} has {len(raw)} bytes, {count} hashes were expected")
    places = range(0, len(raw), RECORD_BYTES)
    return [(raw[at : at + 16].hex(), *PIECE_VALUE.unpack_from(raw, at + 16)) for at in places]
