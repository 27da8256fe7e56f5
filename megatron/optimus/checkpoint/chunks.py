"""The bytes of a checkpoint's pieces: read in chunks, several at a time ahead of their use, and verified in order."""

from __future__ import annotations

import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from megatron.optimus.checkpoint.direct import ALIGNED
from megatron.optimus.checkpoint.errors import CheckpointError, DamagedError
from megatron.optimus.checkpoint.manifest import Manifest, Piece, TensorEntry
from megatron.optimus.checkpoint.shards import DTYPE_BYTES, ShardFile, torch_dtype
from megatron.optimus.checkpoint.slices import Place

CHUNK_BYTES = (16 << 20) - 4 * ALIGNED  # with the pages around it, a power of two: pinned memory comes in such
AHEAD = min(8, max(3, (os.cpu_count() or 1) // 2))  # chunks that threads read while one is worked on
MAX_OPEN = 256  # files of one checkpoint at a time, of two descriptors each: 1,024 is a usual limit of a process
_HEADER_BYTES_PER_PIECE = 8192  # more than the longest key, in JSON's escapes, and its numbers can need


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


def chunks_of(entry: TensorEntry, piece: Piece) -> Iterator[Chunk]:
    size = CHUNK_BYTES // DTYPE_BYTES[entry.dtype]
    for start in range(0, piece.stop - piece.start, size):
        yield Chunk(entry, piece, start, min(start + size, piece.stop - piece.start))


class ShardFiles:
    """The open shard files of one checkpoint, and the bytes of its chunks. Threads may share it."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path, self._manifest = path, manifest
        self._num_pieces: dict[str, int] = defaultdict(int)
        for entry in manifest.tensors.values():
            for piece in entry.pieces:
                self._num_pieces[piece.file] += 1
        self._files: dict[str, tuple[ShardFile, int]] = {}  # and how many threads read it; latest last
        self._lock = threading.Lock()

    def read(self, chunk: Chunk, buffer: torch.Tensor, *, is_paged: bool = False) -> torch.Tensor:
        """The chunk's bytes, not verified, at the beginning of ``buffer``, or ``is_paged`` somewhere in one of
        ``pages``, which the disk may fill without the kernel's copy. Raises DamagedError naming the tensor.
        """
        where = self.where(chunk)
        with self._open(chunk.piece.file) as file:
            stored = file.tensors.get(chunk.piece.key)
            if stored is None:
                raise DamagedError(f"{where}: key {chunk.piece.key!r} is missing: header is damaged")
            if (stored.dtype, stored.shape) != (chunk.entry.dtype, (chunk.piece.stop - chunk.piece.start,)):
                raise DamagedError(f"{where}: header is damaged: it says {stored.dtype} {stored.shape}")
            offset = stored.offset + chunk.start * DTYPE_BYTES[chunk.entry.dtype]
            begin, data = 0, buffer[: chunk.num_bytes]
            try:
                if is_paged:
                    begin = file.read_pages(buffer.numpy().data, offset, chunk.num_bytes)
                else:
                    file.read_into(data.numpy().data, offset)
            except CheckpointError as error:
                raise DamagedError(f"{where}: {error}") from error
        return buffer[begin : begin + chunk.num_bytes]

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

    @contextmanager
    def _open(self, name: str) -> Iterator[ShardFile]:
        """The open file; it is not closed meanwhile. Of thousands, only the latest stay open."""
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
                    raise DamagedError(f"{error}; it holds {contents(self._manifest, name)}") from error
            self._files[name] = file, users + 1
        try:
            yield file
        finally:
            with self._lock:
                file, users = self._files[name]
                self._files[name] = file, users - 1

    def close(self) -> None:
        for file, _ in self._files.values():
            file.close()
        self._files.clear()


class ReadAhead:
    """Chunks one after the other, verified, while threads read the next ones.

    ``place_of(chunk)``: where its bytes belong (uint8, on the host), and they are read there directly; None: into a
    buffer of ours, pinned beside ``device`` if that is an accelerator, so that copies from it need not wait.
    """

    def __init__(
        self,
        files: ShardFiles,
        chunks: Sequence[Chunk],
        place_of: Callable[[Chunk], torch.Tensor | None] = lambda chunk: None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._files, self._chunks, self._device = files, chunks, torch.device(device)
        self._places = [place_of(chunk) for chunk in chunks]
        self._threads = ThreadPoolExecutor(AHEAD, "checkpoint")
        self._pending: deque[tuple[Future[torch.Tensor], torch.Tensor | None]] = deque()
        # Used again and again: fresh memory costs as much time as the disk. One more than is read ahead is given out.
        buffered = [chunk.num_bytes for chunk, place in zip(chunks, self._places, strict=True) if place is None]
        pin, size = self._device.type != "cpu", max(buffered, default=0)
        count = min(AHEAD, len(buffered)) + 1 if buffered else 0
        self._free = deque(pages(size, pin) for _ in range(count))
        self._given_out: torch.Tensor | None = None
        self._copied: dict[int, torch.Event] = {}  # by buffer: what must have happened before it is filled again
        self._started = self._given = 0
        self._hash = xxhash.xxh3_128()

    def next(self) -> torch.Tensor:
        """The next chunk's elements, 1-D, until the call after. Raises DamagedError naming the tensor."""
        self._take_back()
        while self._started < len(self._chunks) and len(self._pending) < AHEAD:
            self._start(self._chunks[self._started], self._places[self._started])
        chunk = self._chunks[self._given]
        self._given += 1
        future, self._given_out = self._pending.popleft()
        data = future.result()
        if chunk.start == 0:
            self._hash.reset()
        self._hash.update(data.numpy().data)
        if chunk.is_last:
            self._files.check(chunk, self._hash.hexdigest())
        return data.view(torch_dtype(chunk.entry.dtype))

    def _start(self, chunk: Chunk, place: torch.Tensor | None) -> None:
        buffer = None
        if place is None:
            buffer = self._free.popleft()
            copied = self._copied.pop(buffer.data_ptr(), None)
            if copied is not None:
                copied.synchronize()
        target = place if buffer is None else buffer
        assert target is not None
        self._pending.append(
            (self._threads.submit(self._files.read, chunk, target, is_paged=buffer is not None), buffer)
        )
        self._started += 1

    def _take_back(self) -> None:
        """The buffer given out before; copies from it may still be under way."""
        buffer, self._given_out = self._given_out, None
        if buffer is None:
            return
        if self._device.type != "cpu":
            self._copied[buffer.data_ptr()] = torch.accelerator.current_stream(self._device).record_event()
        self._free.append(buffer)

    def close(self) -> None:
        """Waits for the threads and for copies from the buffers."""
        self._take_back()
        for copied in self._copied.values():
            copied.synchronize()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._files.close()


def pages(size: int, pin: bool = False) -> torch.Tensor:
    """Host memory that begins on a page and has two more than ``size`` bytes need: those around them in a file."""
    memory = torch.empty(size + 3 * ALIGNED, dtype=torch.uint8, pin_memory=pin)
    first = -memory.data_ptr() % ALIGNED
    return memory[first : first + size + 2 * ALIGNED]


def contents(manifest: Manifest, file: str) -> str:
    """Which tensors a file holds, for the message about its loss."""
    names = [e.name for e in manifest.tensors.values() if any(p.file == file for p in e.pieces)]
    names = list(dict.fromkeys(names))
    return f"{', '.join(names[:3])}" + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")
