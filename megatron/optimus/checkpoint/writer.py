"""One rank's part of a save: its background thread, and its pieces written and hashed in large direct blocks.

The page cache costs a save more than the disk does: memory for everything that is written, a copy into it, and with
several writers a wait for the file's lock, which a buffered write holds while it copies. So whole blocks are written
directly (O_DIRECT) from memory of this module. What shares a page with other pieces, at the beginning and the end of a
stretch, goes through the cache. A file system that refuses direct writes gets everything through it.

    the save's thread          copies and hashes block n + 1
    a thread of PieceWriter    writes block n

No function here communicates with other ranks; saver.py does.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.manifest import Manifest, StoredPiece
from megatron.optimus.checkpoint.save_plan import PIECE_VALUE, RECORD_BYTES, SavePlan
from megatron.optimus.checkpoint.shards import ALIGNED, DIRECT_REFUSALS, O_DIRECT, tensor_bytes
from megatron.optimus.checkpoint.slices import TensorSlice
from megatron.optimus.checkpoint.snapshot import Snapshot
from megatron.optimus.checkpoint.values import largest_magnitude
from megatron.optimus.platform import files

BLOCK_BYTES = 16 << 20

log = logging.getLogger("optimus")


# ---- a save in flight


class Task:
    """Runs a function in a thread of its own and keeps its error."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._action()
        except Exception as error:
            self.error = error
        except BaseException as error:  # or a thread that was torn down would look like one that has finished
            self.error = CheckpointError(f"the writing thread ended: {error!r}")

    @property
    def is_done(self) -> bool:
        """Whether the function has returned or raised."""
        return not self._thread.is_alive()

    def join(self, seconds: float | None = None) -> None:
        """Waits for the function, at most ``seconds``; None: without limit."""
        self._thread.join(seconds)


@dataclass
class Job:
    """A save in flight. Its ``phases`` run one after the other; the ranks agree between them."""

    header: Manifest
    plan: SavePlan
    slices: list[TensorSlice]  # this rank's pieces, in the plan's order
    snapshot: Snapshot | None  # whose copies are the slices' memory; None: it is the live one
    temporary: Path  # the directory that is renamed in the end
    retain: int | None
    started: float  # time.perf_counter
    stall_s: float = 0.0
    local: Path | None = None  # a directory on the node's own disk that is written first
    digests: list[bytes] = field(default_factory=list)  # of this rank's pieces, once written
    largest: list[float] = field(default_factory=list)  # magnitude in each of them
    warnings: tuple[str, ...] = ()  # of what the checkpoint holds; known to rank 0
    hash_wait_s: float = 0.0
    phases: list[Callable[[], None] | None] = field(default_factory=list)
    phase: int = 0
    task: Task | None = None
    revision: int = 0
    attempts: int = 0  # that have failed
    is_dropped: threading.Event = field(default_factory=threading.Event)  # ends the pause before the next attempt

    @property
    def first_directory(self) -> Path:
        """Where this attempt writes first: on the node's own disk if there is one."""
        return self.local or self.temporary


def write(job: Job, directory: Path) -> None:
    """Writes this rank's pieces into its file in ``directory``; notes their hashes and largest values in ``job``."""
    if job.snapshot is not None:
        job.snapshot.wait()
    slices = iter(job.slices)
    job.largest = []

    def data(piece: StoredPiece, offset: int) -> Iterator[memoryview]:
        largest = []
        for values in next(slices).stored_values(BLOCK_BYTES):
            flat = values.detach().cpu()
            for part in flat.split(BLOCK_BYTES // flat.itemsize):  # hashed while the processor's cache has it
                largest.append(largest_magnitude(part))
                yield tensor_bytes(part)
        job.largest.append(float(np.max(largest, initial=0.0)))  # NaN if one is

    job.digests = _write_own(job, directory, data)


def copy(job: Job, local: Path) -> None:
    """Copies this rank's pieces from the node's own disk to the directory of all ranks, and checks them on the way."""
    descriptor = os.open(local / job.plan.file.name, os.O_RDONLY)

    def data(piece: StoredPiece, offset: int) -> Iterator[memoryview]:
        for start in range(0, piece.num_bytes, BLOCK_BYTES):
            yield memoryview(os.pread(descriptor, min(BLOCK_BYTES, piece.num_bytes - start), offset + start))

    try:
        digests = _write_own(job, job.temporary, data)
    finally:
        os.close(descriptor)
    if digests != job.digests:
        raise CheckpointError(f"{local / job.plan.file.name} does not give back what was written to it")


def _write_own(job: Job, directory: Path, data: Callable[[StoredPiece, int], Iterator[memoryview]]) -> list[bytes]:
    """Writes this rank's pieces into its file in ``directory``; returns their hashes.

    In the directory of all ranks it leaves hashes and largest values for rank 0 beside the file.
    """
    plan = job.plan
    files.make_directory(directory)  # every rank: on a network disk rank 0's may not be visible yet
    digests: list[bytes] = []
    writer = PieceWriter(directory / plan.file.name)
    try:
        if plan.writes_header:
            writer.write(memoryview(plan.file.header), 0)
            writer.end_piece()  # the header's hash is not needed
        for piece, offset in plan.own():
            position = offset
            for block in data(piece, offset):
                writer.write(block, position)
                position += len(block)
            digests.append(writer.end_piece())
        writer.finish()
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(directory)) from error  # says which disk is full
    finally:
        writer.close()
    job.hash_wait_s += writer.hash_wait_s
    if digests and directory == job.temporary:
        descriptor = os.open(directory / plan.file.hashes_name, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            found = [digest + PIECE_VALUE.pack(value) for digest, value in zip(digests, job.largest, strict=True)]
            files.write_at(descriptor, memoryview(b"".join(found)), plan.first * RECORD_BYTES)
        finally:
            os.close(descriptor)
    return digests


# ---- files


class SharedFile:
    """An open file that several processes write, each at places of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._buffered = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._direct: int | None = None
        try:
            self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | O_DIRECT)
        except OSError as error:
            try:
                self._without_direct(error)
            except OSError:
                os.close(self._buffered)
                raise

    def write(self, block: memoryview, offset: int) -> None:
        """Writes a block whose address and ``offset`` are the same modulo ``ALIGNED``: its whole pages directly."""
        low = min(-offset % ALIGNED, len(block))
        high = low + (len(block) - low) // ALIGNED * ALIGNED
        for start, stop in ((0, low), (high, len(block))):
            if start < stop:
                files.write_at(self._buffered, block[start:stop], offset + start)
        if low < high:
            self._write_pages(block[low:high], offset + low)

    def _write_pages(self, pages: memoryview, offset: int) -> None:
        if self._direct is not None:
            try:
                files.write_at(self._direct, pages, offset)
                return
            except OSError as error:  # also the rest of a short write, which need not begin with a page
                self._without_direct(error)
        files.write_at(self._buffered, pages, offset)

    def _without_direct(self, error: OSError) -> None:
        """Goes on through the page cache if ``error`` is a refusal of direct writes; raises it otherwise."""
        if error.errno not in DIRECT_REFUSALS:
            raise error
        log.info("%s: direct writes are refused (%s), so it goes through the page cache", self._path, error.strerror)
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None

    def sync(self) -> None:
        """Makes durable what was written, directly or through the cache."""
        os.fsync(self._buffered)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._buffered)
        if self._direct is not None:
            os.close(self._direct)


class PieceWriter:
    """Writes and hashes pieces one after the other. ``close`` must be called, whatever happens.

    ``hash_wait_s``: seconds in which nothing was written because a block was being hashed, the cost of hashing.
    """

    def __init__(self, path: Path) -> None:
        self._file = SharedFile(path)
        self._thread = ThreadPoolExecutor(1, "checkpoint-write")
        self._blocks = [np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), np.uint8) for _ in range(2)]
        self._start = self._stop = 0  # what blocks[0] holds of the file
        self._pending: Future[float] | None = None  # of the previous block; gives the time when it was written
        self._digest = xxhash.xxh3_128()
        self._hashed_s = 0.0  # of the block being filled
        self.hash_wait_s = 0.0

    def write(self, data: memoryview, offset: int) -> None:
        """Writes the next bytes of a piece at ``offset`` in the file. The caller may change them after the return."""
        source = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
        done = 0
        while done < len(source):
            if offset + done != self._stop:
                self._flush()
                self._start = self._stop = offset + done
            place = self._stop % BLOCK_BYTES  # so blocks end at multiples of BLOCK_BYTES in the file too
            # As much as there is: every further call would take the interpreter's lock from the training thread.
            part = source[done : done + BLOCK_BYTES - place]
            np.copyto(self._blocks[0][place : place + len(part)], part)
            began = time.perf_counter()
            self._digest.update(part.data)
            self._hashed_s += time.perf_counter() - began
            done += len(part)
            self._stop += len(part)
            if self._stop % BLOCK_BYTES == 0:
                self._flush()

    def end_piece(self) -> bytes:
        """Returns the hash of what was written since the last call."""
        digest = self._digest.digest()
        self._digest.reset()
        return digest

    def finish(self) -> None:
        """Waits until everything is durable on the disk."""
        self._flush()
        self._wait()
        self._file.sync()

    def _flush(self) -> None:
        if self._start == self._stop:
            return
        self._wait()
        place, length = self._start % BLOCK_BYTES, self._stop - self._start
        block = self._blocks[0][place : place + length].data
        self._pending = self._thread.submit(self._write_block, block, self._start)
        self._blocks.reverse()
        self._start = self._stop

    def _write_block(self, block: memoryview, offset: int) -> float:
        self._file.write(block, offset)
        return time.perf_counter()

    def _wait(self) -> None:
        """Waits until the previous block is written; counts the time in which nothing was being written."""
        idle_s = self._hashed_s  # before the first block nothing could be written
        if self._pending is not None:
            ready = time.perf_counter()
            idle_s = max(0.0, ready - self._pending.result())
            self._pending = None
        self.hash_wait_s += min(idle_s, self._hashed_s)
        self._hashed_s = 0.0

    def close(self) -> None:
        """Waits for the writing thread and closes the file."""
        self._thread.shutdown(wait=True)
        self._file.close()
