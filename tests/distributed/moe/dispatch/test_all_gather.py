"""All-gather on two ranks: every rank has all tokens, serves its own experts, and sums and gradients come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.optimus.config.schema import ExpertPlacement
from megatron.optimus.moe.dispatch.all_gather import AllGatherDispatcher
from megatron.optimus.moe.dispatch.ownership import Ownership
from megatron.optimus.ops import Routing
from tests.helpers import run_distributed

CHOICES = [[0, 3], [1, 2], [3, 1], [0, 2]]  # of all tokens


def of_rank(rank: int, world: int, counts: list[int]) -> dict[str, Any]:
    """Every expert multiplies by one more than its number."""
    group = dist.group.WORLD
    assert group is not None
    ownership = Ownership.from_placement(4, 2, ExpertPlacement.INTERLEAVED)
    dispatcher = AllGatherDispatcher(group, ownership, equal_tokens=len(set(counts)) == 1)
    first = sum(counts[:rank])
    own = slice(first, first + counts[rank])
    x_TD = torch.arange(1.0, 9).view(4, 2)[own].requires_grad_()
    weights_TK = torch.tensor([[1.0, 0.5]] * 4)[own].requires_grad_()
    routing = Routing(weights_TK, torch.tensor(CHOICES)[own], weights_TK)
    called: list[int] = []
    rows = dispatcher.dispatch(x_TD, routing, dispatcher.start(x_TD), lambda: called.append(1))
    factors_E = torch.tensor([float(1 + expert) for expert in ownership.expert_ids(rank)])
    served = rows.indices_RK >= 0
    factors_RK = torch.where(served, factors_E[rows.indices_RK.clamp(min=0).long()], 0.0)
    y_RD = rows.x_RD * (rows.weights_RK.where(served, torch.zeros(())) * factors_RK).sum(1, keepdim=True)
    y_TD = dispatcher.combine(y_RD, rows.handle)
    y_TD.sum().backward()
    assert x_TD.grad is not None and weights_TK.grad is not None
    return {
        "x": rows.x_RD.tolist(),
        "indices": rows.indices_RK.tolist(),
        "slots": int(dispatcher.num_slots(rows)),
        "y": y_TD.tolist(),
        "dx": x_TD.grad.tolist(),
        "dweights": weights_TK.grad.tolist(),
        "called": called,
    }


@pytest.mark.parametrize("counts", [[2, 2], [3, 1], [0, 4]], ids=str)
def test_two_ranks_serve_all_experts_together(counts: list[int]) -> None:
    tokens = torch.arange(1.0, 9).view(4, 2)
    factors = torch.tensor([[1.0 * (1 + a) + 0.5 * (1 + b)] for a, b in CHOICES])
    each = torch.tensor([[1.0 + a, 1.0 + b] for a, b in CHOICES])
    results = run_distributed(of_rank, 2, counts)
    for rank, found in enumerate(results):
        own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        assert found["x"] == tokens.tolist() and found["called"] == [1]
        # Interleaved: rank 0 has experts 0 and 2, rank 1 has 1 and 3.
        assert found["indices"] == [[expert // 2 if expert % 2 == rank else -1 for expert in row] for row in CHOICES]
        assert found["y"] == (tokens * factors)[own].tolist()
        assert found["dx"] == factors.expand(4, 2)[own].tolist()
        assert found["dweights"] == (each * tokens.sum(1, keepdim=True))[own].tolist()
    assert sum(found["slots"] for found in results) == 8
