"""A small expert-parallel model, its data, and its training in one process: the reference of the ZeRO tests.

T tokens of a rank, D model width, V vocabulary, E experts in total, N = E / EP local experts, H expert width. Sizes are
odd on purpose. Every token visits every expert, weighted by a softmax gate: no routing decision can flip on rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from deepspeed_ext.zero.bucket import all_gather, reduce_scatter

V, D, H, E = 131, 20, 13, 4
BATCH, SEQ = 2, 5
LR, DECAY, BETAS, EPS = 3e-3, 0.1, (0.9, 0.95), 1e-8


class GatherTokens(torch.autograd.Function):
    """[T, W] on each rank -> [EP * T, W]; the gradient sums what all peers sent back."""

    @staticmethod
    def forward(ctx: Any, x_TW: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out = x_TW.new_empty(dist.get_world_size(group) * x_TW.shape[0], x_TW.shape[1])
        all_gather(out, x_TW.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        out = grad.new_empty(grad.shape[0] // dist.get_world_size(ctx.group), grad.shape[1])
        reduce_scatter(out, grad.contiguous(), group=ctx.group)
        return out, None


class ScatterSum(torch.autograd.Function):
    """[EP * T, W] partial sums -> [T, W] sums of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out = x.new_empty(x.shape[0] // dist.get_world_size(group), x.shape[1])
        reduce_scatter(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        out = grad.new_empty(grad.shape[0] * dist.get_world_size(ctx.group), grad.shape[1])
        all_gather(out, grad.contiguous(), group=ctx.group)
        return out, None


class ToyExperts(nn.Module):
    """A soft mixture of E experts, N of them here; ``group`` is the expert-parallel group, None without peers."""

    def __init__(self, ep: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        rank = dist.get_rank(group) if group is not None else 0
        self.first, self.local = rank * E // ep, E // ep
        self.router = nn.Parameter(torch.randn(E, D) * 0.3)
        mine = slice(self.first, self.first + self.local)
        self.up_NHD = nn.Parameter((torch.randn(E, H, D) * 0.3)[mine].clone())
        self.down_NDH = nn.Parameter((torch.randn(E, D, H) * 0.3)[mine].clone())

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        gate_TE = (x_TD.float() @ self.router.float().T).softmax(-1).to(x_TD.dtype)
        if self.group is not None:
            both = GatherTokens.apply(torch.cat([x_TD, gate_TE], dim=1), self.group)
            x_TD, gate_TE = both[:, :D], both[:, D:]
        hidden_NTH = F.silu(torch.einsum("td,nhd->nth", x_TD, self.up_NHD))
        gate_TN = gate_TE[:, self.first : self.first + self.local]
        out_TD = torch.einsum("nth,ndh,tn->td", hidden_NTH, self.down_NDH, gate_TN)
        return ScatterSum.apply(out_TD, self.group) if self.group is not None else out_TD


class ToyModel(nn.Module):
    """Tied embedding, a dense layer with bias, one ToyExperts per entry of ``ep_sizes``, an unused parameter."""

    def __init__(self, ep_sizes: tuple[int, ...], groups: dict[int, dist.ProcessGroup] | None = None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(V, D)
        self.dense = nn.Linear(D, D)
        self.norm = nn.LayerNorm(D)
        self.experts = nn.ModuleList(ToyExperts(ep, groups[ep] if groups else None) for ep in ep_sizes)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean next-token loss of a [BATCH, SEQ + 1] micro-batch."""
        x_TD = self.embedding(tokens[:, :-1]).flatten(0, 1)
        x_TD = x_TD + torch.tanh(self.dense(self.norm(x_TD)))
        for experts in self.experts:
            x_TD = x_TD + experts(x_TD)
        return F.cross_entropy(self.head(x_TD).float(), tokens[:, 1:].flatten())


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Decay for matrices, none and another learning rate for vectors."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() > 1]},
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0, "lr": LR / 2},
    ]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(param_groups(model), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    """Micro-batch ``micro`` of a rank in a step: the same tokens however many ranks there are."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randint(0, V, (BATCH, SEQ + 1), generator=generator)


def reference(
    steps: int, accumulation: int, world: int, max_norm: float, layers: int, half: bool = False
) -> tuple[dict[str, dict[str, torch.Tensor]], list[float]]:
    """One process, torch's AdamW, the whole global batch: final master and moments by name, and each step's norm.

    ``half``: start from weights rounded to bf16, as a bf16 engine does.
    """
    model = ToyModel((1,) * layers)
    if half:
        for p in model.parameters():
            p.data.copy_(p.data.bfloat16())
    optimizer = adamw(model)
    norms = []
    for step in range(steps):
        tokens = torch.cat([batch(step, m, r) for m in range(accumulation) for r in range(world)])
        optimizer.zero_grad()
        model(tokens).backward()
        trainable = [p for p in model.parameters() if p.requires_grad]
        for p in trainable:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norms.append(float(nn.utils.clip_grad_norm_(trainable, max_norm)))
        optimizer.step()
    states = {
        name: {
            "master": p.detach(),
            "exp_avg": optimizer.state[p]["exp_avg"],
            "exp_avg_sq": optimizer.state[p]["exp_avg_sq"],
        }
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    return states, norms
