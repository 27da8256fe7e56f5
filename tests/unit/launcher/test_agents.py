"""Agents and their coordinator without a run: who may connect, which node is lost, what hangs, what a rank is told."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.optimus import launch
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.launcher import coordinator as coordinators
from megatron.optimus.launcher import node_agent, wire
from megatron.optimus.launcher.cluster import AURORA, Allocation, BatchSystem
from megatron.optimus.launcher.command import LaunchMethod, LaunchOptions, Mpi, build_launch
from megatron.optimus.launcher.coordinator import Coordinator
from megatron.optimus.launcher.hangs import RankFacts, describe
from megatron.optimus.launcher.job_keeper import JobKeeper, JobState, Starter
from megatron.optimus.launcher.node_agent import RanksOfNode
from megatron.optimus.launcher.supervisor import AttemptResult
from megatron.optimus.platform import environment
from megatron.optimus.platform.exit_codes import STALLED

PBS = Allocation(BatchSystem.PBS, tuple(f"x{n}.hostmgmt.site" for n in range(3)))
SLURM = Allocation(BatchSystem.SLURM, ("g1", "g2", "g3"))
TOKEN = "secret"


def facts(rank: int, *, count: int = 7, waits: str | None = "all_reduce", stopped: bool = False) -> RankFacts:
    return RankFacts(
        rank, 100 + rank, stopped, True, count, f" in phase {count}", True, waits, "f (a.py:1)", f"x{rank}"
    )


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ([facts(0), facts(1), facts(2, waits=None)], 2),  # alone outside of a collective, though none is behind
        ([facts(0), facts(1, count=6), facts(2)], 1),  # all wait: the one behind
        ([facts(0, count=6, waits=None), facts(1), facts(2, stopped=True)], 2),  # stopped: whatever the others do
    ],
)
def test_the_rank_that_hangs_is_named_over_all_nodes(ranks: list[RankFacts], named: int) -> None:
    rank, text = describe(ranks, Path("stacks"))
    assert rank == named
    assert text.startswith(f"rank {named} (process {100 + named} on node x{named}): ")
    assert text.endswith("; the other ranks wait in all_reduce; stacks of all ranks: stacks")


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


def test_an_agent_does_not_obey_a_stranger() -> None:
    listener = wire.listen("127.0.0.1", "")

    def answer() -> None:
        link = wire.AgentLink(listener.accept()[0], "another")
        link.challenge()
        link.fileno()
        time.sleep(0.1)
        link._socket.sendall(b'{"answer": "' + b"0" * 64 + b'"}\n{"start": {}}\n')

    threading.Thread(target=answer, daemon=True).start()
    with pytest.raises(ConnectionError, match="it does not know the token"):
        wire.connect(*listener.getsockname(), TOKEN)
    listener.close()


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_never_on_all_interfaces(address: str) -> None:
    with pytest.raises(OSError, match="all interfaces"):
        wire.listen(address, "")
    assert wire.listen("", "127.0.0.1").getsockname()[0] == "127.0.0.1"  # the address on the way to a node


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


def test_a_keeper_whose_coordinator_dies_again_and_again_ends(caplog: Any) -> None:
    listener = wire.listen("127.0.0.1", "")
    keeper = JobKeeper(listener, TOKEN, lambda hosts, number: ([], {}), lambda state: os.kill(os.getpid(), 9) or 0)
    before = {number: coordinators.signal.getsignal(number) for number in coordinators.STOP_SIGNALS}
    try:
        assert keeper.run() == 137
    finally:
        for number, handler in before.items():
            coordinators.signal.signal(number, handler)
        listener.close()
    assert "the coordinator ended 6 times in a minute, now with SIGKILL" in caplog.text


# ---- what is started


def test_one_agent_a_node_with_all_its_cores() -> None:
    for allocation, options, expected in (
        (PBS, LaunchOptions(mpi=Mpi.PALS, cpu_bind="list:0-3:4-7"), "-n 3 --ppn 1 --hostfile F --cpu-bind none"),
        (PBS, LaunchOptions(mpi=Mpi.MPICH), "-genvall -n 3 -ppn 1 -f F -disable-auto-cleanup"),
        (SLURM, LaunchOptions(), "--nodes 3 --ntasks 3 --ntasks-per-node 1 --kill-on-bad-exit=0 --no-kill --overlap"),
    ):
        started = build_launch(allocation, replace(options, nproc_per_node=2), [], {})
        assert started.why_no_agents({}) == ""
        words = started.agent_command(allocation.hosts, "F", "cpu")
        assert expected in " ".join(words)
        assert words[-4:] == [sys.executable, "-m", "megatron.optimus.launcher.node_agent", "cpu"]
    words = build_launch(PBS, LaunchOptions(nproc_per_node=2, mpi=Mpi.OPENMPI), [], {}).agent_command(
        PBS.hosts, "F", "cpu"
    )
    passed = {words[i + 1] for i, word in enumerate(words) if word == "-x"}
    assert passed >= set(environment.AGENT_VARIABLES)


def test_where_mpiexec_itself_has_to_start_the_ranks() -> None:
    aurora = build_launch(PBS, LaunchOptions(system=AURORA), [], {})
    assert "CCL_ATL_TRANSPORT=mpi needs ranks that mpiexec has started" in aurora.why_no_agents({})
    own = {"CCL_ATL_TRANSPORT": "ofi", "CCL_PROCESS_LAUNCHER": "none", "CCL_KVS_MODE": "pmi"}
    own |= {"CCL_KVS_USE_MPI_RANKS": "0"}
    without = build_launch(PBS, LaunchOptions(system=AURORA), [], own)
    assert without.why_no_agents(own) == ""
    assert without.agent_cores()[:2] == [[2, 3, 4], [10, 11, 12]] and len(without.agent_cores()) == 12
    bound = build_launch(PBS, LaunchOptions(nproc_per_node=2, cpu_bind="depth"), [], {})
    assert "--cpu-bind=depth is for mpiexec" in bound.why_no_agents({})
    assert build_launch(SLURM, LaunchOptions(nproc_per_node=2, method=LaunchMethod.TORCHRUN), [], {}).why_no_agents({})
    for text, problem in (("list:0-1", "has cores for 1 ranks"), ("list:0:x", "'x' is not of the form")):
        with pytest.raises(ConfigError, match=problem):
            build_launch(PBS, LaunchOptions(nproc_per_node=2, cpu_bind=text), [], {}).agent_cores()


@pytest.mark.parametrize(
    "started",
    [
        {"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2", "PMIX_RANK": "5"},
        {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
        | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "2"}
        | {"SLURM_STEP_TASKS_PER_NODE": "2(x4)", "SLURM_STEP_NODELIST": "g[1-4]"},
    ],
    ids=["pals", "mpich", "openmpi", "srun"],
)
def test_a_rank_of_an_agent_is_told_what_mpiexec_would_tell_it(
    started: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Number, place and devices of rank 5, the second on the third of four nodes."""
    common = {"WORLD_SIZE": "8", "MASTER_ADDR": "x0", "MASTER_PORT": "29500", "ZE_FLAT_DEVICE_HIERARCHY": "FLAT"}
    common |= {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_JOB_ID": "77"}
    old = environment.detect({**common, **started})
    # The agent is process 2, alone on its node.
    ones = {"PALS_RANKID": "2", "PMIX_RANK": "2", "PMI_RANK": "2", "OMPI_COMM_WORLD_RANK": "2", "SLURM_PROCID": "2"}
    of_agent = {name: ones.get(name, "0" if "LOCAL" in name else "4") for name in started}
    monkeypatch.setattr(os, "environ", {**common, **of_agent, environment.JOB_TOKEN: TOKEN})
    env = environment.for_agents_rank(5, 1, 2, {"OPTIMUS_RENDEZVOUS_TOKEN": "t", "WORLD_SIZE": "8"})
    new = environment.detect(env)
    assert {**asdict(new), "launcher": None} == {**asdict(old), "launcher": None}
    assert env.items() >= common.items() and not started.keys() & env.keys() and environment.JOB_TOKEN not in env


def test_ranks_are_bound_to_their_cores(tmp_path: Path) -> None:
    """A new interpreter; that of a fork server is in test_agents.py of tests/integration."""
    from megatron.optimus.launcher.agent import LocalAgent

    core = max(os.sched_getaffinity(0))
    code = f"import os; open({str(tmp_path / 'core')!r}, 'w').write(str(os.sched_getaffinity(0)))"
    with LocalAgent([sys.executable, "-c", code], 1) as agent:
        agent.start([{**os.environ, "RANK": "0"}], [[core]])
        assert agent.ranks[0].wait(30) == 0
    assert (tmp_path / "core").read_text() == f"{{{core}}}"


def test_nodes_whose_names_have_no_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nodes").write_text("x1.invalid\nx2.invalid\n")
    (tmp_path / "mpiexec").write_text("#!/bin/false\n")
    (tmp_path / "mpiexec").chmod(0o755)
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["--nproc-per-node", "1", "--max-restarts", "1", "--preset", "mula-tiny", "--data-path", "corpus"]
    assert launch.main([*words, "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no address at which the other nodes can reach this one: ")
    assert "export OPTIMUS_LAUNCH_ADDRESS=" in error
    assert launch.main([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert (
        "mpiexec -genvall -n 2 -ppn 1 -f HOSTFILE -disable-auto-cleanup python -m megatron.optimus.launcher." in shown
    )
    assert "# once, on spare nodes too; these agents start the ranks:\npython -m megatron.optimus.pretrain" in shown


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
