"""A bucket on one rank: its gradients' storage and reduction, its parameters' all-gather, and the hooks' view of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from deepspeed_ext.optimizers.base import Shard
from deepspeed_ext.zero.gradient_noise import GradientUnit
from deepspeed_ext.zero.options import ZeroOptions
from deepspeed_ext.zero.partition import BucketLayout, TensorRange
from deepspeed_ext.zero.update_stream import Pending

MAX_IN_FLIGHT = 4  # reductions of stage 2 before the next bucket waits for the oldest

# torch 2.13 renamed these two and warns about the old names.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Bucket:
    """One bucket: full-size gradients in ``storage``, what this rank owns of everything in ``shard``.

    Reduction happens in place: this rank's slice of what is sent becomes the sum.

    Args:
        layout: where its parameters lie.
        group: the process group over which it is reduced and gathered; None: this rank alone.
        rank: this rank's in the group.
        shard: what this rank owns.
        param: the bucket's slice of the parameters' flat buffer.
        storage: its slice of the gradients' flat buffer (stage 1, or a group of one rank); None: it acquires a buffer
            of the pool while it is open (stage 2).
        options: the optimizer's.
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
        self._gathering: Pending | None = None

    # ---- gradients

    def start_reduce(self) -> None:
        """Starts the reduce-scatter of storage; every part of it must have been written. Collective."""
        if not self.has_peers:
            return
        assert self.storage is not None and self._sent is None
        self._sent = self.storage.to(self._options.communication_dtype)  # itself, if the dtypes agree
        own = self._sent[self._own]
        self._reduction = reduce_scatter(own, self._sent, group=self.group, async_op=True)
        self.is_reduced = True

    def collect(self) -> None:
        """Waits (on a GPU: makes the stream wait) for the reduction and adds its result to this step's sum."""
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
        """Makes room for gradients after a reduction in the same step: keeps the reduced shard beside storage."""
        self.collect()
        if not self._is_summed:
            assert self.storage is not None
            if self._sum is None:
                self._sum = torch.empty_like(self.storage[self._own])
            self._sum.copy_(self.storage[self._own])
            self._is_summed = True
        self.is_reduced = False

    def finish_gradient(self) -> Tensor:
        """Returns the summed gradient of this rank's shard and sets it as ``shard.grad``.

        All reductions of the step must have started. Waits (on a GPU: makes the stream wait) for them.
        """
        self.collect()
        if self._is_summed:
            assert self._sum is not None
            self.shard.grad = self._sum
        else:
            assert self.storage is not None
            self.shard.grad = self.storage[self._own]
        return self.shard.grad

    def forget_gradient(self) -> None:
        """Starts a new sum, after a step."""
        self.is_reduced = False
        self._is_summed = False

    # ---- parameters

    def start_gather(self) -> None:
        """Starts the all-gather of the bucket's new parameters. Collective."""
        if self.has_peers:
            self._gathering = all_gather(self.param, self.shard.param, group=self.group, async_op=True)

    def set_pending(self, update: Pending) -> None:
        """Makes ``finish_gather`` wait for an update on another stream. The bucket has no peers."""
        self._gathering = update

    @property
    def is_gathering(self) -> bool:
        """Whether an all-gather, or an update on another stream, has started for which nobody has waited yet."""
        return self._gathering is not None

    def finish_gather(self) -> None:
        """Waits (on a GPU: makes the stream wait) for the new parameters."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def gradient_tensors(self) -> list[Tensor]:
        """Returns the tensors that hold gradients of the bucket: its storage, and the sum beside it."""
        return [held for held in (self.storage, self._sum) if held is not None]

    def gradient_bytes(self) -> int:
        """Returns the bytes that the bucket holds for gradients beside ``storage``."""
        return 0 if self._sum is None else self._sum.nbytes


class ParamState:
    """What the gradient hooks know of one parameter.

    ``expected`` is the largest number of gradients that one backward has brought so far; a weight that is used twice
    under reentrant checkpoints gets two. ``is_fused`` says that a producer puts gradients into ``main_grad``;
    ``has_asked`` is True after the producer called ``main_grad_holds_sum()`` and until it calls ``main_grad_ready()``;
    ``adds_unasked`` says that a producer did not ask in the first step.
    """

    __slots__ = ("adds_unasked", "buckets", "expected", "handle", "has_asked", "is_fused", "name", "param")

    def __init__(self, name: str, param: nn.Parameter) -> None:
        self.name, self.param = name, param
        self.buckets: list[BucketState] = []  # those it lies in: most often one
        self.expected = 1
        self.is_fused = self.has_asked = self.adds_unasked = False
        self.handle: RemovableHandle | None = None

    @property
    def may_add_unasked(self) -> bool:
        """Whether a producer may add to main_grad without asking whether it holds a sum."""
        return getattr(self.param, "main_grad", None) is not None and (self.adds_unasked or not self.is_fused)


class BucketState:
    """What the gradient hooks know of one bucket.

    ``ranges`` has an entry for each parameter in the bucket. ``copied_together`` are those that lie in no other bucket
    and whose gradients come in ``param.grad``: one multi-tensor copy moves them all. ``moved_singly`` come in
    ``main_grad`` or lie in several buckets. ``filled`` are the parameters whose gradients the storage holds since it
    was opened. ``unit`` is the noise measurement of the present step (gradient_noise.py).
    """

    __slots__ = (
        *("arrivals", "bucket", "buffer", "expected", "filled", "is_complete", "is_known"),
        *("is_launched", "copied_together", "moved_singly", "params", "ranges", "unit", "_places"),
    )

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.buffer: Tensor | None = None  # of the pool, which storage is a part of (stage 2)
        self.ranges: dict[ParamState, TensorRange] = {}
        self.copied_together: list[ParamState] = []
        self.params: list[nn.Parameter] = []  # of ``copied_together``
        self.moved_singly: list[ParamState] = []
        self.filled: set[ParamState] = set()
        self.arrivals: list[ParamState] = []  # one entry for each gradient of the present backward
        self.expected = 0  # gradients of all its parameters in one backward
        self.is_complete = False  # all expected gradients have arrived and are in storage
        self.is_launched = False  # in this backward
        self.unit = GradientUnit()
        self.is_known = False  # a backward has shown how often its gradients arrive
        self._places: dict[int, tuple[dict[ParamState, Tensor], list[Tensor]]] = {}

    def sort(self) -> None:
        """Divides the parameters into ``copied_together`` and ``moved_singly``, and sums what is expected of them."""
        self.copied_together = [state for state in self.ranges if len(state.buckets) == 1 and not state.is_fused]
        self.params = [state.param for state in self.copied_together]
        # Those in several buckets come last: moving one opens its other buckets as well.
        self.moved_singly = [state for state in self.ranges if len(state.buckets) > 1 or state.is_fused]
        self.moved_singly.sort(key=lambda state: len(state.buckets) > 1)
        self.expected = sum(state.expected for state in self.ranges)
        self._places.clear()

    def begin(self) -> None:
        """Resets what is known of the present backward."""
        self.arrivals.clear()
        self.is_complete = not self.ranges
        self.is_launched = False

    def has_all(self) -> bool:
        """Whether each parameter has got at least the expected number of gradients in this backward."""
        if self.expected == len(self.ranges):
            return len(set(self.arrivals)) == len(self.ranges)
        counts = Counter(self.arrivals)
        return all(counts[state] >= state.expected for state in self.ranges)

    def learn(self) -> None:
        """Raises what is expected of each parameter to what has arrived in this backward."""
        if self.is_complete and len(self.arrivals) == self.expected:
            return
        for state, count in Counter(self.arrivals).items():
            if count > state.expected:
                for bucket in state.buckets:
                    bucket.expected += count - state.expected
                state.expected = count

    def places(self) -> tuple[dict[ParamState, Tensor], list[Tensor]]:
        """Views of the storage: by parameter, and a list in the order of ``copied_together``.

        A view has the parameter's shape, or is flat where the parameter lies in several buckets.
        """
        key = id(self.buffer)  # buffers stay as long as the pool
        if key not in self._places:
            storage = self.bucket.storage
            assert storage is not None
            views = {}
            for state, part in self.ranges.items():
                flat = storage[part.where]
                views[state] = flat.view(state.param.shape) if len(state.buckets) == 1 else flat
            self._places[key] = views, [views[state] for state in self.copied_together]
        return self._places[key]


class BufferPool:
    """ZeRO stage 2: the few buffers in which full-size gradients exist.

    A bucket acquires one when the first of its gradients is moved and releases it after its reduction. Buffers are as
    large as the largest bucket, are made when first needed, and stay.
    """

    def __init__(self, buckets: Sequence[Bucket], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._numel = max((bucket.layout.numel for bucket in buckets if bucket.has_peers), default=0)
        self._in_flight: list[BucketState] = []  # oldest first
        self._free: list[Tensor] = []

    def acquire(self, state: BucketState) -> None:
        """Gives the bucket a buffer as its storage; waits for the oldest reduction if too many are in flight."""
        while not self._free and len(self._in_flight) >= MAX_IN_FLIGHT:
            self.release(self._in_flight.pop(0))
        bucket = state.bucket
        if not self._free:
            self._free.append(torch.empty(self._numel, dtype=self._dtype, device=bucket.param.device))
        state.buffer = self._free.pop()
        bucket.storage = state.buffer[: bucket.layout.numel]
        for start, stop in bucket.layout.gaps():
            bucket.storage[start:stop].zero_()

    def mark_in_flight(self, state: BucketState) -> None:
        """Records that the bucket's reduction has started; its buffer is released when another one needs it."""
        self._in_flight.append(state)

    def keep(self, state: BucketState) -> None:
        """Lets a bucket whose reduction is in flight keep its buffer for further gradients."""
        if state in self._in_flight:
            self._in_flight.remove(state)

    def release_all(self) -> None:
        """Waits for all reductions in flight and takes their buffers back."""
        while self._in_flight:
            self.release(self._in_flight.pop(0))

    def free_buffers(self) -> list[Tensor]:
        """The buffers that no bucket has."""
        return list(self._free)

    def release(self, state: BucketState) -> None:
        """Takes a bucket's buffer back; waits for the bucket's reduction, if it has one."""
        bucket = state.bucket
        bucket.collect()
        bucket.is_reduced = False
        assert state.buffer is not None
        self._free.append(state.buffer)
        bucket.storage = state.buffer = None
        state.filled.clear()
