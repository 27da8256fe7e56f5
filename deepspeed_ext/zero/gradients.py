"""From backward to reduced buckets: hooks collect gradients, complete buckets are reduced while backward goes on.

A hook per parameter counts; its gradient stays in ``param.grad`` until all of its bucket are there and one multi-tensor
copy takes them over (a parameter that lies in several buckets is copied at once). Buckets are launched strictly in one
order, the expected order of completion, which is a pure function of the model: whatever gets its gradients early or
late on some rank, every rank issues the same collectives in the same order. Nothing is launched in the first backward,
which shows how often each parameter's gradient arrives; what never arrives is reduced as zeros at the end.

Producers that add straight into the buffer (stage 1): ``param.main_grad`` is the parameter's place, of its shape;
after adding, call ``param.main_grad_ready()`` and return no gradient. Parameters whose gradient came the ordinary way
in the first backward lose ``main_grad``, and their place need not be cleared every step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from deepspeed_ext.zero.bucket import Bucket
from deepspeed_ext.zero.family import Family
from deepspeed_ext.zero.options import ZeroOptions
from deepspeed_ext.zero.partition import launch_order

logger = logging.getLogger("deepspeed_ext")

_RING = 4  # stage 2: buckets that may be in flight before the next one waits for the oldest


class _Part:
    """One piece of one parameter in one bucket."""

    __slots__ = ("bucket", "is_filled", "offset", "slot", "start", "stop", "view")

    def __init__(self, slot: _Slot, bucket: _Queued, start: int, stop: int, offset: int) -> None:
        self.slot, self.bucket = slot, bucket
        self.start, self.stop, self.offset = start, stop, offset
        self.is_filled = False  # storage holds gradients of this rank since the bucket was opened
        self.view: Tensor | None = None  # its place, where storage stays

    def place(self) -> Tensor:
        if self.view is not None:
            return self.view
        storage = self.bucket.bucket.storage
        assert storage is not None
        flat = storage[self.offset : self.offset + self.stop - self.start]
        return flat.view(self.slot.param.shape) if len(self.slot.parts) == 1 else flat


class _Slot:
    """One parameter."""

    __slots__ = ("events", "expected", "is_fused", "name", "param", "parts")

    def __init__(self, name: str, param: nn.Parameter) -> None:
        self.name, self.param = name, param
        self.parts: list[_Part] = []
        self.events = 0  # gradients that arrived in this backward
        self.expected = 1  # the most that arrived in one
        self.is_fused = False  # a producer adds into main_grad


class _Queued:
    """A bucket, what lies in it, and how far it is in this backward."""

    __slots__ = ("bucket", "is_complete", "is_launched", "lent", "parts", "waiting")

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.lent: Tensor | None = None  # the ring's buffer behind storage
        self.parts: list[_Part] = []
        self.waiting = 0
        self.is_complete = self.is_launched = False


class GradientSync:
    """The gradients of all families on one rank. ``positions``: each parameter's place in forward order."""

    def __init__(self, families: Sequence[Family], positions: dict[nn.Parameter, int], options: ZeroOptions) -> None:
        self._options = options
        self._slots: list[_Slot] = []
        queued: list[_Queued] = []
        for family in families:
            own = [_Queued(bucket) for bucket in family.buckets]
            queued += own
            for name, param in family.params.items():
                self._add_slot(family, own, name, param)
        members = [[positions[part.slot.param] for part in entry.parts] for entry in queued]
        self._queue = [queued[index] for index in launch_order(members)]
        self.buckets = [entry.bucket for entry in self._queue]  # in launch order
        self._next = 0
        self._is_armed = False  # launch complete buckets at once
        self._has_learned = False
        self.has_events = False
        self._has_fused = False
        self.is_dirty = False  # gradients have come since the last step
        self._lent: list[_Queued] = []  # stage 2, in flight, oldest first
        self._ring: list[Tensor] = []  # free buffers
        self._ring_numel = max(
            (entry.bucket.layout.numel for entry in self._queue if entry.bucket.has_peers), default=0
        )
        self._hooks = [slot.param.register_post_accumulate_grad_hook(self._hook_of(slot)) for slot in self._slots]
        self._begin()

    def _add_slot(self, family: Family, queued: list[_Queued], name: str, param: nn.Parameter) -> None:
        slot = _Slot(name, param)
        self._slots.append(slot)
        for index, piece in family.pieces[name]:
            part = _Part(slot, queued[index], piece.start, piece.stop, piece.offset)
            slot.parts.append(part)
            queued[index].parts.append(part)
        if family.grad_buffer is not None:
            for part in slot.parts:
                part.view = part.place()
            param.main_grad = family.grad_buffer[family.place(name)].view(param.shape)  # type: ignore[attr-defined]
            param.main_grad_ready = self._ready_of(slot)  # type: ignore[attr-defined]

    def _begin(self) -> None:
        self._next = 0
        self._is_armed = False
        for entry in self._queue:
            entry.waiting = len(entry.parts)
            entry.is_complete = not entry.parts
            entry.is_launched = False

    # ---- during backward

    def arm(self, will_reduce: bool) -> None:
        """Before a backward: may complete buckets be reduced at once?"""
        self._is_armed = will_reduce and self._has_learned and self._options.overlap_comm
        if self._has_fused:  # producers write without asking: what an earlier reduction left must be out of the way
            for entry in self._queue:
                if entry.bucket.is_reduced:
                    self._open(entry)

    def _hook_of(self, slot: _Slot) -> Callable[[Tensor], None]:
        def arrived(param: Tensor) -> None:
            slot.events += 1
            if slot.events == slot.expected:
                self._arrived(slot)
            elif slot.events > slot.expected:
                self._arrived_again(slot)
            self.has_events = self.is_dirty = True

        return arrived

    def _ready_of(self, slot: _Slot) -> Callable[[], None]:
        def ready() -> None:
            slot.is_fused = self._has_fused = True
            for part in slot.parts:
                part.is_filled = True
            slot.events += 1
            if slot.events == slot.expected:
                self._arrived(slot)
            elif slot.events > slot.expected:
                self._arrived_again(slot)
            self.has_events = self.is_dirty = True

        return ready

    def _arrived(self, slot: _Slot) -> None:
        if len(slot.parts) > 1 and slot.param.grad is not None:
            self._take_apart(slot)
        for part in slot.parts:
            entry = part.bucket
            entry.waiting -= 1
            if not entry.waiting:
                self._take([part for part in entry.parts if len(part.slot.parts) == 1])
                entry.is_complete = True
                if self._is_armed:
                    self._launch_complete()

    def _arrived_again(self, slot: _Slot) -> None:
        """More gradients than in any backward before: harmless unless the bucket is on its way already."""
        if any(part.bucket.is_launched for part in slot.parts):
            raise RuntimeError(
                f"parameter {slot.name!r} got gradient number {slot.events} of one backward after its bucket had been "
                f"reduced, because it got {slot.expected} in earlier ones; set overlap_comm=false for models whose "
                "parameters are used a varying number of times"
            )

    @torch.no_grad()
    def _take(self, parts: list[_Part]) -> None:
        """Moves ``param.grad`` of parameters that lie in one bucket, all the same one, into its storage."""
        parts = [part for part in parts if part.slot.param.grad is not None]
        if not parts:
            return
        self._open(parts[0].bucket)
        fresh: tuple[list[Tensor], list[Tensor]] = ([], [])
        again: tuple[list[Tensor], list[Tensor]] = ([], [])
        for part in parts:
            param = part.slot.param
            into, gradients = again if part.is_filled else fresh
            into.append(part.place())
            gradients.append(_dense(part.slot))
            part.is_filled = True
            param.grad = None
        if fresh[0]:
            torch._foreach_copy_(*fresh)
        if again[0]:
            torch._foreach_add_(*again)

    @torch.no_grad()
    def _take_apart(self, slot: _Slot) -> None:
        """Moves the gradient of a parameter that lies in several buckets."""
        flat = _dense(slot).reshape(-1)
        for part in slot.parts:
            self._open(part.bucket)
            into, gradient = part.place(), flat[part.start : part.stop]
            into.add_(gradient) if part.is_filled else into.copy_(gradient)
            part.is_filled = True
        slot.param.grad = None

    def _open(self, entry: _Queued) -> None:
        """Makes storage writable: lends it (stage 2), or sets aside what a reduction left there (stage 1)."""
        bucket = entry.bucket
        if bucket.storage is None:
            self._lend(entry)
        elif bucket.is_reduced and not entry.is_launched:
            if entry in self._lent:
                self._lent.remove(entry)  # in flight from the backward before: it keeps its buffer
            bucket.reopen()
            for part in entry.parts:
                part.is_filled = False
            fused = [part.place() for part in entry.parts if part.slot.is_fused]
            if fused:
                torch._foreach_zero_(fused)

    # ---- launching

    def _launch_complete(self) -> None:
        while self._next < len(self._queue) and self._queue[self._next].is_complete:
            self._launch(self._queue[self._next])

    @torch.no_grad()
    def _launch(self, entry: _Queued) -> None:
        self._open(entry)
        missing = [part.place() for part in entry.parts if not part.is_filled]
        if missing:
            torch._foreach_zero_(missing)
            for part in entry.parts:
                part.is_filled = True
        entry.is_launched = True
        self._next += 1
        entry.bucket.start_reduce()
        if self._options.stage == 2 and entry.bucket.has_peers:
            self._lent.append(entry)

    def end_backward(self, reduce: bool) -> None:
        """After a backward: takes what is left in ``param.grad``; with ``reduce`` launches what is left. Collective
        with ``reduce``."""
        # Not only after hooks: a schedule that computes weight gradients apart sets param.grad without running them.
        has_left = any(slot.param.grad is not None for slot in self._slots)
        if not (reduce or self.has_events or has_left):
            return
        if has_left:
            self.is_dirty = True
            for entry in self._queue:
                self._take([part for part in entry.parts if len(part.slot.parts) == 1])
            for slot in self._slots:
                if len(slot.parts) > 1 and slot.param.grad is not None:
                    self._take_apart(slot)
        if reduce:
            for entry in self._queue[self._next :]:
                self._launch(entry)
        if self.has_events:
            self._learn()
        self.has_events = False
        self._begin()

    def _learn(self) -> None:
        unused = [slot.name for slot in self._slots if not slot.events]
        for slot in self._slots:
            slot.expected = max(slot.expected, slot.events)
            slot.events = 0
            if not (self._has_learned or slot.is_fused):
                slot.param.main_grad = None  # type: ignore[attr-defined]
        if unused and not self._has_learned and self._options.overlap_comm:
            logger.info(
                "%d parameters got no gradient in the first backward (%r first); the reduction of their buckets and of "
                "all later ones waits for the end of backward; freeze parameters that are never used",
                len(unused),
                unused[0],
            )
        self._has_learned = True

    def accumulated(self, param: nn.Parameter) -> list[Tensor]:
        """Where this rank's gradient of a parameter adds up until it is reduced (stage 1), piece by piece, for a sum
        with other ranks than those of the reduction; zeros if none has come. To be called between backwards."""
        [slot] = [slot for slot in self._slots if slot.param is param]
        for part in slot.parts:
            self._open(part.bucket)
            if not part.is_filled:
                part.place().zero_()
                part.is_filled = True
        return [part.place() for part in slot.parts]

    # ---- stage 2: the ring

    def _lend(self, entry: _Queued) -> None:
        while not self._ring and len(self._lent) >= _RING:
            self._give_back(self._lent.pop(0))
        bucket = entry.bucket
        if not self._ring:
            self._ring.append(
                torch.empty(self._ring_numel, dtype=self._options.travel_dtype, device=bucket.param.device)
            )
        entry.lent = self._ring.pop()
        bucket.storage = entry.lent[: bucket.layout.numel]
        for start, stop in bucket.layout.gaps():
            bucket.storage[start:stop].zero_()

    def _give_back(self, entry: _Queued) -> None:
        bucket = entry.bucket
        bucket.collect()
        bucket.is_reduced = False
        assert entry.lent is not None
        self._ring.append(entry.lent)
        bucket.storage = entry.lent = None
        for part in entry.parts:
            part.is_filled = False

    # ---- around the step

    def finish(self) -> None:
        """Waits for all reductions; ``shard.grad`` of every bucket is set."""
        while self._lent:
            self._give_back(self._lent.pop(0))
        for bucket in self.buckets:
            bucket.finish_gradient()

    @torch.no_grad()
    def forget(self) -> None:
        """After a step, taken or skipped: the next gradients start new sums."""
        self.is_dirty = False
        fused = []
        for entry in self._queue:
            entry.bucket.forget_gradient()
            for part in entry.parts:
                part.is_filled = False
                if part.slot.is_fused:
                    fused.append(part.place())
        if fused:
            torch._foreach_zero_(fused)

    def storages(self) -> list[Tensor]:
        """The ring's free buffers (stage 2)."""
        return list(self._ring)

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for slot in self._slots:
            slot.param.main_grad = slot.param.main_grad_ready = None  # type: ignore[attr-defined]


def _dense(slot: _Slot) -> Tensor:
    gradient = slot.param.grad
    assert gradient is not None
    if gradient.layout != torch.strided:
        raise ValueError(
            f"parameter {slot.name!r} got a {gradient.layout} gradient; sparse gradients cannot be sharded, build the "
            "module with sparse=False"
        )
    return gradient
