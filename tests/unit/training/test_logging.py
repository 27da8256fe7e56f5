"""Outputs that rank 0 cannot write do not end the run."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import pytest
import torch

from megatron.optimus.config.load import load
from megatron.optimus.context import RunContext
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.training.logging import MetricsLogger
from megatron.optimus.training.trackers import StepRange
from tests.unit.training.test_metrics import metrics


def test_a_full_disk_is_told_once_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load(["--preset", "mula-tiny", "--run-dir", str(tmp_path)]).config
    mesh = Mesh(config.parallel, rank=0, world_size=1)
    logging.getLogger("optimus").propagate = True
    run = RunContext.of(config, mesh, torch.device("cpu"))
    with MetricsLogger(run, StepRange(0, 9, 9 * config.training.seq_length)) as written:
        written.log(metrics(1, expert_load_LE=[[3, 1]]), {})
        disk, written._metrics._file = written._metrics._file, open("/dev/full", "w", buffering=1)  # noqa: SIM115
        for step in (2, 3):
            written.log(metrics(step, expert_load_LE=[[3, 1]]), {"validation": 3.0, "web": 2.5})
        with pytest.raises(OSError):
            written._metrics._file.close()
        written._metrics._file = disk
        written.log(metrics(4, expert_load_LE=[[3, 1]]), {})
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 4]
    assert json.loads((tmp_path / "expert_load.json").read_text())["total_slots_per_layer_and_expert"] == [[12, 4]]
    assert [record.message.count("No space left on device") for record in caplog.records] == [1]
    assert capsys.readouterr().out.count(" valid_loss=3.0000 valid_loss/web=2.5000 ") == 2


class Gone:
    """A terminal that was closed, and a tracker whose service is out of reach."""

    def __init__(self) -> None:
        self.calls = 0

    def isatty(self) -> bool:
        return False

    def write(self, _: object) -> None:
        self.calls += 1
        raise OSError(5, "Input/output error") if self is sys.stdout else ConnectionAbortedError

    log = write

    def close(self) -> None:
        raise RuntimeError("no such run")


def test_a_closed_terminal_and_a_tracker_out_of_reach_do_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 alone would leave, in the step that a closed terminal's SIGHUP asks to save."""
    config = load(["--preset", "mula-tiny", "--run-dir", str(tmp_path), "--log-interval", "1"]).config
    mesh = Mesh(config.parallel, rank=0, world_size=1)
    logging.getLogger("optimus").propagate = True
    run = RunContext.of(config, mesh, torch.device("cpu"))
    with MetricsLogger(run, StepRange(0, 9, 9 * config.training.seq_length)) as written:
        tracker = Gone()
        written._trackers.append(tracker)
        monkeypatch.setattr(sys, "stdout", Gone())
        for step in (1, 2):
            written.log(metrics(step, expert_load_LE=[[3, 1]]), {})
        monkeypatch.undo()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert tracker.calls == 2
    assert [record.message.count("Input/output error") for record in caplog.records] == [1]


def outputs(folder: Path, first_step: int = 0) -> MetricsLogger:
    config = load(["--preset", "mula-tiny", "--run-dir", str(folder)]).config
    mesh = Mesh(config.parallel, rank=0, world_size=1)
    return MetricsLogger(RunContext.of(config, mesh, torch.device("cpu")), StepRange(first_step, 9, 9))


def test_outputs_are_not_written_through_links(tmp_path: Path) -> None:
    run, mine = tmp_path / "run", tmp_path / "mine"
    run.mkdir()
    mine.write_text("of the user")
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    for name in ("config.yaml", "metrics.jsonl.tmp"):
        (run / name).symlink_to(mine)
    with outputs(run, first_step=1):
        pass
    assert mine.read_text() == "of the user"
    assert (run / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert "num_layers" in (run / "config.yaml").read_text() and not (run / "config.yaml").is_symlink()


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_metrics_that_are_no_file_are_an_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to(tmp_path / "target") if kind == "link" else os.mkfifo(path)
    with pytest.raises(OSError, match=r"not a regular file .*metrics.jsonl"):
        outputs(tmp_path)
    assert not (tmp_path / "target").exists()


def test_the_report_is_there_at_the_end_and_before_trackers_close(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also after a restart, whose lost steps it tells; not after an error. Its own errors are a warning."""
    config = load(["--preset", "mula-tiny", "--run-dir", str(tmp_path)]).config
    mesh = Mesh(config.parallel, rank=0, world_size=1)
    logging.getLogger("optimus").propagate = True
    run, page = RunContext.of(config, mesh, torch.device("cpu")), tmp_path / "report.html"
    seen: list[bool] = []

    class Uploads(Gone):
        def log(self, _: object) -> None:
            pass

        def close(self) -> None:
            seen.append(page.exists())

    def train(first: int, last: int, *, fails: bool = False) -> None:
        with MetricsLogger(run, StepRange(first, 600, 600 * 100)) as written:
            written._trackers.append(Uploads())
            for step in range(first + 1, last + 1):
                startup_s = {"total": 9.0, "first_step": 1.0} if step == first + 1 else None
                written.log(metrics(step, expert_load_LE=[[step, 1]], startup_s=startup_s), {})
            if fails:
                raise KeyError

    with pytest.raises(KeyError):
        train(0, 7, fails=True)
    assert seen == [False] and not page.exists()
    train(6, 8)
    assert seen == [False, True] and '"lost_steps":1' in page.read_text()
    history = [json.loads(line) for line in (tmp_path / "expert_load_history.jsonl").read_text().splitlines()]
    assert [(one["first_step"], one["step"], one["slots"]) for one in history] == [
        (1, 3, [[6, 3]]), (4, 6, [[15, 3]]), (7, 8, [[15, 2]])
    ]  # fmt: skip
    page.unlink()
    page.mkdir()
    train(8, 9)
    assert "report.html was not written: " in caplog.text
