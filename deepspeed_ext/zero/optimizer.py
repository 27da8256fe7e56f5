"""EPZeroOptimizer: ZeRO stages 1 and 2 whose expert states are sharded over the ranks that hold the same experts.

One step: backward leaves p.grad -> hooks collect gradients in buckets (gradient_hooks.py); complete buckets are
reduce-scattered over their flat buffer's group while backward goes on; one global norm; clip factor, skip flag and step
number stay on the device (grad_scaling.py); each flat buffer's rule updates masters, states and parameters of this
rank's shards in one pass; the group all-gathers a bucket's parameters (param_all_gather.py) while the next bucket is
updated. The host waits for nothing.

Scale: the engine divides each loss by the accumulation steps, and a gradient sums over its buffer's group, so dividing
by the number of ranks of the DENSE group gives the mean over the global batch. That holds for experts too: through
the exchange of tokens an expert's gradient already contains the losses of all its expert-parallel peers, and the sum
over its replicas adds the others.

Order of summation: stage 1 adds the micro-batches of a rank, then the ranks; stage 2 the ranks of a micro-batch, then
the micro-batches. They agree bitwise with one micro-batch a step, or with ``reduce_each_micro_batch``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from torch import Tensor, nn

from deepspeed_ext.groups import ZeroGroups, expert_group_name, ranks_of
from deepspeed_ext.optimizers import shard_optimizer_for
from deepspeed_ext.optimizers.base import CurvatureOptimizer, MatrixOptimizer, Shard, StepScalars
from deepspeed_ext.optimizers.elementwise import ElementwiseOptimizer
from deepspeed_ext.optimizers.whole_tensors import TensorOptimizer, run_in_rounds
from deepspeed_ext.versions import BaseOptimizer
from deepspeed_ext.zero import deepspeed_api, gradient_noise, sharded_state
from deepspeed_ext.zero.bucket import Bucket, ParamState
from deepspeed_ext.zero.deepspeed_api import DeepSpeedFiles
from deepspeed_ext.zero.flat_buffer import FlatBuffer, build_flat_buffers, norm_groups
from deepspeed_ext.zero.grad_scaling import NoLossScale, StepState, global_norm, summed_over, total_of_squares
from deepspeed_ext.zero.gradient_hooks import GradientReducer
from deepspeed_ext.zero.offload import HostStates
from deepspeed_ext.zero.options import ZeroOptions
from deepspeed_ext.zero.param_all_gather import ParamAllGather
from deepspeed_ext.zero.sharded_state import MatrixState, StateShard
from deepspeed_ext.zero.sync_errors import BackwardTracker, StepErrors
from deepspeed_ext.zero.update_stream import UpdateStream


class EPZeroOptimizer(DeepSpeedFiles, BaseOptimizer):
    """Wraps a torch optimizer into sharded fp32 masters and states, updated by the optimizer's rule.

    Frozen parameters are left out; a parameter without a gradient in a step counts as one with a zero gradient.
    Construction is local; the engine has checked before that all ranks describe the same parameters.

    Args:
        optimizer: a fresh one. Its param_groups keep their options (lr, weight_decay, ...) and get master shards in
            place of the parameters, so schedulers built on it keep working.
        param_names: the parameters' names, in the order in which forward uses them as far as known.
        groups: the process groups.
        options: how it works.
        module: whose forward waits for the parameters; needed for ``options.overlap_param_gather``.

    Raises:
        ValueError: an optimizer that is used or has no rule, an expert group without a process group, or a parameter
            dtype other than float32, bfloat16 and float16.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        param_names: Mapping[nn.Parameter, str],
        *,
        groups: ZeroGroups,
        options: ZeroOptions | None = None,
        module: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
            raise ValueError("the optimizer has taken steps already; wrap a fresh one, then load its state")
        optimizer.state.clear()  # Adagrad's are made with it, of the whole parameters
        self.options = options or ZeroOptions()
        self.optimizer = optimizer
        self.groups = groups
        self.bit16_groups = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
        shard_optimizers = [shard_optimizer_for(optimizer, group) for group in optimizer.param_groups]
        self.flat_buffers = build_flat_buffers(self.bit16_groups, shard_optimizers, param_names, groups, self.options)
        if not self.flat_buffers:
            raise ValueError("the optimizer holds no parameter that requires a gradient")
        for group in optimizer.param_groups:
            group["params"] = []
        for flat_buffer in self.flat_buffers:
            self._options_of(flat_buffer)["params"] += [bucket.shard.master for bucket in flat_buffer.buckets]
            flat_buffer.new_states(self._options_of(flat_buffer))
        positions = {param: index for index, param in enumerate(param_names)}
        # DeepSpeed's module file holds those of one rank only, so they go into each rank's file.
        self.frozen_experts = {
            name: param
            for param, name in param_names.items()
            if not param.requires_grad and self.is_spread(expert_group_name(param))
        }
        self._norm_groups = norm_groups(groups)
        self.device = self.flat_buffers[0].masters.device
        self._errors = StepErrors(self._norm_groups, self.device)
        self.record_error = self._errors.record
        self._reducer = GradientReducer(self.flat_buffers, positions, self.options, self._errors)
        self._tracker = BackwardTracker(self._reducer, self._errors, self._leave_backward)
        self.interrupt = self._tracker.interrupt
        self.local_gradient = self._reducer.local_gradient
        self._param_gather = ParamAllGather(
            self.flat_buffers, self._reducer.buckets, module, self.options.overlap_param_gather
        )
        self._update_stream = self._new_update_stream()
        self._buffer_of = {bucket: flat_buffer for flat_buffer in self.flat_buffers for bucket in flat_buffer.buckets}
        self.gradient_divisor = dist.get_world_size(groups.dense) if self.options.average else 1  # of summed gradients
        self._state = StepState(self.device, self.gradient_divisor, self.options)
        self._copies: list[StateShard] = []  # returned by state_shards, with copies of states not kept in fp32
        self.gradient_noise: Tensor | None = None  # of the last step, fp64 [groups, 2], see gradient_noise.py
        self._row_scales: dict[nn.Parameter, Tensor] = {}
        self._further_sums: list[tuple[Bucket, dist.ProcessGroup]] = []
        self._evaluates_average = self._is_average_swapped = False
        self.has_reduced = False  # gradients have been reduced since the last step
        self._is_destroyed = False
        self.has_begun = False  # a backward has begun, or is about to, since the last step
        self._reductions_held = False
        self._reports_previous = self._was_previous_skipped = False
        self._init_engine_attributes()
        self._host = HostStates(self.flat_buffers, self._reducer.settle_buffers)
        self.require_on_device = self._host.require
        deepspeed_api.attach(self)

    def _new_update_stream(self) -> UpdateStream | None:
        """A stream for updates beside the next forward, where one GPU trains alone with fused updates."""
        is_fused = all(
            isinstance(flat_buffer.shard_optimizer, ElementwiseOptimizer) for flat_buffer in self.flat_buffers
        )
        if self.options.overlap_param_gather and is_fused and self.device.type == "cuda" and dist.get_world_size() == 1:
            return UpdateStream(self.device)
        return None

    def _init_engine_attributes(self) -> None:
        """Sets what DeepSpeed's engine reads, and the norms to clip and to skip above, which may change every step."""
        self.clip_grad, self.skip_above = self.options.max_norm, math.inf
        self.custom_loss_scaler = False
        self.external_loss_scale = self.torch_autocast_gradscaler = None
        self.loss_scaler = self._state.loss_scale or NoLossScale(scale=1.0)
        self.dynamic_loss_scale = self._state.loss_scale is not None and self._state.loss_scale.is_dynamic
        self.dp_process_group = self.groups.dense

    def is_spread(self, expert_group: str | None) -> bool:
        """Whether ranks hold different parameters of an expert group (None: the dense parameters)."""
        if expert_group not in self.groups.expert:
            return False
        return len(ranks_of(self.groups.of(expert_group))) < dist.get_world_size(self.groups.dense)

    def _options_of(self, flat_buffer: FlatBuffer) -> dict[str, Any]:
        """The parameter group of a flat buffer."""
        return self.param_groups[flat_buffer.key.param_group]

    # ---- loss scale (fp16)

    def needs_scaler(self) -> bool:
        """Whether a backward must start from ``engine.scale(loss)`` (``engine.backward`` does it itself)."""
        return self._state.loss_scale is not None

    @property
    def loss_scale(self) -> float:
        """The factor on the next loss, 1 without fp16. Waits for the device."""
        return self.loss_scaler.cur_scale

    @property
    def cur_scale(self) -> float:
        """DeepSpeed's name for ``loss_scale``."""
        return self.loss_scale

    @property
    def loss_scale_state(self) -> dict[str, float] | None:
        """What a checkpoint keeps of the loss scale, the same on every rank and at every layout; None without fp16.

        Reading waits for the device. Setting None, or setting it without fp16, changes nothing.
        """
        return None if self._state.loss_scale is None else self._state.loss_scale.state_dict()

    @loss_scale_state.setter
    def loss_scale_state(self, state: Mapping[str, float] | None) -> None:
        if self._state.loss_scale is not None and state is not None:
            self._state.loss_scale.load_state_dict(state)

    # ---- gradients

    def set_gradient_accumulation_boundary(self, is_boundary: bool, only: Sequence[Bucket] | None = None) -> None:
        """Prepares for a backward. Called by the engine before each.

        Args:
            is_boundary: whether it is the last one before a step.
            only: the buckets (see ``buckets_of``) that its reduction takes, in the order in which they are launched, on
                every rank alike; None: all.
        """
        self.require_on_device("backward", "lp_params", "lp_grads")
        if self._tracker.is_in_another_backward():
            self.end_interrupted_backward()
        self._tracker.begin()
        if self._update_stream is not None:
            self._param_gather.wait()  # a backward writes the gradients that an update reads
        super().set_gradient_accumulation_boundary(is_boundary)
        self.has_begun = True
        self._reducer.arm((is_boundary or self.options.reduces_each_backward) and not self._reductions_held, only)

    def end_interrupted_backward(self) -> None:
        """Ends a backward that an exception has interrupted, if there was one. Called before a backward or a step.

        It counts as an error of this rank, and the step is skipped on all ranks. ``zero_grad`` drops what it has left.
        """
        self.has_reduced |= self._tracker.end_interrupted()

    def _leave_backward(self) -> None:
        self._backward_active_depth = 0  # DeepSpeed's count of the backwards that are under way

    def buckets_of(self, params: Iterable[nn.Parameter]) -> list[Bucket]:
        """Returns the buckets in which any of these parameters lies, in launch order."""
        wanted = set(params)
        found = {
            flat_buffer.buckets[index]
            for flat_buffer in self.flat_buffers
            for name, param in flat_buffer.params.items()
            if param in wanted
            for index, _ in flat_buffer.ranges[name]
        }
        return [bucket for bucket in self._reducer.buckets if bucket in found]

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Launches the reductions that backward has not launched. Called by the engine at the boundary. Collective.

        Backward and this may run again before a step; the sums then add up.
        """
        self._reducer.end_backward(reduce=True)
        self.has_reduced = True

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """Calls ``reduce_gradients``; the engine does so after every stage 2 backward."""
        self.reduce_gradients()

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Does nothing: in stage 2 without managed accumulation every backward has been reduced already."""

    def backward_epilogue(self, **kwargs: Any) -> None:
        """Ends a backward. Called by the engine after each, after the reduction if there was one."""
        each = self.options.stage == 1 and self.options.reduce_each_micro_batch
        if each and not self._is_gradient_accumulation_boundary and not self._reductions_held:
            self.reduce_gradients()
        else:
            self._reducer.end_backward(reduce=False)

    def finish_reduction(self) -> None:
        """Waits (on a GPU: makes the stream wait) until ``shard.grad`` of every bucket is the sum over its group."""
        self._reducer.finish()
        for bucket, group in self._further_sums:
            dist.all_reduce(bucket.shard.grad, group=group)

    def sum_over(self, param: nn.Parameter, group: dist.ProcessGroup) -> None:
        """Makes every later reduction sum the gradient of ``param`` over ``group`` too. Local.

        For pipeline stages that share a weight.

        Args:
            param: the parameter, which must be alone in its flat buffer.
            group: ranks that have it in flat buffers of the same layout and own the same shards.

        Raises:
            ValueError: other parameters are in its flat buffer.
        """
        [flat_buffer] = [flat for flat in self.flat_buffers if any(param is other for other in flat.params.values())]
        if len(flat_buffer.params) > 1:
            raise ValueError(
                f"a sum over {len(flat_buffer.params)} parameters for one; mark it with pipe_tied beforehand"
            )
        self._further_sums += [(bucket, group) for bucket in flat_buffer.buckets]

    def measure_ranks_only(self) -> None:
        """Measures the gradient noise between ranks alone: pipelines mix the backwards of micro-batches. Local."""
        self._reducer.measures_micro_batches = False

    @contextmanager
    def hold_reductions(self) -> Iterator[None]:
        """Makes backwards inside only accumulate, whatever the boundary (the engine's ``no_sync``)."""
        self._reductions_held = True
        try:
            yield
        finally:
            self._reductions_held = False

    def local_gradients(self) -> list[Tensor]:
        """Returns this rank's gradients since the last step where no reduction has begun (``hold_reductions``)."""
        return self._reducer.local_gradients()

    def held_gradients(self) -> list[set[ParamState]]:
        """Which parameters have gradients since the last step, for ``replay_backward``."""
        return self._reducer.held()

    def replay_backward(self, replay: Callable[[], None], held: list[set[ParamState]]) -> None:
        """Runs recorded kernels of a forward and backward (a CUDA graph) and counts the backward, as no hook runs.

        Stage 1, and a backward that is not reduced. If it was recorded as the first of a step, it overwrites gradients
        and must be the first here too; else it adds to them.

        Args:
            replay: launches the kernels.
            held: ``held_gradients()`` after they were recorded.
        """
        self.require_on_device("backward", "lp_params", "lp_grads")
        self.end_interrupted_backward()
        self.wait_for_params()
        self.has_begun = True
        replay()
        self._reducer.count_replay(held)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients of the present step, reduced or not."""
        self.has_begun = False
        self._tracker.give_up()
        if not (self.has_reduced or self._reducer.is_dirty):
            return
        self.require_on_device("zero_grad", "lp_grads")
        for flat_buffer in self.flat_buffers:
            for param in flat_buffer.params.values():
                param.grad = None
        self._reducer.drop()
        self.has_reduced = False

    # ---- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Computes the norm, clips, updates this rank's shards and gathers the new parameters. Collective.

        If the norm is not finite (see ``check_grad_overflow``) or exceeds ``skip_above``, the step is skipped on all
        ranks: ``overflow`` is True and masters, states and step_count stay untouched. Does not wait for the device.

        Raises:
            ValueError: a closure is given.
            RuntimeError: states are offloaded to the host. Or, on every rank and after this step has been taken: in the
                previous step a rank recorded an error (``record_error``), or the smallest loss scale overflowed.
        """
        if closure is not None:
            raise ValueError("EPZeroOptimizer.step takes no closure; run forward and backward through the engine")
        row_scales, self._row_scales = self._row_scales, {}
        norm, terms = self._finish_gradients("step")
        self._errors.end_step()
        # A norm that is not finite says that a rank has failed, unless such norms are allowed.
        errors = None if self.options.check_grad_overflow else global_norm(terms, self.device, self._norm_groups)
        scalars = self._state.scalars(norm, self.clip_grad, self.skip_above, errors)
        updated: set[FlatBuffer] = set()
        self._update_tensors(scalars)
        if self._update_stream is not None:
            scalars = replace(scalars, shares_device=True)
            self._update_stream.begin(scalars, row_scales)
        for bucket in self._param_gather.buckets:
            update = partial(self._update_bucket, bucket, scalars, row_scales, updated)
            if self._update_stream is not None:
                bucket.set_pending(self._update_stream.submit(update))
            else:
                update()
                bucket.start_gather()
        self._param_gather.finish_step()
        self._forget_gradients()
        self._was_previous_skipped = self._state.read_previous_outcome()
        if self._was_previous_skipped:
            self._errors.raise_on_all_ranks()

    def _update_bucket(
        self,
        bucket: Bucket,
        scalars: StepScalars,
        row_scales: Mapping[nn.Parameter, Tensor],
        updated: set[FlatBuffer],
    ) -> None:
        """Updates this rank's shard of a bucket; ``updated`` are flat buffers of matrices that are done."""
        flat_buffer = self._buffer_of[bucket]
        group_options = self._options_of(flat_buffer)
        if flat_buffer.tensors is not None:
            pass  # updated already
        elif not isinstance(flat_buffer.shard_optimizer, MatrixOptimizer):
            flat_buffer.shard_optimizer.update_(bucket.shard, group_options, scalars)
        elif flat_buffer not in updated:  # matrices lie across buckets: all of the buffer's at once
            assert flat_buffer.exchange is not None
            updated.add(flat_buffer)
            shards = [bucket.shard for bucket in flat_buffer.buckets]
            flat_buffer.shard_optimizer.update_matrices_(shards, flat_buffer.exchange, group_options, scalars)
        if row_scales:
            flat_buffer.scale_rows(bucket, row_scales, scalars.skip, group_options)

    def scale_rows_after_update(self, scales: Mapping[nn.Parameter, Tensor]) -> None:
        """Makes the next step multiply rows of parameters after their update, masters included. Local.

        A skipped step multiplies nothing. Ranks that have the same parameter must pass the same factors.

        Args:
            scales: for each parameter fp32 [rows] on the device, one factor for each index of its first dimension.
        """
        self._row_scales = dict(scales)

    def _finish_gradients(self, what: str) -> tuple[Tensor, list[Tensor]]:
        """Waits for all summed gradients; returns their global norm and the terms in it that stand for errors."""
        self.require_on_device(what)
        self.require_masters(what)
        self.end_interrupted_backward()
        if not self.has_reduced or self._reducer.has_arrivals:
            self.reduce_gradients()
        self._reducer.check_all_sent()
        self._param_gather.wait()  # what no forward has waited for: an all-gather must not cross the next update
        self.finish_reduction()
        counted = [b.shard.grad for f in self.flat_buffers if f.in_norm for b in f.buckets]
        terms = self._errors.norm_terms()
        if not self.options.measure_gradient_noise:
            return global_norm(counted + terms, self.device, self._norm_groups), terms
        # In the norm's all-reduce: a measured step has no further message.
        own = gradient_noise.partial_sums(self.flat_buffers, self._reducer.units(), self.param_groups, self.device)
        totals = summed_over(torch.cat([total_of_squares(counted + terms, self.device), own]), self._norm_groups)
        self.gradient_noise = totals[1:].view(-1, 2) / self._state.divisor**2
        return totals[0].sqrt(), terms

    def _forget_gradients(self) -> None:
        if self._reducer.zeroes_storage:
            self._param_gather.wait()  # an update may be reading what is zeroed
        self._reducer.reset_after_step()
        self.has_reduced = self.has_begun = False
        self._copies.clear()

    @torch.no_grad()
    def update_curvature(self, num_labels: Tensor | float) -> None:
        """Averages a curvature estimate into the states of an optimizer that has one (Sophia). Collective.

        Call it in the place of ``step`` after a backward of the mean loss over labels drawn from the model's own
        predictions. Its gradients are dropped afterwards. One that is not finite changes nothing. An error in it skips
        the next step, and the one after that raises it.

        Args:
            num_labels: how many labels of the global batch the mean is over.

        Raises:
            TypeError: the optimizer keeps no curvature.
        """
        optimizers = [flat_buffer.shard_optimizer for flat_buffer in self.flat_buffers]
        if not all(isinstance(one, CurvatureOptimizer) for one in optimizers):
            raise TypeError(f"{type(self.optimizer).__name__} keeps no curvature; update_curvature is for Sophia")
        norm, _ = self._finish_gradients("update_curvature")
        scalars = self._state.unclipped_scalars(norm)
        count = torch.as_tensor(num_labels, dtype=torch.float32, device=self.device)
        for flat_buffer in self.flat_buffers:
            for bucket in flat_buffer.buckets:
                flat_buffer.shard_optimizer.update_curvature_(  # type: ignore[attr-defined]
                    bucket.shard, self._options_of(flat_buffer), scalars, count
                )
        self._forget_gradients()

    def _update_tensors(self, scalars: StepScalars) -> None:
        """Updates the flat buffers whose optimizer needs sums over whole tensors, in common rounds."""
        updates = []
        for flat_buffer in self.flat_buffers:
            if flat_buffer.tensors is not None:
                assert isinstance(flat_buffer.shard_optimizer, TensorOptimizer)
                shards = [bucket.shard for bucket in flat_buffer.buckets]
                group_options = self._options_of(flat_buffer)
                rounds = flat_buffer.shard_optimizer.update_tensors_(
                    shards, flat_buffer.tensors, group_options, scalars
                )
                updates.append((rounds, flat_buffer.sum_groups))
        run_in_rounds(updates)

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped. Waits for the device, except inside ``reporting_previous_step``."""
        return self._was_previous_skipped if self._reports_previous else self._state.was_skipped

    @property
    def _global_grad_norm(self) -> float | None:
        return None if self._reports_previous else self._state.grad_norm

    @property
    def outcome(self) -> Tensor:
        """Norm of the last step and 1.0 if it was skipped, fp32 [2] on the device, without waiting."""
        return self._state.outcome

    @property
    def skipped_steps(self) -> int:
        """Steps skipped since construction. Waits for the device, except inside ``reporting_previous_step``."""
        return self._state.settled_skips if self._reports_previous else self._state.skips

    @property
    def is_reporting_previous_step(self) -> bool:
        """Whether ``reporting_previous_step`` is active."""
        return self._reports_previous

    @contextmanager
    def reporting_previous_step(self) -> Iterator[None]:
        """Makes ``overflow`` report the step before the last inside, which needs no waiting; the norm is None."""
        self._reports_previous = True
        try:
            yield
        finally:
            self._reports_previous = False

    @torch.no_grad()
    def sync_params_from_master(self) -> None:
        """Writes the masters into the parameters of every rank, after state shards were changed. Collective."""
        self.require_on_device("sync_params_from_master")
        self._param_gather.wait()
        sharded_state.write_back(self._copies)
        self._copies.clear()
        for flat_buffer in self.flat_buffers:
            flat_buffer.write_training_point(self._options_of(flat_buffer))
        self._gather_params()

    def _gather_params(self) -> None:
        for bucket in self._param_gather.buckets:
            bucket.start_gather()
        self._param_gather.finish_step()
        self.wait_for_params()

    @contextmanager
    def averaged_parameters(self) -> Iterator[None]:
        """Has the averaged weights in the parameters inside, to evaluate them. Collective.

        They are the moving average where ``keep_average`` says so, else ``master_parameters``. Masters and average
        have changed places inside, where a step or ``state_dict`` raises RuntimeError; afterwards all is as before, bit
        by bit.
        """
        if not self._evaluates_average:
            with self.master_parameters():
                yield
            return
        self.require_at_rest("averaged_parameters", "hp_params", "lp_params", "optim_states")
        self._swap_average()
        try:
            yield
        finally:
            self._swap_average()

    @torch.no_grad()
    def _swap_average(self) -> None:
        """Exchanges masters and averages, and writes the new masters into the parameters."""
        for shard in self._shards():
            assert shard.average is not None
            master = shard.master.clone()
            shard.master.copy_(shard.average)
            shard.average.copy_(master)
        for flat_buffer in self.flat_buffers:
            flat_buffer.write_params_from_masters()
        self._gather_params()
        self._is_average_swapped = not self._is_average_swapped

    def require_masters(self, what: str) -> None:
        """Raises RuntimeError where masters and averages have changed places; ``what`` needs them as they are."""
        if self._is_average_swapped:
            raise RuntimeError(
                f"{what} inside averaged_parameters(), where the masters are the average; leave it first"
            )

    @contextmanager
    def master_parameters(self) -> Iterator[None]:
        """Has the masters in the parameters inside, to save them. Collective.

        A schedule-free optimizer's masters are an average, and the model is trained elsewhere; of any other optimizer
        the parameters are the masters already, and nothing happens.
        """
        averaged = [flat_buffer for flat_buffer in self.flat_buffers if flat_buffer.shard_optimizer.weight_kinds]
        if not averaged:
            yield
            return
        self.require_at_rest("master_parameters", "hp_params", "lp_params", "optim_states")
        for flat_buffer in averaged:
            flat_buffer.write_params_from_masters()
        self._gather_params()
        try:
            yield
        finally:
            with torch.no_grad():
                for flat_buffer in averaged:
                    flat_buffer.write_training_point(self._options_of(flat_buffer))
                self._gather_params()

    # ---- the moving average of the weights

    def _shards(self) -> list[Shard]:
        return [bucket.shard for flat_buffer in self.flat_buffers for bucket in flat_buffer.buckets]

    @torch.no_grad()
    def keep_average(self, *, evaluates: bool) -> None:
        """Keeps an exponential moving average of the masters, fp32 and sharded like them, from their present values.

        Args:
            evaluates: whether ``averaged_parameters`` puts it into the parameters.

        Raises:
            ValueError: the optimizer is schedule-free, and its masters are an average already.
        """
        if any(flat_buffer.shard_optimizer.weight_kinds for flat_buffer in self.flat_buffers):
            raise ValueError("a schedule-free optimizer keeps an average of its own; no other is kept beside it")
        self._evaluates_average = evaluates
        self._param_gather.wait()
        for shard in self._shards():
            shard.average = shard.master.clone()

    @torch.no_grad()
    def update_average(self, weight: float) -> None:
        """Moves the average by ``weight`` towards the masters. Between steps; the host waits for nothing. Local."""
        self.require_at_rest("update_average", "hp_params", "optim_states")
        for shard in self._shards():
            if shard.average is not None:
                shard.average.lerp_(shard.master, weight)

    @torch.no_grad()
    def restart_average(self) -> None:
        """Sets the average, if one is kept, to the masters: after weights were loaded without it."""
        self._param_gather.wait()
        for shard in self._shards():
            if shard.average is not None:
                shard.average.copy_(shard.master)

    @torch.no_grad()
    def restart_states(self) -> None:
        """Makes states that are weights (schedule-free's z, the average) anew, after weights alone were loaded."""
        self.require_at_rest("restart_states", "hp_params", "optim_states")
        self.restart_average()
        for flat_buffer in self.flat_buffers:
            if flat_buffer.shard_optimizer.weight_kinds:
                flat_buffer.new_states(self._options_of(flat_buffer))

    @torch.no_grad()
    def restart_from_params(self) -> None:
        """Sets masters and states as construction does, after the parameters of every rank were set. Before a step."""
        self._param_gather.wait()
        for flat_buffer in self.flat_buffers:
            flat_buffer.read_masters_from_params()
            flat_buffer.new_states(self._options_of(flat_buffer))
        self.restart_average()

    def wait_for_params(self) -> None:
        """Waits for all updates and new parameters, before they or optimizer states are read outside of forward.

        Needed with overlap_param_gather. On a GPU it makes the stream wait, not the host.
        """
        self._param_gather.wait()

    def wait_before_forward(self) -> None:
        """Waits for the new parameters that forward uses without calling the modules that own them."""
        self.require_on_device("forward", "lp_params")
        self._param_gather.wait_for_uncalled()

    # ---- state

    def require_at_rest(self, what: str, *kinds: str) -> None:
        """As ``require_on_device``; and waits for updates and parameters in flight: in fp32 these are the masters."""
        self.require_on_device(what, *kinds)
        self._param_gather.wait()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups; a changed lr takes effect at the next step."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Mapping[Tensor, Any]:
        """Each bucket's states, keyed by its master shard."""
        self._param_gather.wait()
        return {bucket.shard.master: bucket.shard.state for bucket in self._param_gather.buckets}

    @property
    def step_count(self) -> int:
        """Applied (not skipped) steps, which bias correction counts. Reading waits for the device."""
        return self._state.applied

    @step_count.setter
    def step_count(self, value: int) -> None:
        self._state.applied = value

    def state_shards(self) -> list[StateShard]:
        """Returns what this rank owns, by parameter. Over a buffer's group every element has exactly one owner."""
        self.require_at_rest("state_shards", "hp_params", "lp_params", "optim_states")
        self._copies = sharded_state.state_shards(self)
        return self._copies

    def matrix_states(self) -> list[MatrixState]:
        """Returns the states of the whole matrices that this rank owns, as live tensors."""
        self.require_at_rest("matrix_states", "optim_states")
        return sharded_state.matrix_states(self)

    def tensor_states(self, *, all_copies: bool) -> list[StateShard]:
        """Returns the states that are numbers of rows or columns (Adafactor's), by parameter, without masters.

        Args:
            all_copies: True: all that this rank has, to be filled; False: what it writes, so that over all ranks
                every number occurs once.
        """
        self.require_at_rest("tensor_states", "optim_states")
        return sharded_state.tensor_states(self, all_copies=all_copies)

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Frees the device's memory of idle states until ``reload_states``, for ``engine.offload_states``.

        Waits for the device in any case. What needs the states meanwhile raises RuntimeError.

        Args:
            include: the kinds of states; None: all.
            device: the host's memory is the only one.
            pin_memory: whether the host copies are in pinned memory.
            non_blocking: has no effect.
        """
        self._param_gather.wait()
        self._copies.clear()
        self._host.offload(include, pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Restores what ``offload_states`` took away, bit by bit. Waits for the device in any case."""
        self._host.reload()

    def memory_bytes(self) -> dict[str, int]:
        """Returns the bytes on this rank by kind.

        "parameters", "gradients" (stage 2: without the buffers of the pool), "masters" and "states" of the optimizer;
        "padding" is contained in these.
        """
        sizes: Counter[str] = Counter()
        for flat_buffer in self.flat_buffers:
            sizes.update(flat_buffer.memory_bytes())
        return dict(sizes)

    def destroy(self) -> None:
        """Removes all hooks. The model keeps its parameters. A second call, an engine's end for one, does nothing."""
        if self._is_destroyed:  # the parameters may have another engine's by now
            return
        self._is_destroyed = True
        self._param_gather.close()
        self._reducer.close()
        deepspeed_api.detach(self)

    def give_way(self) -> None:
        """Ends this optimizer because another engine takes a parameter: later calls raise RuntimeError."""
        self._host.reload()
        self.zero_grad()  # waits for reductions in flight
        self.destroy()
        self.require_on_device = self._refuse

    def _refuse(self, what: str, *kinds: str) -> None:
        raise RuntimeError(f"{what}: a later engine has taken this engine's model; go on with that one")
