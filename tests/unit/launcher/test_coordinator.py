"""The coordinator of agents without a run: who may connect, which node is lost, and which rank hangs."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron.optimus.launcher import coordinator as coordinators
from megatron.optimus.launcher import wire
from megatron.optimus.launcher.coordinator import Coordinator
from megatron.optimus.launcher.hangs import RankFacts
from megatron.optimus.launcher.job_keeper import JobState, Starter
from megatron.optimus.launcher.node_agent import RanksOfNode
from megatron.optimus.launcher.supervisor import AttemptResult
from megatron.optimus.platform.exit_codes import STALLED

TOKEN = "secret"


# ---- connections


class Job:
    """A coordinator for nodes of one rank each, and agents that say what a test has them say."""

    def __init__(self, hosts: Sequence[str], folder: Path) -> None:
        self.listener = wire.listen("127.0.0.1", "")
        self.keeper, theirs = socket.socketpair()
        read, self.output = os.pipe()
        self.hosts = list(hosts)
        state = JobState(self.listener, read, theirs, TOKEN, [Starter(self.hosts, None)])
        self.coordinator = Coordinator(state, self.ranks, folder / "metrics.jsonl", by_name=False)
        self.links: list[wire.AgentLink] = []
        self.received: dict[int, list[dict[str, Any]]] = {}

    @staticmethod
    def ranks(hosts: Sequence[str], number: int) -> RanksOfNode:
        return RanksOfNode(number, 0, 1, {}, [], [], "stacks", 600.0, None)

    def agent(self, number: int, says: Callable[[wire.AgentLink, dict[str, Any]], None]) -> None:
        """An agent in a thread, which answers each message by ``says``."""

        def serve() -> None:
            link = wire.connect(*self.listener.getsockname(), TOKEN)
            self.links.append(link)
            link.send({"place": {"starter": 0, "number": number, "name": None}})
            link.send({"attempt": 0, "codes": [], "memory_step": -1, "was_asked": False})
            try:
                while True:
                    for message in link.receive():
                        self.received.setdefault(number, []).append(message)
                        says(link, message)
                    time.sleep(0.01)
            except OSError:
                link.close()

        threading.Thread(target=serve, daemon=True).start()

    def run(self) -> AttemptResult:
        return self.coordinator.run(self.hosts, {})

    def close(self) -> None:
        self.listener.close()
        for link in self.links:
            link.close()
        os.close(self.output)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Job]]:
    opened: list[Job] = []
    monkeypatch.setattr(coordinators.signal, "signal", lambda *_: None)  # pytest's own stay

    def open_job(count: int) -> Job:
        opened.append(Job([f"x{n}" for n in range(count)], tmp_path))
        return opened[-1]

    yield open_job
    for one in opened:
        one.close()


def does(code: int | None = None, **beat: Any) -> Callable[[wire.AgentLink, dict[str, Any]], None]:
    """An agent whose rank ends with this code at once, or hangs and sends this heartbeat, until it is killed."""

    def says(link: wire.AgentLink, message: dict[str, Any]) -> None:
        if "start" in message or message.get("signal") == 9:
            ended = code if "start" in message else -9
            link.send({"attempt": 1, "codes": [ended], "memory_step": 12, "was_asked": False})
            link.send({"attempt": 1, "fewest": None, "late": False, "stopped": False, **beat})
        if "stacks" in message:
            rank = beat["fewest"]
            one = RankFacts(rank, 1, False, beat["late"], rank, "", True, None if rank == 1 else "all_reduce", "")
            link.send({"attempt": 1, "facts": [asdict(one)]})

    return says


def test_a_stranger_is_refused_and_does_not_learn_the_token(job: Callable[[int], Job], caplog: Any) -> None:
    one = job(1)
    stranger = socket.create_connection(one.listener.getsockname())
    stranger.sendall(b'{"challenge": "b", "answer": "' + b"0" * 64 + b'"}\n')
    one.agent(0, does(0))
    assert one.run().code == 0
    stranger.settimeout(5)
    assert TOKEN not in stranger.recv(1 << 16).decode()  # the challenge
    assert stranger.recv(1) == b""
    assert "refused: it does not know the token of the job" in caplog.text


def test_a_node_whose_agent_falls_silent_is_lost(job: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a link is cut: no connection is reset."""
    monkeypatch.setattr(coordinators, "SILENT_SECONDS", 0.5)
    one = job(2)
    talks = threading.Event()

    def beats(link: wire.AgentLink, message: dict[str, Any]) -> None:
        does(None)(link, message)
        if "start" in message:
            threading.Thread(target=keep_beating, args=(link,), daemon=True).start()

    def keep_beating(link: wire.AgentLink) -> None:
        while not talks.wait(0.1):
            try:
                link.send({"attempt": 1, "fewest": 3, "late": False, "stopped": False})
            except OSError:
                return

    def falls_silent(link: wire.AgentLink, message: dict[str, Any]) -> None:
        if "start" in message:
            time.sleep(60)

    one.agent(0, beats)
    one.agent(1, falls_silent)
    result = one.run()
    talks.set()
    assert result.lost == {"x1": "no heartbeat of its agent for 0 s"} and result.code == 137
    assert {"signal": 9} in one.received[0]  # the ranks of the other were ended


def test_a_rank_that_ends_is_no_evidence_against_its_node(job: Callable[[int], Job], capfd: Any) -> None:
    one = job(3)
    for number in (0, 2):
        one.agent(number, does(None))
    one.agent(1, does(-11))
    result = one.run()
    assert (result.code, result.lost, result.where) == (139, {}, "x1")
    assert "error: rank 1 on node x1 ended with signal SIGSEGV" in capfd.readouterr().err
    assert one.coordinator.memory_step == 12


def test_ranks_wait_for_one_that_has_time_left_and_then_it_is_named(job: Callable[[int], Job], caplog: Any) -> None:
    """Rank 2 is late but not behind; the run hangs when rank 1, which is, is late too."""
    one = job(3)
    is_late, asked_early = threading.Event(), list[dict[str, Any]]()

    def notes_questions(link: wire.AgentLink, message: dict[str, Any]) -> None:
        asked_early.extend([message] if "stacks" in message and not is_late.is_set() else [])
        does(None, fewest=5, late=False)(link, message)

    one.agent(0, notes_questions)
    one.agent(2, does(None, fewest=2, late=True))

    def is_late_later(link: wire.AgentLink, message: dict[str, Any]) -> None:
        if "start" in message:
            time.sleep(0.3)  # nobody knows yet that it is behind
        does(None, fewest=1, late=False)(link, message)
        if "start" in message:
            time.sleep(0.3)
            is_late.set()
            link.send({"attempt": 1, "fewest": 1, "late": True, "stopped": False})

    one.agent(1, is_late_later)
    result = one.run()
    assert asked_early == []
    assert (result.code, result.where, result.lost) == (STALLED, "x1", {})
    assert "rank 1 (process 1 on node x1): without progress; the other ranks wait in all_reduce" in caplog.text


def test_mpiexec_that_takes_all_agents_with_it_is_no_evidence(job: Callable[[int], Job], caplog: Any) -> None:
    one = job(2)

    def vanishes(link: wire.AgentLink, message: dict[str, Any]) -> None:
        if "start" in message:
            one.keeper.sendall(b'{"starter": 0, "code": 137}\n')
            link.close()

    for number in range(2):
        one.agent(number, vanishes)
    result = one.run()
    assert result.lost == {} and result.code == 137
    assert "the program that starts agents ended with code 137, and its agents with it" in caplog.text


# ---- what is started
