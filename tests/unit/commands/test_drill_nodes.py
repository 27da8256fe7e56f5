"""A job whose nodes are processes of this machine: the stand-in for mpiexec starts one agent for each node."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.optimus.commands import drill_nodes
from megatron.optimus.commands.drill_nodes import make_job
from megatron.optimus.launcher import cluster
from megatron.optimus.platform import environment

_AGENT = """
import os, sys
from pathlib import Path
rank, names = os.environ["PALS_RANKID"], ["{memory}", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", *{more}]
Path(sys.argv[1], rank).write_text(" ".join(os.environ.get(name, "-") for name in names))
sys.exit(int(rank) * 4)
"""


_GPUS = ["CUDA_VISIBLE_DEVICES", "NCCL_HOSTID"]


@pytest.mark.parametrize(
    ("gpus_per_node", "expected"),
    [(0, ["4,5,7 -"] * 3), (1, ["4 n0", "5 n1", "7 n2"]), (2, ["4,5 n0", "7,4 n1", "5,7 n2"])],
)
def test_every_node_has_one_agent_with_memory_and_gpus_of_its_own(
    gpus_per_node: int, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    folder = tmp_path / "job"
    job = make_job(folder, 3, gpus_per_node)
    assert cluster.detect_allocation(job).hosts == ("n0", "n1", "n2")
    assert job["PATH"].split(os.pathsep)[0] == str(folder) and job[environment.LAUNCH_ADDRESS] == "127.0.0.1"
    (tmp_path / "agent.py").write_text(_AGENT.format(memory=environment.MEMORY_FOLDER, more=_GPUS))
    words = ["mpiexec", "--hostfile", job["PBS_NODEFILE"], "--ppn", "1", sys.executable, "-m", "agent", str(tmp_path)]
    variables = {**os.environ, **job, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([folder / words[0], *words[1:]], env=variables, check=False, timeout=60)
    assert done.returncode == 8  # the largest of 0, 4 and 8
    for number in range(3):
        assert (tmp_path / str(number)).read_text() == f"{folder}/memory-n{number} 0 1 {expected[number]}"


def test_nodes_share_the_gpus_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(drill_nodes, "device_count", lambda kind: {"cuda": 1}[kind])
    found = drill_nodes._gpus_of_nodes(3, 1)
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found.values()] == ["0", "0", "0"]
    assert len({one["NCCL_HOSTID"] for one in found.values()}) == 3  # or NCCL would refuse the second rank of a GPU
