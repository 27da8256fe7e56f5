"""The planner's flat buffers, and bytes of parameters, gradients and states, against the real optimizer's."""

from __future__ import annotations

import random

from deepspeed_ext.zero.partition import flat_layout
from megatron.optimus.config.load import load
from megatron.optimus.config.rank_plan import rank_plans
from megatron.optimus.models.parameters import num_parameters
from megatron.optimus.planner.memory import memory_of
from megatron.optimus.planner.optimizer_state import PlannedFlatBuffer
from tests.helpers import run_distributed
from tests.unit.planner.cases import MIXED, MOE, SHARED, run, runnable, states_in_fake_worlds

COMPLETEP = "--parametrization completep --base-hidden-size 8 --base-num-layers 1 --base-moe-ffn-hidden-size 8 "
# (options, rank, ranks). The last one is the paper's model and layout on 1,024 nodes of Aurora.
WORLDS = [
    ("", 0, 1),
    ("--normalization layernorm-nonparametric --no-qk-layernorm --ddp-bucket-size 5000", 3, 4),
    (MOE + "--expert-model-parallel-size 4 --zero-stage 2", 5, 8),
    (MOE + "--zero-stage 2 --expert-model-parallel-size 2 --ddp-bucket-size 3000", 1, 4),
    (MOE + "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 --expert-tensor-parallel-size 2", 6, 8),
    (MOE + "--pipeline-model-parallel-size 2 --context-parallel-size 2 --optimizer-state-dtype int8", 7, 8),
    (MOE + "--no-accumulate-allreduce-grads-in-fp32 --params-dtype bf16 --optimizer muon --ema-decay 0.9", 1, 2),
    (SHARED + "--tensor-model-parallel-size 2 --expert-model-parallel-size 4", 6, 8),
    (SHARED + "--no-weight-decay-biases --optimizer muon", 1, 8),
    (MIXED + "--tensor-model-parallel-size 2 --expert-model-parallel-size 4", 6, 8),
    (MIXED + "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2", 1, 4),
    ("--pipeline-model-parallel-size 2 --no-untie-embeddings-and-output-weights --optimizer lion", 3, 4),
    ("--num-query-groups 2 --qk-layernorm-scope head --tensor-model-parallel-size 2 --optimizer sgd", 1, 4),
    (MOE + "--optimizer schedule-free-adamw --lr-decay-style constant --expert-model-parallel-size 2", 1, 4),
    (MOE + "--optimizer adafactor --tensor-model-parallel-size 2 --expert-model-parallel-size 2", 1, 4),
    (MOE + "--optimizer adafactor --expert-model-parallel-size 2", 1, 4),
    (MOE + "--optimizer pytorch_optimizer:Tiger --tensor-model-parallel-size 2", 1, 2),
    (MOE + "--optimizer mars --optimizer-state-dtype bf16 --params-dtype bf16", 1, 2),
    ("--no-weight-decay-norms --no-weight-decay-embeddings --grad-reduce-in-bf16 --zero-stage 2", 0, 2),
    (MOE + "--optimizer soap --soap-max-dim 30", 0, 1),
    (MOE + "--optimizer shampoo --shampoo-block-size 12", 0, 1),
    (SHARED + "--optimizer galore --galore-rank 8", 0, 1),
    (MOE + "--optimizer dion", 0, 1),
    (SHARED + COMPLETEP + "--tensor-model-parallel-size 2 --expert-model-parallel-size 4", 6, 8),
    (MIXED + COMPLETEP + "--optimizer muon --zero-stage 2", 1, 4),
    ("--optimizer normuon", 0, 1),
    ("--preset mula-220b-a10b --global-batch-size 12288", 12287, 12288),
]


def test_parameters_and_states_are_those_of_the_real_optimizer() -> None:
    worlds = [world for world in WORLDS if runnable(world[0])]
    [built] = run_distributed(states_in_fake_worlds, 1, worlds, timeout=200)
    for (words, rank, world), (numel, sizes) in zip(worlds, built, strict=True):
        config = load(words.split()).config if words.startswith("--preset") else run(words)
        members = rank_plans(config, world)
        share = members[rank // (world // len(members))]
        states = memory_of(share).states
        planned = dict(
            parameters=states.parameters, gradients=states.gradients, masters=states.masters, states=states.states
        )
        assert num_parameters(share) == numel, words
        assert planned == {key: sizes[key] for key in planned}, words


def test_flat_buffers_are_cut_as_the_optimizer_cuts_them() -> None:
    draw = random.Random(5)
    for _ in range(300):
        numels = [draw.randrange(1, 10 ** draw.randrange(1, 7)) for _ in range(draw.randrange(1, 20))]
        ranks, limit = draw.choice([1, 2, 3, 8, 12, 96]), draw.choice([1, 5000, 10**5, 10**7])
        layout = flat_layout([(str(number), numel) for number, numel in enumerate(numels)], ranks, limit)
        planned = PlannedFlatBuffer(False, False, ranks, tuple((numel, 1) for numel in numels), limit)
        assert (planned.numel, planned.shard) == (layout.numel, layout.shard_numel)
        assert (planned.num_buckets, min(planned.bucket, planned.numel)) == (
            len(layout.buckets),
            layout.buckets[0].numel,
        )
