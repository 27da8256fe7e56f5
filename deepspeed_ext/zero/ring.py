"""ZeRO stage 2: the few buffers in which full-size gradients exist, lent to buckets from their opening to their sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_ext.zero.bucket import Bucket
from deepspeed_ext.zero.queued import Queued

_IN_FLIGHT = 4  # buckets that may be on their way before the next one waits for the oldest


class Ring:
    """Buffers as large as the largest of the ``buckets``, made when first needed."""

    def __init__(self, buckets: Sequence[Bucket], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._numel = max((bucket.layout.numel for bucket in buckets if bucket.has_peers), default=0)
        self._sent: list[Queued] = []  # oldest first
        self._free: list[Tensor] = []

    def lend(self, entry: Queued) -> None:
        """Gives the bucket storage."""
        while not self._free and len(self._sent) >= _IN_FLIGHT:
            self._give_back(self._sent.pop(0))
        bucket = entry.bucket
        if not self._free:
            self._free.append(torch.empty(self._numel, dtype=self._dtype, device=bucket.param.device))
        entry.lent = self._free.pop()
        bucket.storage = entry.lent[: bucket.layout.numel]
        for start, stop in bucket.layout.gaps():
            bucket.storage[start:stop].zero_()

    def sent(self, entry: Queued) -> None:
        """Its reduction has started."""
        self._sent.append(entry)

    def keep(self, entry: Queued) -> None:
        """One that is on its way is wanted again: it keeps its buffer."""
        if entry in self._sent:
            self._sent.remove(entry)

    def drain(self) -> None:
        """Waits for all that are on their way and takes their buffers back."""
        while self._sent:
            self._give_back(self._sent.pop(0))

    def free(self) -> list[Tensor]:
        """Buffers that nobody has."""
        return list(self._free)

    def _give_back(self, entry: Queued) -> None:
        bucket = entry.bucket
        bucket.collect()
        bucket.is_reduced = False
        assert entry.lent is not None
        self._free.append(entry.lent)
        bucket.storage = entry.lent = None
        entry.empty()
