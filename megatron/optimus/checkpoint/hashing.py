"""Hashes of pieces, computed by a second thread while the first one writes them."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import xxhash

_INLINE_BYTES = 1 << 18  # hashed in less time than a thread takes to wake up


class HashBeside:
    """xxh3-128 of one piece after the other. The caller hands over a block, writes it, and only then waits.

    ``waited_s``: how long it has waited, which is what hashing costs a save.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint-hash")
        self._digest = xxhash.xxh3_128()
        self._pending: Future[None] | None = None
        self.waited_s = 0.0

    def start(self, block: memoryview) -> None:
        """Begins to hash the next block of the piece; its bytes must not change until ``wait``."""
        if len(block) < _INLINE_BYTES:
            began = time.perf_counter()
            self._digest.update(block)
            self.waited_s += time.perf_counter() - began
        else:
            self._pending = self._thread.submit(self._digest.update, block)

    def wait(self) -> None:
        """Returns when the block is hashed."""
        if self._pending is not None:
            began = time.perf_counter()
            self._pending.result()
            self._pending = None
            self.waited_s += time.perf_counter() - began

    def finish(self) -> bytes:
        """The piece's hash; the next block begins another piece."""
        self.wait()
        digest = self._digest.digest()
        self._digest.reset()
        return digest

    def close(self) -> None:
        self._thread.shutdown(wait=True)
