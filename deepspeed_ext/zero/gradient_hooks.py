"""From backward to reduced buckets: hooks count gradients, complete buckets are reduced while backward goes on.

One rule: **a bucket is complete when the expected number of gradients of each of its parameters has arrived in this
backward; complete buckets are launched in launch order.** The expected number is the largest that any backward has
brought, 1 to begin with. On completion, one multi-tensor copy moves the gradients from ``param.grad`` into the
bucket's storage, or adds them to what is there. Storage has the gradient dtype, or the communication dtype where it is
a buffer of stage 2's pool. At the end of a backward the remaining gradients are moved too. If the backward reduces, the
remaining buckets are then launched, with zeros for parameters that got no gradient.

The launch order is the expected order of completion, a pure function of the model: whatever gets its gradients early or
late on some rank, every rank issues the same collectives in the same order. Nothing is launched during the first
backward of a bucket, which shows how often each gradient arrives. The gradient of a parameter that lies in several
buckets is moved without waiting for the others. ZeRO stage 2, when nothing will be launched before the end of the
backward, moves nothing before it either: a buffer acquired earlier would only be held.

Producers that put gradients straight into the storage (stage 1): ``param.main_grad`` is the parameter's part of it, of
its shape. Right before, call ``param.main_grad_holds_sum()``: True, add to what is there; False, write the whole part,
what is there is undefined. Then call ``param.main_grad_ready()``, which counts as an arrival, and return no gradient.
A producer that does not ask adds: its parameter's part is zeroed after every step. Parameters that no producer has
served in the first step lose ``main_grad`` at its end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from deepspeed_ext.zero.bucket import Bucket, BucketState, BufferPool, ParamState
from deepspeed_ext.zero.flat_buffer import FlatBuffer
from deepspeed_ext.zero.options import ZeroOptions
from deepspeed_ext.zero.partition import launch_order
from deepspeed_ext.zero.sync_errors import StepErrors

logger = logging.getLogger("deepspeed_ext")


class GradientReducer:
    """Collects and reduces the gradients of all flat buffers on one rank.

    The optimizer calls ``arm`` before and ``end_backward`` after each backward. A step then calls ``check_all_sent``,
    ``finish`` (which sets ``shard.grad`` of every bucket) and ``reset_after_step``. Every rank must make the same
    calls.

    Errors in a gradient are recorded in ``errors`` and not raised in backward, because other ranks would wait for this
    one in a collective.

    Args:
        flat_buffers: their buckets are reduced.
        positions: each parameter's position in forward order.
        options: the optimizer's.
        errors: takes the errors of this rank.
    """

    def __init__(
        self,
        flat_buffers: Sequence[FlatBuffer],
        positions: dict[nn.Parameter, int],
        options: ZeroOptions,
        errors: StepErrors,
    ) -> None:
        self._options = options
        self._errors = errors
        self._params: list[ParamState] = []
        states: list[BucketState] = []
        for flat_buffer in flat_buffers:
            own = [BucketState(bucket) for bucket in flat_buffer.buckets]
            states += own
            for name, param in flat_buffer.params.items():
                self._add_param(flat_buffer, own, name, param)
        members = [[positions[param.param] for param in state.ranges] for state in states]
        self._queue = [states[index] for index in launch_order(members)]
        self.buckets = [state.bucket for state in self._queue]  # in launch order
        self._state_of = {state.bucket: state for state in self._queue}
        self._pool = BufferPool(self.buckets, options.communication_dtype)
        self._active_buckets = self._queue  # buckets that the present backward may launch
        self._next_launch = 0  # index in ``_active_buckets`` of the next bucket to launch
        self._launches_in_backward = False  # True: a complete bucket is launched during backward
        self._will_reduce = False  # True: the gradients of the present backward are reduced
        self.has_ended = True  # False from ``arm`` to ``end_backward``
        self._was_dirty = False  # True: a backward that has ended brought gradients for the coming step
        self._has_fused = False  # True: some producer writes gradients to ``main_grad``
        self._has_learned = False  # True: the first backward with gradients has ended
        self._main_grad_users_known = False  # True after the first step, which shows who writes to ``main_grad``
        self.measures_micro_batches = True  # False: the noise of ranks is measured, not that of micro-batches
        self._num_backwards = 0  # that have brought gradients since the last step
        self._zeroed_places: list[Tensor] = []  # parts of storage that are zeroed after every step
        for state in self._queue:
            state.sort()
        self._begin()

    @property
    def has_arrivals(self) -> bool:
        """Whether gradients have arrived since the end of the last backward."""
        return any(state.arrivals for state in self._queue)

    @property
    def is_dirty(self) -> bool:
        """Whether gradients have arrived since the last step."""
        return self._was_dirty or self.has_arrivals

    def _add_param(
        self, flat_buffer: FlatBuffer, states: Sequence[BucketState], name: str, param: nn.Parameter
    ) -> None:
        own = ParamState(name, param)
        self._params.append(own)
        for index, part in flat_buffer.ranges[name]:
            states[index].ranges[own] = part
            own.buckets.append(states[index])
        arrived = self._hook_of(own)
        own.handle = param.register_post_accumulate_grad_hook(arrived)
        if flat_buffer.grad_buffer is not None:
            param.main_grad = flat_buffer.grad_buffer[flat_buffer.slice_of(name)].view(param.shape)  # type: ignore[attr-defined]
            param.main_grad_holds_sum = self._main_grad_holds_sum_of(own)  # type: ignore[attr-defined]
            param.main_grad_ready = self._main_grad_ready_of(own, arrived)  # type: ignore[attr-defined]

    def _begin(self) -> None:
        """Resets what is known of the present backward."""
        self._active_buckets, self._next_launch = self._queue, 0
        self._launches_in_backward = False
        for state in self._queue:
            state.begin()

    # ---- during backward

    def arm(self, will_reduce: bool, only: Sequence[Bucket] | None = None) -> None:
        """Prepares for a backward.

        Args:
            will_reduce: whether its gradients are reduced; complete buckets are then launched while it runs.
            only: the buckets that it reduces, in this order; None: all.
        """
        self.has_ended, self._will_reduce = False, will_reduce
        self._active_buckets = self._queue if only is None else [self._state_of[bucket] for bucket in only]
        self._launches_in_backward = (
            will_reduce and self._options.overlap_comm and all(state.is_known for state in self._active_buckets)
        )
        if self._has_fused or not self._main_grad_users_known:  # a producer that does not ask needs the storage open
            for state in self._active_buckets:
                if state.bucket.is_reduced and state.buffer is None:
                    self._open(state)

    def _hook_of(self, param: ParamState) -> Callable[[nn.Parameter], None]:
        """The function that runs for every gradient of the parameter."""
        if len(param.buckets) != 1:
            return lambda _: self._arrive_in_several(param)
        [state] = param.buckets
        arrivals = state.arrivals

        def arrived(_: nn.Parameter) -> None:
            arrivals.append(param)
            if len(arrivals) >= state.expected:
                self._check_complete(state, param)

        return arrived

    def _arrive_in_several(self, param: ParamState) -> None:
        for state in param.buckets:
            state.arrivals.append(param)
        is_ready = all(
            not state.is_launched and state.arrivals.count(param) >= param.expected for state in param.buckets
        )
        if is_ready and not self._moves_at_end:
            self._move([param])
        for state in param.buckets:
            if len(state.arrivals) >= state.expected:
                self._check_complete(state, param)

    @property
    def _moves_at_end(self) -> bool:
        """Whether gradients stay in ``param.grad`` until the backward has ended."""
        return self._options.stage == 2 and not self._launches_in_backward

    def _check_complete(self, state: BucketState, param: ParamState) -> None:
        """Moves the gradients of a bucket that is complete with this one, and launches what can be launched."""
        if state.is_launched:
            self._refuse_late(param)
        elif not self._moves_at_end and state.has_all():
            self._move_all(state)
            state.is_complete = True
            while (
                self._launches_in_backward
                and self._next_launch < len(self._active_buckets)
                and self._active_buckets[self._next_launch].is_complete
            ):
                self._launch(self._active_buckets[self._next_launch])

    def _refuse_late(self, param: ParamState) -> None:
        param.param.grad = None
        number = param.buckets[0].arrivals.count(param)
        self._errors.record(
            RuntimeError(
                f"parameter {param.name!r} got gradient number {number} of one backward after its bucket had been "
                f"reduced, because it got {param.expected} in earlier ones; set overlap_comm=false for models whose "
                "parameters are used a varying number of times"
            )
        )

    # ---- producers of main_grad

    def _main_grad_holds_sum_of(self, param: ParamState) -> Callable[[], bool]:
        def holds_sum() -> bool:
            param.has_asked = True
            for state in param.buckets:
                self._open(state)
            empty = [state for state in param.buckets if param not in state.filled]
            if len(empty) == len(param.buckets):
                return False
            for state in empty:  # of a parameter in several buckets, some of which hold a sum
                state.places()[0][param].zero_()
            return True

        return holds_sum

    def _main_grad_ready_of(self, param: ParamState, arrived: Callable[[nn.Parameter], None]) -> Callable[[], None]:
        def ready() -> None:
            if not param.has_asked:
                self._check_unasked(param)
            param.has_asked = False
            param.is_fused = self._has_fused = True
            for state in param.buckets:
                state.filled.add(param)
            arrived(param.param)

        return ready

    def _check_unasked(self, param: ParamState) -> None:
        """Checks that a producer that has not asked whether main_grad holds a sum has added to one."""
        if not self._main_grad_users_known:
            param.adds_unasked = True
        elif not param.adds_unasked and not all(param in state.filled for state in param.buckets):
            self._errors.record(
                RuntimeError(
                    f"parameter {param.name!r} got a gradient added to main_grad, which holds no sum: all who did so "
                    "in the first step asked main_grad_holds_sum(), so it is not zeroed; ask, or do not in the first "
                    "step"
                )
            )

    # ---- moving gradients into storage

    def _move_all(self, state: BucketState) -> None:
        """Moves the gradients that are in ``param.grad`` into this bucket's storage."""
        copied_together, filled = state.copied_together, state.filled
        gradients = [gradient for param in state.params if (gradient := param.grad) is not None]
        if gradients:
            self._open(state)
        is_full = len(filled) == len(state.ranges)
        num_filled = len(copied_together) if is_full else len(filled and filled.intersection(copied_together))
        if gradients and len(gradients) == len(copied_together) and num_filled in (0, len(copied_together)):
            move = torch._foreach_add_ if num_filled else torch._foreach_copy_
            try:
                with torch.inference_mode():  # autograd's part is a quarter of the host's time for small gradients
                    move(state.places()[1], gradients)
            except RuntimeError:
                if all(gradient.layout == torch.strided for gradient in gradients):
                    raise
            else:
                if not num_filled:
                    filled.update(copied_together)
                for moved in state.params:
                    moved.grad = None
                gradients = []
        if gradients:
            self._move([param for param in copied_together if param.param.grad is not None])
        for param in state.moved_singly:
            if param.param.grad is not None:
                self._move([param])

    @torch.no_grad()
    def _move(self, params: Sequence[ParamState]) -> None:
        """Moves the gradients of these parameters into all buckets they lie in; sparse ones are refused."""
        copied: tuple[list[Tensor], list[Tensor]] = [], []
        added: tuple[list[Tensor], list[Tensor]] = [], []
        for param in params:
            gradient = param.param.grad
            if gradient is None:
                continue
            if gradient.layout != torch.strided:
                self._refuse_sparse(param, gradient)
                continue
            if len(param.buckets) > 1:
                gradient = gradient.reshape(-1)
            for state in param.buckets:
                self._open(state)
                places, gradients = added if param in state.filled else copied
                part = state.ranges[param]
                places.append(state.places()[0][param])
                gradients.append(gradient if len(param.buckets) == 1 else gradient[part.start : part.stop])
                state.filled.add(param)
        for (places, gradients), move in ((copied, torch._foreach_copy_), (added, torch._foreach_add_)):
            if places:
                move(places, gradients)
        for param in params:
            param.param.grad = None

    def _refuse_sparse(self, param: ParamState, gradient: Tensor) -> None:
        self._errors.record(
            ValueError(
                f"parameter {param.name!r} got a {gradient.layout} gradient; sparse gradients cannot be sharded, "
                "compute it with sparse=False"
            )
        )

    def _open(self, state: BucketState) -> None:
        """Makes storage writable: acquires it (stage 2), or sets aside what a reduction left there (stage 1)."""
        bucket = state.bucket
        if bucket.storage is None:
            self._pool.acquire(state)
        elif bucket.is_reduced and not state.is_launched:
            self._pool.keep(state)
            bucket.reopen()
            state.filled.clear()
            zeroed = [
                param
                for param in (state.moved_singly if self._main_grad_users_known else state.ranges)
                if param.may_add_unasked
            ]
            if zeroed:
                torch._foreach_zero_([state.places()[0][param] for param in zeroed])

    # ---- launching

    def _launch(self, state: BucketState) -> None:
        self._open(state)
        if len(state.filled) < len(state.ranges):
            views = state.places()[0]
            torch._foreach_zero_([views[param] for param in state.ranges if param not in state.filled])
        state.is_launched = True
        self._next_launch += 1
        if self._options.measure_gradient_noise:
            state.unit.measure_launch(self._filled_storage(state))
        state.bucket.start_reduce()
        if state.buffer is not None:
            self._pool.mark_in_flight(state)

    def end_backward(self, reduce: bool) -> None:
        """Ends a backward: moves what is left in ``param.grad``.

        Args:
            reduce: launch the buckets that are not launched yet; then collective.
        """
        if self.has_ended and not (reduce or self.has_arrivals):
            return
        # Not only after hooks: a schedule that computes weight gradients apart sets param.grad without running them.
        for state in (
            self._queue if self._active_buckets is self._queue else dict.fromkeys((*self._active_buckets, *self._queue))
        ):
            if not state.is_complete:
                self._was_dirty |= any(param.param.grad is not None for param in state.ranges)
                self._move_all(state)
            if self._options.measure_gradient_noise and self.measures_micro_batches and not reduce and state.filled:
                state.unit.measure_backward(self._filled_storage(state))
            # one by one: stage 2 acquires no more buffers than it may have in flight
            if (
                reduce
                and self._next_launch < len(self._active_buckets)
                and self._active_buckets[self._next_launch] is state
            ):
                self._launch(state)
        if self.has_arrivals:
            self._was_dirty = True
            self._num_backwards += 1
            self._learn()
        self.has_ended = True
        self._begin()

    def held(self) -> list[set[ParamState]]:
        """The parameters of which storage holds a gradient, by bucket in launch order."""
        return [set(state.filled) for state in self._queue]

    def count_replay(self, held: Sequence[set[ParamState]]) -> None:
        """Counts a backward whose kernels have run without hooks; ``held``: of the same backward with hooks."""
        for state, params in zip(self._queue, held, strict=True):
            state.filled.update(params)
        self._was_dirty = True
        self._num_backwards += 1

    def end_interrupted(self) -> bool:
        """Ends a backward that an exception has interrupted, instead of ``end_backward``.

        Launches every reduction that this backward was to launch, because other ranks may wait in the same collectives.
        The gradients are incomplete and must be dropped by ``reset_after_step``.

        Returns:
            Whether the gradients were reduced.
        """
        for state in self._queue:
            state.arrivals.clear()  # nothing is to be learnt from them
        self.end_backward(reduce=self._will_reduce)
        self._was_dirty = True
        return self._will_reduce

    def _learn(self) -> None:
        """Raises the expected numbers to those of the backward that has ended."""
        for state in self._queue:
            state.learn()
        new = [state for state in self._active_buckets if not state.is_known]
        arrived = {param for state in new for param in state.arrivals}
        unused = {param.name: None for state in new for param in state.ranges if param not in arrived}
        if unused and self._options.overlap_comm:
            logger.info(
                "%d parameters got no gradient in the first backward (%r first); their buckets and all later ones are "
                "reduced when backward has ended; freeze parameters that are never used",
                *(len(unused), next(iter(unused))),
            )
        for state in new:
            state.is_known = True
        self._has_learned = True

    def _filled_storage(self, state: BucketState) -> list[Tensor]:
        """The storage of a bucket, without the parameters that have got no gradient since it was opened."""
        assert state.bucket.storage is not None
        if state.is_launched or len(state.filled) == len(state.ranges):
            return [state.bucket.storage]
        views = state.places()[0]
        return [views[param].flatten() for param in state.ranges if param in state.filled]

    def units(self) -> dict[Bucket, tuple[Tensor, int]]:
        """Squared norm of a unit's gradient on this rank by bucket, fp64 [1], and the units of the step on a rank."""
        return {state.bucket: unit for state in self._queue if (unit := state.unit.result(self._num_backwards))}

    # ---- around the step

    @torch.no_grad()
    def local_gradient(self, param: nn.Parameter) -> Tensor | None:
        """Returns this rank's sum over the backwards since the last step, before any reduction; None without one.

        Of the parameter's shape, fp32. In stage 1 only: stage 2 reduces every backward.
        """
        [own] = [state for state in self._params if state.param is param]
        if not own.buckets or not all(own in state.filled for state in own.buckets):
            return None
        flat = torch.empty(param.numel(), dtype=torch.float32, device=param.device)
        for state in own.buckets:
            assert state.bucket.storage is not None
            part = state.ranges[own]
            flat[part.start : part.stop] = state.bucket.storage[part.where]
        return flat.view(param.shape)

    def check_all_sent(self) -> None:
        """Records an error where stage 2 holds gradients that no reduction took. Called before a step."""
        for state in self._queue:
            if state.buffer is not None and not state.bucket.is_reduced:
                name = next(iter(state.ranges)).name
                self._errors.record(
                    RuntimeError(
                        f"parameter {name!r} or one beside it got a gradient in a backward that was said not to reach "
                        "it; give its bucket to set_gradient_accumulation_boundary(only=...)"
                    )
                )

    def local_gradients(self) -> list[Tensor]:
        """Returns the gradients of ended backwards in buckets that have not been launched, in launch order."""
        return [state.places()[0][param] for state in self._queue for param in state.ranges if param in state.filled]

    def finish(self) -> None:
        """Waits for all reductions; ``shard.grad`` of every bucket is set afterwards."""
        self._pool.release_all()
        for bucket in self.buckets:
            bucket.finish_gradient()

    @property
    def zeroes_storage(self) -> bool:
        """Whether ``reset_after_step`` writes zeros into storage."""
        return bool(self._zeroed_places)

    @torch.no_grad()
    def reset_after_step(self) -> None:
        """Starts new sums, after a step that was taken or skipped."""
        self._was_dirty = False
        self._num_backwards = 0
        for state in self._queue:
            if state.buffer is not None:  # what no reduction took is dropped
                self._pool.release(state)
            state.bucket.forget_gradient()
            state.filled.clear()
            state.unit.forget()
        if self._has_learned and not self._main_grad_users_known:
            self._find_main_grad_users()
        if self._zeroed_places:
            torch._foreach_zero_(self._zeroed_places)

    def drop(self) -> None:
        """Drops what has come since the last step, also from a backward that began without ``arm``."""
        self.settle_buffers()
        self._begin()
        self.reset_after_step()

    def _find_main_grad_users(self) -> None:
        """Removes ``main_grad`` where no producer wrote to it, and finds the producers that never asked.

        Called after the first step, because the first backward of a pipeline with several chunks reaches one of them.
        """
        self._main_grad_users_known = True
        for param in self._params:
            if not param.is_fused:
                param.param.main_grad = None  # type: ignore[attr-defined]
        for state in self._queue:
            state.sort()
        adding = [param for param in self._params if param.adds_unasked]
        self._zeroed_places = [state.places()[0][param] for param in adding for state in param.buckets]

    def settle_buffers(self) -> list[Tensor]:
        """Waits between backwards for what is in flight. Returns all memory that holds gradients, or may."""
        self._pool.release_all()
        for bucket in self.buckets:
            bucket.collect()
        return self._pool.free_buffers() + [held for bucket in self.buckets for held in bucket.gradient_tensors()]

    def close(self) -> None:
        """Removes the hooks and the parameters' ``main_grad``."""
        for param in self._params:
            if param.handle is not None:
                param.handle.remove()
            for name in ("main_grad", "main_grad_holds_sum", "main_grad_ready"):
                setattr(param.param, name, None)
