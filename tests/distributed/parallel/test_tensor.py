"""Tensor and sequence parallelism equal one process: losses, logits, every gradient (fp32)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.optimus.config.schema import (
    LoadBalancing,
    Normalization,
    ParallelConfig,
    QKNormScope,
    Recompute,
    TokenDispatcherType,
)
from megatron.optimus.parallel import tensor
from megatron.optimus.parallel.tensor import TensorGroup
from megatron.optimus.platform import collectives
from megatron.optimus.platform.mesh import Mesh
from tests.distributed.layouts import Case, batch_of, build, deviations
from tests.helpers import run_distributed

TP2 = dict(tensor_model_parallel_size=2)
TP4 = dict(tensor_model_parallel_size=4)
PLAIN = dict(sequence_parallel=False)
MOE = dict(num_experts=8, moe_z_loss_coeff=0.1)
GLOBAL = dict(moe_router_load_balancing_type=LoadBalancing.GLOBAL_AUX_LOSS)
SHARED = dict(moe_shared_expert_intermediate_size=20, moe_shared_expert_gate=True)
BIAS = dict(add_qkv_bias=True)
OVERLAP = dict(tp_comm_overlap=True)
A2A = dict(moe_token_dispatcher_type=TokenDispatcherType.ALLTOALL)

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
    "dense, tp 4, overlapped": Case({}, TP4 | OVERLAP),
    "dense, tp 2 x dp 2, gqa, overlapped, everything recomputed": Case(
        dict(num_query_groups=2), TP2 | OVERLAP | dict(recompute_modules=list(Recompute))
    ),
    "moe, tp 4, overlapped, everything recomputed, first layer offloaded": Case(
        MOE, TP4 | OVERLAP | dict(recompute_modules=list(Recompute), cpu_offloading_num_layers=1)
    ),
    "dense, qkv biases, gqa, tp 2 x dp 2": Case(BIAS | dict(num_query_groups=2), TP2),
    "dense, qkv biases, tp 4, without sequence parallelism": Case(BIAS, TP4 | PLAIN),
    "moe, shared experts with a gate, qkv biases, tp 4, overlapped, everything recomputed": Case(
        MOE | SHARED | BIAS, TP4 | OVERLAP | dict(recompute_modules=list(Recompute))
    ),
    "moe, shared experts, tp 2 x dp 2, ep 4 over both": Case(
        MOE | dict(moe_shared_expert_intermediate_size=20), TP2 | dict(expert_model_parallel_size=4)
    ),
    "moe, shared experts with a gate, etp 2 x ep 2, all-to-all, first layer offloaded": Case(
        MOE | SHARED | GLOBAL,
        TP2 | A2A | dict(expert_model_parallel_size=2, expert_tensor_parallel_size=2, cpu_offloading_num_layers=1),
    ),
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
        | dict(moe_token_dispatcher_type=TokenDispatcherType.HIERARCHICAL, moe_hierarchical_node_size=2),
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


def gradients(rank: int, world: int, parallel: dict[str, Any]) -> tuple[list[torch.Tensor], int]:
    """Every gradient, and the exchanges that forward and backward have started."""
    config = ParallelConfig(**TP4, **parallel)
    model = build(dict(num_query_groups=4), Mesh(config, rank=rank, world_size=world), config)
    with watched() as events:
        model(*batch_of(0)).loss_sum.backward()
    return [parameter.grad for parameter in model.parameters()], events.count("start")


@contextmanager
def watched() -> Iterator[list[str]]:
    """What happens in which order."""
    events: list[str] = []
    start, wait, mm = collectives.start_ring_shift, collectives.AsyncCollective.wait, torch.mm

    def note(event: str, call: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            events.append(event)
            return call(*args, **kwargs)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "start_ring_shift", note("start", start))
        patch.setattr(tensor, "start_ring_shift", note("start", start))
        patch.setattr(collectives.AsyncCollective, "wait", note("wait", wait))
        patch.setattr(torch, "mm", note("mm", mm))
        yield events


@torch.no_grad()
def in_and_out(ranks: TensorGroup) -> tuple[list[str], list[str]]:
    """What happens on the way into a region of two projections, and out of it."""
    with watched() as entering:
        ranks.column_parallel(torch.ones(1, 2, 8), [nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)])
    with watched() as leaving:
        ranks.overlapped_row_parallel(torch.ones(1, 2 * ranks.size, 4), nn.Linear(4, 8, bias=False))
    return entering, leaving


def sum_in_bf16(rank: int, ranks: TensorGroup) -> bool:
    """Whether partial results in bf16 are added up as exactly as fp32 can, in the order of ranks."""
    layer = nn.Linear(4, 64, bias=False, dtype=torch.bfloat16)
    every = [torch.randn(2 * ranks.size, 4, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(4)]
    with torch.no_grad():
        dist.broadcast(layer.weight, 0, group=ranks.group)
        found = ranks.overlapped_row_parallel(every[rank][None], layer)
        wanted = torch.stack([layer(x.chunk(ranks.size)[rank]) for x in every]).float().sum(dim=0).bfloat16()
    return torch.equal(found[0], wanted)


def overlapped_rank(rank: int, world: int) -> dict[str, Any]:
    mesh = Mesh(ParallelConfig(**TP4), rank=rank, world_size=world)
    group = mesh.group("tp")
    assert group is not None
    ranks = TensorGroup(group, mesh.index("tp"), mesh.size("tp"), sequence_parallel=True, overlap=True)
    entering, leaving = in_and_out(ranks)
    (first, exchanges), (second, _), (again, exchanges_again) = (
        gradients(rank, world, OVERLAP | more) for more in ({}, {}, dict(recompute_modules=list(Recompute)))
    )
    return {
        "entering": entering,
        "leaving": leaving,
        "exchanges": (exchanges, exchanges_again),
        "bf16": sum_in_bf16(rank, ranks),
        "repeats": all(map(torch.equal, first, second)),
        "recomputed": all(map(torch.equal, first, again)),
    }


def test_overlap_works_while_blocks_travel_and_repeats_every_bit() -> None:
    for found in run_distributed(overlapped_rank, 4):
        # Three other ranks: all is under way before the two products of the first block, each later pair has one wait.
        assert found["entering"] == ["start"] * 3 + ["mm"] * 2 + ["wait", "mm", "mm"] * 3
        # Each of the others' blocks leaves when it is multiplied; nobody waits before this rank's own is.
        assert found["leaving"] == ["start"] * 3 + ["mm"] + ["wait"] * 3
        # Two regions in each of two layers: in, out, and gradients in. Recomputation sends nothing again.
        assert found["exchanges"] == (36, 36)
        assert found["bf16"] and found["repeats"] and found["recomputed"]
