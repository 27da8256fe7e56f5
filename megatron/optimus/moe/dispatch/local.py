"""The dispatcher of a rank that has every expert itself: nothing travels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.optimus.moe.dispatch.base import ExpertRows, OverlappedWork, TokenDispatcher, no_work
from megatron.optimus.ops import Routing


class LocalDispatcher(TokenDispatcher):
    """The rows that experts compute are this rank's tokens. Every layer has it until expert parallelism is applied."""

    def dispatch(
        self, x_TD: Tensor, routing: Routing, in_flight: None, overlapped: OverlappedWork = no_work
    ) -> ExpertRows:
        overlapped()
        return ExpertRows(x_TD, routing.weights_TK, routing.indices_TK, None)

    def combine(self, y_RD: Tensor, handle: Any) -> Tensor:
        return y_RD

    def num_slots(self, rows: ExpertRows) -> int:
        return rows.indices_RK.numel()
