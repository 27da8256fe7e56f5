"""Single checks of ``optimus doctor``, on imitated devices; test_doctor.py runs all of them on this machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.optimus.commands import diagnosis
from megatron.optimus.commands.diagnosis import State
from megatron.optimus.ops import backend
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.exchange import Exchange

PERFORMANCE = (Path(__file__).resolve().parents[3] / "docs" / "performance.md").read_text()


def test_costs_are_those_of_the_performance_page() -> None:
    assert "demo trains 1.29 times as fast with the C++ operations as without, on two cores with AVX2" in PERFORMANCE
    rows = {}
    for name in ("CUDA C++ (`auto` on Hopper)", "Triton"):
        line = next(line for line in PERFORMANCE.splitlines() if line.startswith(f"| Optimus, {name} |"))
        rows[name] = [int(number) for number in re.findall(r"\b\d{3}\b", line)]
    ratios = [cuda / triton for cuda, triton in zip(*rows.values(), strict=True)]
    assert len(ratios) == 12
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times as long, on an H200" in diagnosis.COSTS["cuda"]


def states(kind: str) -> dict[str, State]:
    return {one.name: one.state for one in diagnosis.kernels(kind) if one.name != "compiler"}


def test_a_gpu_without_the_fastest_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    why = {"cuda": "built without csrc/cuda; with nvcc run ...", "triton": None}
    monkeypatch.setattr(backend, "obstacle_of", lambda one, kind, dtype: why[one.value])
    assert states("cuda") == {"cuda": State.WARNING, "triton": State.OK}
    why["cuda"] = "it needs Hopper GPUs, compute capability 9.0, and those here have 8.0; use triton"
    assert states("cuda") == {"cuda": State.ABSENT, "triton": State.OK}
    why["triton"] = "triton is not installed; 'pip install triton'"
    assert states("cuda") == {"cuda": State.ABSENT, "triton": State.WARNING}
    monkeypatch.undo()
    assert states("mps") == {"cuda": State.ABSENT, "triton": State.ABSENT}


def test_one_gpu_has_nobody_to_exchange_with(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def exchange(kind: str, limit_s: float) -> Exchange:
        asked.append(kind)
        return Exchange("gloo", 0.1, None)

    monkeypatch.setattr(diagnosis, "exchange", exchange)
    monkeypatch.setattr(devices, "device_count", lambda kind: 1)
    assert [one.state for one in diagnosis.collectives("cuda", 1)] == [State.ABSENT, State.OK]
    monkeypatch.setattr(devices, "device_count", lambda kind: 2)
    assert [one.state for one in diagnosis.collectives("cuda", 1)] == [State.OK, State.OK]
    assert asked == ["cpu", "cpu", "cuda"]


def test_a_gpu_that_this_torch_does_not_see_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/kfd" or exists(path))
    monkeypatch.setattr(devices, "device_count", lambda kind: 0)
    [found] = [one for one in diagnosis.devices(diagnosis.Device.AUTO) if one.name == "AMD GPU"]
    assert found.state is State.WARNING and "everything runs on the CPU" in found.cost and found.remedy
