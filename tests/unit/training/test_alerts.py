"""Alerts reach the log, a file, trackers and a command that really runs; nothing of it delays or ends a run."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

import pytest

from megatron.optimus.training import alerts as module
from megatron.optimus.training.alerts import Alert, Alerts, used_share
from megatron.optimus.training.health import Health


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_alert_reaches_all_of_them_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    got: list[Alert] = []
    alerts = Alerts(str(tmp_path), f"cat >> {tmp_path}/got")
    alerts.add_sink(got.append)
    alerts.send("slow_rank", 7, "rank 3 on node1")
    alerts.send("slow_rank", 8, "less than a minute later")
    alerts.close()
    [given] = lines(tmp_path / "got")
    assert (given["kind"], given["step"], given["text"]) == ("slow_rank", 7, "rank 3 on node1")
    assert given["run_dir"] == str(tmp_path) and abs(given["time"] - time.time()) < 60 and given["host"]
    assert lines(tmp_path / "alerts.jsonl") == [given] and [one.to_json() for one in got] == [json.dumps(given)]
    assert [record.getMessage() for record in caplog.records] == ["step 7: slow rank: rank 3 on node1"]
    other = Alerts(None, f"touch {tmp_path}/other")  # another rank's
    other.send("slow_rank", 7, "x")
    other.step_done(1)
    other.close()
    assert not (tmp_path / "other").exists()


def test_a_command_that_hangs_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_COMMAND_SECONDS", 0.5)
    program = f"import time; time.sleep(3); open({str(tmp_path / 'late')!r}, 'w')"
    alerts = Alerts(str(tmp_path), f'{sys.executable} -S -c "{program}" & cat; wait')
    began = time.monotonic()
    alerts.send("stall", 1, "x")
    assert time.monotonic() - began < 0.4
    alerts.close()
    time.sleep(3.2)
    assert not (tmp_path / "late").exists()
    assert "alert_command was killed after 0.5 s" in caplog.text


def test_a_command_that_fails_is_one_line_and_runs_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_QUIET_SECONDS", 0.0)
    alerts = Alerts(str(tmp_path), f"echo x >> {tmp_path}/runs; echo bad >&2; exit 3")
    for step in range(14):
        alerts.send("loss_spike", step, "x", is_logged=True)
    alerts.close()
    assert (tmp_path / "runs").read_text() == "x\n" * module.MOST_COMMANDS
    assert len(lines(tmp_path / "alerts.jsonl")) == 14
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert errors == ["alerts: alert_command ended with exit code 3: bad; training goes on"]
    assert "alert_command has run 10 times in a minute" in caplog.text


def test_a_stall_is_one_alert_and_its_end_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    alerts = Alerts(str(tmp_path), stall_seconds=0.2)
    alerts.step_done(5)
    time.sleep(0.8)
    alerts.step_done(6)
    alerts.close()
    [alert] = lines(tmp_path / "alerts.jsonl")
    assert alert["kind"] == "stall" and alert["step"] == 5
    assert "step 6: the run goes on after a stall" in caplog.text


def test_experts_that_collapse_are_told(tmp_path: Path) -> None:
    even, collapsed = [25, 25, 25, 25, 25, 25, 25, 25], [98, 100, 1, 0, 0, 0, 1, 0]
    assert used_share(even, 2) == pytest.approx(1) and used_share([100, 100, 0, 0], 2) == pytest.approx(0)
    assert used_share([0, 0], 2) == 1 and used_share([3, 3], 2) == 1
    alerts = Alerts(str(tmp_path))
    for step in range(1, 20):
        alerts.step_done(step, [even, collapsed], 2)
    alerts.step_done(20, [even, even], 2)  # a row that ends in time
    assert not (tmp_path / "alerts.jsonl").exists()
    for step in range(21, 45):
        alerts.step_done(step, [even, collapsed], 2)
    alerts.close()
    [alert] = lines(tmp_path / "alerts.jsonl")
    assert alert["kind"] == "expert_collapse" and alert["step"] == 40
    assert "MoE layer 2 uses few of its 8 experts" in alert["text"] and "expert 1 has 50%" in alert["text"]


def test_health_feeds_them(tmp_path: Path) -> None:
    alerts = Alerts(str(tmp_path))
    health = Health(alerts=alerts)
    for step in range(1, 41):
        health.observe(step, loss=2.0 + 0.01 * (step % 3), grad_norm=1.0, skipped=False)
    health.observe(41, loss=9.0, grad_norm=1.0, skipped=False)
    health.observe(42, loss=float("nan"), grad_norm=1.0, skipped=False)
    alerts.close()
    assert [(one["kind"], one["step"]) for one in lines(tmp_path / "alerts.jsonl")] == [
        ("loss_spike", 41),
        ("not_finite", 42),
    ]
