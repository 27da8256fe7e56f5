"""Other implementations of the MoE layer that moe_layer.py compares with: each makes a function of its inputs.

SonicMoE compiles its products at first use, minutes for all candidates; they can be compiled before, without a GPU,
with QUACK_ARCH=90 and CUTE_DSL_ARCH=sm_90a, and kept in QUACK_CACHE_DIR.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Inputs:
    x: Tensor  # [T, D]
    router: Tensor  # [E, D]
    gate_up: Tensor  # [E, 2F, D]
    down: Tensor  # [E, D, F]
    dy: Tensor  # [T, D]
    topk: int

    def leaves(self) -> list[Tensor]:
        return [self.x, self.router, self.gate_up, self.down]


def _plain_route(data: Inputs) -> tuple[Tensor, Tensor]:
    weights, indices = torch.softmax(F.linear(data.x, data.router).float(), dim=-1).topk(data.topk, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True), indices


def _grouped_mm(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, topk: int) -> Tensor:
    weights, indices = torch.softmax(F.linear(x, router).float(), dim=-1).topk(topk, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    expert = indices.reshape(-1)
    order = torch.argsort(expert)
    ends = torch.cumsum(torch.bincount(expert, minlength=gate_up.shape[0]), 0).to(torch.int32)
    token = order // topk
    hidden = torch._grouped_mm(x[token], gate_up.transpose(1, 2), offs=ends)
    gate, up = hidden.chunk(2, dim=-1)
    y = torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    y = y * weights.reshape(-1)[order][:, None].to(y.dtype)
    return torch.zeros_like(x).index_add_(0, token, y)


def grouped_mm(data: Inputs) -> Callable[[], Tensor]:
    return lambda: _grouped_mm(*data.leaves(), data.topk)


def grouped_mm_compiled(data: Inputs) -> Callable[[], Tensor]:
    torch._dynamo.reset()
    fn = torch.compile(_grouped_mm)
    return lambda: fn(*data.leaves(), data.topk)


def sonicmoe(data: Inputs) -> Callable[[], Tensor]:
    """SonicMoE's layer function; it wants gate and up rows interleaved. Its module's auxiliary loss is left out."""
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_TC_softmax_topk_layer

    with torch.no_grad():
        experts, twice, width = data.gate_up.shape
        data.gate_up.copy_(data.gate_up.view(experts, 2, twice // 2, width).transpose(1, 2).reshape(data.gate_up.shape))
    stream = torch.cuda.current_stream().cuda_stream
    up, down = data.gate_up.permute(1, 2, 0), data.down.permute(1, 2, 0)
    return lambda: moe_TC_softmax_topk_layer(
        data.x, data.router, up, None, down, None, data.topk, stream, ActivationType.SWIGLU, False
    )[0]


def liger(data: Inputs) -> Callable[[], Tensor]:
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    def run() -> Tensor:
        weights, indices = _plain_route(data)
        return LigerFusedMoEFunction.apply(data.x, data.gate_up, data.down, indices.int(), weights.to(data.x.dtype))

    return run


def transformers_eager(data: Inputs) -> Callable[[], Tensor]:
    from transformers.models.olmoe.modeling_olmoe import OlmoeConfig, OlmoeSparseMoeBlock

    experts, width, inner = data.down.shape
    config = OlmoeConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_experts=experts,
        num_experts_per_tok=data.topk,
        norm_topk_prob=True,
    )
    config._experts_implementation = "eager"
    with torch.device("meta"):
        block = OlmoeSparseMoeBlock(config)
    block.gate.weight = torch.nn.Parameter(data.router.detach())
    block.experts.gate_up_proj = torch.nn.Parameter(data.gate_up.detach())
    block.experts.down_proj = torch.nn.Parameter(data.down.detach())
    data.router, data.gate_up, data.down = block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj
    return lambda: block(data.x[None])[0]


PEERS: dict[str, Callable[[Inputs], Callable[[], Tensor]]] = {
    "sonicmoe": sonicmoe,
    "grouped_mm": grouped_mm,
    "grouped_mm+compile": grouped_mm_compiled,
    "liger": liger,
    "transformers": transformers_eager,
}
