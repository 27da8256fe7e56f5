"""The interface of token dispatchers: tokens travel to the ranks of their experts, and the outputs travel back.

A MoE layer calls ``start`` before its router and ``run_experts`` after it; the latter is ``dispatch``, the experts and
``combine``. The computation of the experts is the same for every dispatcher.

What else the layer computes with its tokens (shared experts) is its ``overlapped`` work. ``dispatch`` calls it once,
after it has sent everything it can and before it waits. The autograd nodes of that work then lie between those of
sending and of receiving, so the backward also runs it while gradients are combined.

Shapes: T own tokens, R rows to compute here, D model width, K experts per token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from megatron.optimus.config.schema import ParallelConfig, TokenDispatcherType
from megatron.optimus.moe.dispatch.ownership import Ownership
from megatron.optimus.ops import InputGradients, Routing
from megatron.optimus.platform.mesh import Mesh

OverlappedWork = Callable[[], None]


def no_work() -> None:
    """The ``OverlappedWork`` of a layer that has nothing else to compute."""


class ExpertRows(NamedTuple):
    """The rows that the experts of this rank compute.

    Attributes:
        x_RD: tokens, in the model's dtype.
        weights_RK: routing weights, fp32. The values of choices that other ranks serve may be anything finite and must
            get a gradient of zero.
        indices_RK: int32 or int64, the expert's number on this rank, or -1 for a choice that another rank serves.
        handle: what ``combine`` needs.
        on_input_gradients: combines the gradients of x_RD and weights_RK. The experts' backward may call it as soon as
            it has them, so that they travel beside its last product. None: nothing is gained by that.
    """

    x_RD: Tensor
    weights_RK: Tensor
    indices_RK: Tensor
    handle: Any
    on_input_gradients: InputGradients | None = None


class MessageShape(NamedTuple):
    """Size of what one rank's tokens send in one MoE layer."""

    num_tokens: int
    width: int
    num_experts: int
    topk: int
    dtype: torch.dtype


class TokenDispatcher(ABC):
    """Moves tokens to their experts and the experts' outputs back. Every method is collective over the expert group."""

    runs_everywhere: ClassVar[bool] = True  # False: ``unsupported_reason`` has to be asked

    @classmethod
    def unsupported_reason(cls, mesh: Mesh, device: torch.device) -> str | None:
        """Why this dispatcher cannot run on these ranks; None where it can. Collective over all ranks.

        Returns:
            A sentence with the remedy. Ranks may see different reasons; ``select_dispatcher`` makes them agree.
        """
        return None

    @classmethod
    def build(cls, config: ParallelConfig, mesh: Mesh, ownership: Ownership) -> TokenDispatcher:
        """The dispatcher of one layer over this rank's expert group."""
        return cls(mesh.group("experts"), ownership)  # type: ignore[call-arg]

    def prepare(self, shape: MessageShape, device: torch.device) -> None:  # noqa: B027 - most need nothing
        """Allocates what messages of this shape need, so that its lack shows before the first step.

        Raises:
            ConfigError: on every rank of the group, where one of them lacks the memory.
        """

    def start(self, x_TD: Tensor) -> Any:
        """Sends tokens before the router has seen them; the result goes to ``dispatch``. None: nothing was sent."""
        return None

    @abstractmethod
    def dispatch(
        self, x_TD: Tensor, routing: Routing, in_flight: Any, overlapped: OverlappedWork = no_work
    ) -> ExpertRows:
        """Exchanges this rank's tokens for the rows that its experts must compute.

        Args:
            x_TD: tokens as the router returns them, so that both uses of them share one gradient (``ops.route``).
            routing: the chosen experts by their numbers in the model, and their weights.
            in_flight: what ``start`` returned for these tokens.
            overlapped: called exactly once, when everything that can be sent is under way.
        """

    @abstractmethod
    def combine(self, y_RD: Tensor, handle: Any) -> Tensor:
        """Sums the experts' outputs for the rows of ``dispatch`` to the outputs of this rank's tokens, [T, D]."""

    def run_experts(
        self, experts: nn.Module, x_TD: Tensor, routing: Routing, in_flight: Any, overlapped: OverlappedWork
    ) -> tuple[Tensor, Tensor | int]:
        """Dispatches this rank's tokens, runs the experts on the rows that arrive, and combines their outputs.

        Args:
            experts: called with the fields of ``ExpertRows`` but ``handle``; returns [R, D].
            x_TD: as ``dispatch``, and so are ``routing``, ``in_flight`` and ``overlapped``.

        Returns:
            The outputs of this rank's tokens [T, D], and the number of slots (token and choice) computed on this rank.
        """
        rows = self.dispatch(x_TD, routing, in_flight, overlapped)
        y_RD = experts(rows.x_RD, rows.weights_RK, rows.indices_RK, rows.on_input_gradients)
        return self.combine(y_RD, rows.handle), self.num_slots(rows)

    def num_slots(self, rows: ExpertRows) -> Tensor | int:
        """The number of choices that this rank serves; int64 [], on the device, where they depend on the routing."""
        return (rows.indices_RK >= 0).sum()


REGISTRY: dict[TokenDispatcherType, type[TokenDispatcher]] = {}


def register(kind: TokenDispatcherType) -> Callable[[type[TokenDispatcher]], type[TokenDispatcher]]:
    """Class decorator: the class is what ``moe_token_dispatcher_type=kind`` selects."""

    def add(cls: type[TokenDispatcher]) -> type[TokenDispatcher]:
        REGISTRY[kind] = cls
        return cls

    return add
