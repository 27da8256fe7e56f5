"""Memory of a rank: moments of a step, measured peaks, and the documents' table of them."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import torch

from megatron.optimus.config.costs import FP32
from megatron.optimus.config.load import load
from megatron.optimus.config.rank_plan import rank_plans
from megatron.optimus.models.parameters import num_parameters
from megatron.optimus.planner.hardware import H200
from megatron.optimus.planner.memory import memory_of
from tests.unit.planner.test_plan import ROOT, script
from tests.unit.planner.test_step_time import PAGE


def test_gradients_that_wait_in_stage_2s_first_backward_are_a_peak_where_activations_are_few() -> None:
    words = "--preset mula-7b-a1b --zero-stage 2 --seq-length 4096 --global-batch-size 128 --micro-batch-size "
    [share], [larger] = (rank_plans(load(f"{words}{size}".split()).config, 16) for size in (1, 8))
    few, many = memory_of(share), memory_of(larger)
    bf16 = 2 * num_parameters(share)
    assert few.pool == many.pool
    assert few.worst.name == "first backward, end"
    assert bf16 < few.peak - few.states.total - few.buffers < bf16 + few.pool
    assert many.worst.name == "layer 16 of 16, experts, backward"
    moments = [moment for moment in few.moments if moment.name.startswith("first backward, layer")]
    layer = bf16 // share.num_layers
    waiting = [after.temporaries - before.temporaries for before, after in itertools.pairwise(moments)]
    assert len(moments) == 16 and all(0.8 * layer < more < layer for more in waiting)  # without the vocabulary's


def test_what_norms_and_router_losses_keep_is_measured() -> None:
    """Peaks of a step with torch's operations and with our kernels: all that differs is what they keep."""
    steps = script("benchmarks/planner_steps.py")
    raw = json.loads((ROOT / "benchmarks/results/training_step_720m_h200.json").read_text())
    older, now, _ = (result["peak_bytes"] for result in raw["results"])
    words = steps.training_step.words("moe-720m", steps.Options(**raw["options"]))
    [rank] = rank_plans(steps.run_config(words, torch.device("cuda")), 1)
    predicted = [memory_of(rank, machine.kernels).peak for machine in (steps.SEPARATE_NORMS, H200)]
    assert predicted == pytest.approx([older, now], rel=0.003)
    assert predicted[0] - predicted[1] == pytest.approx(older - now, rel=0.06)
    layers, tokens, heads = 12, 64 * 1024, 16
    assert older - now >= FP32 * tokens * layers * (2 * heads + 2), "a number a row of queries, keys and two norms"


def test_the_documents_table_of_peaks_is_that_of_the_raw_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # it imports a neighbour when it compares
    benchmark = script("benchmarks/planner_memory.py")
    assert benchmark.compare(ROOT / "benchmarks/results/planner_memory_h200.json")
    made: dict[str, set[str]] = {}
    for line in capsys.readouterr().out.splitlines()[2:]:
        case, _, numbers = line.strip("| ").split(" | ", 2)
        made.setdefault(case, set()).add(numbers)
    rows = re.findall(r"^\| ([\w-]+)(?:, stage \d)? \| (\d.* \| [+-]\d+\.\d% \| .*%) \|$", PAGE.read_text(), re.M)
    assert {case for case, _ in rows} == set(made)
    for case, numbers in rows:
        assert numbers in made[case], case
