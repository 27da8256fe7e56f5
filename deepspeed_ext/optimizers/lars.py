"""LARS (You et al. 2017, arXiv 1708.03888): SGD with momentum whose rate follows each tensor's norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed_ext.optimizers.base import Shard, ShardableOptimizer, StepScalars
from deepspeed_ext.optimizers.blocks import check_options
from deepspeed_ext.optimizers.whole_tensors import Rounds, TensorOptimizer, WholeTensors


class ShardLARS(TensorOptimizer):
    """Options of a parameter group: lr, momentum, trust_coefficient, weight_decay, maximize, state_dtype."""

    state_kinds = ("momentum_buffer",)

    def update_tensors_(
        self, shards: Sequence[Shard], tensors: WholeTensors, options: Mapping[str, Any], scalars: StepScalars
    ) -> Rounds:
        """See TensorOptimizer.update_tensors_. Vectors (norms, biases) get SGD without weight decay."""
        decay, own = options["weight_decay"], tensors.zeros(2)
        for block in tensors.blocks(shards, self.state_kinds, scalars):
            block.sum_into(own[0], block.master.square())
            block.sum_into(own[1], block.gradient().square())
        sums = yield own
        norms, lengths = sums.sqrt().unbind()
        scale = lengths + decay * norms
        ratios = options["trust_coefficient"] * norms / scale
        ratios = torch.where((norms > 0) & (scale > 0) & tensors.is_matrix_T, ratios, 1.0)
        for block in tensors.blocks(shards, self.state_kinds, scalars, options["maximize"]):
            update = block.gradient() + decay * block.spread(tensors.is_matrix_T) * block.master
            buffer = options["momentum"] * block.read("momentum_buffer") + block.spread(ratios) * update
            block.write_weights(block.master - options["lr"] * buffer)
            block.write("momentum_buffer", buffer)


class LARS(ShardableOptimizer):
    """LARS: momentum SGD; a matrix's gradient is scaled to ``trust_coefficient`` times its weights' norm.

    Args:
        params: parameters, or parameter groups.
        lr: learning rate.
        momentum: decay rate of the momentum.
        trust_coefficient: length of an update relative to the weights, at lr 1.
        weight_decay: added to the gradient of matrices before it is scaled.
        maximize: ascend instead of descend.
        state_dtype: "fp32", "bf16" or "int8".

    Raises:
        ValueError: an option is out of range.
    """

    rule = ShardLARS

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        momentum: float = 0.9,
        trust_coefficient: float = 1e-3,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state_dtype: str = "fp32",
    ) -> None:
        check_options(lr, weight_decay, (momentum,), trust_coefficient=trust_coefficient)
        options: dict[str, Any] = {"lr": lr, "momentum": momentum, "trust_coefficient": trust_coefficient}
        options |= {"weight_decay": weight_decay, "maximize": maximize, "state_dtype": state_dtype}
        super().__init__(params, options)
