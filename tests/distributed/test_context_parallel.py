"""Context parallelism, both ways, equals one process: losses, logits, every gradient (fp32)."""

from __future__ import annotations

import pytest

from megatron.optimus.config.schema import ContextCommunication, LoadBalancing, TokenDispatcher
from tests.distributed.layouts import Case, deviations

CP2, CP4 = dict(context_parallel_size=2), dict(context_parallel_size=4)
TP2 = dict(tensor_model_parallel_size=2)
RING = dict(cp_comm_type=ContextCommunication.P2P)
GQA = dict(num_query_groups=2)
MOE = dict(num_experts=8, moe_z_loss_coeff=0.1)
GLOBAL = dict(moe_router_load_balancing_type=LoadBalancing.GLOBAL_AUX_LOSS)
A2A = dict(moe_token_dispatcher_type=TokenDispatcher.ALLTOALL)
SIX_HEADS = dict(hidden_size=36, num_attention_heads=12, num_query_groups=6, kv_channels=4)

CASES = {
    "ulysses, cp 4": Case({}, CP4),
    "ulysses, cp 2 x dp 2, gqa": Case(GQA, CP2),
    "ulysses, cp 4, two key/value heads for four ranks": Case(GQA, CP4),
    "ulysses, cp 4, six key/value heads for four ranks": Case(SIX_HEADS, CP4),
    "ulysses, cp 4, documents": Case(GQA, CP4, documents=True),
    "ring, cp 4": Case({}, CP4 | RING),
    "ring, cp 2 x dp 2, gqa": Case(GQA, CP2 | RING),
    "ring, cp 4, documents": Case(GQA, CP4 | RING, documents=True),
    "ring, cp 2 x dp 2, documents": Case({}, CP2 | RING, documents=True),
    "ulysses, tp 2 x cp 2": Case(GQA, TP2 | CP2),
    "ring, tp 2 x cp 2, documents": Case({}, TP2 | CP2 | RING, documents=True),
    "ulysses, cp 2 x dp 2, ep 4 over both": Case(MOE, CP2 | dict(expert_model_parallel_size=4)),
    "ring, cp 2 x dp 2, ep 2, global balance": Case(
        MOE | GLOBAL, CP2 | RING | A2A | dict(expert_model_parallel_size=2)
    ),
    "ring, tp 2 x cp 2, ep 4 over both": Case(MOE | GQA, TP2 | CP2 | RING | dict(expert_model_parallel_size=4)),
}


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, float]]:
    return deviations(4, CASES)


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(measured: dict[str, dict[str, float]], case: str) -> None:
    found = measured[case]
    assert found.pop("losses") <= 1e-6
    assert {name: value for name, value in found.items() if not value <= 1e-5} == {}
