"""Beats of a rank: what the launcher reads, and what they cost."""

from __future__ import annotations

import time

import pytest

from megatron.optimus.platform import environment, heartbeat


def test_without_a_launcher_a_beat_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.AGENT_FOLDER, raising=False)
    heartbeat.connect(0)
    began = time.perf_counter()
    for _ in range(10_000):
        heartbeat.beat("optimizer step", 3)
    assert time.perf_counter() - began < 1.0
