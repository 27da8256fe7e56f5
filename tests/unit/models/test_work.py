"""Operations and bytes of a layer: norms with rotation in one pass, and a router that is not recomputed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.optimus.config.load import load
from megatron.optimus.config.rank_plan import rank_plans
from megatron.optimus.config.schema import Recompute
from megatron.optimus.models.activations import CUDA, Kernels
from megatron.optimus.models.work import FUSED, layer_work, router_training_work
from megatron.optimus.planner.hardware import H200
from megatron.optimus.planner.step_time import compute_seconds


def test_norm_and_rope_of_queries_and_keys_are_one_pass_each_way() -> None:
    """Where the program has no such kernel (clipped values, TensorParallelRMSNorm, other devices), RoPE is apart."""

    def traffic(words: str, kernels: Kernels, world: int = 1) -> tuple[float, int]:
        words = f"--preset mula-7b-a1b --micro-batch-size 4 --expert-model-parallel-size 1 --device cuda {words}"
        [rank, *_] = rank_plans(load(words.split()).config, world)
        return layer_work(rank, frozenset(), kernels, is_moe=True).memory_bytes, rank.queries + rank.keys

    separate = replace(CUDA, norm_width=0)
    for words, world, is_one in (
        ("", 1, True),
        ("--qk-layernorm-scope head", 1, True),
        ("--no-qk-layernorm", 1, False),
        ("--clip-qkv 8", 1, False),
        ("--tensor-model-parallel-size 2 --global-batch-size 8", 2, False),
        ("--tensor-model-parallel-size 2 --global-batch-size 8 --qk-layernorm-scope head", 2, True),
    ):
        (now, inner), (then, _) = traffic(words, CUDA, world), traffic(words, separate, world)
        assert then - now == (FUSED.rope * inner if is_one else 0), words


def test_a_router_takes_time_and_is_not_recomputed() -> None:
    words = "--preset mula-7b-a1b --micro-batch-size 4 --seq-length 4096 --recompute-modules "
    [rank] = rank_plans(load(words.split()).config, 1)
    router = router_training_work(rank, CUDA)
    tokens, width, experts = 4 * 4096, 2048, 64
    assert router.gemm_flops == 14 * tokens * width * experts
    assert 5 * 2 * tokens * width < router.memory_bytes < 10 * 2 * tokens * width, "a few passes over the tokens"
    none, every = (layer_work(rank, frozenset(chosen), is_moe=True) for chosen in ((), Recompute))
    assert every.gemm_flops - none.gemm_flops == pytest.approx((none.gemm_flops - router.gemm_flops) / 3)
    dense = layer_work(rank, frozenset(), is_moe=False)
    share = compute_seconds(router, rank, H200) / compute_seconds(none, rank, H200)
    assert 0.005 < share < 0.05 and dense.experts == 0
