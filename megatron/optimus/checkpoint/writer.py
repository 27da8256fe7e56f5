"""Pieces into their places of one file, hashed, in large blocks that go past the page cache.

The page cache costs a save more than the disk does: memory for all that is written, a copy into it, and with several
writers a wait for the file's lock, which a buffered write holds while it copies. So whole blocks are written directly
(O_DIRECT) from memory of our own; only what shares a page with other pieces, at the beginning and the end of a stretch,
goes through the cache. A file system that refuses direct writes gets everything that way.

    the caller's thread    copies and hashes block n + 1
    a thread of ours       writes block n
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash

from megatron.optimus.checkpoint import direct
from megatron.optimus.checkpoint.direct import ALIGNED, REFUSALS
from megatron.optimus.platform import files

BLOCK_BYTES = 16 << 20

log = logging.getLogger("optimus")


class SharedFile:
    """An open file of which every writer, in whatever process, writes places of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._buffered = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._direct: int | None = None
        try:
            self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | direct.FLAG)
        except OSError as error:
            try:
                self._without_direct(error)
            except OSError:
                os.close(self._buffered)
                raise

    def write(self, block: memoryview, offset: int) -> None:
        """Writes all of it. ``block`` lies as far behind a multiple of ``ALIGNED`` in memory as in the file."""
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
        """Goes on through the cache if that is what the file system wants; raises ``error`` if it is another."""
        if error.errno not in REFUSALS:
            raise error
        log.info("%s: direct writes are refused (%s), so it goes through the page cache", self._path, error.strerror)
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None

    def sync(self) -> None:
        """Makes durable what was written, whichever way it went."""
        os.fsync(self._buffered)

    def close(self) -> None:
        os.close(self._buffered)
        if self._direct is not None:
            os.close(self._direct)


class PieceWriter:
    """Writes and hashes pieces one after the other. To be closed, whatever happens.

    ``hash_wait_s``: how long nothing was written because a block was being hashed, which is what hashing costs a save.
    """

    def __init__(self, path: Path) -> None:
        self._file = SharedFile(path)
        self._thread = ThreadPoolExecutor(1, "checkpoint-write")
        self._blocks = [np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), np.uint8) for _ in range(2)]
        self._start = self._stop = 0  # what blocks[0] holds of the file
        self._pending: Future[float] | None = None  # the block before; gives the time when it was written
        self._digest = xxhash.xxh3_128()
        self._hashed_s = 0.0  # of the block being filled
        self.hash_wait_s = 0.0

    def write(self, data: memoryview, offset: int) -> None:
        """Continues a piece: its next bytes, at their place in the file. They may change as soon as this returns."""
        source = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
        done = 0
        while done < len(source):
            if offset + done != self._stop:
                self._flush()
                self._start = self._stop = offset + done
            place = self._stop % BLOCK_BYTES  # so the end of a block is one of the file's blocks too
            # As much as there is: to go on after every call takes the interpreter's lock from the training thread.
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
        """The hash of what was written since the last call."""
        digest = self._digest.digest()
        self._digest.reset()
        return digest

    def finish(self) -> None:
        """Returns when everything is on the disk, durably."""
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
        """Until the block before is written; notes for how long, meanwhile, nothing was."""
        idle_s = self._hashed_s  # before the first block, all of it
        if self._pending is not None:
            ready = time.perf_counter()
            idle_s = max(0.0, ready - self._pending.result())
            self._pending = None
        self.hash_wait_s += min(idle_s, self._hashed_s)
        self._hashed_s = 0.0

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._file.close()
