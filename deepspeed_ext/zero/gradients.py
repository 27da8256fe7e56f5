"""From backward to reduced buckets: hooks collect gradients, complete buckets are reduced while backward goes on.

A gradient stays in ``param.grad`` until all of its bucket are there and one multi-tensor copy takes them over (a
parameter that lies in several buckets is copied at once). The parameter that came last in a bucket the time before is
the one whose hook looks whether all are there; the others' hooks are a list's ``append``, which runs no Python code.
Where it once is not the last, all look from then on. Buckets are launched strictly in one order, the expected order of
completion, which is a pure function of the model: whatever gets its gradients early or late on some rank, every rank
issues the same collectives in the same order. Nothing is launched in the first backward, which shows how often each
parameter's gradient arrives; what never arrives is reduced as zeros at the end.

Producers that put gradients straight into the buffer (stage 1): ``param.main_grad`` is the parameter's place, of its
shape. Right before, ask ``param.main_grad_holds_sum()``: True, add to what is there; False, write the whole place, what
is there is undefined. Then call ``param.main_grad_ready()`` and return no gradient. Who does not ask adds: the place of
a parameter for which somebody did not in the first step is zeroed after every step. Parameters for which nobody was
ready in the first step lose ``main_grad`` at its end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from deepspeed_ext.zero.bucket import Bucket
from deepspeed_ext.zero.failures import Failures
from deepspeed_ext.zero.family import Family
from deepspeed_ext.zero.options import ZeroOptions
from deepspeed_ext.zero.partition import launch_order
from deepspeed_ext.zero.queued import Part, Queued, Slot
from deepspeed_ext.zero.ring import Ring

logger = logging.getLogger("deepspeed_ext")


class GradientSync:
    """The gradients of all families on one rank. ``positions``: each parameter's place in forward order. What is wrong
    with a gradient is no error in backward, where other ranks would wait: it is noted in ``failures``."""

    def __init__(
        self,
        families: Sequence[Family],
        positions: dict[nn.Parameter, int],
        options: ZeroOptions,
        failures: Failures,
    ) -> None:
        self._options = options
        self._failures = failures
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
        self._entries = {entry.bucket: entry for entry in self._queue}
        self._now = self._queue  # what this backward may launch
        self._next = 0  # place in it
        self._is_armed = False  # launch complete buckets at once
        self._has_counted = False  # gradients of single parameters, see Queued, have come since the last backward
        self._will_reduce = False  # this backward
        self.has_ended = True  # the last backward, and no other has begun
        self._has_surplus = False  # among them more for a parameter than in any backward before
        self._is_unusual = False  # among them some that had to be counted one by one
        self._has_settled = False  # the first step is over: it is known who puts gradients into main_grad, and how
        self._has_fused = self._has_learned = self._was_dirty = False
        self._zeroed_places: list[Tensor] = []  # after every step
        self._single: list[Slot] = []  # those that are not moved together with others
        self._ring = Ring(self.buckets, options.communication_dtype)
        self._sort()
        self._begin()

    @property
    def has_events(self) -> bool:
        """Whether gradients have come since the end of the last backward."""
        return self._has_counted or any(entry.arrivals for entry in self._queue)

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
            param.main_grad_holds_sum = self._question_of(slot)  # type: ignore[attr-defined]
            param.main_grad_ready = self._ready_of(slot)  # type: ignore[attr-defined]

    def _sort(self) -> None:
        """Who is moved with others and who is not, and the hooks that follow from it."""
        for entry in self._queue:
            if not entry.is_sorted:
                entry.sort()
                entry.begin()
                self._watch(entry)
        self._single = [slot for slot in self._slots if not any(part.is_together for part in slot.parts)]
        for slot in self._single:
            slot.tell(self._hook_of(slot))
        self._is_unsorted = False

    @property
    def _takes_at_end(self) -> bool:
        """Stage 2, when nothing is reduced before the end of backward: a buffer lent earlier would only be held."""
        return self._options.stage == 2 and not self._is_armed

    def _begin(self) -> None:
        self._now, self._next = self._queue, 0
        self._is_armed = False
        for entry in self._queue:
            entry.begin()

    # ---- during backward

    def arm(self, will_reduce: bool, only: Sequence[Bucket] | None = None) -> None:
        """Before a backward: may complete buckets be reduced at once? ``only``: it reduces these, in this order."""
        self.has_ended, self._will_reduce = False, will_reduce
        self._now = self._queue if only is None else [self._entries[bucket] for bucket in only]
        self._is_armed = will_reduce and self._options.overlap_comm and all(entry.is_known for entry in self._now)
        if self._has_fused or not self._has_settled:  # producers may not ask: the place must be free
            for entry in self._now:
                if entry.bucket.is_reduced and entry.lent is None:
                    self._open(entry)

    def _watch(self, entry: Queued) -> None:
        """Every arrival of those that are moved together looks whether it was the last."""
        arrivals, number = entry.arrivals, len(entry.together)

        def arrived(param: nn.Parameter) -> None:
            arrivals.append(param)
            if len(arrivals) >= number and not entry.is_here and entry.is_sorted:
                self._arrived_together(entry)

        entry.has_tail = False
        for part in entry.together:
            part.slot.tell(arrived)

    def _arrived_together(self, entry: Queued) -> None:
        gradients = entry.gradients()
        if gradients is None:  # one came twice, another not yet
            return
        entry.is_here = True
        entry.waiting -= 1
        if not entry.waiting:
            self._complete(entry, gradients)

    def _hook_of(self, slot: Slot) -> Callable[[nn.Parameter], None]:
        """Of a parameter that is not moved with others."""
        entry = slot.parts[0].entry if len(slot.parts) == 1 else None

        def arrived(param: nn.Parameter) -> None:
            self._has_counted = True
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

    def _question_of(self, slot: Slot) -> Callable[[], bool]:
        def holds_sum() -> bool:
            slot.has_asked = True
            for part in slot.parts:
                self._open(part.entry)
            return slot.holds_sum()

        return holds_sum

    def _ready_of(self, slot: Slot) -> Callable[[], None]:
        arrived = self._hook_of(slot)

        def ready() -> None:
            if not slot.has_asked:
                slot.add_unasked(self._has_settled, self._failures)
            slot.has_asked = False
            slot.is_fused = self._has_fused = True
            for part in slot.parts:
                part.mark()
            if slot.parts and slot.parts[0].is_together:  # not for long
                slot.parts[0].entry.is_sorted = False
                self._is_unsorted = self._has_counted = self._is_unusual = True
                slot.events += 1
            else:
                arrived(slot.param)

        return ready

    def _arrived_in_parts(self, slot: Slot) -> None:
        if slot.param.grad is not None and not self._takes_at_end:
            self._take_apart(slot)
        for part in slot.parts:
            part.entry.waiting -= 1
            if not part.entry.waiting:
                self._complete(part.entry)

    def _complete(self, entry: Queued, gradients: list[Tensor] | None = None) -> None:
        if self._takes_at_end:
            return
        self._take(entry, gradients)
        entry.is_complete = True
        if self._is_armed:
            self._launch_complete()

    def _arrived_otherwise(self, slot: Slot) -> None:
        """Fewer gradients than expected, so far; or more: harmless unless the bucket is on its way already."""
        if slot.events < slot.expected:
            return
        self._has_surplus = True
        if any(part.entry.is_launched for part in slot.parts):
            slot.drop_late(self._failures)

    @torch.no_grad()
    def _take(self, entry: Queued, gradients: list[Tensor] | None = None) -> None:
        """Moves ``param.grad`` of parameters that lie in this bucket alone into its storage. ``gradients``: what
        ``entry.gradients()`` is, where it is known."""
        parts = entry.parts
        # The first step looks at each gradient; later ones trust that a dense one does not become sparse.
        if self._has_settled and entry.can_move_together and (gradients := gradients or entry.gradients()):
            self._open(entry)
            move, places = torch._foreach_add_ if entry.is_filled else torch._foreach_copy_, entry.places()
            try:
                with torch.inference_mode():  # autograd's part is a quarter of the host's time for small gradients
                    move(places, gradients)
            except RuntimeError:
                if all(gradient.layout == torch.strided for gradient in gradients):
                    raise
            else:
                entry.is_filled = True
                for param in entry.params:
                    param.grad = None
                parts = entry.others
        self._take_some([p for p in parts if len(p.slot.parts) == 1 and p.slot.param.grad is not None])

    def _take_some(self, parts: list[Part]) -> None:
        parts = [part for part in parts if part.slot.gradient(self._failures) is not None]
        if not parts:
            return
        self._open(parts[0].entry)
        for is_filled, move in ((False, torch._foreach_copy_), (True, torch._foreach_add_)):
            some = [part for part in parts if part.is_filled is is_filled]
            if some:
                move([part.place() for part in some], [g for part in some if (g := part.slot.param.grad) is not None])
        for part in parts:
            part.mark()
            part.slot.param.grad = None

    @torch.no_grad()
    def _take_apart(self, slot: Slot) -> None:
        """Moves the gradient of a parameter that lies in several buckets."""
        gradient = slot.gradient(self._failures)
        if gradient is None:
            return
        flat = gradient.reshape(-1)
        for part in slot.parts:
            self._open(part.entry)
            into, piece = part.place(), flat[part.start : part.stop]
            into.add_(piece) if part.is_filled else into.copy_(piece)
            part.mark()
        slot.param.grad = None

    def _open(self, entry: Queued) -> None:
        """Makes storage writable: lends it (stage 2), or sets aside what a reduction left there (stage 1)."""
        bucket = entry.bucket
        if bucket.storage is None:
            self._ring.lend(entry)
        elif bucket.is_reduced and not entry.is_launched:
            self._ring.keep(entry)
            bucket.reopen()
            entry.empty()
            parts = entry.others if self._has_settled else entry.parts
            zeroed = [part.place() for part in parts if part.slot.may_add_unasked]
            if zeroed:
                torch._foreach_zero_(zeroed)

    # ---- launching

    def _launch_complete(self) -> None:
        while self._next < len(self._now) and self._now[self._next].is_complete:
            self._launch(self._now[self._next])

    @torch.no_grad()
    def _launch(self, entry: Queued) -> None:
        self._open(entry)
        missing = entry.missing()
        if missing:
            torch._foreach_zero_(missing)
        entry.is_launched = True
        self._next += 1
        entry.bucket.start_reduce()
        if entry.lent is not None:
            self._ring.sent(entry)

    def end_backward(self, reduce: bool) -> None:
        """After a backward: takes what is left in ``param.grad``; with ``reduce`` (collective) launches the rest."""
        if self.has_ended and not (reduce or self.has_events):
            return
        for entry in self._queue:
            self._review(entry)
        # Not only after hooks: a schedule that computes weight gradients apart sets param.grad without running them.
        for entry in dict.fromkeys((*self._now, *self._queue)):
            if self._has_surplus or not entry.is_complete:
                self._take_left(entry)
            # one by one: stage 2 lends no more buffers than it has in flight
            if reduce and self._next < len(self._now) and self._now[self._next] is entry:
                self._launch(entry)
        if self.has_events:
            self._was_dirty = True
            self._learn()
        self._has_counted = self._has_surplus = self._is_unusual = False
        self.has_ended = True
        self._begin()

    def end_interrupted(self) -> bool:
        """Instead of ``end_backward`` where an exception has ended the backward: other ranks, which may have come
        further, wait for what it was to reduce. Whether it was. The gradients are good for nothing but ``forget``."""
        for entry in self._queue:
            entry.arrivals.clear()  # nothing is to be learnt from them
        for slot in self._slots:
            slot.events = 0
        self.end_backward(reduce=self._will_reduce)
        self._was_dirty = True
        return self._will_reduce

    def _take_left(self, entry: Queued) -> None:
        self._was_dirty |= any(part.slot.param.grad is not None for part in entry.parts)
        self._take(entry)
        for part in entry.parts:
            if len(part.slot.parts) > 1 and part.slot.param.grad is not None:
                self._take_apart(part.slot)

    def _review(self, entry: Queued) -> None:
        """After a backward: who came how often, and who looks for the last one in the next."""
        if not entry.arrivals:
            return
        if entry.is_here and len(entry.arrivals) == len(entry.together) and self._has_learned:  # each of them once
            if self._has_settled and not (entry.has_tail or entry.is_erratic):
                self._appoint_tail(entry)
            return
        if entry.has_tail:
            entry.is_erratic = True
            self._watch(entry)
        self._is_unusual = True
        entry.count()
        for part in entry.together:
            slot = part.slot
            if slot.events > slot.expected:
                self._has_surplus = True
                if entry.is_launched and slot.param.grad is not None:
                    slot.drop_late(self._failures)

    def _appoint_tail(self, entry: Queued) -> None:
        tail = entry.arrivals[-1]
        for part in entry.together:
            if part.slot.param is not tail:
                part.slot.tell(entry.arrivals.append)
        entry.has_tail = True

    def _learn(self) -> None:
        self._learn_first()
        for slot in self._slots if self._is_unusual else self._single:
            if slot.events > slot.expected:
                slot.expected = slot.events
                for part in slot.parts:
                    if part.is_together:
                        part.entry.is_sorted, self._is_unsorted = False, True
            slot.events = 0

    def _learn_first(self) -> None:
        new = [entry for entry in self._now if not entry.is_known]
        unused = list(dict.fromkeys(p.slot.name for entry in new for p in entry.parts if not p.slot.events))
        if unused and self._options.overlap_comm:
            logger.info(
                "%d parameters got no gradient in the first backward (%r first); their buckets and all later ones are "
                "reduced when backward has ended; freeze parameters that are never used",
                *(len(unused), unused[0]),
            )
        self._has_learned = True
        for entry in new:
            entry.is_known = True

    def _settle(self) -> None:
        """After the first step. Not after the first backward: of a pipeline with several chunks that reaches one."""
        self._has_settled = True
        for slot in self._slots:
            if not slot.is_fused:
                slot.param.main_grad = None  # type: ignore[attr-defined]
        self._zeroed_places = [part.place() for slot in self._slots if slot.adds_unasked for part in slot.parts]

    # ---- around the step

    def check_all_sent(self) -> None:
        """Before a step: notes a failure where stage 2 holds gradients that no reduction took."""
        for entry in self._queue:
            if entry.lent is not None and not entry.bucket.is_reduced:
                self._failures.note(
                    RuntimeError(
                        f"parameter {entry.parts[0].slot.name!r} or one beside it got a gradient in a backward that "
                        "was said not to reach it; give its bucket to set_gradient_accumulation_boundary(only=...)"
                    )
                )

    def finish(self) -> None:
        """Waits for all reductions; ``shard.grad`` of every bucket is set."""
        self._ring.drain()
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
            self._sort()
        if self._has_learned and not self._has_settled:
            self._settle()
        if self._zeroed_places:
            torch._foreach_zero_(self._zeroed_places)

    def settle_buffers(self) -> list[Tensor]:
        """Between backwards: waits for what is on its way; all memory that holds gradients, or may."""
        self._ring.drain()
        return self._ring.free() + [held for entry in self._queue for held in entry.settle()]

    def close(self) -> None:
        """Removes the hooks."""
        for slot in self._slots:
            slot.ignore()
            for name in ("main_grad", "main_grad_holds_sum", "main_grad_ready"):
                setattr(slot.param, name, None)
