"""Reading: every needed byte leaves the file system once, whatever the number of ranks, and is verified on the way.

All ranks tell each other what they want. From that, each works out the same assignment: one rank reads a piece, a rank
that wants most of it where possible, the least loaded one among equals; at the layout that saved, everybody reads its
own. The reader hashes while it reads and passes on, point to point, what others want. Nothing larger than a few chunks
is in memory beside the tensors that are filled.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.optimus.checkpoint.chunks import Chunk, ReadAhead, ShardFiles, chunks_of
from megatron.optimus.checkpoint.errors import CheckpointError, DamagedError
from megatron.optimus.checkpoint.manifest import Manifest, TensorEntry
from megatron.optimus.checkpoint.shards import DTYPE_BYTES, dtype_name, torch_dtype
from megatron.optimus.checkpoint.slices import Part, Place, TensorSlice, common_parts
from megatron.optimus.platform.ranks import Ranks, attempt

_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass
class _Schedule:
    """What this rank reads in each round, and what it gets from others in it."""

    chunks: list[Chunk] = field(default_factory=list)
    incoming: dict[int, list[tuple[int, Chunk]]] = field(default_factory=dict)  # round -> (reader, chunk)
    num_rounds: int = 0


def matching_entry(path: Path, manifest: Manifest, request: TensorSlice, cast: bool) -> TensorEntry:
    """The stored tensor that ``request`` asks for. Raises CheckpointError where name, shape or dtype differ."""
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


def read(path: Path, manifest: Manifest, requests: Sequence[TensorSlice], ranks: Ranks, *, cast: bool) -> None:
    """Fills every request from the checkpoint directory ``path``. Collective over ``ranks``.

    Raises CheckpointError on every rank for a request that does not fit the checkpoint, DamagedError on every rank for
    bytes that are not what the manifest says; requests may then be partly filled.
    """
    requests = [request for request in requests if request.start < request.stop]
    task = f"loading {path}"
    ranks.run_on_all_ranks(lambda: [matching_entry(path, manifest, r, cast) for r in requests], task, CheckpointError)
    entries = list(manifest.tensors.values())
    numbers = {(entry.name, entry.kind): number for number, entry in enumerate(entries)}
    wanted = [[numbers[r.name, r.kind], r.start, r.stop, r.box] for r in requests]
    everyone = [json.loads(text) for text in ranks.all_gather_bytes(json.dumps(wanted).encode())]
    schedule = _schedule(entries, everyone, ranks.rank)
    _, error = attempt(lambda: _run(path, manifest, schedule, requests, everyone, numbers, ranks))
    failure = ranks.first_failure(error)
    if failure is not None:
        raise ranks.failure_error(failure, error, task, DamagedError) from error


def _schedule(entries: list[TensorEntry], everyone: list[list[list]], rank: int) -> _Schedule:
    """The same assignment on every rank, and this rank's part of it."""
    interested: dict[int, list[tuple[int, Place]]] = defaultdict(list)
    for asker, wanted in enumerate(everyone):
        for number, start, stop, box in wanted:
            interested[number].append((asker, _place(entries[number], start, stop, box)))
    pieces = [(entries[number], piece, number) for number in interested for piece in entries[number].pieces]
    # The order in which a rank writes (plan.py): its own pieces then follow each other in the file.
    pieces.sort(key=lambda item: (item[1].file, -DTYPE_BYTES[item[0].dtype], item[2], item[1].start))
    load = [0] * len(everyone)
    rounds = [0] * len(everyone)
    schedule = _Schedule()
    for entry, piece, number in pieces:
        place = piece.place(entry.shape)
        shares: dict[int, int] = defaultdict(int)
        for asker, wanted_place in interested[number]:
            shares[asker] += sum(part.numel for part, _ in common_parts(place, wanted_place))
        askers = {asker: share for asker, share in shares.items() if share}
        if not askers:
            continue
        most = max(askers.values())
        reader = min((a for a, share in askers.items() if share == most), key=lambda a: (load[a], a))
        load[reader] += (piece.stop - piece.start) * DTYPE_BYTES[entry.dtype]
        for chunk in chunks_of(entry, piece):
            if reader == rank:
                schedule.chunks.append(chunk)
            elif rank in askers:
                schedule.incoming.setdefault(rounds[reader], []).append((reader, chunk))
            rounds[reader] += 1
    schedule.num_rounds = max(rounds, default=0)
    return schedule


def _place(entry: TensorEntry, start: int, stop: int, box: list[list[int]] | None) -> Place:
    return Place(entry.shape, start, stop, None if box is None else tuple((a, b) for a, b in box))


def _run(
    path: Path,
    manifest: Manifest,
    schedule: _Schedule,
    requests: Sequence[TensorSlice],
    everyone: list[list[list]],
    numbers: dict[tuple[str, str], int],
    ranks: Ranks,
) -> None:
    """All rounds. A rank that fails goes on with zeros, so that no other waits for it, and raises at the end."""
    targets: dict[tuple[str, str], list[TensorSlice]] = defaultdict(list)
    for request in requests:
        targets[request.name, request.kind].append(request)
    entries = list(manifest.tensors.values())
    askers: dict[int, list[tuple[int, Place]]] = defaultdict(list)
    for rank, wanted in enumerate(everyone):
        for number, start, stop, box in wanted:
            if rank != ranks.rank:
                askers[number].append((rank, _place(entries[number], start, stop, box)))
    source = ReadAhead(
        ShardFiles(path, manifest), schedule.chunks, lambda chunk: _own_memory(chunk, targets), ranks.device
    )
    failed: Exception | None = None
    try:
        for index in range(schedule.num_rounds):
            own = schedule.chunks[index] if index < len(schedule.chunks) else None
            outgoing: list[tuple[int, torch.Tensor]] = []
            if own is not None:
                data, error = attempt(source.next) if failed is None else (None, failed)
                failed = failed or error
                if data is None:
                    data = torch.zeros(own.stop - own.start, dtype=torch_dtype(own.entry.dtype))
                _fill(own, data, targets)
                outgoing = _outgoing(own, data, askers[numbers[own.entry.name, own.entry.kind]], ranks)
            _exchange(outgoing, schedule.incoming.get(index, []), targets, ranks)
    finally:
        source.close()
    if failed is not None:
        raise failed


def _own_memory(chunk: Chunk, targets: dict[tuple[str, str], list[TensorSlice]]) -> torch.Tensor | None:
    """Where all of a chunk belongs, byte for byte and in one stretch of host memory; None if there is no such place."""
    wanted = targets[chunk.entry.name, chunk.entry.kind]
    parts = [(request, target) for request in wanted for _, target in common_parts(chunk.place, request.place)]
    if len(parts) != 1:
        return None
    request, target = parts[0]
    view = target.view(request.tensor)
    is_same = request.tensor.dtype == torch_dtype(chunk.entry.dtype) and request.tensor.device.type == "cpu"
    if not is_same or view.numel() != chunk.stop - chunk.start or not view.is_contiguous():
        return None
    return view.detach().reshape(-1).view(torch.uint8)


def _fill(chunk: Chunk, data: torch.Tensor, targets: dict[tuple[str, str], list[TensorSlice]]) -> None:
    with torch.no_grad():
        for request in targets[chunk.entry.name, chunk.entry.kind]:
            for source, target in common_parts(chunk.place, request.place):
                view = target.view(request.tensor)
                if view.data_ptr() != data.data_ptr():  # else it was read there
                    view.copy_(source.view(data), non_blocking=True)


def _parts_for(chunk: Chunk, places: Sequence[Place]) -> list[Part]:
    """What of a chunk goes to a rank that asks for these places; sender and receiver compute it alike."""
    return [source for place in places for source, _ in common_parts(chunk.place, place)]


def _outgoing(
    chunk: Chunk, data: torch.Tensor, askers: list[tuple[int, Place]], ranks: Ranks
) -> list[tuple[int, torch.Tensor]]:
    places: dict[int, list[Place]] = defaultdict(list)
    for rank, place in askers:
        places[rank].append(place)
    result = []
    for rank, asked in places.items():
        parts = [part.view(data).reshape(-1) for part in _parts_for(chunk, asked)]
        if parts:
            result.append((rank, torch.cat(parts).view(torch.uint8).to(ranks.device)))
    return result


def _exchange(
    outgoing: list[tuple[int, torch.Tensor]],
    incoming: list[tuple[int, Chunk]],
    targets: dict[tuple[str, str], list[TensorSlice]],
    ranks: Ranks,
) -> None:
    """One round of messages between ranks, and what came into the tensors that want it."""
    arrived = []
    operations = []
    for reader, chunk in incoming:
        wanted = targets[chunk.entry.name, chunk.entry.kind]
        numel = sum(part.numel for part in _parts_for(chunk, [request.place for request in wanted]))
        if numel:
            buffer = torch.empty(numel * DTYPE_BYTES[chunk.entry.dtype], dtype=torch.uint8, device=ranks.device)
            arrived.append((chunk, wanted, buffer))
            operations.append(dist.P2POp(dist.irecv, buffer, group=ranks.group, group_peer=reader))
    for rank, buffer in outgoing:
        operations.append(dist.P2POp(dist.isend, buffer, group=ranks.group, group_peer=rank))
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    with torch.no_grad():
        for chunk, wanted, buffer in arrived:
            flat, position = buffer.view(torch_dtype(chunk.entry.dtype)), 0
            for request in wanted:
                for source, target in common_parts(chunk.place, request.place):
                    view = target.view(request.tensor)
                    view.copy_(flat[position : position + source.numel].view(view.shape))
                    position += source.numel
