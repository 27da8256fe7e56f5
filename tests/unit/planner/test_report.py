"""A plan as text and as JSON: layouts in words and as options, and the same numbers in both."""

from __future__ import annotations

import json

import pytest

from megatron.optimus.config.load import load
from megatron.optimus.planner.hardware import AURORA, H200
from megatron.optimus.planner.plan import Plan, plan
from megatron.optimus.planner.report import (
    gib,
    layout_options,
    layout_words,
    plan_json,
    plan_text,
    shown,
    split_words,
)

WORDS = (
    "--preset mula-7b-a1b --global-batch-size 64 --pipeline-model-parallel-size 4 --expert-model-parallel-size 2 "
    "--recompute-modules moe norm"
)


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan(load(WORDS.split()).config, 16, H200)


def test_layouts_in_words_and_as_options(made: Plan) -> None:
    assert gib(3 * 2**29) == "1.50"
    assert layout_words(made.config, 16) == "pp 4, ep 2, dp 4, micro-batch 1, recompute moe+norm"
    ring = load("--context-parallel-size 2 --cp-comm-type p2p --micro-batch-size 2".split()).config
    assert layout_words(ring, 4) == "cp 2, ring, dp 2, micro-batch 2"
    again = load([*WORDS.split()[:4], *layout_options(made.config).split()]).config
    assert again.parallel == made.config.parallel and again.training == made.config.training


def test_the_split_of_layers_says_who_decided_it(made: Plan) -> None:
    assert (
        split_words(made) == "layers of the pipeline ranks: 5, 2 x 4, 3 (split for the slowest rank, the head included)"
    )
    fixed = load([*WORDS.split(), "--decoder-first-pipeline-num-layers", "4"]).config
    assert split_words(plan(fixed, 16, H200)).endswith("4 x 4 (as fixed by the options)")


def test_text_and_json_say_the_same(made: Plan) -> None:
    found = json.loads(json.dumps(plan_json(made)))
    assert found["layers"] == [[5], [4], [4], [3]] and found["layout"] in plan_text(made, explain=False)
    assert [one["peak_bytes"] for one in found["memory"]] == [memory.peak for memory in made.memories]
    ranks = [memory.pipeline_rank for memory in shown(made)]
    assert ranks == sorted({0, 3, made.worst.pipeline_rank})
    text = plan_text(made, explain=True)
    for rank in ranks:
        assert gib(found["memory"][rank]["peak_bytes"]) in text
    assert found["time"]["step_s"] == made.time.total and found["usable_bytes"] == round(made.usable)
    assert sum(one["sent"] for one in found["communication"]) == pytest.approx(
        sum(one.sent for one in made.collectives(made.worst.pipeline_rank))
    )
    assert text.startswith("16 x ") and all(figure.source in text for figure in (H200.peak, H200.memory))


def test_figures_that_nobody_measured_are_said_to_be_so(made: Plan) -> None:
    config = load("--preset mula-1b --global-batch-size 24".split()).config
    assert "not measured by us" in plan_text(plan(config, 12, AURORA), explain=False)
    assert "not measured by us" not in plan_text(made, explain=False)
