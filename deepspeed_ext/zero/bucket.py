"""One bucket on one rank: where its gradients collect, how they are reduced, how its new parameters are published."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_ext.optimizers.base import Shard
from deepspeed_ext.zero.collectives import all_gather, reduce_scatter
from deepspeed_ext.zero.options import ZeroOptions
from deepspeed_ext.zero.partition import BucketLayout


class Bucket:
    """Full-size gradients in ``storage``, this rank's share of everything in ``shard``.

    ``storage`` is a slice of the family's buffer (stage 1, or a group of one rank), or lent by the ring while the
    bucket is open (stage 2). Reduction happens in place: this rank's slice of what is sent becomes the sum.
    """

    def __init__(
        self,
        layout: BucketLayout,
        group: dist.ProcessGroup | None,
        rank: int,
        shard: Shard,
        param: Tensor,
        storage: Tensor | None,
        options: ZeroOptions,
    ) -> None:
        self.layout = layout
        self.group = group
        self.shard = shard
        self.param = param
        self.storage = storage
        self.has_peers = layout.group_size > 1
        self.is_reduced = False  # storage was sent since the last step, so it holds no gradients of this rank
        self._own = slice(rank * layout.shard_numel, (rank + 1) * layout.shard_numel)
        self._options = options
        # Results of several reductions are added up beside storage where storage cannot hold them.
        wide = options.shard_dtype != options.grad_dtype
        self._keeps_sum = self.has_peers and (storage is None or wide)
        self._sum: Tensor | None = None
        if self._keeps_sum:
            self._sum = torch.empty(layout.shard_numel, dtype=options.shard_dtype, device=param.device)
        self._is_summed = False
        self._sent: Tensor | None = None
        self._reduction: dist.Work | None = None
        self._gathering: dist.Work | None = None

    # ---- gradients

    def start_reduce(self) -> None:
        """Starts summing storage over the group; every part of it must have been written. Collective."""
        if not self.has_peers:
            return
        assert self.storage is not None and self._sent is None
        self._sent = self.storage.to(self._options.communication_dtype)  # itself, if the dtypes agree
        own = self._sent[self._own]
        self._reduction = reduce_scatter(own, self._sent, group=self.group, async_op=True)
        self.is_reduced = True

    def collect(self) -> None:
        """Waits (on a GPU: makes the stream wait) for the reduction and puts its result where it belongs."""
        if self._sent is None:
            return
        assert self.storage is not None
        if self._reduction is not None:
            self._reduction.wait()
        result = self._sent[self._own]
        if self._is_summed:
            assert self._sum is not None
            self._sum.add_(result)
        elif self._keeps_sum:
            assert self._sum is not None
            self._sum.copy_(result)
            self._is_summed = True
        elif self._sent is not self.storage:
            self.storage[self._own].copy_(result)
        self._sent = self._reduction = None

    def reopen(self) -> None:
        """Makes room for gradients after a reduction in the same step; the reduced part is set aside."""
        self.collect()
        if not self._is_summed:
            assert self.storage is not None
            if self._sum is None:
                self._sum = torch.empty_like(self.storage[self._own])
            self._sum.copy_(self.storage[self._own])
            self._is_summed = True
        self.is_reduced = False

    def finish_gradient(self) -> Tensor:
        """The summed gradient of this rank's shard, also set as ``shard.grad``; all reductions must have started."""
        self.collect()
        if self._is_summed:
            assert self._sum is not None
            self.shard.grad = self._sum
        else:
            assert self.storage is not None
            self.shard.grad = self.storage[self._own]
        return self.shard.grad

    def forget_gradient(self) -> None:
        """After a step: the next gradients start a new sum."""
        self.is_reduced = False
        self._is_summed = False

    # ---- parameters

    def start_gather(self) -> None:
        """Starts gathering all ranks' new parameters of the bucket. Collective."""
        if self.has_peers:
            self._gathering = all_gather(self.param, self.shard.param, group=self.group, async_op=True)

    @property
    def is_gathering(self) -> bool:
        """Whether nobody has waited yet for the parameters."""
        return self._gathering is not None

    def finish_gather(self) -> None:
        """Waits (on a GPU: makes the stream wait) until the bucket's parameters are here."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def gradient_tensors(self) -> list[Tensor]:
        """What holds gradients of the bucket: its storage, and sums beside it."""
        return [held for held in (self.storage, self._sum) if held is not None]

    def gradient_bytes(self) -> int:
        """Bytes that the bucket holds for gradients beside ``storage``."""
        return 0 if self._sum is None else self._sum.nbytes
