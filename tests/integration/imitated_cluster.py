"""A PBS job of nodes that are forked processes of this machine, and a stand-in for mpiexec that runs them.

The launcher is a process of its own and calls the stand-in as it would PALS's mpiexec. Agents and ranks are forked by
the test's process, which has imported everything, so that a start takes no seconds of imports.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from megatron.optimus.launcher import forkserver, node_agent
from megatron.optimus.launcher.agent import LocalAgent
from megatron.optimus.launcher.command import AGENT
from megatron.optimus.platform import parent_death
from tests.helpers import _CONTEXT, _program
from tests.integration.conftest import environment
from tests.integration.launched_run import LaunchedRun

MPIEXEC = """#!{python}
import os, signal, sys
from multiprocessing.connection import Client
words = sys.argv[1:]
for secret in ("OPTIMUS_RENDEZVOUS_TOKEN", "OPTIMUS_JOB_TOKEN"):
    assert os.environ.get(secret) not in words
hosts = open(words[words.index("--hostfile") + 1]).read().split()
server = Client("{address}")
signal.signal(signal.SIGTERM, lambda *_: server.send("stop"))
server.send((hosts, int(words[words.index("--ppn") + 1]), dict(os.environ), words[words.index("-m") + 1:]))
while isinstance(answer := server.recv(), str):
    print(answer, end="", flush=True)
sys.exit(answer)
"""


class ImitatedCluster(LaunchedRun):
    """The nodes, and one launch on them; a context manager.

    Args:
        folder: for everything of this job.
        hosts: names of the nodes.
        run_dir: of the run.
        ranks_per_node: on each.
    """

    def __init__(self, folder: Path, hosts: list[str], run_dir: Path, ranks_per_node: int = 1) -> None:
        super().__init__(run_dir, folder / "log")
        self.folder, self.ranks_per_node = folder, ranks_per_node
        self.starts: list[list[str]] = []  # nodes of each mpiexec
        self.processes: dict[str, list[Any]] = {}  # of each node: its agent, or without agents its ranks
        self._messages: list[str] = []
        (folder / "started").mkdir(parents=True)
        (folder / "nodes").write_text("\n".join(hosts) + "\n")
        self._listener = Listener(str(folder / "socket"))
        (folder / "mpiexec").write_text(MPIEXEC.format(python=sys.executable, address=folder / "socket"))
        (folder / "mpiexec").chmod(0o755)
        threading.Thread(target=self._serve, daemon=True).start()

    def launch(self, *words: str) -> None:
        """Starts ``optimus launch`` in the job."""
        env = {**environment(), "PATH": f"{self.folder}:{os.environ['PATH']}", "MASTER_ADDR": "127.0.0.1"}
        env |= {"PBS_NODEFILE": str(self.folder / "nodes"), "OPTIMUS_MEMORY_FOLDER": str(self.folder / "memory")}
        env |= {"OPTIMUS_LAUNCH_ADDRESS": "127.0.0.1"}
        start = ["--launcher", "mpiexec", "--mpi", "pals", "--nproc-per-node", str(self.ranks_per_node)]
        start += ["--run-dir", str(self.run_dir)]
        command = [sys.executable, "-m", "megatron.optimus.launch", *start, *words]
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env)

    def __enter__(self) -> ImitatedCluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        for host in self.processes:
            self._kill(host)
        self._listener.close()

    @property
    def attempts(self) -> list[list[str]]:
        """The nodes of each attempt in rank order, as their agents started it, or mpiexec."""
        names = sorted(path.name.split("-") for path in (self.folder / "started").iterdir())
        found: dict[str, list[str]] = {}
        for attempt, _, host in names:
            found.setdefault(attempt, []).append(host)
        return list(found.values()) or self.starts

    def coordinator(self) -> int:
        """Its process: the fork of the launcher."""
        command = Path(f"/proc/{self.process.pid}/cmdline").read_bytes()
        [found] = [pid for pid in children(self.process.pid) if Path(f"/proc/{pid}/cmdline").read_bytes() == command]
        return found

    def ranks(self, host: str) -> list[int]:
        """The processes that the agent's fork server has forked, in rank order."""
        agents = [agent.pid for agent in self.processes[host] if agent.is_alive()]
        return [rank for agent in agents for server in children(agent) for rank in children(server)]

    def lose(self, host: str, message: str = "") -> None:
        """Kills everything on the node, takes its memory, and has mpiexec print the message."""
        self._kill(host)
        shutil.rmtree(self.memory(host), ignore_errors=True)
        self._messages += [message] if message else []

    def _kill(self, host: str) -> None:
        for process in self.processes[host]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()

    def signal_all(self, number: int) -> None:
        for host in self.processes:
            for rank in self.ranks(host):
                os.kill(rank, number)

    def memory(self, host: str) -> Path:
        return self.folder / f"memory-{host}"

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._run, args=(self._listener.accept(),), daemon=True).start()

    def _run(self, client: Connection) -> None:
        """One mpiexec."""
        hosts, per_node, env, (module, *argv) = client.recv()
        printed = self.folder / f"output-{len(self.starts)}"
        printed.touch()
        self.starts.append(hosts)
        self.processes |= {host: [] for host in hosts}
        for number in range(len(hosts) * per_node):
            host = hosts[number // per_node]
            place = {"PALS_RANKID": number, "PALS_LOCAL_RANKID": number % per_node, "PALS_LOCAL_SIZE": per_node}
            variables = env | {name: str(value) for name, value in place.items()}
            variables["OPTIMUS_MEMORY_FOLDER"] = str(self.memory(host))
            words: tuple[Any, ...] = (module, argv, variables, str(printed), str(printed))
            if module == AGENT:
                words = (argv, variables, str(printed), host, str(self.folder / "started"))
            process = _CONTEXT.Process(target=_agent if module == AGENT else _program, args=words, daemon=True)
            process.start()
            self.processes[host].append(process)
        everyone = [process for host in hosts for process in self.processes[host]]
        with printed.open() as output, contextlib.suppress(OSError, EOFError):
            is_over = False
            while not is_over:
                is_over = not any(process.is_alive() for process in everyone)
                if client.poll(0.02) and client.recv() == "stop":
                    for process in everyone:
                        process.terminate()
                if text := output.read():
                    client.send(text)
                while self._messages:
                    client.send(self._messages.pop())
            client.send(max(abs(process.exitcode) for process in everyone))


def children(pid: int) -> list[int]:
    """Processes that this one has started."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _agent(argv: list[str], variables: dict[str, str], output: str, host: str, started: str) -> None:
    """A node's agent, in a process group with all that it starts. Its fork server is a fork of this process."""
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(variables)
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), stream)
    forkserver.ForkServer._start_server = _fork_server  # type: ignore[method-assign]
    start = LocalAgent.start

    def start_and_tell(self: LocalAgent, envs: Any, *further: Any) -> None:
        (Path(started) / f"{agents[0]._asked.attempt:03}-{int(envs[0]['RANK']):03}-{host}").touch()
        start(self, envs, *further)

    agents: list[node_agent.NodeAgent] = []
    run = node_agent.NodeAgent.run

    def note_and_run(self: node_agent.NodeAgent) -> int:
        agents.append(self)
        return run(self)

    node_agent.NodeAgent.run = note_and_run  # type: ignore[method-assign]
    LocalAgent.start = start_and_tell  # type: ignore[method-assign]
    os._exit(node_agent.main(argv))


class _Forked:
    """A forked process, with the methods of ``subprocess.Popen`` that ForkServer uses."""

    def __init__(self, pid: int) -> None:
        self.pid, self._code = pid, None

    def poll(self) -> int | None:
        if self._code is None and os.waitpid(self.pid, os.WNOHANG)[0]:
            self._code = 0
        return self._code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        if self._code is None:
            os.waitpid(self.pid, 0)
            self._code = 0


def _fork_server(self: Any) -> None:
    self._socket, theirs = socket.socketpair()
    self._received, self._statuses, self._is_ready = b"", {}, None
    end_with_agent = parent_death.signal_setter(signal.SIGKILL)
    pid = os.fork()
    if pid == 0:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        assert end_with_agent is not None
        end_with_agent()
        self._socket.close()
        os.dup2(theirs.fileno(), 0)
        theirs.close()
        os._exit(forkserver.main(self._device))
    theirs.close()
    self._process = _Forked(pid)
