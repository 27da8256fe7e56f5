"""Context parallelism, both ways, equals one process: losses, logits, every gradient (fp32)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.optimus.config.schema import (
    ContextCommunication,
    LoadBalancing,
    ParallelConfig,
    Recompute,
    TokenDispatcherType,
)
from megatron.optimus.parallel.context import own_positions
from megatron.optimus.platform import collectives
from megatron.optimus.platform.mesh import Mesh
from tests.distributed.layouts import LENGTH, Case, build, deviations, model_config, objective
from tests.helpers import run_distributed

CP2, CP4 = dict(context_parallel_size=2), dict(context_parallel_size=4)
TP2 = dict(tensor_model_parallel_size=2)
RING = dict(cp_comm_type=ContextCommunication.P2P)
GQA = dict(num_query_groups=2)
MOE = dict(num_experts=8, moe_z_loss_coeff=0.1)
SHARED = dict(moe_shared_expert_intermediate_size=20, moe_shared_expert_gate=True, add_qkv_bias=True)
GLOBAL = dict(moe_router_load_balancing_type=LoadBalancing.GLOBAL_AUX_LOSS)
A2A = dict(moe_token_dispatcher_type=TokenDispatcherType.ALLTOALL)
RECOMPUTED = dict(recompute_modules=list(Recompute))
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
    "ring, cp 4, gqa, documents, everything recomputed": Case(GQA, CP4 | RING | RECOMPUTED, documents=True),
    "ring, cp 2 x dp 2, documents": Case({}, CP2 | RING, documents=True),
    "ulysses, tp 2 x cp 2": Case(GQA, TP2 | CP2),
    "ring, tp 2 x cp 2, documents": Case({}, TP2 | CP2 | RING, documents=True),
    "ulysses, cp 2 x dp 2, ep 4 over both": Case(MOE, CP2 | dict(expert_model_parallel_size=4)),
    "ring, cp 2 x dp 2, ep 2, global balance": Case(
        MOE | GLOBAL, CP2 | RING | A2A | dict(expert_model_parallel_size=2)
    ),
    "ulysses, tp 2 x cp 2, ep 2, shared experts, qkv biases": Case(
        MOE | GQA | SHARED, TP2 | CP2 | dict(expert_model_parallel_size=2)
    ),
    "ulysses, tp 2 x cp 2, everything recomputed": Case(GQA, TP2 | CP2 | RECOMPUTED),
    "ring, tp 2 x cp 2, documents, everything recomputed": Case(GQA, TP2 | CP2 | RING | RECOMPUTED, documents=True),
    "ring, tp 2 x cp 2, ep 4 over both": Case(MOE | GQA, TP2 | CP2 | RING | dict(expert_model_parallel_size=4)),
}


EIGHT = {
    "tp 2 x cp 2 x dp 2, ep 8, everything recomputed": Case(
        MOE | GQA, TP2 | CP2 | RING | RECOMPUTED | dict(expert_model_parallel_size=8)
    ),
    "ring, cp 8, gqa, documents": Case(GQA, dict(context_parallel_size=8) | RING, documents=True),
    "tp 2 x cp 2 x dp 2, ep 2 x etp 2, all-to-all": Case(
        MOE | GLOBAL, TP2 | CP2 | A2A | dict(expert_model_parallel_size=2, expert_tensor_parallel_size=2)
    ),
}


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, float]]:
    return deviations(4, CASES) | deviations(8, EIGHT)


@pytest.mark.parametrize("case", CASES | EIGHT)
def test_equals_one_process(measured: dict[str, dict[str, float]], case: str) -> None:
    found = measured[case]
    assert found.pop("losses") <= 1e-6
    assert {name: value for name, value in found.items() if not value <= 1e-5} == {}


def counting_rank(rank: int, world: int, recomputed: dict[str, list[Recompute]]) -> dict[str, int]:
    """Collectives and messages of one forward and backward."""
    calls: dict[str, int] = {}

    def counted(module: Any, name: str) -> None:
        call = getattr(module, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return call(*args, **kwargs)

        setattr(module, name, count)

    for name in ("all_gather_single", "reduce_scatter_single"):
        counted(collectives, name)
    for name in ("all_reduce", "all_to_all_single", "batch_isend_irecv"):
        counted(dist, name)
    for comm in (RING, {}):
        config = ParallelConfig(**(TP2 | CP2 | comm | recomputed | dict(expert_model_parallel_size=4)))
        mesh = Mesh(config, rank=rank, world_size=world)
        model = build(MOE, mesh, config)
        tokens = torch.zeros(1, LENGTH // 2, dtype=torch.int64)
        positions = own_positions(LENGTH, config, mesh)
        assert positions is not None
        objective(model(tokens, tokens, None, positions[None]), tokens.numel()).backward()
    return calls


def test_nothing_is_communicated_again() -> None:
    plain = run_distributed(counting_rank, 4, {})
    recomputed = run_distributed(counting_rank, 4, RECOMPUTED)
    # Without recomputation, tensor-parallel attention keeps a part of its input and gathers it once more; with it, not.
    kept = 2 * model_config(MOE).num_layers
    assert plain[0] == recomputed[0] | {"all_gather_single": recomputed[0]["all_gather_single"] + kept}
    assert min(plain[0].values()) > 2 and len(plain[0]) == 5
