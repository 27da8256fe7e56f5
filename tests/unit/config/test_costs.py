"""Multiply-adds of a token, by hand, and the arithmetic of memory, operations and collectives."""

from __future__ import annotations

import pytest

from megatron.optimus.config.costs import (
    Collective,
    CollectiveKind,
    OperationCounts,
    PartMemory,
    flops_per_token,
    layer_cost,
)
from megatron.optimus.config.schema import ModelConfig
from tests.unit.config.test_family import EXPERTS, SHAPE

SHARED = dict(moe_shared_expert_intermediate_size=14, moe_shared_expert_gate=True)


def test_multiply_adds_are_those_of_the_matrices_by_hand() -> None:
    """config/costs.py has the formulas."""
    model = ModelConfig(**SHAPE, **EXPERTS, **SHARED, add_qkv_bias=True)  # type: ignore[arg-type]
    dense, moe = (layer_cost(model, 100, is_moe=is_moe) for is_moe in (False, True))
    projections = 24 * 32 + 2 * 24 * 16 + 32 * 24
    assert dense == (projections, 100 * 32, 3 * 24 * 40, 0, 0)
    assert moe == (projections, 100 * 32, 3 * 24 * 14, 24 * 6 + 24, 2 * 3 * 24 * 10)


def test_flops_of_training_are_six_for_each_multiply_add() -> None:
    model = ModelConfig(**SHAPE, **EXPERTS, num_layers=3, moe_layer_freq=[0, 1, 0], vocab_size=50)  # type: ignore[arg-type]
    dense, moe = (layer_cost(model, 100, is_moe=is_moe).total for is_moe in (False, True))
    assert flops_per_token(model, 100) == 6 * (2 * dense + moe + 24 * 50)


def test_what_is_not_kept_is_computed_again_or_waits_on_the_host() -> None:
    part = PartMemory("mlp", saved=100, forward=20, backward=50)
    assert part.recomputed(kept=10) == PartMemory("mlp", 10, 90 + 20, 90 + 50)
    assert PartMemory("mlp", 100, 60, 50).recomputed(10).backward == 90 + 60  # its forward's peak counts again
    assert part.offloaded() == PartMemory("mlp", 0, 120, 150)


def test_operations_add_up() -> None:
    work = OperationCounts(gemm_flops=2, memory_bytes=8, host=1) * 3 + OperationCounts(gemm_flops=1, wide=5)
    assert work == OperationCounts(gemm_flops=7, memory_bytes=24, host=3, wide=5)


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        (CollectiveKind.ALL_GATHER, 75),
        (CollectiveKind.REDUCE_SCATTER, 75),
        (CollectiveKind.ALL_REDUCE, 150),
        (CollectiveKind.SEND, 100),
        (CollectiveKind.ALL_TO_ALL, 75),
    ],
)
def test_what_a_rank_sends_in_a_ring(kind: CollectiveKind, sent: float) -> None:
    assert Collective("dp", kind, "gradients", size=4, payload=100, count=7).sent == 7 * sent
