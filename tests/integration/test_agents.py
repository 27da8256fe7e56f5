"""Agents of the nodes of an imitated PBS job: ranks, nodes and the coordinator are lost, and strangers knock."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.optimus.checkpoint.verify import compare
from megatron.optimus.launcher import wire
from megatron.optimus.launcher.nodes import FILE_NAME
from tests.helpers import start_program
from tests.integration.conftest import TINY
from tests.integration.imitated_cluster import ImitatedCluster, children

HOSTS = ["x0", "x1", "x2", "x3", "x4"]
LAST, INTERVAL = 48, 4
RUN = f"--train-iters {LAST} --eval-interval 0 --global-batch-size 16 --expert-model-parallel-size 2".split()


def listening(pid: int) -> set[str]:
    """The addresses at which a process listens, as hexadecimal numbers of the kernel."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
        found |= {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}
    return found


def coordinators_address(job: ImitatedCluster) -> tuple[str, int, str]:
    """Address, port and token, as mpiexec got them."""
    for pid in children(job.process.pid):
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        env = dict(word.decode().partition("=")[::2] for word in words if b"=" in word)
        if "OPTIMUS_COORDINATOR" in env:
            host, _, port = env["OPTIMUS_COORDINATOR"].rpartition(":")
            return host, int(port), env["OPTIMUS_JOB_TOKEN"]
    raise AssertionError("no mpiexec")


@pytest.fixture
def strangers() -> Iterator[list[socket.socket]]:
    opened: list[socket.socket] = []
    yield opened
    for one in opened:
        one.close()


def test_ranks_nodes_and_the_coordinator_are_lost_and_the_run_ends_with_the_same_bits(
    tmp_path: Path, tokens: Path, strangers: list[socket.socket]
) -> None:
    """Eight ranks on four nodes and a spare, only memory checkpoints."""
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    words = [*TINY, *RUN, "--data-path", str(tokens), "--save-interval", "0"]
    faults = "--nodes 4 --max-restarts 9 --memory-checkpoint-interval".split()
    with ImitatedCluster(tmp_path / "job", HOSTS, run, ranks_per_node=2) as job:
        job.launch(*words, *faults, str(INTERVAL))

        def wait_for_start(after: float) -> None:
            """Until a start after this time of day has done its first step and a few more."""
            job.wait_until(lambda: any("startup_s/total" in s and s["wall_time"] > after for s in job.steps()[:-5]))

        wait_for_start(0.0)
        host, port, token = coordinators_address(job)
        for garbage in (b"GET / HTTP/1.0\r\n\r\n", b'{"challenge": 1, "answer": "x"}\n', b"\xff" * 5000, b"{"):
            strangers.append(socket.create_connection((host, port)))
            strangers[-1].sendall(garbage)
        with pytest.raises(OSError, match=r"closed by the other end|reset"):
            wire.connect(host, port, token[::-1])
        agents = [agent.pid for agents in job.processes.values() for agent in agents]
        everyone = [*agents, *(server for agent in agents for server in children(agent))]
        assert [listening(pid) for pid in everyone] == [set()] * len(everyone)
        assert listening(job.process.pid) == listening(job.coordinator()) == {"0100007F"}

        now = time.time()
        os.kill(job.ranks("x1")[1], signal.SIGKILL)
        wait_for_start(now)
        os.kill(job.coordinator(), signal.SIGKILL)
        steps = len(job.steps())
        job.wait_until(lambda: len(job.steps()) > steps + 3)
        assert len(job.attempts) == 2  # the ranks went on
        now = time.time()
        job.lose("x2")
        wait_for_start(now)
        stopped = job.ranks("x4")[0]
        os.kill(stopped, signal.SIGSTOP)
        os.kill(coordinator := job.coordinator(), signal.SIGSTOP)
        job.wait_until(lambda: job.log.read_text().count("another one takes over") == 2)
        assert not is_running(coordinator)  # it can do nothing any more, and the next one finds the hang
        assert job.process.wait(timeout=90) == 0, job.log.read_text()
    text = job.log.read_text()
    assert job.attempts == [["x0", "x1", "x2", "x3"]] * 2 + [["x0", "x1", "x4", "x3"]] * 2
    assert job.starts == [HOSTS]  # one mpiexec for all
    assert "error: rank 3 on node x1 ended with signal SIGKILL" in text
    assert "the coordinator ended with SIGKILL; another one takes over" in text
    assert "the coordinator has been stopped (SIGSTOP) for 3 s: it is killed" in text
    assert "lost nodes: x2 (its agent is gone)" in text and '"x2"' in (run / FILE_NAME).read_text()
    assert f"rank 4 (process {stopped} on node x4): stopped by a signal (SIGSTOP) for 1" in text
    assert "; the other ranks wait in " in text
    assert text.count("a connection to the coordinator was refused: ") in (4, 5)  # the fifth has ten seconds to answer
    assert text.count("resumed from host memory: step ") == 3
    lost = [step["lost_steps"] for step in job.steps() if step.get("lost_steps") is not None and step["step"] > 1]
    assert lost and max(lost) < 2 * INTERVAL  # one interval more where a copy was under way

    done = start_program("megatron.optimus.pretrain", [*words, "--run-dir", str(undisturbed)], 8, timeout=120)
    assert done.returncode == 0, done.stderr
    pair = [one / "checkpoints" / f"step-{LAST:08}" for one in (run, undisturbed)]
    found = compare(*pair)
    assert {one.kind for one in found} >= {"master", "exp_avg", "exp_avg_sq", "rng"}
    assert [one for one in found if not one.is_same or one.only_in is not None] == []
    expected = [json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()]
    for name in ("step", "loss", "grad_norm", "lr", "consumed_tokens"):
        assert [line[name] for line in job.steps()] == [line[name] for line in expected], name


def test_the_launcher_is_killed_and_nobody_stays(tmp_path: Path, tokens: Path) -> None:
    words = "--max-restarts 3 --train-iters 100000 --eval-interval 0 --save-interval 0".split()
    run = tmp_path / "run"
    with ImitatedCluster(tmp_path / "job", ["x0", "x1", "x2"], run) as job:
        job.launch(*TINY, *words, "--nodes", "2", "--data-path", str(tokens))
        job.wait_until(lambda: len(job.steps()) >= 5)
        agents = [agent.pid for agents in job.processes.values() for agent in agents]
        below = [pid for agent in agents for server in children(agent) for pid in (server, *children(server))]
        everyone = [*children(job.process.pid), *agents, *below]
        assert len(everyone) == 2 + 3 + 3 + 2  # mpiexec and coordinator, agents, their fork servers, ranks
        job.process.kill()
        job.process.wait()
        job.wait_until(lambda: not any(is_running(pid) for pid in everyone), seconds=30)
        last = int(job.steps()[-1]["step"])
        assert (run / "checkpoints" / f"step-{last:08}").is_dir()  # the ranks have saved
        assert not (run / "checkpoints" / ".claim").exists()


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended and whose parent has not yet asked does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
