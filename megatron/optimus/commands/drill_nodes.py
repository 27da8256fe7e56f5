"""A PBS job whose nodes are processes of this machine, for faults that need agents: its hostfile and its mpiexec.

``optimus launch --launcher mpiexec`` finds both by its environment. The stand-in for mpiexec starts one agent for each
node, with memory of its own, and ends when they have ended. Launcher, coordinator, agents and ranks are the real ones.

With CUDA a node has a GPU for each of its ranks. Where the machine has fewer than all nodes together, nodes share GPUs.
NCCL takes each node for a host: it uses TCP between them, and lets their ranks have the same GPU, as it does not inside
a host.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megatron.optimus.platform import environment
from megatron.optimus.platform.device import device_count

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
    node |= {gpus!r}.get(host, {{}})
    agents.append(subprocess.Popen(words[words.index("-m") - 1 :], env=os.environ | node))
sys.exit(max(abs(agent.wait()) for agent in agents))
"""


def make_job(folder: Path, num_nodes: int, gpus_per_node: int = 0) -> dict[str, str]:
    """Makes a job of nodes n0, n1, ... in ``folder``; returns the variables for ``optimus launch`` in it.

    ``gpus_per_node``: of those of this machine; 0 for ranks on the CPU.
    """
    folder.mkdir()
    (folder / "nodes").write_text("".join(f"n{number}\n" for number in range(num_nodes)), encoding="utf-8")
    gpus = _gpus_of_nodes(num_nodes, gpus_per_node) if gpus_per_node else {}
    text = _MPIEXEC.format(python=sys.executable, memory=environment.MEMORY_FOLDER, folder=str(folder), gpus=gpus)
    (folder / "mpiexec").write_text(text, encoding="utf-8")
    (folder / "mpiexec").chmod(0o700)
    path = os.pathsep.join((str(folder), environment.current().get("PATH", "")))
    here = {environment.LAUNCH_ADDRESS: "127.0.0.1", "MASTER_ADDR": "127.0.0.1"}
    return {"PATH": path, "PBS_NODEFILE": str(folder / "nodes"), **here}


def _gpus_of_nodes(num_nodes: int, per_node: int) -> dict[str, dict[str, str]]:
    """The variables of each node's ranks: their GPUs in turns, and that NCCL takes the node for a host."""
    named = environment.current().get("CUDA_VISIBLE_DEVICES")
    seen = named.split(",") if named else [str(number) for number in range(device_count("cuda"))]
    found = {}
    for node in range(num_nodes):
        own = [seen[(node * per_node + place) % len(seen)] for place in range(per_node)]
        found[f"n{node}"] = {"CUDA_VISIBLE_DEVICES": ",".join(own), "NCCL_HOSTID": f"n{node}", "NCCL_NET": "Socket"}
    return found
