"""Floating-point operations of training, counted from the shape of the model."""

from __future__ import annotations

from megatron.optimus.config.costs import head_cost, layer_cost
from megatron.optimus.config.schema import ModelConfig


def flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """FLOPs that one token costs in training, forward and backward: 2 for each multiply-add of config/costs.py in
    a sequence of that length, and backward costs twice the forward."""
    dense, moe = (layer_cost(model, seq_length, is_moe=is_moe).total for is_moe in (False, True))
    moe_layers = len(model.moe_layers)
    return 6.0 * (moe_layers * moe + (model.num_layers - moe_layers) * dense + head_cost(model))


def mfu(tokens_per_second_per_device: float, flops_per_token: float, peak_flops: float | None) -> float | None:
    """Model FLOPs utilisation: counted FLOP/s over the device's dense peak (arXiv 2204.02311, appendix B).

    None where the peak is unknown (``runtime.device.peak_flops``).
    """
    return None if peak_flops is None else tokens_per_second_per_device * flops_per_token / peak_flops
