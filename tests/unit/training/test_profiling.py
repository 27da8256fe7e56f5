"""The window of profiled steps: where it lies, what it leaves behind, and what happens when it cannot be written."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron.optimus.config.checks import check
from megatron.optimus.config.load import load
from megatron.optimus.config.schema import ConfigError, LoggingConfig
from megatron.optimus.training.profiling import StepProfiler, activities
from megatron.optimus.training.timing import StepClock


def watch(
    options: LoggingConfig, *, steps: int, first_step: int = 0, rank: int = 0, left_out: int | None = None
) -> nn.Module:
    model = nn.Sequential()
    model.add_module("embedding", nn.Linear(2, 2))
    device = torch.device("cpu")
    with StepProfiler(options, model, device, StepClock(device), rank=rank, first_step=first_step) as profiler:
        for step in range(first_step + 1, first_step + steps + 1):
            if step == left_out:
                continue
            profiler.before(step)
            model(torch.ones(1, 2))
            profiler.after(step)
    return model


def options(folder: Path, start: int, end: int, **changes: object) -> LoggingConfig:
    fields = {"run_dir": str(folder), "profile": True, "profile_step_start": start, "profile_step_end": end, **changes}
    return LoggingConfig(**fields)


def table(folder: Path, stem: str) -> list[str]:
    return (folder / "profile" / f"{stem}-rank-0.txt").read_text().splitlines()


@pytest.mark.parametrize(("start", "end"), [(1, 1), (1, 3), (3, 4)])
def test_steps_count_from_where_the_process_began(tmp_path: Path, start: int, end: int) -> None:
    model = watch(options(tmp_path, start, end), steps=5, first_step=100)
    lines = table(tmp_path, f"steps-{100 + start}-{100 + end}")
    [embedding] = [line.split() for line in lines if line.endswith("embedding")]
    assert float(embedding[2]) == 1.0, "one forward a step: the warm-up step is not counted"
    assert not model.embedding._forward_hooks and not model.embedding._forward_pre_hooks
    assert len(list((tmp_path / "profile").iterdir())) == 2


@pytest.mark.parametrize("left_out", [2, 3, 4, 5])
def test_a_step_that_is_left_out_does_not_cost_the_profile(tmp_path: Path, left_out: int) -> None:
    """Of a window of steps 3 to 5, which begins with step 2."""
    model = watch(options(tmp_path, 3, 5), steps=8, left_out=left_out)
    assert any(line.endswith("embedding") for line in table(tmp_path, "steps-3-5"))
    assert not model.embedding._forward_hooks


def test_other_ranks_and_runs_without_it_record_nothing(tmp_path: Path) -> None:
    watch(options(tmp_path, 1, 2), steps=3, rank=1)
    watch(LoggingConfig(run_dir=str(tmp_path), profile_step_start=1, profile_step_end=2), steps=3)
    assert not (tmp_path / "profile").exists()


def test_a_run_that_ends_early_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("optimus").propagate = True
    model = watch(options(tmp_path, 2, 9), steps=3)
    assert "the run ended before step 9: no profile was written" in caplog.text
    assert not (tmp_path / "profile").exists() and not model.embedding._forward_hooks


def test_a_folder_that_cannot_be_made_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("optimus").propagate = True
    (tmp_path / "profile").write_text("in the way")
    watch(options(tmp_path, 1, 2), steps=3)
    assert "the profile cannot be written" in caplog.text


def test_the_kernels_of_every_kind_of_device_are_recorded() -> None:
    kinds = {kind: [a.name for a in activities(torch.device(kind))] for kind in ("cpu", "cuda", "xpu")}
    assert kinds == {"cpu": ["CPU"], "cuda": ["CPU", "CUDA"], "xpu": ["CPU", "XPU"]}


def test_wrong_windows_and_ranks() -> None:
    with pytest.raises(ConfigError, match="profile_step_end=3 comes before profile_step_start=10; use 10 or more"):
        LoggingConfig(profile_step_end=3)
    run = load(["--preset", "mula-tiny", "--profile", "--profile-ranks", "0", "4"]).config
    with pytest.raises(ConfigError, match=r"profile_ranks=\[0, 4\] with 2 ranks: use numbers from 0 to 1"):
        check(run, 2)
