"""The declared activation bytes against what real layers leave alive, and against their peaks."""

from __future__ import annotations

import re

import pytest

from megatron.optimus.config.checks import check
from megatron.optimus.config.family import Family
from megatron.optimus.config.rank_plan import rank_plans
from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.models.activations import CPU, CUDA, layer_parts
from megatron.optimus.models.work import layer_work
from megatron.optimus.planner.memory import memory_of
from tests.helpers import run_distributed
from tests.unit.planner.cases import HAS_PIPELINES, MOE, SHARED, alone_in_worlds, bytes_kept, peaks_of_parts, run
from tests.unit.planner.test_plan import ROOT

KEPT = {
    1: [
        "",
        MOE,
        MOE + "--recompute-modules moe",
        SHARED,
        SHARED + "--recompute-modules moe",
        SHARED + "--no-moe-shared-expert-gate",
        MOE + "--recompute-modules moe attention norm",
        "--recompute-modules attention",
        "--recompute-modules moe norm",
        "--normalization layernorm-nonparametric --no-qk-layernorm",
        "--num-query-groups 2 --clip-qkv 3.0",
    ],
    2: [
        MOE + "--expert-model-parallel-size 2",
        MOE + "--expert-model-parallel-size 2 --recompute-modules moe",
        MOE + "--tensor-model-parallel-size 2 --expert-model-parallel-size 2",
        SHARED + "--tensor-model-parallel-size 2 --expert-model-parallel-size 2",
        SHARED + "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --recompute-modules moe",
        "--tensor-model-parallel-size 2",
        "--tensor-model-parallel-size 2 --tp-comm-overlap",
        "--context-parallel-size 2",
        "--context-parallel-size 2 --cp-comm-type p2p",
    ],
}


@pytest.mark.parametrize("world", KEPT)
def test_activations_of_a_layer_are_what_a_forward_leaves(world: int) -> None:
    """Of two more layers, so that what all layers share drops out."""
    # torch before 2.10 keeps grouped keys repeated for each query head.
    cases = [words for words in KEPT[world] if HAS_PIPELINES or "--num-query-groups" not in words]
    deep = [words + " --num-layers 3" for words in cases]
    deep_and_shallow = deep + [words + " --num-layers 1" for words in cases]
    [found] = run_distributed(alone_in_worlds, 1, bytes_kept, [0], world, deep_and_shallow)
    kept = [rank_0 for [rank_0] in found]
    for words, more, fewer in zip(deep, kept, kept[len(deep) :], strict=False):
        config = run(words)
        check(config, world)
        planned = memory_of(rank_plans(config, world)[0], CPU).saved_per_layer[0]
        assert planned == pytest.approx((more - fewer) / 2, rel=0.01), words


RING = "--cp-comm-type p2p --seq-length 512 --max-position-embeddings 512 "
BLOCKS = "--tp-comm-overlap --seq-length 512 --max-position-embeddings 512 "
# On four ranks: (options, what of which part is planned to the byte; the rest may be planned higher, never lower).
PEAKS = [
    (RING + "--context-parallel-size 4", ["attention forward", "attention backward"]),
    (RING + "--context-parallel-size 4 --num-query-groups 2", ["attention forward", "attention backward"]),
    (
        RING + "--context-parallel-size 4 --params-dtype bf16 --no-qk-layernorm",
        ["attention forward", "attention backward"],
    ),
    (RING + "--context-parallel-size 2", ["attention forward", "attention backward"]),
    (RING + "--context-parallel-size 2 --tensor-model-parallel-size 2 --num-query-groups 2", ["attention backward"]),
    (BLOCKS + "--tensor-model-parallel-size 4", ["mlp forward"]),
    (BLOCKS + "--tensor-model-parallel-size 2", ["mlp forward"]),
    (BLOCKS.replace("--tp-comm-overlap", "") + "--tensor-model-parallel-size 4", ["mlp forward"]),
]


def test_peaks_of_rings_and_of_blocks_on_their_way_are_those_of_a_real_layer() -> None:
    [found] = run_distributed(alone_in_worlds, 1, peaks_of_parts, [0, 1, 2, 3], 4, [words for words, _ in PEAKS])
    for ranks, (words, exact) in zip(found, PEAKS, strict=True):
        config = run(words)
        check(config, 4)
        within = 0.02 if "bf16" in words else 0.01  # log-sum-exps, left out, weigh more
        parts = {
            part.name: part
            for part in layer_parts(rank_plans(config, 4)[0], CPU, frozenset(), is_moe=False, offload=False)
        }
        for name in ranks[0]:
            part, (forward, backward) = parts[name], (max(each[name][i] for each in ranks) for i in range(2))
            for moment, planned, counted in (
                ("forward", part.saved + part.forward, forward),
                ("backward", part.saved + part.backward, backward),
            ):
                assert planned >= (1 - within) * counted, (words, name, moment)
                if f"{name} {moment}" in exact:
                    assert planned == pytest.approx(counted, rel=within), (words, name, moment)


def test_what_a_familys_attention_keeps_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Keeping(Family):
        def attention_kept(self, model: ModelConfig, element: int) -> int:
            return 7 * element

    rank = rank_plans(run("--tensor-model-parallel-size 2"), 2)[0]

    def counted() -> tuple[int, float]:
        parts = layer_parts(rank, CPU, frozenset(), is_moe=False, offload=False)
        [attention] = [part for part in parts if part.name == "attention"]
        return attention.saved, layer_work(rank, frozenset(), CPU, is_moe=False).memory_bytes

    (saved, traffic), own = counted(), rank.tokens * 7 * 4 // 2
    monkeypatch.setattr("megatron.optimus.config.family._load", lambda name: Keeping())
    assert counted() == (saved + own, pytest.approx(traffic + 5 * own))


def test_limits_of_the_kernels_are_those_of_ops() -> None:
    """Read, not imported: Triton is not everywhere."""
    for file, name, limit in (
        ("norm", "MAX_WIDTH", CUDA.norm_width),
        ("router_statistics", "MAX_EXPERTS", CUDA.router_experts),
    ):
        text = (ROOT / f"megatron/optimus/ops/triton/{file}.py").read_text()
        found = re.search(rf"^{name} = ([\d*]+)", text, re.M)
        assert found and eval(found[1]) == limit, file
