"""What a step decides and what it did, kept on the device: the host queues a step without waiting for its norm."""

from __future__ import annotations

import logging

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.rules.base import StepScalars
from deepspeed_ext.zero.options import ZeroOptions

logger = logging.getLogger("deepspeed_ext")


class StepState:
    """Counts steps and skips, turns a norm into the scalars of the update.

    ``divisor``: what summed gradients are divided by. A norm that is not finite skips the step. The host learns of it
    when it asks (``was_skipped``, ``grad_norm``, ``applied``: each waits for the device), or one step later through
    ``settle``, which never waits for the step just queued.
    """

    def __init__(self, device: torch.device, divisor: float, options: ZeroOptions) -> None:
        self._divisor = divisor
        self._options = options
        self._applied = torch.zeros((), dtype=torch.float32, device=device)
        self._skips = torch.zeros((), dtype=torch.float32, device=device)
        self._skip = torch.zeros((), dtype=torch.float32, device=device)
        self._norm: Tensor | None = None
        self._in_flight: tuple[Tensor, object] | None = None
        self.settled_skips = 0  # skipped steps the host has been told of

    def scalars(self, summed_norm: Tensor) -> StepScalars:
        """From the norm of the summed gradients (0-dim, any float dtype) to clip factor, skip flag and step number."""
        options = self._options
        norm = (summed_norm / self._divisor).to(torch.float32)
        finite = torch.isfinite(norm)
        scale = torch.ones_like(norm)
        if options.max_norm > 0:
            scale = (options.max_norm / (norm + 1e-6)).clamp(max=1.0)
            if options.clip_after_steps:
                scale = torch.where(self._applied >= options.clip_after_steps, scale, 1.0)
        scale = torch.where(finite, scale / self._divisor, 0.0)
        skip = (~finite).to(torch.float32)
        step = self._applied + 1.0
        self._norm, self._skip = norm, skip
        self._applied = self._applied + (1.0 - skip)
        self._skips = self._skips + skip
        return StepScalars(scale=scale, skip=skip, step=step)

    # ---- one step late, without waiting for the device's queue

    def settle(self) -> bool:
        """Whether the step before the last was skipped; call once a step, after ``scalars``."""
        was_skipped = False
        if self._in_flight is not None:
            host, event = self._in_flight
            if event is not None:
                event.synchronize()  # type: ignore[attr-defined]
            skip, norm = host.tolist()
            was_skipped = bool(skip)
            if was_skipped:
                self.settled_skips += 1
                logger.warning("gradient norm was %s: the step was skipped on all ranks", norm)
        assert self._norm is not None
        values = torch.stack([self._skip, self._norm])
        if values.device.type == "cpu":
            self._in_flight = values, None
        else:
            host = get_accelerator().pin_memory(torch.empty(2))
            host.copy_(values, non_blocking=True)
            event = get_accelerator().Event()
            event.record()
            self._in_flight = host, event
        return was_skipped

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
