"""Gradient norm, clip factor, skipped steps and the fp16 loss scale, all kept on the device.

The host queues a step without waiting for its norm: what the step decides (``StepState``) are 0-dim tensors, and the
host learns one step later what a step did.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from torch import Tensor

from deepspeed_ext.optimizers.base import StepScalars
from deepspeed_ext.zero.options import LossScaleOptions, ZeroOptions

logger = logging.getLogger("deepspeed_ext")

# Partial norms are taken over this many elements in fp32 and summed in fp64: one fp32 accumulator over a shard of
# billions would stop growing once it exceeds 2^24 times the addend.
_CHUNK = 4096

_LARGEST_SCALE = 2.0**100  # gradients of zero never overflow; an infinite scale could not be halved any more


# ---- the norm


def _wide_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def sum_of_squares(tensor: Tensor) -> Tensor:
    """Returns the sum of squares of a 1-D tensor (fp32 or bf16), 0-dim fp64; inf or NaN if the tensor holds one."""
    wide = _wide_dtype(tensor.device)
    whole = tensor.numel() // _CHUNK * _CHUNK
    norms = torch.linalg.vector_norm(tensor[:whole].view(-1, _CHUNK), dim=1, dtype=torch.float32).to(wide)
    rest = torch.linalg.vector_norm(tensor[whole:], dtype=torch.float32).to(wide)
    return norms.square().sum() + rest.square()


def total_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the sum of squares over all tensors, fp64 of shape [1]."""
    wide = _wide_dtype(device)
    if not tensors:
        return torch.zeros(1, dtype=wide, device=device)
    if device.type == "cpu":
        return torch.stack([sum_of_squares(tensor) for tensor in tensors]).sum().reshape(1)
    # One multi-tensor kernel for any number of shards; it accumulates chunks of 65,536 elements by 512 threads.
    norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float32)
    return torch.stack(norms).to(wide).square().sum().reshape(1)


def global_norm(shards: Sequence[Tensor], device: torch.device, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Returns the L2 norm over the shards of all ranks that ``groups`` span, by one collective a group.

    Args:
        shards: 1-D tensors that this rank counts. Dense shards are disjoint over the data-parallel group; expert shards
            are disjoint over the ranks that hold the same experts, and hold different experts elsewhere; parameters
            that are the same on all tensor-parallel ranks are passed by one of these. So a plain sum counts every
            element once.
        device: where the norm is computed.
        groups: the groups over which the sums go, one after the other. Collective over each.

    Returns:
        0-dim fp64, with the same bits on every rank.
    """
    return summed_over(total_of_squares(shards, device), groups)[0].sqrt()


def summed_over(totals: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Sums ``totals`` over the ranks of each group, one after the other, in place. Collective over each."""
    for group in groups:
        if dist.get_world_size(group) > 1:
            dist.all_reduce(totals, group=group)
    return totals


# ---- the loss scale


class LossScale:
    """The factor on the loss that keeps fp16 gradients from vanishing.

    The rule is DeepSpeed's: an overflow halves the scale, at first only after ``hysteresis`` overflows; ``window``
    steps without one double it. Every rank sees the same skips, so the scale is the same everywhere without
    communication. ``update`` replaces its tensors, because backward graphs may still hold the old ones.

    Args:
        options: how the scale changes.
        device: where it is kept.
    """

    def __init__(self, options: LossScaleOptions, device: torch.device) -> None:
        self._options = options
        self.scale = torch.tensor(options.initial, dtype=torch.float32, device=device)
        self._clean = torch.zeros_like(self.scale)  # steps since the last overflow; as in DeepSpeed a doubling leaves 1
        self._left = torch.full_like(self.scale, options.hysteresis)  # overflows before the next halving
        self.is_exhausted = torch.zeros_like(self.scale)  # 1.0: the last step overflowed at the smallest scale

    @property
    def is_dynamic(self) -> bool:
        """Whether overflows change the scale."""
        return self._options.is_dynamic

    @property
    def cur_scale(self) -> float:
        """DeepSpeed's name for the scale as a number. Waits for the device."""
        return float(self.scale.item())

    @property
    def minimum(self) -> float:
        """The smallest scale."""
        return self._options.minimum

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Returns loss * scale, in fp32 for a 0-dim fp16 loss, whose range the product could exceed."""
        return loss * self.scale

    def update(self, skip: Tensor) -> None:
        """Adapts the scale after a step, without waiting for the device.

        Args:
            skip: 0-dim, 1.0 if the step's gradients were not finite, else 0.0.
        """
        options = self._options
        if not options.is_dynamic:
            return
        overflowed = skip != 0
        lowers = overflowed & (self._left <= 1)
        raises = (self._clean == options.window) & ~overflowed
        refills = ~overflowed if options.refills_hysteresis else raises
        lowered = (self.scale * 0.5).clamp(min=options.minimum)
        doubled = (self.scale * 2.0).clamp(max=_LARGEST_SCALE)
        self.is_exhausted = (lowers & (self.scale == options.minimum)).to(torch.float32)
        self.scale = torch.where(lowers, lowered, torch.where(raises, doubled, self.scale))
        self._left = torch.where(refills, options.hysteresis, (self._left - skip).clamp(min=1.0))
        self._clean = torch.where(overflowed, 0.0, torch.where(raises, 0.0, self._clean) + 1.0)

    def state_dict(self) -> dict[str, float]:
        """Returns three numbers, the same on every rank and at every layout. Waits for the device."""
        scale, clean, left = torch.stack([self.scale, self._clean, self._left]).tolist()
        return {"scale": scale, "clean_steps": clean, "hysteresis_left": left}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restores what ``state_dict`` returned; a static scale stays as configured."""
        if self.is_dynamic:
            self.scale = torch.full_like(self.scale, state["scale"])
            self._clean = torch.full_like(self.scale, state["clean_steps"])
            self._left = torch.full_like(self.scale, state["hysteresis_left"])


class NoLossScale(LossScaler):
    """What clients find as ``loss_scaler`` without fp16, DeepSpeed's class: a scale of 1 that costs nothing."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Returns the loss itself."""
        return loss


def loss_scale_state(scaler: Any) -> dict[str, float] | None:
    """Converts DeepSpeed's dynamic loss scaler to ``EPZeroOptimizer.loss_scale_state``.

    Returns None for anything else.
    """
    numbers = dict(getattr(scaler, "__dict__", {}))
    if "cur_hysteresis" not in numbers:
        return None
    window = int(numbers["scale_window"])
    clean = int(numbers["cur_iter"]) - int(numbers["last_overflow_iter"]) - 1
    return {
        "scale": float(numbers["cur_scale"]),
        "clean_steps": float(clean if clean <= window else (clean - 1) % window + 1),
        "hysteresis_left": float(numbers["cur_hysteresis"]),
    }


# ---- what a step decides


class StepState:
    """Counts steps and skips, turns a norm into the scalars of the update, keeps the loss scale of fp16 training.

    A norm that is not finite skips the step, unless the options say otherwise. The host learns of it when it asks
    (``was_skipped``, ``grad_norm``, ``applied``: each waits for the device), or one step later through
    ``read_previous_outcome``, which never waits for the step just queued.

    Args:
        device: where everything is kept.
        divisor: what summed gradients are divided by, the loss scale apart.
        options: the optimizer's.
    """

    def __init__(self, device: torch.device, divisor: float, options: ZeroOptions) -> None:
        self._divisor = divisor
        self._options = options
        self.loss_scale = None if options.loss_scale is None else LossScale(options.loss_scale, device)
        self._zero = torch.zeros((), dtype=torch.float32, device=device)
        self._applied = torch.zeros((), dtype=torch.float32, device=device)
        self._skips = torch.zeros((), dtype=torch.float32, device=device)
        self._skip = torch.zeros((), dtype=torch.float32, device=device)
        self._norm: Tensor | None = None
        self._report = _Report(device)
        self._applied_on_host: int | None = 0  # None: as the last report says
        self.settled_skips = 0  # skipped steps that the host knows of
        self._has_warned = False

    def scalars(
        self,
        summed_norm: Tensor,
        max_norm: float | None = None,
        skip_above: float = math.inf,
        errors: Tensor | None = None,
    ) -> StepScalars:
        """Decides clip factor, skip flag and step number of a step, and counts it.

        Args:
            summed_norm: norm of the summed gradients, 0-dim of any float dtype.
            max_norm: clip to this norm, 0: not at all; None: the options'.
            skip_above: a larger norm skips the step.
            errors: 0-dim, not finite where a rank has recorded an error, which skips the step also without
                ``check_grad_overflow``.
        """
        options = self._options
        divisor = self.divisor
        norm = (summed_norm / divisor).to(torch.float32)
        overflowed = (norm - norm) != 0.0  # of inf and NaN the difference is NaN; isfinite() is four kernels
        factor: float | Tensor = 1.0
        max_norm = options.max_norm if max_norm is None else max_norm
        clipped_norm = norm if options.check_grad_overflow else torch.where(overflowed, math.inf, norm)  # NaN: as inf
        if not options.check_grad_overflow:
            overflowed = torch.zeros_like(overflowed) if errors is None else (errors - errors) != 0.0
        if max_norm > 0:
            factor = (max_norm / (clipped_norm + 1e-6)).clamp(max=1.0)
            if options.clip_after_steps:
                factor = torch.where(self._applied >= options.clip_after_steps, factor, 1.0)
        refused = overflowed if math.isinf(skip_above) else overflowed | (norm > skip_above)
        scale = torch.where(refused, self._zero, factor / divisor)
        skip = refused.to(torch.float32)
        step = self._applied + 1.0
        self._norm, self._skip = norm, skip
        self._applied = step - skip
        self._skips = self._skips + skip
        if self.loss_scale is not None:
            self.loss_scale.update(overflowed.to(torch.float32))
        host_step = self._next_step_on_host()
        return StepScalars(scale.to(torch.float32), skip, step, host_step)

    def unclipped_scalars(self, summed_norm: Tensor) -> StepScalars:
        """Returns the scalars of an update that is no step and is not counted: skipped where the norm is not finite."""
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        skip = ((summed_norm - summed_norm) != 0.0).to(torch.float32)
        scale = torch.where(skip != 0, self._zero, 1.0 / (self._divisor * scale + self._zero))
        return StepScalars(scale, skip, self._applied + 1.0, self._next_step_on_host())

    @property
    def divisor(self) -> Tensor | float:
        """What the summed gradients of the next step are divided by, the loss scale included."""
        return self._divisor if self.loss_scale is None else self.loss_scale.scale * self._divisor

    def _next_step_on_host(self) -> Callable[[], int]:
        """Returns what gives the number of the next applied step. It waits for the step before at most."""
        known, report = self._applied_on_host, self._report
        return lambda: 1 + (int(report.last()[2]) if known is None else known)

    # ---- one step late, without waiting for the device's queue

    def read_previous_outcome(self) -> bool:
        """Returns whether the step before the last was skipped. Call it once a step, after ``scalars``.

        Raises:
            RuntimeError: the same on every rank, if that step overflowed at the smallest loss scale.
        """
        assert self._norm is not None
        scaling = self.loss_scale
        sent = [self._skip, self._norm, self._applied]
        sent += [scaling.scale, scaling.is_exhausted] if scaling is not None else []
        report = self._report.exchange(torch.stack(sent))
        self._applied_on_host = None
        if report is None:
            return False
        if not report[0]:
            if not math.isfinite(report[1]) and not self._has_warned:
                logger.warning("gradient norm was %s: the step was taken, as check_grad_overflow is false", report[1])
                self._has_warned = True
            return False
        self.settled_skips += 1
        if scaling is None and math.isfinite(report[1]):
            return True  # larger than ``skip_above``: the caller that set it reports it
        if scaling is None:
            logger.warning("gradient norm was %s: the step was skipped on all ranks", report[1])
        elif report[4]:
            raise RuntimeError(
                f"gradients overflow at the smallest loss scale, {scaling.minimum}: the model diverges, or has values "
                "beyond fp16's 65,504; use bf16, or lower fp16.min_loss_scale"
            )
        else:
            logger.info("fp16 gradients overflowed: the step was skipped on all ranks, loss scale now %s", report[3])
        return True

    @property
    def outcome(self) -> Tensor:
        """Norm and skip flag of the last step, fp32 [2] on the device."""
        assert self._norm is not None
        return torch.stack((self._norm, self._skip))

    # ---- exact, waits for the device

    @property
    def was_skipped(self) -> bool:
        """Whether the last step was skipped."""
        return bool(self._skip.item())

    @property
    def grad_norm(self) -> float | None:
        """Of the last step, before clipping; None before the first."""
        return None if self._norm is None else float(self._norm.item())

    @property
    def applied(self) -> int:
        """Number of applied steps."""
        return int(self._applied.item())

    @applied.setter
    def applied(self, value: int) -> None:
        self._applied = torch.full_like(self._applied, value)
        self._applied_on_host = value

    @property
    def skips(self) -> int:
        """Number of skipped steps."""
        return int(self._skips.item())


class _Report:
    """Copies numbers from the device one step late: each exchange starts a copy and returns the one before."""

    def __init__(self, device: torch.device) -> None:
        self._is_on_host = device.type in ("cpu", "meta", "mps")  # of an Apple GPU it waits: no pinned memory
        self._sent: Tensor | None = None
        self._event = None if self._is_on_host else get_accelerator().Event()

    def exchange(self, values: Tensor) -> list[float] | None:
        """Returns the values of the call before, None the first time. Waits for these only, not for the new ones.

        Args:
            values: 1-D fp32, always of one length.
        """
        before = None if self._sent is None else self.last()
        if self._event is None:
            self._sent = values
            return before
        if self._sent is None:
            self._sent = get_accelerator().pin_memory(torch.empty(values.shape))
        self._sent.copy_(values, non_blocking=True)
        self._event.record()
        return before

    def last(self) -> list[float]:
        """Returns the values of the last call. Waits for these only."""
        assert self._sent is not None
        if self._event is not None:
            self._event.synchronize()
        values: list[float] = self._sent.tolist()
        return values
