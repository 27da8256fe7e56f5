"""What a step decides and what it did, kept on the device: the host queues a step without waiting for its norm."""

from __future__ import annotations

import logging
import math

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.optimizers.base import StepScalars
from deepspeed_ext.zero.loss_scale import LossScale
from deepspeed_ext.zero.options import ZeroOptions

logger = logging.getLogger("deepspeed_ext")


class StepState:
    """Counts steps and skips, turns a norm into the scalars of the update, keeps the loss scale of fp16 training.

    ``divisor``: what summed gradients are divided by, the loss scale apart. A norm that is not finite skips the step.
    The host learns of it when it asks (``was_skipped``, ``grad_norm``, ``applied``: each waits for the device), or one
    step later through ``settle``, which never waits for the step just queued.
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
        self.settled_skips = 0  # skipped steps the host has been told of

    def scalars(self, summed_norm: Tensor, max_norm: float | None = None, skip_above: float = math.inf) -> StepScalars:
        """From the norm of the summed gradients (0-dim, any float dtype) to clip factor, skip flag and step number.

        ``max_norm``: of this step, 0 for no clipping; None: the options'. ``skip_above``: a larger norm skips the step.
        """
        options = self._options
        divisor: float | Tensor = self._divisor
        if self.loss_scale is not None:
            divisor = self.loss_scale.scale * divisor
        norm = (summed_norm / divisor).to(torch.float32)
        overflowed = (norm - norm) != 0.0  # of inf and NaN the difference is NaN; isfinite() is four kernels
        factor: float | Tensor = 1.0
        max_norm = options.max_norm if max_norm is None else max_norm
        if max_norm > 0:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
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
        return StepScalars(scale=scale.to(torch.float32), skip=skip, step=step)

    # ---- one step late, without waiting for the device's queue

    def settle(self) -> bool:
        """Whether the step before the last was skipped; call once a step, after ``scalars``.

        Raises RuntimeError, the same on every rank, if that step overflowed at the smallest loss scale.
        """
        assert self._norm is not None
        scaling = self.loss_scale
        sent = [self._skip, self._norm] + ([scaling.scale, scaling.is_exhausted] if scaling is not None else [])
        report = self._report.exchange(torch.stack(sent))
        if report is None or not report[0]:
            return False
        self.settled_skips += 1
        if scaling is None and math.isfinite(report[1]):
            return True  # ``skip_above``: who set it tells of it
        if scaling is None:
            logger.warning("gradient norm was %s: the step was skipped on all ranks", report[1])
        elif report[3]:
            raise RuntimeError(
                f"gradients overflow at the smallest loss scale, {scaling.minimum}: the model diverges, or has values "
                "beyond fp16's 65,504; use bf16, or lower fp16.min_loss_scale"
            )
        else:
            logger.info("fp16 gradients overflowed: the step was skipped on all ranks, loss scale now %s", report[2])
        return True

    @property
    def outcome(self) -> Tensor:
        """Norm and skip flag of the last step, fp32 [2] on the device."""
        assert self._norm is not None
        return torch.stack((self._norm, self._skip))

    # ---- exact, waits for the device

    @property
    def was_skipped(self) -> bool:
        return bool(self._skip.item())

    @property
    def grad_norm(self) -> float | None:
        """Of the last step, before clipping; None before the first."""
        return None if self._norm is None else float(self._norm.item())

    @property
    def applied(self) -> int:
        return int(self._applied.item())

    @applied.setter
    def applied(self, value: int) -> None:
        self._applied = torch.full_like(self._applied, value)

    @property
    def skips(self) -> int:
        return int(self._skips.item())


class _Report:
    """Numbers on their way from the device: each exchange sends new ones and returns those sent the time before."""

    def __init__(self, device: torch.device) -> None:
        self._is_on_host = device.type in ("cpu", "meta")
        self._sent: Tensor | None = None
        self._event = None if self._is_on_host else get_accelerator().Event()

    def exchange(self, values: Tensor) -> list[float] | None:
        """``values``: 1-D fp32, always of one length. None the first time. Waits for the last numbers only."""
        before = None
        if self._sent is not None:
            if self._event is not None:
                self._event.synchronize()
            before = self._sent.tolist()
        if self._event is None:
            self._sent = values
            return before
        if self._sent is None:
            self._sent = get_accelerator().pin_memory(torch.empty(values.shape))
        self._sent.copy_(values, non_blocking=True)
        self._event.record()
        return before
