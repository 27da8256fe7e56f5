"""Reading: every needed byte leaves the file system once, whatever the number of ranks, and is verified on the way.

All ranks tell each other what they want. From that, each computes the same assignment: a piece is read by one rank, one
that wants most of it, the least loaded among equals; at the layout that saved, every rank reads its own pieces. The
reading rank hashes while it reads and sends other ranks, point to point, what they want. Beside the tensors that are
filled, no more than a few chunks are in memory.
"""

from __future__ import annotations

import json
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash

from megatron.optimus.checkpoint.errors import CheckpointError, DamagedError
from megatron.optimus.checkpoint.manifest import Manifest, StoredPiece
from megatron.optimus.checkpoint.shards import ALIGNED, DTYPE_BYTES, ShardFile, dtype_name, torch_dtype
from megatron.optimus.checkpoint.slices import Overlap, Region, TensorSlice, overlaps
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.ranks import Ranks, attempt

CHUNK_BYTES = (16 << 20) - 4 * ALIGNED  # with the pages around it a power of two, as pinned memory is
AHEAD = min(8, max(3, (os.cpu_count() or 1) // 2))  # chunks that threads read while one is being used
MAX_OPEN = 256  # files of one checkpoint at a time, of two descriptors each: 1,024 is a usual limit of a process
_HEADER_BYTES_PER_PIECE = 8192  # more than the longest key, in JSON's escapes, and its numbers can need
_FLOATS = ("F64", "F32", "F16", "BF16")


# ---- one rank: chunks of files, read ahead


@dataclass(frozen=True)
class ReadChunk:
    """As much of a stored piece as is read in one go: elements [start, stop), counted in the piece."""

    piece: StoredPiece
    start: int
    stop: int

    @property
    def region(self) -> Region:
        """Which elements of the whole tensor the chunk holds."""
        shape, begin, _, box = self.piece.region
        return Region(shape, begin + self.start, begin + self.stop, box)

    @property
    def num_bytes(self) -> int:
        """Bytes of the chunk in the file."""
        return (self.stop - self.start) * DTYPE_BYTES[self.piece.dtype]

    @property
    def is_last(self) -> bool:
        """Whether the piece ends with this chunk."""
        return self.stop == self.piece.numel


def chunks_of(piece: StoredPiece, start: int = 0, stop: int | None = None) -> Iterator[ReadChunk]:
    """Cuts elements [start, stop) of a piece (None: to its end) into chunks, in order."""
    size = CHUNK_BYTES // DTYPE_BYTES[piece.dtype]
    stop = piece.numel if stop is None else stop
    for first in range(start, stop, size):
        yield ReadChunk(piece, first, min(first + size, stop))


class ShardFiles:
    """The open safetensors files of one checkpoint, and the bytes of its chunks. Threads may share it."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path, self._manifest = path, manifest
        self._num_pieces: dict[str, int] = defaultdict(int)
        for entry in manifest.tensors.values():
            for piece in entry.pieces:
                self._num_pieces[piece.file] += 1
        self._files: dict[str, tuple[ShardFile, int]] = {}  # with the number of threads reading it; latest last
        self._lock = threading.Lock()

    def read(self, chunk: ReadChunk, buffer: torch.Tensor, *, is_paged: bool = False) -> torch.Tensor:
        """Reads a chunk's bytes without verifying them.

        Args:
            chunk: what to read.
            buffer: uint8, on the host, at least as long as the chunk.
            is_paged: ``buffer`` is one of ``pages``; the disk may then fill it without the kernel's copy.

        Returns:
            The chunk's bytes, a view of ``buffer``: at its beginning, or if ``is_paged`` anywhere in it.

        Raises:
            DamagedError: the bytes are not there; the message names the tensor.
        """
        where, piece = self.where(chunk.piece), chunk.piece
        with self._open(piece.file) as file:
            stored = file.tensors.get(piece.key)
            if stored is None:
                raise DamagedError(f"{where}: key {piece.key!r} is missing: header is damaged")
            if (stored.dtype, stored.shape) != (piece.dtype, (piece.numel,)):
                raise DamagedError(f"{where}: header is damaged: it says {stored.dtype} {stored.shape}")
            offset = stored.offset + chunk.start * DTYPE_BYTES[piece.dtype]
            begin, data = 0, buffer[: chunk.num_bytes]
            try:
                if is_paged:
                    begin = file.read_pages(buffer.numpy().data, offset, chunk.num_bytes)
                else:
                    file.read_into(data.numpy().data, offset)
            except CheckpointError as error:
                raise DamagedError(f"{where}: {error}") from error
        return buffer[begin : begin + chunk.num_bytes]

    def check(self, piece: StoredPiece, found: str) -> None:
        """Raises DamagedError naming the tensor unless ``found`` is the hash of the piece."""
        if found != piece.xxh3_128:
            raise DamagedError(f"{self.where(piece)}: damaged: xxh3_128 is {found}, the manifest says {piece.xxh3_128}")

    def where(self, piece: StoredPiece) -> str:
        """Names a piece's tensor, elements and file, for an error."""
        _, start, stop, box = piece.region
        of_box = "" if box is None else f" of box {box}"
        place = f"elements [{start}, {stop}){of_box} in {self._path / piece.file}"
        return f"tensor {piece.name} ({piece.kind}) {place}"

    @contextmanager
    def _open(self, name: str) -> Iterator[ShardFile]:
        """Opens a file and keeps it open meanwhile. Of thousands, only the latest stay open."""
        with self._lock:
            file, users = self._files.pop(name, (None, 0))
            if file is None:
                unused = [key for key, (_, others) in self._files.items() if others == 0]
                for key in unused[: max(0, len(self._files) + 1 - MAX_OPEN)]:
                    self._files.pop(key)[0].close()
                limit = _HEADER_BYTES_PER_PIECE * (1 + self._num_pieces[name])
                try:
                    file = ShardFile(self._path / name, self._manifest.files[name], limit)
                except CheckpointError as error:
                    raise DamagedError(f"{error}; it holds {self._manifest.contents_of(name)}") from error
            self._files[name] = file, users + 1
        try:
            yield file
        finally:
            with self._lock:
                file, users = self._files[name]
                self._files[name] = file, users - 1

    def close(self) -> None:
        """Closes all files."""
        for file, _ in self._files.values():
            file.close()
        self._files.clear()


class ReadAhead:
    """Gives chunks one after the other, verified, while threads read the next ones.

    Args:
        files: where they are.
        chunks: all chunks, in the order of ``next``; those of a piece follow each other.
        target_of: the memory (uint8, on the host) that a chunk is read into directly; None: a buffer of this object.
        device: buffers are pinned beside it if it is an accelerator, so that copies from them need not wait.
    """

    def __init__(
        self,
        files: ShardFiles,
        chunks: Sequence[ReadChunk],
        target_of: Callable[[ReadChunk], torch.Tensor | None] = lambda chunk: None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._files, self._chunks, self._device = files, chunks, torch.device(device)
        self._targets = [target_of(chunk) for chunk in chunks]
        self._threads = ThreadPoolExecutor(AHEAD, "checkpoint")
        self._pending: deque[tuple[Future[torch.Tensor], torch.Tensor | None]] = deque()
        # Used again and again, since fresh memory costs as much time as the disk. One is in use while AHEAD are filled.
        buffered = [chunk.num_bytes for chunk, target in zip(chunks, self._targets, strict=True) if target is None]
        pin, size = devices.pins_memory(self._device), max(buffered, default=0)
        count = min(AHEAD, len(buffered)) + 1 if buffered else 0
        self._free = deque(pages(size, pin) for _ in range(count))
        self._in_use: torch.Tensor | None = None
        self._copied: dict[int, torch.Event] = {}  # by buffer: what must have happened before it is filled again
        self._started = self._given = 0
        self._hash = xxhash.xxh3_128()

    def next(self) -> torch.Tensor:
        """Returns the next chunk's elements, 1-D, valid until the call after. Raises DamagedError naming the tensor."""
        self._take_back()
        while self._started < len(self._chunks) and len(self._pending) < AHEAD:
            self._start(self._chunks[self._started], self._targets[self._started])
        chunk = self._chunks[self._given]
        self._given += 1
        future, self._in_use = self._pending.popleft()
        data = future.result()
        if chunk.start == 0:
            self._hash.reset()
        self._hash.update(data.numpy().data)
        if chunk.is_last:
            self._files.check(chunk.piece, self._hash.hexdigest())
        return data.view(torch_dtype(chunk.piece.dtype))

    def _start(self, chunk: ReadChunk, target: torch.Tensor | None) -> None:
        buffer = None
        if target is None:
            buffer = self._free.popleft()
            copied = self._copied.pop(buffer.data_ptr(), None)
            if copied is not None:
                copied.synchronize()
            target = buffer
        future = self._threads.submit(self._files.read, chunk, target, is_paged=buffer is not None)
        self._pending.append((future, buffer))
        self._started += 1

    def _take_back(self) -> None:
        """Takes the buffer in use back; copies from it may still be under way."""
        buffer, self._in_use = self._in_use, None
        if buffer is None:
            return
        if not devices.has_streams(self._device):
            devices.synchronize(self._device)  # an Apple GPU, which may still read the buffer
        else:
            self._copied[buffer.data_ptr()] = torch.accelerator.current_stream(self._device).record_event()
        self._free.append(buffer)

    def close(self) -> None:
        """Waits for the threads and for copies from the buffers, and closes the files."""
        self._take_back()
        for copied in self._copied.values():
            copied.synchronize()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._files.close()


def pages(size: int, pin: bool = False) -> torch.Tensor:
    """Host memory that begins on a page and has room for ``size`` bytes and the pages around them in a file."""
    memory = torch.empty(size + 3 * ALIGNED, dtype=torch.uint8, pin_memory=pin)
    first = -memory.data_ptr() % ALIGNED
    return memory[first : first + size + 2 * ALIGNED]


# ---- all ranks: who reads what


Key = tuple[str, str]  # name and kind of a tensor


@dataclass
class _ReadSchedule:
    """What this rank reads in each round, and what it receives from other ranks in it."""

    chunks: list[ReadChunk] = field(default_factory=list)
    incoming: dict[int, list[tuple[int, ReadChunk]]] = field(default_factory=dict)  # round -> (reader, chunk)
    num_rounds: int = 0


def read(path: Path, manifest: Manifest, requests: Sequence[TensorSlice], ranks: Ranks, *, cast: bool) -> None:
    """Fills every request from a checkpoint. Collective over ``ranks``.

    Args:
        path: the checkpoint's directory.
        manifest: of that directory.
        requests: what this rank wants; their tensors are written into.
        ranks: that load together.
        cast: convert between floating-point dtypes instead of refusing them.

    Raises:
        CheckpointError: on every rank for a request that does not fit the checkpoint, or where memory does not suffice.
        DamagedError: on every rank for bytes that are not what the manifest says; requests may then be partly filled.
    """
    task = f"loading {path}"
    targets: dict[Key, list[TensorSlice]] = defaultdict(list)
    for request in requests:
        if request.start < request.stop:
            targets[request.name, request.kind].append(request)

    def check() -> None:
        for wanted in targets.values():
            for request in wanted:
                _check_request(path, manifest, request, cast)

    ranks.run_on_all_ranks(check, task, CheckpointError)
    regions = _regions_of_all_ranks(manifest, targets, ranks)
    schedule = _schedule(manifest, regions, ranks)

    def open_files() -> ReadAhead:
        files = ShardFiles(path, manifest)
        return ReadAhead(files, schedule.chunks, lambda chunk: _own_memory(chunk, targets), ranks.device)

    # All together, or ranks would wait for the messages of one that has no memory for its buffers.
    source = ranks.run_on_all_ranks(open_files, task, CheckpointError)
    _, error = attempt(lambda: _run(source, schedule, targets, regions, ranks))
    failure = ranks.first_failure(error)
    if failure is not None:
        # Only for damage may an older checkpoint be taken.
        is_damage = ranks.start_all_reduce_min(int(error is None or isinstance(error, DamagedError)))()
        raise ranks.failure_error(failure, error, task, DamagedError if is_damage else CheckpointError) from error


def _check_request(path: Path, manifest: Manifest, request: TensorSlice, cast: bool) -> None:
    """Raises CheckpointError where the checkpoint lacks the tensor, or has it in another shape or dtype."""
    where = f"{path}: tensor {request.name} ({request.kind})"
    entry = manifest.tensors.get((request.name, request.kind))
    if entry is None:
        kinds = sorted(kind for name, kind in manifest.tensors if name == request.name)
        there = f"this {manifest.kind!r} checkpoint has it as {', '.join(kinds)}" if kinds else "no tensor of that name"
        raise CheckpointError(f"{where}: not in the checkpoint ({there})")
    if entry.shape != tuple(request.global_shape):
        raise CheckpointError(f"{where}: shape is {entry.shape} in the checkpoint, {request.global_shape} in this run")
    wanted = dtype_name(request.dtype)
    both_float = entry.dtype in _FLOATS and wanted in _FLOATS
    if entry.dtype != wanted and not (cast and both_float):
        raise CheckpointError(f"{where}: dtype is {entry.dtype} in the checkpoint, {wanted} in this run")


def _regions_of_all_ranks(
    manifest: Manifest, targets: dict[Key, list[TensorSlice]], ranks: Ranks
) -> dict[Key, list[tuple[int, Region]]]:
    """Exchanges what every rank wants. Returns, by tensor, each request's rank and region. Collective."""
    keys = list(manifest.tensors)
    numbers = {key: number for number, key in enumerate(keys)}
    own = [[numbers[key], *request.region[1:]] for key, wanted in targets.items() for request in wanted]
    regions: dict[Key, list[tuple[int, Region]]] = defaultdict(list)
    for rank, text in enumerate(ranks.all_gather_bytes(json.dumps(own).encode())):
        for number, start, stop, box in json.loads(text):
            key = keys[number]
            regions[key].append((rank, Region.from_json(manifest.tensors[key].shape, start, stop, box)))
    return regions


def _schedule(manifest: Manifest, regions: dict[Key, list[tuple[int, Region]]], ranks: Ranks) -> _ReadSchedule:
    """Computes the assignment, which is the same on every rank, and returns this rank's part of it."""
    pieces = [piece for key, entry in manifest.tensors.items() if key in regions for piece in entry.pieces]
    # The order in which a rank writes (save_plan.py): its own pieces then follow each other in the file.
    pieces.sort(key=lambda piece: (piece.file, -DTYPE_BYTES[piece.dtype]))  # stable: then that of the manifest
    load = [0] * ranks.size
    rounds = [0] * ranks.size
    schedule = _ReadSchedule()
    for piece in pieces:
        shares: dict[int, int] = defaultdict(int)
        for asker, region in regions[piece.name, piece.kind]:
            shares[asker] += sum(overlap.numel for overlap in overlaps(piece.region, region))
        askers = {asker: share for asker, share in shares.items() if share}
        if not askers:
            continue
        most = max(askers.values())
        reader = min((a for a, share in askers.items() if share == most), key=lambda a: (load[a], a))
        load[reader] += piece.num_bytes
        for chunk in chunks_of(piece):
            if reader == ranks.rank:
                schedule.chunks.append(chunk)
            elif ranks.rank in askers:
                schedule.incoming.setdefault(rounds[reader], []).append((reader, chunk))
            rounds[reader] += 1
    schedule.num_rounds = max(rounds, default=0)
    return schedule


def _run(
    source: ReadAhead,
    schedule: _ReadSchedule,
    targets: dict[Key, list[TensorSlice]],
    regions: dict[Key, list[tuple[int, Region]]],
    ranks: Ranks,
) -> None:
    """Runs all rounds. A rank that fails goes on with zeros, so that no other waits for it, and raises at the end."""
    failed: Exception | None = None
    try:
        for index in range(schedule.num_rounds):
            own = schedule.chunks[index] if index < len(schedule.chunks) else None
            outgoing: list[tuple[int, torch.Tensor]] = []
            if own is not None:
                data = None
                if failed is None:
                    data, failed = attempt(partial(_next_filled, source, own, targets))
                if data is None:
                    data = torch.zeros(own.stop - own.start, dtype=torch_dtype(own.piece.dtype))
                outgoing = _outgoing(own, data, regions[own.piece.name, own.piece.kind], ranks)
            _exchange(outgoing, schedule.incoming.get(index, []), targets, ranks)
    finally:
        source.close()
    if failed is not None:
        raise failed


def _own_memory(chunk: ReadChunk, targets: dict[Key, list[TensorSlice]]) -> torch.Tensor | None:
    """The host memory into which a whole chunk can be read as it is, in one stretch; None if there is no such."""
    wanted = targets[chunk.piece.name, chunk.piece.kind]
    found = [(request, overlap) for request in wanted for overlap in overlaps(chunk.region, request.region)]
    if len(found) != 1:
        return None
    request, overlap = found[0]
    view = overlap.in_second(request.tensor)
    is_same = request.tensor.dtype == torch_dtype(chunk.piece.dtype) and request.tensor.device.type == "cpu"
    if not is_same or view.numel() != chunk.stop - chunk.start or not view.is_contiguous():
        return None
    return view.detach().reshape(-1).view(torch.uint8)


def _next_filled(source: ReadAhead, chunk: ReadChunk, targets: dict[Key, list[TensorSlice]]) -> torch.Tensor:
    """Returns the next chunk's elements, of which this rank has taken what it wants."""
    data = source.next()
    with torch.no_grad():
        for request in targets[chunk.piece.name, chunk.piece.kind]:
            for overlap in overlaps(chunk.region, request.region):
                view = overlap.in_second(request.tensor)
                if view.data_ptr() != data.data_ptr():  # else it was read there
                    view.copy_(overlap.in_first(data), non_blocking=devices.pins_memory(view.device))
    return data


def _sent(chunk: ReadChunk, regions: Sequence[Region]) -> list[Overlap]:
    """What of a chunk goes to a rank that asks for these regions; sender and receiver compute it alike."""
    return [overlap for region in regions for overlap in overlaps(chunk.region, region)]


def _outgoing(
    chunk: ReadChunk, data: torch.Tensor, regions: list[tuple[int, Region]], ranks: Ranks
) -> list[tuple[int, torch.Tensor]]:
    """The messages of a round: for each other rank that wants some of the chunk, its bytes of it."""
    by_rank: dict[int, list[Region]] = defaultdict(list)
    for rank, region in regions:
        if rank != ranks.rank:
            by_rank[rank].append(region)
    messages: dict[tuple[Region, ...], torch.Tensor] = {}  # replicas of a model all want the same
    result = []
    for rank, asked in by_rank.items():
        sent = [overlap.in_first(data).reshape(-1) for overlap in _sent(chunk, asked)]
        if sent and tuple(asked) not in messages:
            messages[tuple(asked)] = torch.cat(sent).view(torch.uint8).to(ranks.device)
        if sent:
            result.append((rank, messages[tuple(asked)]))
    return result


def _exchange(
    outgoing: list[tuple[int, torch.Tensor]],
    incoming: list[tuple[int, ReadChunk]],
    targets: dict[Key, list[TensorSlice]],
    ranks: Ranks,
) -> None:
    """Exchanges one round of messages and copies what has arrived into the tensors that want it."""
    arrived = []
    operations = []
    for reader, chunk in incoming:
        wanted = targets[chunk.piece.name, chunk.piece.kind]
        numel = sum(overlap.numel for overlap in _sent(chunk, [request.region for request in wanted]))
        if numel:
            buffer = torch.empty(numel * DTYPE_BYTES[chunk.piece.dtype], dtype=torch.uint8, device=ranks.device)
            arrived.append((chunk, wanted, buffer))
            operations.append(dist.P2POp(dist.irecv, buffer, group=ranks.group, group_peer=reader))
    for rank, buffer in outgoing:
        operations.append(dist.P2POp(dist.isend, buffer, group=ranks.group, group_peer=rank))
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    with torch.no_grad():
        for chunk, wanted, buffer in arrived:
            flat, position = buffer.view(torch_dtype(chunk.piece.dtype)), 0
            for request in wanted:
                for overlap in overlaps(chunk.region, request.region):
                    view = overlap.in_second(request.tensor)
                    view.copy_(flat[position : position + overlap.numel].view(view.shape))
                    position += overlap.numel
