"""metrics.jsonl: the keys, each step once, damaged files."""

import json
import logging
import math
import os
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from megatron.optimus.training.metrics import MetricsWriter, StepMetrics, read_metrics

KEYS = [
    "step",
    "consumed_tokens",
    "global_batch_size",
    "loss",
    "aux_loss",
    "z_loss",
    "grad_norm",
    "lr",
    "wall_time",
    "step_time_s",
    "data_wait_s",
    "tokens_per_second_per_device",
    "tflops_per_device",
    "mfu",
    "expert_load_max_over_mean",
    "router_entropy",
    "dropped_tokens",
]


def metrics(step: int, **changes: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "step": step,
        "consumed_tokens": step * 100,
        "global_batch_size": 10,
        "loss": 8.0 / step,
        "aux_loss": 1.0,
        "z_loss": None,
        "grad_norm": 0.1,
        "lr": 1e-3,
        "wall_time": 1790000000.25,
        "step_time_s": 0.5,
        "data_wait_s": 0.0,
        "tokens_per_second_per_device": 200.0,
        "tflops_per_device": 1.5,
        "mfu": None,
        "expert_load_max_over_mean": 1.25,
        "router_entropy": 2.0,
        "dropped_tokens": 0,
    }
    return StepMetrics(**{**values, **changes})


def write_steps(folder: Path, first: int, last: int, resume_step: int = 0) -> list[dict[str, Any]]:
    with closing(MetricsWriter(folder, resume_step)) as writer:
        for step in range(first, last + 1):
            writer.write(metrics(step))
    return read_metrics(folder / "metrics.jsonl")


def steps(records: list[dict[str, Any]]) -> list[int]:
    return [record["step"] for record in records]


def test_keys_and_exact_values(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path / "new" / "run")) as writer:
        writer.write(metrics(1, loss=0.1 + 0.2))
        writer.write(metrics(2, valid_loss=3.5))
        writer.write(metrics(3, peak_memory_gib=1.5))
        writer.write(metrics(4, valid_losses={"web": 2.5, "code": math.nan}))
        before = time.time()
        made = StepMetrics(**{name: value for name, value in vars(metrics(5)).items() if name != "wall_time"}).wall_time
        assert before <= made <= time.time()
    first, second, third, fourth = read_metrics(tmp_path / "new" / "run" / "metrics.jsonl")
    assert list(first) == KEYS and list(second) == [*KEYS, "valid_loss"]
    assert list(third) == [*KEYS, "peak_memory_gib"]
    assert list(fourth) == [*KEYS, "valid_loss/web", "valid_loss/code", "nonfinite"]
    assert fourth["valid_loss/web"] == 2.5 and fourth["valid_loss/code"] is None
    assert first["loss"] == 0.1 + 0.2 and first["mfu"] is None and second["valid_loss"] == 3.5


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_numbers_are_null_and_said_so(tmp_path: Path, value: float) -> None:
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write(metrics(1, loss=value))
        writer.write(metrics(2, valid_loss=value))
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert first["loss"] is None and first["nonfinite"] is True and first["grad_norm"] == 0.1
    assert second["valid_loss"] is None and second["nonfinite"] is True


def test_a_line_is_in_the_file_when_write_returns(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(metrics(1))
    assert steps(read_metrics(tmp_path / "metrics.jsonl")) == [1]  # before close: a killed run keeps it
    writer.close()


def test_resuming_removes_the_steps_that_will_come_again(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 10)
    records = write_steps(tmp_path, 7, 9, resume_step=6)
    assert steps(records) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert steps(write_steps(tmp_path, 10, 11, resume_step=9)) == list(range(1, 12))
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_the_first_line_after_a_restart_says_what_was_lost(tmp_path: Path) -> None:
    """What a second restart from the same step loses counts too, with what the lines that it removes say."""
    write_steps(tmp_path, 1, 10)
    write_steps(tmp_path, 7, 8, resume_step=6)
    records = write_steps(tmp_path, 7, 8, resume_step=6)
    assert [(record.get("lost_steps"), record.get("lost_s")) for record in records[5:]] == [
        (None, None), (6, 3.0), (None, None)
    ]  # fmt: skip
    assert "lost_steps" not in write_steps(tmp_path, 9, 9, resume_step=8)[-1]


def test_a_run_from_the_start_keeps_the_lines_of_earlier_ones_aside(tmp_path: Path) -> None:
    for last in (3, 2, 1):
        assert steps(write_steps(tmp_path, 1, last)) == list(range(1, last + 1))
    assert steps(read_metrics(tmp_path / "metrics.aside-1.jsonl")) == [1, 2, 3]
    assert steps(read_metrics(tmp_path / "metrics.aside-2.jsonl")) == [1, 2]
    MetricsWriter(tmp_path / "empty").close()
    MetricsWriter(tmp_path / "empty").close()
    assert os.listdir(tmp_path / "empty") == ["metrics.jsonl"]


def test_a_torn_last_line_is_left_out_and_removed_by_a_resume(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 3)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "lo')
    assert steps(read_metrics(path)) == [1, 2, 3]
    assert steps(write_steps(tmp_path, 4, 5, resume_step=3)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("damage", [b"\0\0\0\0\n", b"\xff\xfe\n", b"[1]\n", b'{"loss": 1}\n', b"\n"])
def test_a_damaged_line_is_reported_but_does_not_stop_a_resume(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("optimus"), "propagate", True)
    write_steps(tmp_path, 1, 2)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + damage)
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 3: not|codec can't decode"):
        read_metrics(path)
    assert steps(write_steps(tmp_path, 3, 3, resume_step=2)) == [1, 2, 3]
    assert "dropped 1 damaged" in caplog.text


def test_a_crash_during_the_rewrite_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_steps(tmp_path, 1, 5)

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        MetricsWriter(tmp_path, resume_step=2)
    assert steps(read_metrics(tmp_path / "metrics.jsonl")) == [1, 2, 3, 4, 5]


def test_lines_are_standard_json(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 1)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)


def test_recorded_metrics_are_keys_of_their_own(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write(metrics(1, recorded={"attention/entropy": 1.5, "bad": math.inf}))
    [line] = read_metrics(tmp_path / "metrics.jsonl")
    assert line["attention/entropy"] == 1.5 and line["bad"] is None and line["nonfinite"] is True
    assert "recorded" not in line and "expert_load_LE" not in line
    with pytest.raises(ValueError, match=r"metrics.record: lr are fields of every step; use another name"):
        metrics(1, recorded={"lr": 1.0})
