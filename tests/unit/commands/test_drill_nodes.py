"""A job whose nodes are processes of this machine: the stand-in for mpiexec starts one agent for each node."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from megatron.optimus.commands.drill_nodes import make_job
from megatron.optimus.launcher import cluster
from megatron.optimus.platform import environment

_AGENT = """
import os, sys
from pathlib import Path
rank, memory = os.environ["PALS_RANKID"], os.environ["{memory}"]
Path(sys.argv[1], rank).write_text(" ".join([memory, os.environ["PALS_LOCAL_RANKID"], os.environ["PALS_LOCAL_SIZE"]]))
sys.exit(int(rank) * 4)
"""


def test_every_node_has_one_agent_with_memory_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    job = make_job(folder, 3)
    assert cluster.detect_allocation(job).hosts == ("n0", "n1", "n2")
    assert job["PATH"].split(os.pathsep)[0] == str(folder) and job[environment.LAUNCH_ADDRESS] == "127.0.0.1"
    (tmp_path / "agent.py").write_text(_AGENT.format(memory=environment.MEMORY_FOLDER))
    words = ["mpiexec", "--hostfile", job["PBS_NODEFILE"], "--ppn", "1", sys.executable, "-m", "agent", str(tmp_path)]
    variables = {**os.environ, **job, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([folder / words[0], *words[1:]], env=variables, check=False, timeout=60)
    assert done.returncode == 8  # the largest of 0, 4 and 8
    for number in range(3):
        assert (tmp_path / str(number)).read_text() == f"{folder}/memory-n{number} 0 1"
