"""The agent of a node: one request to stop that comes twice, and an agent without a job."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from megatron.optimus.launcher import node_agent

TOKEN = "secret"


def test_one_request_to_stop_that_comes_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By mpiexec and the coordinator, a second apart on a busy node: the second would end ranks that still save."""
    monkeypatch.setenv("OPTIMUS_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setenv("OPTIMUS_JOB_TOKEN", TOKEN)
    monkeypatch.setattr(node_agent, "ForkServer", lambda device: None)
    sent: list[int] = []
    agent = node_agent.NodeAgent("cpu")
    with agent._local:
        agent._local.ranks = [SimpleNamespace(send_signal=sent.append, kill=lambda: None)]  # type: ignore[list-item]
        for number in (15, 15, 2, 9):
            agent._signal_ranks(number)
    assert sent == [15, 9]


def test_without_a_job_an_agent_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megatron.optimus.launcher.node_agent", "cpu"],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.startswith(
        "error: OPTIMUS_COORDINATOR and OPTIMUS_JOB_TOKEN are not set"
    )
