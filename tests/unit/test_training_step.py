"""What benchmarks/training_step.py makes of what it measures, and that both models of ours are what it says."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import layout_speed_programs as programs
import training_step
import training_step_peers as peers

from megatron.optimus.models.decoder import Decoder

CPU = torch.device("cpu")


def row(**changes: Any) -> dict[str, Any]:
    given = dict(model="dense", system="ours", step_ms=1.0, parameters=10, losses=[6.3, 6.0], vocab_size=512)
    return given | changes


def test_doubts_are_another_size_a_first_loss_that_is_no_guess_and_one_that_does_not_fall() -> None:
    assert training_step.doubts([row(), row(system="torchtitan"), row(model="moe", parameters=20)]) == []
    assert "11 parameters" in training_step.doubts([row(), row(system="torchtitan", parameters=11)])[0]
    assert "first loss 9.000" in training_step.doubts([row(losses=[9.0, 6.0])])[0]
    assert "does not fall" in training_step.doubts([row(losses=[6.3, 6.3])])[0]
    assert training_step.doubts([{"model": "moe", "system": "olmo-core", "error": "x"}, row(model="moe")]) == []


def test_steps_are_queued_without_reading_and_every_loss_is_reported_in_order() -> None:
    calls: list[str] = []

    def queue() -> Callable[[], float]:
        number = sum(call.startswith("queue") for call in calls)
        calls.append(f"queue {number}")
        return lambda: calls.append(f"read {number}") or float(number)

    program = programs.Program.queued(queue, 8)
    found = training_step.measure(program, argparse.Namespace(warm_up=1, steps=2), CPU)
    assert calls == ["queue 0", "read 0", "queue 1", "queue 2", "read 1", "read 2"]
    assert found["losses"] == [0.0, 1.0, 2.0] and len(found["step_ms_each"]) == 2
    assert program.step() == 3.0


def test_profile_sums_kernels_by_name_and_kind() -> None:
    found = {"by_name": {"ncclReduce": [1.0, 2.0], "nvjet_tst": [4.0]}, "busy_ms": 6.0, "span_ms": 7.5}
    head, kinds, _, first, second = training_step.kernel_table("moe, ours", found).strip().splitlines()
    assert "7.50 ms" in head and "6.00 ms busy" in head and "3 kernels" in head
    assert kinds == "products 4.00 ms, communication 3.00 ms"
    assert first.split() == ["4.000", "1", "57.1%", "nvjet_tst"] and second.split()[:2] == ["3.000", "2"]


def test_busy_time_counts_what_overlaps_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = training_step.kernels(lambda: torch.ones(4) @ torch.ones(4), CPU)  # aten::dot lies inside aten::matmul
    assert 0 < found["busy_ms"] <= found["span_ms"] < sum(sum(times) for times in found["by_name"].values()) * 100
    assert found["busy_ms"] < sum(sum(times) for times in found["by_name"].values())


ENDS, ATTENTION = 2 * 50304 * 2048, 4 * 2048**2  # embedding and head; a layer's projections
DENSE, EXPERTS = 3 * 2048 * 8192, 64 * (3 * 2048 * 1024 + 2048)  # a layer's MLP; experts and router


@pytest.mark.parametrize(
    ("model", "matrices"), [("dense", ENDS + 16 * (ATTENTION + DENSE)), ("moe", ENDS + 8 * (ATTENTION + EXPERTS))]
)
def test_models_are_mula_1b_and_eight_layers_of_mula_7b_a1b(model: str, matrices: int) -> None:
    args = argparse.Namespace(
        device="cuda", micro_batch_size=None, seq_length=None, layers=16, moe_layers=8, balanced=model == "moe"
    )
    config = programs.run_config(training_step.words(model, args), CPU)
    with torch.device("meta"):
        counted = peers.count(Decoder(config.model))
    assert counted["parameters"] == matrices
    assert bool(counted["norm_parameters"]) == (model == "moe")
    assert (config.training.seq_length, config.training.micro_batch_size) == (4096, 8 if model == "dense" else 4)
    assert config.model.moe_router_force_load_balancing == (model == "moe")


def test_weights_are_drawn_and_norms_are_ones() -> None:
    model = nn.ModuleDict({"router": nn.Linear(64, 1, bias=False), "q_norm": nn.RMSNorm(64)})
    model["router"].weight = nn.Parameter(torch.zeros(64))  # OLMo-core's routers have flat weights
    peers.draw(model, CPU)
    assert torch.equal(model["q_norm"].weight, torch.ones(64))
    assert 0.01 < float(model["router"].weight.detach().std()) < 0.04
    assert peers.count(model) == {"parameters": 64, "norm_parameters": 64}
