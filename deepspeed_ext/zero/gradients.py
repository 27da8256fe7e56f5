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
from typing import cast

import torch
from torch import Tensor, nn

from deepspeed_ext.zero.family import Family
from deepspeed_ext.zero.options import ZeroOptions
from deepspeed_ext.zero.partition import launch_order
from deepspeed_ext.zero.queued import Part, Queued, Slot

logger = logging.getLogger("deepspeed_ext")

_RING = 4  # stage 2: buckets that may be in flight before the next one waits for the oldest


class GradientSync:
    """The gradients of all families on one rank. ``positions``: each parameter's place in forward order."""

    def __init__(self, families: Sequence[Family], positions: dict[nn.Parameter, int], options: ZeroOptions) -> None:
        self._options = options
        self._slots: list[Slot] = []
        queued: list[Queued] = []
        for family in families:
            own = [Queued(bucket) for bucket in family.buckets]
            queued += own
            for name, param in family.params.items():
                self._add_slot(family, own, name, param)
        members = [[positions[part.slot.param] for part in entry.parts] for entry in queued]
        self._queue = [queued[index] for index in launch_order(members)]
        self.buckets = [entry.bucket for entry in self._queue]  # in launch order
        self._next = 0
        self._is_armed = False  # launch complete buckets at once
        self._has_learned = False
        self.has_events = False  # gradients have come since the end of the last backward
        self._has_ended = False  # and no other has begun
        self._has_surplus = False  # among them more for a parameter than in any backward before
        self._has_fused = False
        self._fused_places: list[Tensor] = []
        self._is_unsorted = False
        self._was_dirty = False
        self._lent: list[Queued] = []  # stage 2, in flight, oldest first
        self._ring: list[Tensor] = []  # free buffers
        self._ring_numel = max(
            (entry.bucket.layout.numel for entry in self._queue if entry.bucket.has_peers), default=0
        )
        self._hooks = [slot.param.register_post_accumulate_grad_hook(self._hook_of(slot)) for slot in self._slots]
        for entry in self._queue:
            entry.sort()
        self._begin()

    @property
    def is_dirty(self) -> bool:
        """Whether gradients have come since the last step."""
        return self._was_dirty or self.has_events

    def _add_slot(self, family: Family, queued: list[Queued], name: str, param: nn.Parameter) -> None:
        slot = Slot(name, param)
        self._slots.append(slot)
        for index, piece in family.pieces[name]:
            part = Part(slot, queued[index], piece.start, piece.stop, piece.offset)
            slot.parts.append(part)
            queued[index].parts.append(part)
        if family.grad_buffer is not None:
            for part in slot.parts:
                part.view = part.place()
            param.main_grad = family.grad_buffer[family.place(name)].view(param.shape)  # type: ignore[attr-defined]
            param.main_grad_ready = self._ready_of(slot)  # type: ignore[attr-defined]

    @property
    def _takes_at_end(self) -> bool:
        """Stage 2, when nothing is reduced before the end of backward: a buffer lent earlier would only be held."""
        return self._options.stage == 2 and not self._is_armed

    def _begin(self) -> None:
        self._next = 0
        self._is_armed = False
        for entry in self._queue:
            entry.begin()

    # ---- during backward

    def arm(self, will_reduce: bool) -> None:
        """Before a backward: may complete buckets be reduced at once?"""
        self._has_ended = False
        self._is_armed = will_reduce and self._has_learned and self._options.overlap_comm
        if self._has_fused:  # producers write without asking: what an earlier reduction left must be out of the way
            for entry in self._queue:
                if entry.bucket.is_reduced:
                    self._open(entry)

    def _hook_of(self, slot: Slot) -> Callable[[Tensor], None]:
        entry = slot.parts[0].entry if len(slot.parts) == 1 else None

        def arrived(param: Tensor) -> None:  # runs once a parameter and backward: nothing here that can be elsewhere
            self.has_events = True
            slot.events = events = slot.events + 1
            if events != slot.expected:
                self._arrived_otherwise(slot)
            elif entry is None:
                self._arrived_in_parts(slot)
            else:
                entry.waiting -= 1
                if not entry.waiting:
                    self._complete(entry)

        return arrived

    def _ready_of(self, slot: Slot) -> Callable[[], None]:
        arrived = self._hook_of(slot)

        def ready() -> None:
            slot.is_fused = self._has_fused = True
            for part in slot.parts:
                part.mark()
            arrived(slot.param)

        return ready

    def _arrived_in_parts(self, slot: Slot) -> None:
        if slot.param.grad is not None and not self._takes_at_end:
            self._take_apart(slot)
        for part in slot.parts:
            part.entry.waiting -= 1
            if not part.entry.waiting:
                self._complete(part.entry)

    def _complete(self, entry: Queued) -> None:
        if self._takes_at_end:
            return
        self._take(entry)
        entry.is_complete = True
        if self._is_armed:
            self._launch_complete()

    def _arrived_otherwise(self, slot: Slot) -> None:
        """Fewer gradients than expected, so far; or more: harmless unless the bucket is on its way already."""
        if slot.events < slot.expected:
            return
        self._has_surplus = True
        if any(part.entry.is_launched for part in slot.parts):
            raise RuntimeError(
                f"parameter {slot.name!r} got gradient number {slot.events} of one backward after its bucket had been "
                f"reduced, because it got {slot.expected} in earlier ones; set overlap_comm=false for models whose "
                "parameters are used a varying number of times"
            )

    @torch.no_grad()
    def _take(self, entry: Queued) -> None:
        """Moves ``param.grad`` of parameters that lie in this bucket alone into its storage."""
        gradients = [param.grad for param in entry.params]
        parts = entry.parts
        # The first backward looks at each gradient; later ones trust that a dense one does not become sparse.
        if self._has_learned and entry.can_move_together and all(gradient is not None for gradient in gradients):
            self._open(entry)
            move = torch._foreach_add_ if entry.is_filled else torch._foreach_copy_
            move(entry.places(), cast("list[Tensor]", gradients))
            entry.is_filled = True
            for param in entry.params:
                param.grad = None
            parts = entry.others
        self._take_some([p for p in parts if len(p.slot.parts) == 1 and p.slot.param.grad is not None])

    def _take_some(self, parts: list[Part]) -> None:
        if not parts:
            return
        self._open(parts[0].entry)
        for is_filled, move in ((False, torch._foreach_copy_), (True, torch._foreach_add_)):
            some = [part for part in parts if part.is_filled is is_filled]
            if some:
                move([part.place() for part in some], [_dense(part.slot) for part in some])
        for part in parts:
            part.mark()
            part.slot.param.grad = None

    @torch.no_grad()
    def _take_apart(self, slot: Slot) -> None:
        """Moves the gradient of a parameter that lies in several buckets."""
        flat = _dense(slot).reshape(-1)
        for part in slot.parts:
            self._open(part.entry)
            into, gradient = part.place(), flat[part.start : part.stop]
            into.add_(gradient) if part.is_filled else into.copy_(gradient)
            part.mark()
        slot.param.grad = None

    def _open(self, entry: Queued) -> None:
        """Makes storage writable: lends it (stage 2), or sets aside what a reduction left there (stage 1)."""
        bucket = entry.bucket
        if bucket.storage is None:
            self._lend(entry)
        elif bucket.is_reduced and not entry.is_launched:
            if entry in self._lent:
                self._lent.remove(entry)  # in flight from the backward before: it keeps its buffer
            bucket.reopen()
            entry.empty()
            fused = [part.place() for part in entry.others if part.slot.is_fused]
            if fused:
                torch._foreach_zero_(fused)

    # ---- launching

    def _launch_complete(self) -> None:
        while self._next < len(self._queue) and self._queue[self._next].is_complete:
            self._launch(self._queue[self._next])

    @torch.no_grad()
    def _launch(self, entry: Queued) -> None:
        self._open(entry)
        missing = entry.missing()
        if missing:
            torch._foreach_zero_(missing)
        entry.is_launched = True
        self._next += 1
        entry.bucket.start_reduce()
        if self._options.stage == 2 and entry.bucket.has_peers:
            self._lent.append(entry)

    def end_backward(self, reduce: bool) -> None:
        """After a backward: takes what is left in ``param.grad``; with ``reduce`` launches what is left. Collective
        with ``reduce``."""
        if self._has_ended and not (reduce or self.has_events):
            return
        # Not only after hooks: a schedule that computes weight gradients apart sets param.grad without running them.
        for index, entry in enumerate(self._queue):
            if self._has_surplus or not entry.is_complete:
                self._take_left(entry)
            if reduce and index == self._next:  # one by one: stage 2 lends no more buffers than it has in flight
                self._launch(entry)
        if self.has_events:
            self._was_dirty = True
            self._learn()
        self.has_events = self._has_surplus = False
        self._has_ended = True
        self._begin()

    def _take_left(self, entry: Queued) -> None:
        self._was_dirty |= any(part.slot.param.grad is not None for part in entry.parts)
        self._take(entry)
        for part in entry.parts:
            if len(part.slot.parts) > 1 and part.slot.param.grad is not None:
                self._take_apart(part.slot)

    def _learn(self) -> None:
        if not self._has_learned:
            self._learn_first()
        if self._has_surplus:
            for slot in self._slots:
                slot.expected = max(slot.expected, slot.events)
        for slot in self._slots:
            slot.events = 0

    def _learn_first(self) -> None:
        self._has_learned = True
        unused = [slot.name for slot in self._slots if not slot.events]
        if unused and self._options.overlap_comm:
            logger.info(
                "%d parameters got no gradient in the first backward (%r first); the reduction of their buckets and of "
                "all later ones waits for the end of backward; freeze parameters that are never used",
                len(unused),
                unused[0],
            )
        for slot in self._slots:
            if not slot.is_fused:
                slot.param.main_grad = None  # type: ignore[attr-defined]
        self._fused_places = [part.place() for slot in self._slots if slot.is_fused for part in slot.parts]
        self._is_unsorted = self._has_fused

    def accumulated(self, param: nn.Parameter) -> list[Tensor]:
        """Where this rank's gradient of a parameter adds up until it is reduced (stage 1), piece by piece, for a sum
        with other ranks than those of the reduction; zeros if none has come. To be called between backwards."""
        [slot] = [slot for slot in self._slots if slot.param is param]
        for part in slot.parts:
            self._open(part.entry)
            if not part.is_filled:
                part.place().zero_()
                part.mark()
        return [part.place() for part in slot.parts]

    # ---- stage 2: the ring

    def _lend(self, entry: Queued) -> None:
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

    def _give_back(self, entry: Queued) -> None:
        bucket = entry.bucket
        bucket.collect()
        bucket.is_reduced = False
        assert entry.lent is not None
        self._ring.append(entry.lent)
        bucket.storage = entry.lent = None
        entry.empty()

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
        self._was_dirty = False
        for entry in self._queue:
            entry.bucket.forget_gradient()
            entry.empty()
            if self._is_unsorted:
                entry.sort()
        self._is_unsorted = False
        if self._fused_places:
            torch._foreach_zero_(self._fused_places)

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


def _dense(slot: Slot) -> Tensor:
    gradient = slot.param.grad
    assert gradient is not None
    if gradient.layout != torch.strided:
        raise ValueError(
            f"parameter {slot.name!r} got a {gradient.layout} gradient; sparse gradients cannot be sharded, build the "
            "module with sparse=False"
        )
    return gradient
