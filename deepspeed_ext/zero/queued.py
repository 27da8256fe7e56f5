"""What gradients.py keeps per bucket and parameter, laid out so that the usual case touches a bucket, not its parts.

Usual: a parameter lies in one bucket alone and its gradient arrives in ``param.grad``, once a backward. All such
parameters of a bucket are moved by one multi-tensor copy between two lists, and one flag says that they were; they
share one list of arrivals, too. What is different, a parameter cut by a bucket's end, one whose producer adds into
``main_grad`` or one that gets several gradients in a backward, is counted and marked by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_ext.zero.bucket import Bucket
from deepspeed_ext.zero.failures import Failures


class Slot:
    """One parameter."""

    __slots__ = (
        *("adds_unasked", "events", "expected", "handle", "has_asked"),
        *("is_fused", "name", "param", "parts"),
    )

    def __init__(self, name: str, param: nn.Parameter) -> None:
        self.name, self.param = name, param
        self.parts: list[Part] = []
        self.events = 0  # gradients that arrived in this backward
        self.expected = 1  # the most that arrived in one
        self.is_fused = False  # a producer puts gradients into main_grad
        self.has_asked = False  # it, whether a sum is there, and has not been ready since
        self.adds_unasked = False  # it did not ask, in the first step
        self.handle: Any = None  # of its hook

    def tell(self, hook: Callable[[nn.Parameter], None]) -> None:
        """Makes ``hook`` the one that is called after a gradient has been added to ``param.grad``."""
        self.ignore()
        is_trained = self.param.requires_grad  # it may be frozen for a while, and torch refuses the hook then
        self.param.requires_grad_()
        self.handle = self.param.register_post_accumulate_grad_hook(hook)
        self.param.requires_grad_(is_trained)

    def ignore(self) -> None:
        """Nobody is told any more."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None

    @property
    def may_add_unasked(self) -> bool:
        """Whether a producer may add to main_grad without asking whether a sum is there."""
        return getattr(self.param, "main_grad", None) is not None and (self.adds_unasked or not self.is_fused)

    def holds_sum(self) -> bool:
        """Whether its place holds gradients. Of one in several buckets, some of which do, the rest becomes zero."""
        empty = [part for part in self.parts if not part.is_filled]
        if len(empty) == len(self.parts):
            return False
        for part in empty:
            part.place().zero_()
        return True

    def add_unasked(self, has_settled: bool, failures: Failures) -> None:
        """A producer has added to main_grad without asking whether a sum is there."""
        if not has_settled:
            self.adds_unasked = True
        elif not self.adds_unasked and not all(part.is_filled for part in self.parts):
            failures.note(
                RuntimeError(
                    f"parameter {self.name!r} got a gradient added to main_grad, which holds no sum: all who did so in "
                    "the first step asked main_grad_holds_sum(), so it is not zeroed; ask, or do not in the first step"
                )
            )

    def gradient(self, failures: Failures) -> Tensor | None:
        """Its ``param.grad``; a sparse one is dropped and noted among the failures."""
        gradient = self.param.grad
        if gradient is not None and gradient.layout != torch.strided:
            self.param.grad = None
            failures.note(
                ValueError(
                    f"parameter {self.name!r} got a {gradient.layout} gradient; sparse gradients cannot be sharded, "
                    "compute it with sparse=False"
                )
            )
        return self.param.grad

    def drop_late(self, failures: Failures) -> None:
        """A gradient has come after the bucket has left."""
        self.param.grad = None
        error = RuntimeError(
            f"parameter {self.name!r} got gradient number {self.events} of one backward after its bucket had been "
            f"reduced, because it got {self.expected} in earlier ones; set overlap_comm=false for models whose "
            "parameters are used a varying number of times"
        )
        failures.note(error)


class Part:
    """One piece of one parameter in one bucket."""

    __slots__ = ("entry", "is_marked", "is_together", "offset", "slot", "start", "stop", "view")

    def __init__(self, slot: Slot, entry: Queued, start: int, stop: int, offset: int) -> None:
        self.slot, self.entry = slot, entry
        self.start, self.stop, self.offset = start, stop, offset
        self.is_together = False  # moved with the others of its bucket
        self.is_marked = False  # storage holds its gradients, whatever the bucket's flag says
        self.view: Tensor | None = None  # its place, where storage stays

    @property
    def is_filled(self) -> bool:
        """Whether storage holds gradients of this rank since the bucket was opened."""
        return self.is_marked or (self.is_together and self.entry.is_filled)

    def mark(self) -> None:
        """Storage holds its gradients from now on."""
        if not self.is_marked:
            self.is_marked = True
            self.entry.marked.append(self)

    def place(self) -> Tensor:
        """Where its gradient belongs, of the parameter's shape if it lies here alone, else flat."""
        if self.view is not None:
            return self.view
        storage = self.entry.bucket.storage
        assert storage is not None
        flat = storage[self.offset : self.offset + self.stop - self.start]
        return flat.view(self.slot.param.shape) if len(self.slot.parts) == 1 else flat


class Queued:
    """A bucket, what lies in it, and how far it is in this backward."""

    __slots__ = (
        *("arrivals", "bucket", "has_tail", "is_complete", "is_erratic", "is_filled", "is_here", "is_known"),
        *("is_launched", "is_sorted", "lent", "marked", "others", "params", "parts", "together", "views", "waiting"),
    )

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.lent: Tensor | None = None  # the ring's buffer behind storage
        self.parts: list[Part] = []
        self.together: list[Part] = []
        self.others: list[Part] = []
        self.params: list[nn.Parameter] = []  # of ``together``
        self.arrivals: list[nn.Parameter] = []  # whose gradient came in this backward, of ``together``
        self.is_here = False  # the gradients of all of ``together`` have come in this backward
        self.is_sorted = False  # False: ``together`` has one that does not belong there, as has come out since
        self.is_known = False  # a backward has shown how often its gradients arrive
        self.has_tail = False  # only the parameter that came last looks whether all are here, see GradientSync
        self.is_erratic = False  # it was once not the last
        self.is_filled = False  # storage holds the gradients of all parts in ``together``
        self.marked: list[Part] = []
        self.views: dict[int, list[Tensor]] = {}  # places of ``together``, by address of storage
        self.waiting = 0
        self.is_complete = self.is_launched = False

    def sort(self) -> None:
        """Decides which parts are moved together; storage must hold no gradients. Again once it is known which
        producers add into main_grad, and who gets several gradients in a backward."""
        for part in self.parts:
            slot = part.slot
            part.is_together = len(slot.parts) == 1 and not slot.is_fused and slot.expected == 1
        self.together = [part for part in self.parts if part.is_together]
        self.others = [part for part in self.parts if not part.is_together]
        self.params = [part.slot.param for part in self.together]
        self.views.clear()
        self.is_sorted = True

    def gradients(self) -> list[Tensor] | None:
        """Of ``together``; None if one is missing, or nothing is moved together."""
        found = [gradient for param in self.params if (gradient := param.grad) is not None]
        return found if found and len(found) == len(self.params) else None

    def count(self) -> None:
        """Adds to the slots of ``together`` how often each has arrived in this backward."""
        came = Counter(map(id, self.arrivals))
        for part in self.together:
            part.slot.events += came[id(part.slot.param)]

    def places(self) -> list[Tensor]:
        """Of ``together``, in storage as it is now."""
        assert self.bucket.storage is not None
        address = self.bucket.storage.data_ptr()
        if address not in self.views:
            self.views[address] = [part.place() for part in self.together]
        return self.views[address]

    def settle(self) -> list[Tensor]:
        """Waits for the reduction; the memory behind the gradients, whose address may become another's."""
        self.bucket.collect()
        self.views.clear()
        return self.bucket.gradient_tensors()

    @property
    def can_move_together(self) -> bool:
        """Whether ``together`` is in one state: all filled or none."""
        return not any(part.is_together for part in self.marked)

    def begin(self) -> None:
        """Before a backward."""
        self.waiting = len(self.others) + bool(self.together)
        self.is_complete = not self.parts
        self.is_here = self.is_launched = False
        self.arrivals.clear()

    def empty(self) -> None:
        """Storage holds no gradients of this rank any more."""
        self.is_filled = False
        for part in self.marked:
            part.is_marked = False
        self.marked.clear()

    def missing(self) -> list[Tensor]:
        """Places that nothing was written to."""
        parts = self.others if self.is_filled else self.parts
        return [part.place() for part in parts if not part.is_filled]
