"""The seconds of a start, by phase."""

from __future__ import annotations

import logging
import time

import pytest

from megatron.optimus.platform import startup
from megatron.optimus.platform.startup import StartupClock


def test_each_second_counts_for_one_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(startup.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(startup, "_process_age", lambda: 7.0)
    clock = StartupClock()
    now[0] += 1
    with clock.phase("model"):
        now[0] += 2
        with clock.phase("weights"):
            now[0] += 3
        now[0] += 4
    with pytest.raises(OSError), clock.phase("model"):
        now[0] += 5
        raise OSError
    now[0] += 6
    assert clock.is_running
    expected = {"imports": 7.0, "other": 1.0, "model": 11.0, "weights": 3.0, "first_step": 6.0, "total": 28.0}
    assert clock.finish("first_step") == expected and not clock.is_running


def test_the_age_of_the_process_is_that_since_its_start() -> None:
    before = startup._process_age()
    time.sleep(0.25)
    assert 0.1 < startup._process_age() - before < 5
    assert before > 0.1, "Python and pytest have been imported"


def test_only_a_long_phase_says_what_it_does(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(startup, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(logging.getLogger("optimus"), "propagate", True)
    caplog.set_level(logging.INFO, "optimus")
    clock = StartupClock()
    with clock.phase("data", "opening the token files"):
        pass
    with clock.phase("weights", "drawing initial weights of 6.9 B parameters"):
        time.sleep(0.4)
    time.sleep(0.1)
    assert [record.message for record in caplog.records] == ["drawing initial weights of 6.9 B parameters ..."]
