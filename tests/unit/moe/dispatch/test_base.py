"""What every dispatcher has from its base: dispatch, experts and combine in their order, and the slots of this rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.optimus.config.schema import TokenDispatcherType
from megatron.optimus.moe.dispatch import base
from megatron.optimus.moe.dispatch.base import ExpertRows, OverlappedWork, TokenDispatcher, no_work, register
from megatron.optimus.ops import Routing


class Twice(TokenDispatcher):
    """Sends every token twice, of whose choices another rank serves some, and adds up both outputs."""

    def dispatch(
        self, x_TD: Tensor, routing: Routing, in_flight: Any, overlapped: OverlappedWork = no_work
    ) -> ExpertRows:
        overlapped()
        indices_RK = torch.cat([routing.indices_TK, torch.full_like(routing.indices_TK, -1)])
        return ExpertRows(torch.cat([x_TD, x_TD]), routing.weights_TK.repeat(2, 1), indices_RK, in_flight)

    def combine(self, y_RD: Tensor, handle: Any) -> Tensor:
        return sum(y_RD.chunk(2)) + handle


class Experts(nn.Module):
    def forward(self, x_RD: Tensor, weights_RK: Tensor, indices_RK: Tensor, on_input_gradients: Any) -> Tensor:
        assert on_input_gradients is None
        return x_RD * weights_RK.sum(1, keepdim=True)


def test_experts_run_between_dispatch_and_combine() -> None:
    x_TD, weights_TK = torch.ones(3, 2), torch.tensor([[1.0, 2.0]] * 3)
    routing = Routing(weights_TK, torch.tensor([[0, 1], [2, 0], [1, 2]]), weights_TK)
    called: list[int] = []
    y_TD, num_slots = Twice().run_experts(Experts(), x_TD, routing, 0.5, lambda: called.append(1))
    assert torch.equal(y_TD, torch.full((3, 2), 6.5)) and called == [1]
    assert isinstance(num_slots, Tensor) and num_slots.item() == 6  # choices that other ranks serve do not count
    assert Twice().start(x_TD) is None
    assert Twice.unsupported_reason(None, torch.device("cpu")) is None  # type: ignore[arg-type]


def test_a_dispatcher_is_found_by_its_value() -> None:
    before = dict(base.REGISTRY)
    try:
        assert register(TokenDispatcherType.ALLGATHER)(Twice) is Twice
        assert base.REGISTRY[TokenDispatcherType.ALLGATHER] is Twice
    finally:
        base.REGISTRY.clear()
        base.REGISTRY.update(before)
