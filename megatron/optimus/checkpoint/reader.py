"""Reading: every needed byte leaves the file system once, whatever the number of ranks, and is verified on the way.

All ranks tell each other what they want. From that, each works out the same assignment: one rank reads a piece, a rank
that wants most of it where possible, the least loaded one among equals; at the layout that saved, everybody reads its
own. The reader hashes while it reads and passes on, point to point, what others want. Nothing larger than a few chunks
is in memory beside the tensors that are filled.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash

from megatron.optimus.checkpoint.errors import CheckpointError, DamagedError
from megatron.optimus.checkpoint.manifest import Manifest, Piece, TensorEntry
from megatron.optimus.checkpoint.shards import DTYPE_BYTES, ShardFile, dtype_name, torch_dtype
from megatron.optimus.checkpoint.slices import Part, Place, TensorSlice, common_parts
from megatron.optimus.runtime.agreement import Ranks, attempt

CHUNK_BYTES = 16 << 20
_AHEAD = 3  # chunks that threads read while one is worked on
_HEADER_BYTES_PER_PIECE = 8192  # more than the longest key, in JSON's escapes, and its numbers can need
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Chunk:
    """Elements [start, stop) of a piece's own, read in one go."""

    entry: TensorEntry
    piece: Piece
    start: int
    stop: int

    @property
    def place(self) -> Place:
        begin = self.piece.start
        return Place(self.entry.shape, begin + self.start, begin + self.stop, self.piece.box)

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * DTYPE_BYTES[self.entry.dtype]

    @property
    def is_last(self) -> bool:
        return self.piece.start + self.stop == self.piece.stop


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
    ranks.together(lambda: [matching_entry(path, manifest, r, cast) for r in requests], task, CheckpointError)
    entries = list(manifest.tensors.values())
    numbers = {(entry.name, entry.kind): number for number, entry in enumerate(entries)}
    wanted = [[numbers[r.name, r.kind], r.start, r.stop, r.box] for r in requests]
    everyone = [json.loads(text) for text in ranks.all_gather_bytes(json.dumps(wanted).encode())]
    schedule = _schedule(entries, everyone, ranks.rank)
    _, error = attempt(lambda: _run(path, manifest, schedule, requests, everyone, numbers, ranks))
    failure = ranks.first_failure(error)
    if failure is not None:
        raise ranks.relayed(failure, error, task, DamagedError) from error


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


def chunks_of(entry: TensorEntry, piece: Piece) -> Iterator[Chunk]:
    size = CHUNK_BYTES // DTYPE_BYTES[entry.dtype]
    for start in range(0, piece.stop - piece.start, size):
        yield Chunk(entry, piece, start, min(start + size, piece.stop - piece.start))


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
    source = _Source(ShardFiles(path, manifest), schedule.chunks)
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


def _fill(chunk: Chunk, data: torch.Tensor, targets: dict[tuple[str, str], list[TensorSlice]]) -> None:
    with torch.no_grad():
        for request in targets[chunk.entry.name, chunk.entry.kind]:
            for source, target in common_parts(chunk.place, request.place):
                target.view(request.tensor).copy_(source.view(data))


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


class ShardFiles:
    """The open shard files of one checkpoint, and the bytes of its chunks. Threads may share it."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path, self._manifest = path, manifest
        self._num_pieces: dict[str, int] = defaultdict(int)
        for entry in manifest.tensors.values():
            for piece in entry.pieces:
                self._num_pieces[piece.file] += 1
        self._readers: dict[str, ShardFile] = {}
        self._lock = threading.Lock()

    def read(self, chunk: Chunk, buffer: torch.Tensor) -> torch.Tensor:
        """The chunk's bytes, not verified, at the beginning of ``buffer``. Raises DamagedError naming the tensor."""
        where = self.where(chunk)
        reader = self._reader(chunk.piece.file)
        stored = reader.tensors.get(chunk.piece.key)
        if stored is None:
            raise DamagedError(f"{where}: key {chunk.piece.key!r} is missing: header is damaged")
        if (stored.dtype, stored.shape) != (chunk.entry.dtype, (chunk.piece.stop - chunk.piece.start,)):
            raise DamagedError(f"{where}: header is damaged: it says {stored.dtype} {stored.shape}")
        width = DTYPE_BYTES[chunk.entry.dtype]
        data = buffer[: (chunk.stop - chunk.start) * width]
        try:
            reader.read_into(data.numpy().data, stored.offset + chunk.start * width)
        except CheckpointError as error:
            raise DamagedError(f"{where}: {error}") from error
        return data

    def check(self, chunk: Chunk, found: str) -> None:
        """Raises DamagedError naming the tensor unless ``found`` is the hash of the chunk's piece."""
        if found != chunk.piece.xxh3_128:
            raise DamagedError(
                f"{self.where(chunk)}: damaged: xxh3_128 is {found}, the manifest says {chunk.piece.xxh3_128}"
            )

    def where(self, chunk: Chunk) -> str:
        entry, piece = chunk.entry, chunk.piece
        box = "" if piece.box is None else f" of box {piece.box}"
        place = f"elements [{piece.start}, {piece.stop}){box} in {self._path / piece.file}"
        return f"tensor {entry.name} ({entry.kind}) {place}"

    def _reader(self, file: str) -> ShardFile:
        with self._lock:
            if file not in self._readers:
                limit = _HEADER_BYTES_PER_PIECE * (1 + self._num_pieces[file])
                try:
                    self._readers[file] = ShardFile(self._path / file, self._manifest.files[file], limit)
                except CheckpointError as error:
                    raise DamagedError(f"{error}; it holds {contents(self._manifest, file)}") from error
            return self._readers[file]

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()


class _Source:
    """This rank's chunks, one after the other, verified; threads read ahead."""

    def __init__(self, files: ShardFiles, chunks: Sequence[Chunk]) -> None:
        self._files, self._chunks = files, chunks
        self._threads = ThreadPoolExecutor(_AHEAD, "checkpoint")
        self._pending: deque[tuple[Future[torch.Tensor], torch.Tensor]] = deque()
        # Used again and again: fresh memory costs as much time as the disk. One more than is read ahead is given out.
        size = max((chunk.num_bytes for chunk in chunks), default=0)
        self._free = [torch.empty(size, dtype=torch.uint8) for _ in range(min(_AHEAD, len(chunks)) + 1)]
        self._started = self._given = 0
        self._hash = xxhash.xxh3_128()

    def next(self) -> torch.Tensor:
        """The next chunk's elements, 1-D, until the call after. Raises DamagedError naming the tensor."""
        while self._started < len(self._chunks) and len(self._pending) < _AHEAD:
            buffer = self._free.pop()
            self._pending.append((self._threads.submit(self._files.read, self._chunks[self._started], buffer), buffer))
            self._started += 1
        chunk = self._chunks[self._given]
        self._given += 1
        future, buffer = self._pending.popleft()
        self._free.insert(0, buffer)
        data = future.result()
        if chunk.start == 0:
            self._hash.reset()
        self._hash.update(data.numpy().data)
        if chunk.is_last:
            self._files.check(chunk, self._hash.hexdigest())
        return data.view(torch_dtype(chunk.entry.dtype))

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._files.close()


def contents(manifest: Manifest, file: str) -> str:
    """Which tensors a file holds, for the message about its loss."""
    names = [e.name for e in manifest.tensors.values() if any(p.file == file for p in e.pieces)]
    names = list(dict.fromkeys(names))
    return f"{', '.join(names[:3])}" + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")
