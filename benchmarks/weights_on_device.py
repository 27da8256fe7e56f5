"""Weights for models that are only timed or measured."""

from __future__ import annotations

from typing import Any

import torch


def draw_on_device(model: Any, *, seed: int, device: torch.device, dtype: torch.dtype) -> None:
    """In place of ``initialize_weights``, which draws on the host and takes minutes: other numbers, as large."""
    from megatron.optimus.models import initialize

    initialize.materialize(model, device, dtype)
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0) if param.dim() == 1 else param.normal_(0.0, 0.02, generator=generator)
