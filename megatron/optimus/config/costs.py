"""Multiply-adds of a token, and the types in which modules declare memory, operations and collectives to the planner.

Multiply-adds give MFU, the planner's FLOPs and the split of layers over pipeline stages. Counted are those of the
matrix products of one forward, per token of a sequence of length S, with H query heads and G key/value heads of width
d, model width D, E experts of inner width F of which a token takes K, and vocabulary V:

    projections = D·H·d (q) + 2·D·G·d (k, v) + H·d·D (o)
    attention   = 2 · S/2 · H·d          causal QK^T and PV: half of the S keys on average
    mlp         = 3·D·F                  dense layer; with experts the shared ones
    router      = D·E                    with a gate of shared experts + D
    experts     = K·3·D·F                the K of E that a token takes
    head        = D·V                    the embedding is a look-up

Norms, RoPE, softmax and everything computed a second time (recomputation, padding) are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from megatron.optimus.config.family import ParameterKind, family_of, layer_parameters
from megatron.optimus.config.schema import ModelConfig

FP32, INT32, INT64 = 4, 4, 8  # bytes of an element


class LayerCost(NamedTuple):
    """Multiply-adds of a token in one layer's forward."""

    projections: int
    attention: int
    mlp: int
    router: int
    experts: int

    @property
    def total(self) -> int:
        """Multiply-adds of the whole layer."""
        return sum(self)


def layer_cost(model: ModelConfig, seq_length: int, *, is_moe: bool) -> LayerCost:
    """Counts the multiply-adds of a token in a layer with experts or in a dense one.

    A matrix counts as many as it has elements, of experts those that a token takes.
    """
    counted = dict.fromkeys(("projections", "mlp", "router", "experts"), 0)
    for name, spec in layer_parameters(model, is_moe=is_moe).items():
        if spec.kind is ParameterKind.MATRIX:
            is_mlp = name.startswith(("mlp.", "moe.shared_experts.mlp."))
            part = "experts" if spec.is_expert else "mlp" if is_mlp else "router"
            counted["projections" if name.startswith("attention.") else part] += spec.numel
    if is_moe and model.is_moe:
        counted["experts"] = counted["experts"] * model.moe_router_topk // model.num_experts
    return LayerCost(attention=family_of(model).attention_cost(model, seq_length), **counted)


def head_cost(model: ModelConfig) -> int:
    """Counts the multiply-adds of a token in the output projection."""
    return model.hidden_size * model.vocab_size


@dataclass(frozen=True)
class PartMemory:
    """Bytes that one part of the computation needs for one micro-batch."""

    name: str
    saved: int = 0  # what the backward keeps
    forward: int = 0  # the most that its forward needs besides
    backward: int = 0  # and its backward, gradients of its weights and of its output included

    def recomputed(self, kept: int) -> PartMemory:
        """The part with only ``kept`` bytes waiting for the backward, which computes the rest again."""
        dropped = self.saved - kept
        return PartMemory(self.name, kept, dropped + self.forward, dropped + max(self.forward, self.backward))

    def offloaded(self) -> PartMemory:
        """The part with what is saved waiting in host memory."""
        return PartMemory(self.name, 0, self.saved + self.forward, self.saved + self.backward)


@dataclass(frozen=True)
class OperationCounts:
    """Operations by the unit that does them, and bytes through memory."""

    gemm_flops: float = 0.0  # of dense matrix products
    attention: float = 0.0
    experts: float = 0.0  # of the grouped products
    memory_bytes: float = 0.0
    layers: float = 0.0  # passes through a layer, forward or backward, that the host has to launch
    host: float = 0.0  # bytes to host memory and back
    wide: float = 0.0  # FLOPs of products in fp32

    def __add__(self, other: OperationCounts) -> OperationCounts:
        return OperationCounts(
            *(getattr(self, name) + getattr(other, name) for name in OperationCounts.__dataclass_fields__)
        )

    def __mul__(self, factor: float) -> OperationCounts:
        return OperationCounts(*(getattr(self, name) * factor for name in OperationCounts.__dataclass_fields__))


class CollectiveKind(str, Enum):
    """Kinds of collectives."""

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    SEND = "send"


class OverlapsWith(str, Enum):
    """What the device computes while a collective is under way."""

    NOTHING = "nothing"
    BACKWARD = "the last backward"
    FORWARD = "the next forward"
    PRODUCTS = "matrix products beside it"
    ROUTER = "the router and the shared experts"
    SHARED = "the shared experts"
    LAST_PRODUCT = "the last product of the experts' backward, and the shared experts'"


@dataclass(frozen=True)
class Collective:
    """``count`` equal collectives of a rank in a step, each over ``size`` ranks of an axis.

    ``payload`` is the size of the whole tensor (what an all-gather gives, what a reduce-scatter takes); what a rank
    sends follows from the ring algorithm: (n - 1) / n of it, twice that for an all-reduce. All-to-all: what leaves the
    rank.
    """

    axis: str
    kind: CollectiveKind
    purpose: str
    size: int
    payload: int  # bytes of one
    count: int
    hiding: OverlapsWith = OverlapsWith.NOTHING

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in a step."""
        share = {CollectiveKind.ALL_REDUCE: 2 * (self.size - 1) / self.size, CollectiveKind.SEND: 1.0}
        return self.count * self.payload * share.get(self.kind, (self.size - 1) / self.size)


def flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """FLOPs of one token in training, forward and backward.

    Two for each multiply-add that ``layer_cost`` and ``head_cost`` count at ``seq_length`` tokens; the backward
    costs twice the forward.
    """
    dense, moe = (layer_cost(model, seq_length, is_moe=is_moe).total for is_moe in (False, True))
    moe_layers = len(model.moe_layers)
    return 6.0 * (moe_layers * moe + (model.num_layers - moe_layers) * dense + head_cost(model))
