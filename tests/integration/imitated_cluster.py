"""A PBS job of nodes that are forked ranks of this machine, and a stand-in for mpiexec that runs them.

The launcher is a process of its own and calls the stand-in as it would PALS's mpiexec. Ranks are forked by the test's
process, which has imported everything, so that an attempt takes no seconds of imports.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from tests.helpers import _CONTEXT, _program
from tests.integration.conftest import environment
from tests.integration.launched_run import LaunchedRun

MPIEXEC = """#!{python}
import os, signal, sys
from multiprocessing.connection import Client
words = sys.argv[1:]
assert os.environ["OPTIMUS_RENDEZVOUS_TOKEN"] not in words
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
    """

    def __init__(self, folder: Path, hosts: list[str], run_dir: Path) -> None:
        super().__init__(run_dir, folder / "log")
        self.folder = folder
        self.attempts: list[list[str]] = []  # nodes of each
        self._ranks: dict[str, list[Any]] = {}
        self._messages: list[str] = []
        folder.mkdir()
        (folder / "nodes").write_text("\n".join(hosts) + "\n")
        self._listener = Listener(str(folder / "socket"))
        (folder / "mpiexec").write_text(MPIEXEC.format(python=sys.executable, address=folder / "socket"))
        (folder / "mpiexec").chmod(0o755)
        threading.Thread(target=self._serve, daemon=True).start()

    def launch(self, *words: str) -> None:
        """Starts ``optimus launch`` in the job."""
        env = {**environment(), "PATH": f"{self.folder}:{os.environ['PATH']}", "MASTER_ADDR": "127.0.0.1"}
        env |= {"PBS_NODEFILE": str(self.folder / "nodes"), "OPTIMUS_MEMORY_FOLDER": str(self.folder / "memory")}
        start = ["--launcher", "mpiexec", "--mpi", "pals", "--nproc-per-node", "1", "--run-dir", str(self.run_dir)]
        command = [sys.executable, "-m", "megatron.optimus.launch", *start, *words]
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env)

    def __enter__(self) -> ImitatedCluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        for rank in [rank for ranks in self._ranks.values() for rank in ranks]:
            rank.kill()
        self._listener.close()

    def lose(self, host: str) -> None:
        """Kills the node's ranks, takes its memory, and has mpiexec say so."""
        for rank in self._ranks[host]:
            rank.kill()
        shutil.rmtree(self.memory(host), ignore_errors=True)
        self._messages.append(f"{host}.hsn: shepherd died from signal 9\n")

    def signal_all(self, number: int) -> None:
        for rank in [rank for ranks in self._ranks.values() for rank in ranks if rank.is_alive()]:
            os.kill(rank.pid, number)

    def memory(self, host: str) -> Path:
        return self.folder / f"memory-{host}"

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._run(self._listener.accept())

    def _run(self, client: Connection) -> None:
        """One attempt."""
        hosts, per_node, env, (module, *argv) = client.recv()
        printed = self.folder / f"attempt-{len(self.attempts)}"
        printed.touch()
        self.attempts.append(hosts)
        self._ranks = {host: [] for host in hosts}
        for number in range(len(hosts) * per_node):
            host = hosts[number // per_node]
            place = {"PALS_RANKID": number, "PALS_LOCAL_RANKID": number % per_node, "PALS_LOCAL_SIZE": per_node}
            variables = env | {name: str(value) for name, value in place.items()}
            variables["OPTIMUS_MEMORY_FOLDER"] = str(self.memory(host))
            words = (module, argv, variables, str(printed), str(printed))
            rank = _CONTEXT.Process(target=_program, args=words, daemon=True)
            rank.start()
            self._ranks[host].append(rank)
        everyone = [rank for ranks in self._ranks.values() for rank in ranks]
        with printed.open() as output, contextlib.suppress(OSError, EOFError):
            is_over = False
            while not is_over:
                is_over = not any(rank.is_alive() for rank in everyone)
                if client.poll(0.02) and client.recv() == "stop":
                    self.signal_all(signal.SIGTERM)
                if text := output.read():
                    client.send(text)
                while self._messages:
                    client.send(self._messages.pop())
            client.send(max(abs(rank.exitcode) for rank in everyone))
