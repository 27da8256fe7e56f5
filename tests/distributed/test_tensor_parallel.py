"""Tensor and sequence parallelism equal one process: losses, logits, every gradient (fp32)."""

from __future__ import annotations

import pytest

from megatron.optimus.config.schema import LoadBalancing, Normalization, QKNormScope, Recompute, TokenDispatcher
from tests.distributed.layouts import Case, deviations

TP2 = dict(tensor_model_parallel_size=2)
TP4 = dict(tensor_model_parallel_size=4)
PLAIN = dict(sequence_parallel=False)
MOE = dict(num_experts=8, moe_z_loss_coeff=0.1)
GLOBAL = dict(moe_router_load_balancing_type=LoadBalancing.GLOBAL_AUX_LOSS)
A2A = dict(moe_token_dispatcher_type=TokenDispatcher.ALLTOALL)

CASES = {
    "dense, tp 4": Case({}, TP4 | PLAIN),
    "dense, tp 2 x dp 2, sequence parallel": Case({}, TP2),
    "dense, tied embeddings, gqa, clip": Case(
        dict(untie_embeddings_and_output_weights=False, num_query_groups=2, clip_qkv=0.5), TP2
    ),
    "dense, no qk-norm, layernorm without scale": Case(
        dict(qk_layernorm=False, normalization=Normalization.LAYERNORM_NONPARAMETRIC), TP4
    ),
    "dense, qk-norm of each head, tp 4": Case(dict(qk_layernorm_scope=QKNormScope.HEAD), TP4 | PLAIN),
    "dense, qk-norm of each head, tp 2 x dp 2, sequence parallel": Case(dict(qk_layernorm_scope=QKNormScope.HEAD), TP2),
    "moe, tp 4": Case(MOE, TP4),
    "moe, tp 2 x dp 2, ep 4, 64 experts for 64 tokens, many empty": Case(
        MOE | dict(num_experts=64, moe_router_topk=1), TP2 | dict(expert_model_parallel_size=4)
    ),
    "moe, tp 2 x dp 2, ep 4 over both": Case(MOE, TP2 | dict(expert_model_parallel_size=4)),
    "moe, tp 4, ep 2 inside": Case(MOE | GLOBAL, TP4 | A2A | dict(expert_model_parallel_size=2)),
    "moe, tp 2 x dp 2, ep 2, global balance": Case(MOE | GLOBAL, TP2 | A2A | dict(expert_model_parallel_size=2)),
    "moe, split experts: etp 2 x ep 2": Case(
        MOE, TP2 | dict(expert_model_parallel_size=2, expert_tensor_parallel_size=2)
    ),
    "moe, split experts: etp 4, all-to-all": Case(MOE, A2A | dict(expert_tensor_parallel_size=4)),
    "moe, tp 2 x dp 2, ep 4, everything recomputed, first layer offloaded": Case(
        MOE, TP2 | dict(expert_model_parallel_size=4, recompute_modules=list(Recompute), cpu_offloading_num_layers=1)
    ),
    "moe, etp 2 x ep 2, hierarchical, everything recomputed": Case(
        MOE,
        TP2
        | dict(expert_model_parallel_size=2, expert_tensor_parallel_size=2, recompute_modules=list(Recompute))
        | dict(moe_token_dispatcher_type=TokenDispatcher.HIERARCHICAL, moe_hierarchical_node_size=2),
    ),
    "moe, etp 2 x ep 2, all-to-all": Case(
        MOE, TP2 | A2A | dict(expert_model_parallel_size=2, expert_tensor_parallel_size=2)
    ),
}


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, float]]:
    return deviations(4, CASES)


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(measured: dict[str, dict[str, float]], case: str) -> None:
    found = measured[case]
    assert found.pop("losses") <= 1e-6
    assert {name: value for name, value in found.items() if not value <= 1e-5} == {}
