"""A node's network link is cut: the run goes on with a spare, and the node that is cut off ends its own processes.

    sudo python -m tests.campaigns.link_cut

Needs root and Linux's `ip`: each of three nodes is a network namespace of this machine, joined by a bridge. The
launcher runs on the first one, with a stand-in for mpiexec that starts an agent in each. Two nodes train, one rank
each; then the link of the second is set down, which resets no connection. Prints the seconds to the next step that is
new and to the end of the last process of the node; the exit code is 1 where either does not come.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.conftest import ROOT, TINY, environment, write_corpus

NODES = ["optcut0", "optcut1", "optcut2"]
WORDS = "--nodes 2 --nproc-per-node 1 --launcher mpiexec --mpi pals --max-restarts 5 --train-iters 1000000".split()
WORDS += "--eval-interval 0 --save-interval 1000 --memory-checkpoint-interval 4".split()
MPIEXEC = """#!{python}
import os, signal, subprocess, sys
words = sys.argv[1:]
hosts = open(words[words.index("--hostfile") + 1]).read().split()
place = lambda n, host: dict(os.environ, PALS_RANKID=str(n), OPTIMUS_MEMORY_FOLDER="{folder}/memory-" + host)
agent = words[words.index("-m") - 1:]
start = lambda n, host: subprocess.Popen(["ip", "netns", "exec", host, *agent], env=place(n, host))
agents = [start(n, host) for n, host in enumerate(hosts)]
signal.signal(signal.SIGTERM, lambda *_: [agent.terminate() for agent in agents])
sys.exit(max(abs(agent.wait()) for agent in agents))
"""


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def set_up() -> None:
    """Three namespaces with an address each, which know each other by name."""
    names = "".join(f"10.77.0.{number + 1} {node}\n" for number, node in enumerate(NODES))
    ip("link", "add", "optcut", "type", "bridge")
    ip("link", "set", "optcut", "up")
    for number, node in enumerate(NODES):
        ip("netns", "add", node)
        ip("link", "add", f"v{node}", "type", "veth", "peer", "name", "eth0", "netns", node)
        ip("link", "set", f"v{node}", "master", "optcut", "up")
        ip("-n", node, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
        ip("-n", node, "link", "set", "eth0", "up")
        ip("-n", node, "link", "set", "lo", "up")
        folder = Path("/etc/netns") / node
        folder.mkdir(parents=True)
        own = f"10.77.0.{number + 1} {os.uname().nodename}\n"
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}{own}")


def take_down() -> None:
    for node in NODES:
        for pid in processes(node):
            os.kill(pid, signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", node], check=False)
        (Path("/etc/netns") / node / "hosts").unlink(missing_ok=True)
        (Path("/etc/netns") / node).rmdir()
    subprocess.run(["ip", "link", "del", "optcut"], check=False)


def processes(node: str) -> list[int]:
    return [int(pid) for pid in ip("netns", "pids", node).split()]


def run(folder: Path) -> int:
    """Trains, cuts the link and watches; returns the exit code."""
    tokens, metrics = write_corpus(folder / "tokens"), folder / "run/metrics.jsonl"
    (folder / "nodes").write_text("\n".join(NODES) + "\n")
    (folder / "mpiexec").write_text(MPIEXEC.format(python=sys.executable, folder=folder))
    (folder / "mpiexec").chmod(0o755)
    env = {**environment(), "PATH": f"{folder}:{os.environ['PATH']}", "PBS_NODEFILE": str(folder / "nodes")}
    command = [sys.executable, "-m", "megatron.optimus.launch", *TINY, *WORDS, "--data-path", str(tokens)]
    command = ["ip", "netns", "exec", NODES[0], *command, "--run-dir", str(folder / "run")]
    with (folder / "log").open("wb") as log:
        launcher = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=env | {"GLOO_SOCKET_IFNAME": "eth0"})

    def steps() -> list[dict[str, Any]]:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait(condition: Callable[[], Any], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or launcher.poll() is not None:
                raise TimeoutError((folder / "log").read_text()[-4000:])
            time.sleep(0.02)

    try:
        wait(lambda: len(steps()) > 15, 300)
        ip("link", "set", f"v{NODES[1]}", "down")
        last, now = steps()[-1]["step"], time.time()
        wait(lambda: any(step["step"] > last and step["wall_time"] > now + 1 for step in steps()), 120)
        new = next(step for step in steps() if step["step"] > last and step["wall_time"] > now + 1)
        print(f"a new step {new['wall_time'] - now:.1f} s after the cut, load {os.getloadavg()[0]:.1f}", flush=True)
        wait(lambda: not processes(NODES[1]), 150)
        print(f"the last process of the node ended {time.time() - now:.1f} s after the cut")
        assert f"lost nodes: {NODES[1]} (no heartbeat of its agent" in (folder / "log").read_text()
    except (TimeoutError, AssertionError) as error:
        print(error)
        return 1
    finally:
        launcher.kill()
        launcher.wait()
    return 0


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        set_up()
        with tempfile.TemporaryDirectory() as folder:
            return run(Path(folder))
    finally:
        take_down()


if __name__ == "__main__":
    sys.exit(main())
