"""A PBS job whose nodes are processes of this machine, for faults that need agents: its hostfile and its mpiexec.

``optimus launch --launcher mpiexec`` finds both by its environment. The stand-in for mpiexec starts one agent for each
node, with memory of its own, and ends when they have ended. Launcher, coordinator, agents and ranks are the real ones.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megatron.optimus.platform import environment

_MPIEXEC = """#!{python}
import os, signal, subprocess, sys
words = sys.argv[1:]
with open(words[words.index("--hostfile") + 1]) as file:
    hosts = file.read().split()
agents = []
signal.signal(signal.SIGTERM, lambda *_: [agent.terminate() for agent in agents])
for number, host in enumerate(hosts):
    node = {{"PALS_RANKID": str(number), "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "1"}}
    node["{memory}"] = os.path.join({folder!r}, "memory-" + host)
    agents.append(subprocess.Popen(words[words.index("-m") - 1 :], env=os.environ | node))
sys.exit(max(abs(agent.wait()) for agent in agents))
"""


def make_job(folder: Path, num_nodes: int) -> dict[str, str]:
    """Makes a job of nodes n0, n1, ... in ``folder``; returns the variables for ``optimus launch`` in it."""
    folder.mkdir()
    (folder / "nodes").write_text("".join(f"n{number}\n" for number in range(num_nodes)), encoding="utf-8")
    text = _MPIEXEC.format(python=sys.executable, memory=environment.MEMORY_FOLDER, folder=str(folder))
    (folder / "mpiexec").write_text(text, encoding="utf-8")
    (folder / "mpiexec").chmod(0o700)
    path = os.pathsep.join((str(folder), environment.current().get("PATH", "")))
    here = {environment.LAUNCH_ADDRESS: "127.0.0.1", "MASTER_ADDR": "127.0.0.1"}
    return {"PATH": path, "PBS_NODEFILE": str(folder / "nodes"), **here}
