"""Every launcher's variables, as they are found on the machines, and what contradicts itself."""

import os
import sys
import types
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.platform import environment
from megatron.optimus.platform.environment import Launcher, RankEnvironment, detect

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "1234",
}
PALS = {"PALS_RANKID": "13", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "12", "PMI_RANK": "13", "PMI_SIZE": "24"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "nid[003-004,009]",
    "SLURM_JOB_ID": "4711",
}


@pytest.fixture
def no_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_has_mpi4py", lambda: False)


@pytest.fixture
def mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package: 24 ranks, rank 0 on host "root"."""
    world = types.SimpleNamespace(Get_size=lambda: 24, bcast=lambda value, root: "root")
    module = types.ModuleType("mpi4py")
    module.MPI = types.SimpleNamespace(COMM_WORLD=world)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    monkeypatch.setattr(environment, "_has_mpi4py", lambda: True)


def test_torchrun() -> None:
    assert detect(TORCHRUN) == RankEnvironment(5, 8, 1, 4, "node7", 1234, Launcher.TORCHRUN)


def test_torchrun_started_by_another_launcher_counts_first() -> None:
    assert detect({**SLURM, **PALS, **TORCHRUN}) == detect(TORCHRUN)


def test_alone() -> None:
    first = detect({})
    assert (first.rank, first.world_size, first.local_rank, first.local_world_size) == (0, 1, 0, 1)
    assert first.master_addr == "127.0.0.1" and 1024 < first.master_port < 65536
    assert first.launcher is Launcher.ALONE
    assert detect({"WORLD_SIZE": "8", "MASTER_ADDR": "x"}).launcher is Launcher.ALONE  # exported by a job script


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert detect() == detect(TORCHRUN)


def test_pals_on_aurora(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("x1.hsn.cm.aurora.alcf.anl.gov\nx2.hsn.cm.aurora.alcf.anl.gov\n")
    env = {**PALS, "PBS_NODEFILE": str(nodes), "PBS_JOBID": "8123456.aurora-pbs"}
    expected = RankEnvironment(13, 24, 1, 12, "x1.hsn.cm.aurora.alcf.anl.gov", 23456, Launcher.MPI)
    assert detect(env) == expected
    assert detect({**env, "MASTER_ADDR": "x9", "MASTER_PORT": "77"}).master_addr == "x9"
    assert detect({**env, "MASTER_PORT": "77"}).master_port == 77


@pytest.mark.parametrize("rank_name", ["PALS_RANKID", "PMIX_RANK"])
def test_ranks_without_a_size_take_it_from_world_size_or_mpi(
    rank_name: str, mpi4py: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {rank_name: "13", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "12"}
    assert detect(env) == RankEnvironment(13, 24, 1, 12, "root", 29500, Launcher.MPI)
    assert detect({**env, "WORLD_SIZE": "36"}).world_size == 36
    monkeypatch.setattr(environment, "_has_mpi4py", lambda: False)
    with pytest.raises(ConfigError, match=r"rank 13 .* WORLD_SIZE=<n>\) or pip install mpi4py"):
        detect(env)


def test_open_mpi_and_mpich_on_one_machine_need_nothing_else(no_mpi4py: None) -> None:
    open_mpi = {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}
    open_mpi |= {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "PMIX_RANK": "1", "SLURM_PROCID": "0"}
    expected = RankEnvironment(1, 2, 1, 2, "127.0.0.1", 29500, Launcher.MPI, True)
    assert detect(open_mpi) == expected
    assert detect({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}) == expected


def test_mpich_on_several_machines_asks_mpi_for_the_first(mpi4py: None) -> None:
    assert (
        detect({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}).master_addr == "root"
    )


def test_srun() -> None:
    assert detect(SLURM) == RankEnvironment(5, 6, 1, 2, "nid003", 24711, Launcher.SLURM)


def test_srun_with_few_variables() -> None:
    env = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7"}
    assert detect(env) == RankEnvironment(1, 4, 1, 4, "10.0.0.7", 29500, Launcher.SLURM)
    assert detect({**SLURM, "SLURM_NODEID": "9"}).local_world_size == 6  # not in the list: the cautious guess


def test_srun_step_smaller_than_its_allocation() -> None:
    assert detect({**SLURM, "SLURM_STEP_NUM_TASKS": "6", "SLURM_NTASKS": "64"}).world_size == 6


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu7", "gpu7"), ("gpu7,gpu9", "gpu7"), ("n[01-03,7]x,m2", "n01x"), ("a-b[5],c", "a-b5"), ("x[2,4]", "x2")],
)
def test_first_slurm_host(nodes: str, first: str) -> None:
    assert detect({**SLURM, "SLURM_STEP_NODELIST": nodes}).master_addr == first


@pytest.mark.parametrize(
    ("env", "part"),
    [
        ({**TORCHRUN, "RANK": "8"}, "rank 8 is outside 0..7"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "local rank 4 is outside 0..3"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "9 processes on this node but 8 in all"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "outside"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK='-1'"),
        ({**TORCHRUN, "WORLD_SIZE": "eight"}, "WORLD_SIZE='eight'"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({"RANK": "0"}, "RANK=0 is set without WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "set one of LOCAL_RANK"),
        ({**PALS, "PBS_NODEFILE": "/no/such/file"}, "PBS_NODEFILE=/no/such/file cannot be read"),
        (PALS, "export MASTER_ADDR="),
        ({name: value for name, value in TORCHRUN.items() if name != "MASTER_ADDR"}, "export MASTER_ADDR="),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, "export MASTER_ADDR="),
    ],
)
def test_contradictions_and_gaps(env: dict[str, str], part: str, no_mpi4py: None) -> None:
    with pytest.raises(ConfigError) as info:
        detect(env)
    assert part in str(info.value)


def test_export_is_what_torchrun_would_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*TORCHRUN, "DS_ACCELERATOR"]:
        monkeypatch.setenv(name, "left over")  # and restored after the test
    launch = detect(SLURM)
    environment.export(launch, "cpu")
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    read_back = detect(dict(os.environ))
    assert read_back.launcher is Launcher.TORCHRUN
    assert (read_back.rank, read_back.world_size, read_back.local_rank) == (5, 6, 1)
    assert (read_back.master_addr, read_back.master_port) == (launch.master_addr, launch.master_port)


def test_set_default_leaves_the_users_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIMUS_TEST_A", "user")
    environment.set_default("OPTIMUS_TEST_A", "ours")
    assert os.environ["OPTIMUS_TEST_A"] == "user"


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
    monkeypatch.setattr(os, "environ", {**common, **of_agent, environment.JOB_TOKEN: "secret"})
    env = environment.for_agents_rank(5, 1, 2, {"OPTIMUS_RENDEZVOUS_TOKEN": "t", "WORLD_SIZE": "8"})
    new = environment.detect(env)
    assert {**asdict(new), "launcher": None} == {**asdict(old), "launcher": None}
    assert env.items() >= common.items() and not started.keys() & env.keys() and environment.JOB_TOKEN not in env
