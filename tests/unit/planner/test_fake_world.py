"""What a search proposes is what the real program builds."""

from __future__ import annotations

import math
import random
from functools import cache

import pytest
import torch.distributed as dist

from megatron.optimus.config.load import load
from megatron.optimus.config.schema import RunConfig
from megatron.optimus.models.parameters import num_parameters
from megatron.optimus.planner.hardware import AURORA, H200
from megatron.optimus.planner.memory import memory_of
from megatron.optimus.planner.plan import Plan
from megatron.optimus.planner.search import search
from tests.helpers import run_distributed
from tests.unit.planner.cases import HAS_PIPELINES

# (options, ranks, machine): what the search may vary besides is every axis, the micro-batch and recomputation.
ASKED = [
    ("--preset mula-1b --num-layers 6 --global-batch-size 24", 6, H200),
    (
        "--preset mula-1b --num-layers 4 --seq-length 32768 --max-position-embeddings 32768 --global-batch-size 8",
        8,
        H200,
    ),
    ("--preset mula-7b-a1b --num-layers 4 --global-batch-size 48 --tp-comm-overlap", 12, AURORA),
    ("--preset mula-20b-a2b --num-layers 6 --global-batch-size 96 --zero-stage 2", 24, AURORA),
    (
        "--preset mula-7b-a1b --num-layers 8 --global-batch-size 32 --pipeline-schedule zbv "
        "--virtual-pipeline-model-parallel-size 2 --no-untie-embeddings-and-output-weights",
        8,
        H200,
    ),
]
EACH = 3


@cache
def proposals() -> tuple[Plan, ...]:
    """Of each search a few of all layouts that fit, fast and slow ones, drawn evenly."""
    draw, drawn = random.Random(7), []
    for words, world, machine in ASKED:
        fixed_options = {word[2:].replace("-", "_") for word in words.split() if word.startswith("--")}
        best = search(load(words.split()).config, world, machine, fixed_options=fixed_options, keep=10**6).best
        assert len(best) > EACH, words
        drawn += draw.sample(best, EACH)
    return tuple(drawn)


def built(
    rank: int, world: int, runs: list[tuple[RunConfig, int]]
) -> list[list[tuple[int, dict[str, int], list[int]]]]:
    """(parameters, optimizer's bytes, layers) of the first and the last rank of each run, from the real program."""
    from megatron.optimus.planner.fake_world import build
    from megatron.optimus.training.engine import shutdown_engine

    found = []
    for config, size in runs:
        found.append([])
        for one in (0, size - 1):
            if dist.is_initialized():
                dist.destroy_process_group()
            made = build(config, one, size)
            found[-1].append((made.parameters, made.optimizer_bytes, made.layers))
            shutdown_engine()
    return found


@pytest.mark.skipif(not HAS_PIPELINES, reason="pipeline stages need torch 2.10")
def test_proposed_layouts_are_built_with_the_sizes_that_were_planned() -> None:
    made = proposals()
    [found] = run_distributed(built, 1, [(one.config, one.world_size) for one in made], timeout=200)
    sizes = {
        name: {getattr(one.config.parallel, name) for one in made}
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    }
    assert all(len(seen) > 1 for seen in sizes.values()), f"the draw has too little in it: {sizes}"
    for one, ends in zip(made, found, strict=True):
        for share, (parameters, states, layers) in zip((one.ranks[0], one.ranks[-1]), ends, strict=True):
            planned = memory_of(share).states
            assert num_parameters(share) == parameters, one.config.parallel
            assert [layer for chunk in share.chunks for layer in chunk] == layers
            for kind in ("parameters", "gradients", "masters", "states"):
                assert getattr(planned, kind) == states[kind], (kind, one.config.parallel)


def test_numbers_of_a_plan_agree_with_one_another() -> None:
    for one in proposals():
        time, memory = one.time, one.worst
        training = one.config.training
        assert 0 < time.mfu < 1
        assert math.isclose(time.tokens_per_second * time.total, training.global_batch_size * training.seq_length)
        assert math.isclose(time.tokens_per_second, time.tokens_per_second_per_device * one.world_size)
        parts = (time.compute, time.exposed, time.bubble, time.update, time.launching)
        assert abs(sum(parts) - time.total) < 1e-9
        assert min(parts) >= 0 and time.data <= time.communication
        assert memory.peak == memory.states.total + memory.pool + memory.buffers + memory.worst.total <= one.usable
        assert sum(share.num_layers for share in one.ranks) == one.config.model.num_layers
