"""The experts of a MoE layer: routed ones as two 3-D weights, and the shared ones that every token passes.

Shapes: E experts on this rank, D model width, F inner width, R rows, K experts per row, B sequences, S positions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron.optimus import ops
from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.layers.mlp import MLP


class Experts(nn.Module):
    """The routed SwiGLU experts of one layer on this rank.

    y[r] = sum_k weights[r,k] * down_e(silu(gate_e(x[r])) * up_e(x[r])) with e = indices[r,k], skipping -1.

    Where an optimizer keeps gradients in ``main_grad`` of the weights, the backward adds to it if the backend gains by
    that (ops/main_grads.py).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, width, inner = config.num_experts, config.hidden_size, config.moe_ffn_hidden_size
        self.gate_up_weight = nn.Parameter(torch.empty(experts, 2 * inner, width))  # rows 0..F-1 gate, F..2F-1 up
        self.down_weight = nn.Parameter(torch.empty(experts, width, inner))
        self.moe_mlp: Callable[..., Tensor] | None = None  # a model converter's, in another precision than ops.moe_mlp

    def forward(
        self, x_RD: Tensor, weights_RK: Tensor, indices_RK: Tensor, on_input_gradients: ops.InputGradients | None = None
    ) -> Tensor:
        """Computes the rows that a dispatcher has brought here.

        Args:
            x_RD: tokens.
            weights_RK: routing weights, fp32.
            indices_RK: numbers of experts on this rank, or -1.
            on_input_gradients: called by the backward with the gradients of x and weights before its last product.

        Returns:
            The weighted sum over each row's experts, [R, D] in x's dtype.
        """
        gate_up, down = self.gate_up_weight, self.down_weight
        adds = on_input_gradients is not None or ops.prefers_main_grads(x_RD)
        main_grads = (ops.main_grad_of(gate_up), ops.main_grad_of(down)) if adds else (None, None)
        moe_mlp = self.moe_mlp or ops.moe_mlp
        return moe_mlp(x_RD, gate_up, down, weights_RK, indices_RK, main_grads, on_input_gradients)


class SharedExperts(nn.Module):
    """The experts that every token passes beside its routed ones (arXiv 2401.06066): [B, S, D] -> [B, S, D].

    Any number of them side by side is one SwiGLU MLP of the sum of their widths, here mlp(x), or with a gate
    sigmoid(gate . x) * mlp(x) as in Qwen2-MoE. They are dense parameters: tensor parallelism splits them as the dense
    MLP, and the optimizer shards them over all data-parallel ranks, those of an expert-parallel group too.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.mlp = MLP(config.hidden_size, config.moe_shared_expert_intermediate_size)
        # Not part of the MLP, which sees the tokens of all tensor-parallel ranks: the gate sees this rank's alone.
        self.gate = nn.Linear(config.hidden_size, 1, bias=False) if config.moe_shared_expert_gate else None

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Computes [B, S, D] of every token."""
        y_BSD: Tensor = self.mlp(x_BSD)
        return y_BSD if self.gate is None else torch.sigmoid(self.gate(x_BSD)) * y_BSD
