"""This machine is measured into a file that the planner takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.optimus.commands import plan as command
from megatron.optimus.planner import measure
from megatron.optimus.planner.hardware import machine_named

OPTIONS = "--preset mula-tiny --world-size 2 --global-batch-size 16 --top 2".split()
ALWAYS = ("memory", "products", "peak", "wide", "experts", "attention", "attention_long", "traffic")


def test_measured_and_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "_SECONDS", 0.02)
    path = tmp_path / "mine.yaml"
    assert command.main(["--measure", str(path)]) == 0
    printed = capsys.readouterr().out
    machine = machine_named(str(path))
    names = (
        (*ALWAYS, "two_rank_bandwidth", "intra_node_bandwidth", "latency")
        if not torch.accelerator.is_available()
        else ALWAYS
    )
    for name in names:
        figure = getattr(machine, name)
        assert figure.is_measured and figure.source.startswith("measured on 20") and name in printed
    assert 1e8 < machine.products.value < 1e16 and 1e8 < machine.traffic.value < 1e14
    assert not machine.node_bandwidth.is_measured and not machine.layer_time.is_measured
    assert command.main([*OPTIONS, "--system", str(path)]) == 0
    assert "not measured by us" not in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
def test_rates_of_an_accelerator_are_those_of_one() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    figures = measure._of_device(torch.device(device.type, 0))
    assert figures["products"][0] > 5e13 and figures["traffic"][0] > 2e11 and figures["host"][0] > 1e9
