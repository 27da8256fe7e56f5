"""The factor on the loss that keeps fp16 gradients from vanishing, kept on the device.

The rule is DeepSpeed's: an overflow halves the scale, at first only after ``hysteresis`` overflows; ``window`` steps
without one double it. Every rank sees the same skips, so the scale is the same everywhere without communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_LARGEST = 2.0**100  # gradients of zero never overflow; an infinite scale could not be halved any more


@dataclass(frozen=True)
class LossScaleOptions:
    """``initial``: the first scale. ``is_dynamic``: follow overflows; all below is for that alone.

    ``window``: steps without overflow after which the scale doubles. ``hysteresis``: overflows up to the first halving;
    what is used up comes back when the scale doubles, or with ``refills_hysteresis`` after any step without overflow.
    ``minimum``: the scale never falls below.
    """

    initial: float = 2.0**16
    is_dynamic: bool = True
    window: int = 1000
    hysteresis: int = 2
    refills_hysteresis: bool = False
    minimum: float = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError for a value out of range."""
        if not 0 < self.initial < float("inf") or not 0 < self.minimum < float("inf"):
            raise ValueError(f"loss scale {self.initial} and min_loss_scale {self.minimum} must be positive and finite")
        if self.window < 1 or self.hysteresis < 1:
            raise ValueError(
                f"loss_scale_window={self.window} and hysteresis={self.hysteresis} must be at least 1; "
                "hysteresis=1 lowers the scale at every overflow"
            )


class LossScale:
    """Scale, steps since the last overflow and overflows left before the next halving, as 0-dim fp32 tensors.

    ``update`` puts new tensors in the place of the old ones, which backward graphs may still hold.
    """

    def __init__(self, options: LossScaleOptions, device: torch.device) -> None:
        self._options = options
        self.scale = torch.tensor(options.initial, dtype=torch.float32, device=device)
        self._clean = torch.zeros_like(self.scale)  # as DeepSpeed counts: a doubling leaves 1
        self._left = torch.full_like(self.scale, options.hysteresis)
        self.is_exhausted = torch.zeros_like(self.scale)  # 1.0: the last step overflowed at the smallest scale

    @property
    def is_dynamic(self) -> bool:
        """Whether overflows change the scale."""
        return self._options.is_dynamic

    @property
    def minimum(self) -> float:
        """The smallest scale."""
        return self._options.minimum

    def scale_loss(self, loss: Tensor) -> Tensor:
        """loss * scale; fp32 for a 0-dim fp16 loss, which the product could exceed."""
        return loss * self.scale

    def update(self, skip: Tensor) -> None:
        """After a step; ``skip``: 0-dim, 1.0 if its gradients were not finite. Does not wait for the device."""
        options = self._options
        if not options.is_dynamic:
            return
        overflowed = skip != 0
        lowers = overflowed & (self._left <= 1)
        raises = (self._clean == options.window) & ~overflowed
        refills = ~overflowed if options.refills_hysteresis else raises
        lowered = (self.scale * 0.5).clamp(min=options.minimum)
        doubled = (self.scale * 2.0).clamp(max=_LARGEST)
        self.is_exhausted = (lowers & (self.scale == options.minimum)).to(torch.float32)
        self.scale = torch.where(lowers, lowered, torch.where(raises, doubled, self.scale))
        self._left = torch.where(refills, options.hysteresis, (self._left - skip).clamp(min=1.0))
        self._clean = torch.where(overflowed, 0.0, torch.where(raises, 0.0, self._clean) + 1.0)

    def state_dict(self) -> dict[str, float]:
        """The three numbers, the same on every rank and at every layout. Waits for the device."""
        scale, clean, left = torch.stack([self.scale, self._clean, self._left]).tolist()
        return {"scale": scale, "clean_steps": clean, "hysteresis_left": left}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Goes on from what ``state_dict`` returned; a static scale stays as configured."""
        if self.is_dynamic:
            self.scale = torch.full_like(self.scale, state["scale"])
            self._clean = torch.full_like(self.scale, state["clean_steps"])
            self._left = torch.full_like(self.scale, state["hysteresis_left"])
