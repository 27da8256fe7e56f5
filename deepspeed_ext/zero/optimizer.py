"""EPZeroOptimizer: ZeRO stages 1 and 2 whose expert states are sharded over the ranks that hold the same experts.

One step, as data walks: backward leaves p.grad -> hooks collect gradients in buckets (gradients.py); complete buckets
are reduce-scattered over their family's group while backward goes on; one global norm; clip factor, skip flag and step
number stay on the device (step_state.py); each bucket's rule updates masters, states and parameters of this rank's
shard in one pass; the group gathers the bucket's other shards (publish.py) while the next one is updated. The host
waits for nothing.

Scale: the engine divides each loss by the accumulation steps, and a gradient sums over the family's group, so dividing
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
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from torch import Tensor, nn

from deepspeed_ext.groups import ZeroGroups
from deepspeed_ext.optimizers import shard_optimizer_for
from deepspeed_ext.optimizers.base import MatrixOptimizer
from deepspeed_ext.zero import checkpoint, full_access
from deepspeed_ext.zero.bucket import Bucket
from deepspeed_ext.zero.build import build_families, norm_groups
from deepspeed_ext.zero.checkpoint import StateShard
from deepspeed_ext.zero.deepspeed_files import DeepSpeedFiles
from deepspeed_ext.zero.failures import Failures
from deepspeed_ext.zero.family import Family
from deepspeed_ext.zero.gradients import GradientSync
from deepspeed_ext.zero.interruption import BackwardWatch
from deepspeed_ext.zero.norm import global_norm
from deepspeed_ext.zero.offload import HostStates
from deepspeed_ext.zero.options import ZeroOptions
from deepspeed_ext.zero.publish import ParamPublisher
from deepspeed_ext.zero.step_state import StepState


class EPZeroOptimizer(DeepSpeedFiles, ZeROOptimizer):
    """Wraps a torch optimizer into sharded fp32 masters and states, updated by the optimizer's rule.

    ``optimizer`` must be fresh; its param_groups keep their options (lr, weight_decay, ...) and get master shards in
    place of the parameters, so schedulers built on it keep working. ``param_names`` maps parameters to names, in the
    order in which forward uses them as far as known. ``module``: needed for ``options.overlap_param_gather``.
    Frozen parameters are left out; a parameter without a gradient in a step counts as one with a zero gradient.
    Construction is local; the engine has checked before that all ranks describe the same parameters.

    Raises ValueError for an optimizer that is used or has no rule, an expert group without a process group, or a
    parameter dtype other than float32, bfloat16 and float16.
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
        rules = [shard_optimizer_for(optimizer, group) for group in optimizer.param_groups]
        self.families = build_families(self.bit16_groups, rules, param_names, groups, self.options)
        if not self.families:
            raise ValueError("the optimizer holds no parameter that requires a gradient")
        for index, group in enumerate(optimizer.param_groups):
            mine = [family for family in self.families if family.key.param_group == index]
            group["params"] = [bucket.shard.master for family in mine for bucket in family.buckets]
            for family in mine:
                family.new_states(group)
        positions = {param: index for index, param in enumerate(param_names)}
        self._norm_groups = norm_groups(groups)
        self.device = self.families[0].masters.device
        self._failures = Failures(self._norm_groups, self.device)
        self.fail = self._failures.note
        self._sync = GradientSync(self.families, positions, self.options, self._failures)
        self._watch = BackwardWatch(self._sync, self._failures, self._backward_hook_state)
        self.interrupt = self._watch.interrupt
        self._publisher = ParamPublisher(self.families, self._sync.buckets, module, self.options.overlap_param_gather)
        self._family_of = {bucket: family for family in self.families for bucket in family.buckets}
        divisor = dist.get_world_size(groups.dense) if self.options.average else 1
        self._state = StepState(self.device, divisor, self.options)
        self._copies: list[StateShard] = []  # handed out by state_shards where states are not kept in fp32
        self._further_sums: list[tuple[Bucket, dist.ProcessGroup]] = []
        self._reduced = False
        self.has_begun = False  # a backward has, or is about to, since the last step
        self._holds_back = False
        self._tells_previous = self._was_previous_skipped = False
        self._init_engine_attributes()
        self._host = HostStates(self.families, self._sync.settle_buffers)
        self.require_on_device = self._host.require
        full_access.attach(self.families, divisor, lambda: self._reduced, self._require_at_rest)

    def _init_engine_attributes(self) -> None:
        """What DeepSpeed's engine reads, and largest norms, clipped to and accepted, which may change every step."""
        self.clip_grad, self.skip_above = self.options.max_norm, math.inf
        self.custom_loss_scaler = False
        self.external_loss_scale = self.torch_autocast_gradscaler = None
        self.loss_scaler = self._state.loss_scale
        self.dynamic_loss_scale = self.loss_scaler is not None and self.loss_scaler.is_dynamic
        self.dp_process_group = self.groups.dense

    # ---- loss scale (fp16)

    def needs_scaler(self) -> bool:
        """Whether a backward must start from ``engine.scale(loss)`` (``engine.backward`` does it itself)."""
        return self.loss_scaler is not None

    @property
    def loss_scale(self) -> float:
        """By which the next loss is multiplied, 1 without fp16. Waits for the device."""
        return 1.0 if self.loss_scaler is None else float(self.loss_scaler.scale.item())

    @property
    def cur_scale(self) -> float:
        """DeepSpeed's name for ``loss_scale``."""
        return self.loss_scale

    @property
    def loss_scale_state(self) -> dict[str, float] | None:
        """What a checkpoint keeps of the loss scale, the same on every rank and at every layout; None without fp16.
        Reading waits for the device. Setting None, or setting it without fp16, changes nothing."""
        return None if self.loss_scaler is None else self.loss_scaler.state_dict()

    @loss_scale_state.setter
    def loss_scale_state(self, state: Mapping[str, float] | None) -> None:
        if self.loss_scaler is not None and state is not None:
            self.loss_scaler.load_state_dict(state)

    # ---- gradients

    def set_gradient_accumulation_boundary(self, is_boundary: bool, only: Sequence[Bucket] | None = None) -> None:
        """Called by the engine before each backward: is it the last one before a step?

        ``only``: its reduction takes these buckets (see ``buckets_of``) and leaves others out; on every rank alike, in
        the order in which they are to be launched.
        """
        self.require_on_device("backward", "lp_params", "lp_grads")
        if self._watch.is_another():
            self.notice_interruption()
        self._watch.begin()
        super().set_gradient_accumulation_boundary(is_boundary)
        self.has_begun = True
        self._sync.arm((is_boundary or self.options.reduces_each_backward) and not self._holds_back, only)

    def notice_interruption(self) -> None:
        """Before a backward or a step: a backward that an exception has ended since counts as a failure of this rank,
        and the step is skipped on all ranks. ``zero_grad`` drops what that backward has left."""
        self._reduced |= self._watch.notice()

    def buckets_of(self, params: Iterable[nn.Parameter]) -> list[Bucket]:
        """The buckets in which any of these parameters lies, in launch order."""
        wanted = set(params)
        found = {
            family.buckets[index]
            for family in self.families
            for name, param in family.params.items()
            if param in wanted
            for index, _ in family.pieces[name]
        }
        return [bucket for bucket in self._sync.buckets if bucket in found]

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Launches what backward has not launched yet. Called by the engine at the boundary. Collective.

        Backward and this may run again before a step; the sums then add up.
        """
        self._sync.end_backward(reduce=True)
        self._reduced = True

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """The engine's name, after every stage 2 backward, for ``reduce_gradients``."""
        self.reduce_gradients()

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Stage 2 without managed accumulation: every backward has been reduced already."""

    def backward_epilogue(self, **kwargs: Any) -> None:
        """Called by the engine after every backward, after the reduction if there was one."""
        each = self.options.stage == 1 and self.options.reduce_each_micro_batch
        if each and not self.is_gradient_accumulation_boundary() and not self._holds_back:
            self.reduce_gradients()
        else:
            self._sync.end_backward(reduce=False)

    def finish_reduction(self) -> None:
        """Waits (on a GPU: makes the stream wait) until ``shard.grad`` of every bucket is the sum over its group."""
        self._sync.finish()
        for bucket, group in self._further_sums:
            dist.all_reduce(bucket.shard.grad, group=group)

    def sum_over(self, param: nn.Parameter, group: dist.ProcessGroup) -> None:
        """From now on the gradient of ``param`` is summed over ``group`` too, whose ranks have it in families of the
        same layout and own the same shards: over pipeline stages that share a weight. Local.

        Raises ValueError where other parameters are in its family."""
        [family] = [family for family in self.families if any(param is other for other in family.params.values())]
        if len(family.params) > 1:
            raise ValueError(f"a sum over {len(family.params)} parameters for one; mark it with pipe_tied beforehand")
        self._further_sums += [(bucket, group) for bucket in family.buckets]

    @contextmanager
    def hold_reductions(self) -> Iterator[None]:
        """Backwards inside only accumulate, whatever the boundary (the engine's ``no_sync``)."""
        self._holds_back = True
        try:
            yield
        finally:
            self._holds_back = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients of the present step, reduced or not."""
        self.has_begun = False
        self._watch.give_up()
        if not (self._reduced or self._sync.is_dirty):
            return
        self.require_on_device("zero_grad", "lp_grads")
        for family in self.families:
            for param in family.params.values():
                param.grad = None
        self._sync.finish()
        self._sync.forget()
        self._reduced = False

    # ---- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Norm, clip, update, new parameters on every rank; skipped on all ranks if the norm is not finite (then
        ``overflow`` is True and masters, states and step_count stay untouched). Does not wait for the device.
        Collective."""
        if closure is not None:
            raise ValueError("EPZeroOptimizer.step takes no closure; run forward and backward through the engine")
        self.require_on_device("step")
        self.notice_interruption()
        if not self._reduced or self._sync.has_events:
            self.reduce_gradients()
        self._sync.check_all_sent()
        self._publisher.wait()  # what no forward has waited for: a gather must not cross the update that follows
        self.finish_reduction()
        counted = [b.shard.grad for f in self.families if f.in_norm for b in f.buckets]
        norm = global_norm(counted + self._failures.counted(), self.device, self._norm_groups)
        scalars = self._state.scalars(norm, self.clip_grad, self.skip_above)
        updated: set[Family] = set()
        for bucket in self._publisher.buckets:
            family = self._family_of[bucket]
            family_options = self.param_groups[family.key.param_group]
            if not isinstance(family.rule, MatrixOptimizer):
                family.rule.update_(bucket.shard, family_options, scalars)
            elif family not in updated:  # matrices lie across buckets: all of the family's at once
                assert family.exchange is not None
                updated.add(family)
                shards = [bucket.shard for bucket in family.buckets]
                family.rule.update_matrices_(shards, family.exchange, family_options, scalars)
            bucket.start_gather()
        self._publisher.finish_step()
        self._sync.forget()
        self._reduced = self.has_begun = False
        self._copies.clear()
        self._was_previous_skipped = self._state.settle()
        if self._was_previous_skipped:
            self._failures.tell()

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped. Waits for the device, except inside ``telling_previous_step``."""
        return self._was_previous_skipped if self._tells_previous else self._state.was_skipped

    @property
    def _global_grad_norm(self) -> float | None:
        return None if self._tells_previous else self._state.grad_norm

    @property
    def outcome(self) -> Tensor:
        """Of the last step, without waiting: fp32 [2] on the device, the norm and 1.0 if the step was skipped."""
        return self._state.outcome

    @property
    def skipped_steps(self) -> int:
        """Steps skipped since construction. Waits for the device, except inside ``telling_previous_step``."""
        return self._state.settled_skips if self._tells_previous else self._state.skips

    @property
    def is_telling_previous_step(self) -> bool:
        """Whether ``telling_previous_step`` is active."""
        return self._tells_previous

    @contextmanager
    def telling_previous_step(self) -> Iterator[None]:
        """Inside, ``overflow`` speaks of the step before the last, which needs no waiting; the norm is None."""
        self._tells_previous = True
        try:
            yield
        finally:
            self._tells_previous = False

    @torch.no_grad()
    def sync_params_from_master(self) -> None:
        """Writes the masters into the parameters of every rank; needed after state shards were changed. Collective."""
        self.require_on_device("sync_params_from_master")
        self._publisher.wait()
        checkpoint.write_back(self, self._copies)
        self._copies.clear()
        for family in self.families:
            family.write_params_from_masters()
        for bucket in self._publisher.buckets:
            bucket.start_gather()
        self._publisher.finish_step()
        self.wait_for_params()

    def wait_for_params(self) -> None:
        """With overlap_param_gather: makes all new parameters present, before reading them outside of forward."""
        self._publisher.wait()

    def wait_before_forward(self) -> None:
        """With overlap_param_gather: makes those present that forward uses without calling the modules they are in."""
        self.require_on_device("forward", "lp_params")
        self._publisher.wait_for_uncalled()

    # ---- state

    def _require_at_rest(self, what: str, *kinds: str) -> None:
        """As ``require_on_device``; and waits for parameters on their way: in fp32 they are the masters."""
        self.require_on_device(what, *kinds)
        self._publisher.wait()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups; a changed lr takes effect at the next step."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Mapping[Tensor, Any]:
        """Each bucket's states, keyed by its master shard."""
        return {bucket.shard.master: bucket.shard.state for bucket in self._publisher.buckets}

    @property
    def step_count(self) -> int:
        """Applied (not skipped) steps, which bias correction counts. Reading waits for the device."""
        return self._state.applied

    @step_count.setter
    def step_count(self, value: int) -> None:
        self._state.applied = value

    def state_shards(self) -> list[StateShard]:
        """What this rank owns, parameter by parameter; over a family's group every element has exactly one owner."""
        self._require_at_rest("state_shards", "hp_params", "lp_params", "optim_states")
        self._copies = checkpoint.state_shards(self)
        return self._copies

    def forget_copies(self) -> None:
        """For who has only read ``state_shards``: decoded copies go with the shards, not as late as the next step."""
        self._copies = []

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """``engine.offload_states``: frees the device's memory of the kinds in ``include`` (None: all) until
        ``reload_states``. Waits for the device in any case. What needs them meanwhile raises RuntimeError."""
        self._publisher.wait()
        self._copies.clear()
        self._host.offload(include, pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """``engine.reload_states``: everything is where it was, bit by bit. Waits for the device in any case."""
        self._host.reload()

    def memory_bytes(self) -> dict[str, int]:
        """Bytes on this rank: "parameters", "gradients" (stage 2: without what the ring lends during backward),
        "masters" and "states" of the rule; "padding" is contained in these."""
        sizes: Counter[str] = Counter()
        for family in self.families:
            sizes.update(family.memory_bytes())
        return dict(sizes)

    def destroy(self) -> None:
        """Removes all hooks; the model keeps its parameters."""
        self._publisher.close()
        self._sync.close()
        full_access.detach([param for family in self.families for param in family.params.values()])
