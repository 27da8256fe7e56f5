"""The command lines that start ranks: every rank gets started once, on the right nodes, with the right environment."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.launcher.cluster import AURORA, GENERIC, Allocation, BatchSystem
from megatron.optimus.launcher.command import LaunchMethod, LaunchOptions, Mpi, build_launch
from megatron.optimus.platform import environment

PBS = Allocation(BatchSystem.PBS, tuple(f"x{n}.hostmgmt.site" for n in range(5)))
THREE = Allocation(BatchSystem.PBS, PBS.hosts[:3])
SLURM = Allocation(BatchSystem.SLURM, ("g1", "g2", "g3"), devices_per_node=8)
NOWHERE = Allocation(BatchSystem.NONE, ())


def value_after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_aurora() -> None:
    launch = build_launch(PBS, LaunchOptions(nodes=4, system=AURORA), ["--preset", "mula-1b"], {})
    words = launch.command(launch.hosts, "FILE")
    assert launch.world_size == 48
    assert launch.spares == ("x4.hostmgmt.site",)
    assert words[0] == "mpiexec"
    assert (value_after(words, "-n"), value_after(words, "--ppn"), value_after(words, "--hostfile")) == (
        "48",
        "12",
        "FILE",
    )
    assert words[-4:] == ["-m", "megatron.optimus.pretrain", "--preset", "mula-1b"]
    added = launch.environment(launch.hosts)
    assert added["MASTER_ADDR"] == "x0.hsn.cm.aurora.alcf.anl.gov"
    assert added["WORLD_SIZE"] == "48"
    assert added["CCL_ATL_TRANSPORT"] == "mpi"


def test_aurora_binds_every_rank_and_no_worker_shares_its_cores() -> None:
    assert AURORA.cpu_bind is not None
    cores = [range(*(int(n) for n in part.split("-"))) for part in AURORA.cpu_bind.removeprefix("list:").split(":")]
    workers = [int(n) for n in AURORA.environment["CCL_WORKER_AFFINITY"].value.split(",")]
    bound = [core for rank in cores for core in (*rank, rank.stop)]
    assert len(cores) == len(workers) == AURORA.ranks_per_node
    assert len(set(bound + workers)) == len(bound + workers)
    assert not {0, 52, 104, 156} & set(bound + workers)  # reserved for the operating system


def test_the_binding_list_is_for_its_number_of_ranks_only() -> None:
    assert build_launch(PBS, LaunchOptions(system=AURORA, nproc_per_node=6), [], {}).cpu_bind is None
    assert build_launch(PBS, LaunchOptions(system=AURORA, cpu_bind="none"), [], {}).cpu_bind is None
    assert (
        build_launch(PBS, LaunchOptions(system=AURORA, nproc_per_node=6, cpu_bind="depth"), [], {}).cpu_bind == "depth"
    )


def test_workers_cores_are_for_their_number_of_ranks_and_workers_only() -> None:
    """oneCCL takes a core for each worker of each rank, no more and no fewer."""
    for launch_options, env in (
        (LaunchOptions(system=AURORA, nproc_per_node=6), {}),
        (LaunchOptions(system=AURORA), {"CCL_WORKER_COUNT": "4"}),
    ):
        launch = build_launch(PBS, launch_options, [], env)
        assert "CCL_WORKER_AFFINITY" not in launch.environment(launch.hosts)
        mine = build_launch(PBS, launch_options, [], {**env, "CCL_WORKER_AFFINITY": "1,2"})
        assert "CCL_WORKER_AFFINITY" not in mine.environment(mine.hosts)
    assert "CCL_WORKER_AFFINITY" in build_launch(PBS, LaunchOptions(system=AURORA), [], {}).settings


def test_the_users_environment_wins() -> None:
    launch = build_launch(PBS, LaunchOptions(system=AURORA), [], {"CCL_ATL_TRANSPORT": "ofi", "MASTER_ADDR": "head"})
    added = launch.environment(launch.hosts)
    assert "CCL_ATL_TRANSPORT" not in added
    assert "MASTER_ADDR" not in added
    assert launch.user_settings["CCL_ATL_TRANSPORT"].value == "ofi"


def test_a_run_on_one_node_listens_there_only() -> None:
    for allocation, env, expected in ((PBS, {}, "127.0.0.1"), (PBS, {"MASTER_ADDR": "head"}, None)):
        launch = build_launch(allocation, LaunchOptions(nproc_per_node=2, nodes=1), [], env)
        assert launch.environment(launch.hosts).get("MASTER_ADDR") == expected


def test_every_setting_has_a_reason() -> None:
    for system, env in ((AURORA, {}), (AURORA, {"MASTER_PORT": "1234"}), (GENERIC, {})):
        launch = build_launch(PBS, LaunchOptions(nproc_per_node=12, system=system), [], env)
        assert all(len(launch.reason(name)) > 10 for name in {**launch.environment(PBS.hosts), **launch.user_settings})


def test_slurm() -> None:
    launch = build_launch(SLURM, LaunchOptions(), ["--lr", "1"], {})
    words = launch.command(launch.hosts, "FILE")
    assert words[0] == "srun"
    assert [value_after(words, f"--{name}") for name in ("nodes", "ntasks", "ntasks-per-node")] == ["3", "24", "8"]
    assert "--kill-on-bad-exit=1" in words
    assert "--nodelist" not in words
    fewer = build_launch(SLURM, LaunchOptions(nodes=2), [], {})
    assert value_after(fewer.command(("g1", "g3"), "FILE"), "--nodelist") == "g1,g3"


def test_other_mpis() -> None:
    launch = build_launch(PBS, LaunchOptions(nproc_per_node=2, mpi=Mpi.OPENMPI), [], {})
    words = launch.command(launch.hosts, "FILE")
    assert value_after(words, "--map-by") == "ppr:2:node"
    exported = [words[i + 1] for i, word in enumerate(words) if word == "-x"]
    assert exported == ["MASTER_ADDR", "MASTER_PORT", "OPTIMUS_RENDEZVOUS_TOKEN", "WORLD_SIZE"]
    own = {"MASTER_ADDR": "head", "FI_MR_CACHE_MONITOR": "memhooks"}
    words = build_launch(PBS, LaunchOptions(system=AURORA, mpi=Mpi.OPENMPI), [], own).command(PBS.hosts, "FILE")
    assert {words[i + 1] for i, word in enumerate(words) if word == "-x"} >= own.keys()
    words = build_launch(PBS, LaunchOptions(nproc_per_node=2), [], {}).command(PBS.hosts, "FILE")
    assert (value_after(words, "-n"), value_after(words, "-ppn"), value_after(words, "-f")) == ("10", "2", "FILE")


def test_torchrun_on_several_nodes_is_started_once_a_node() -> None:
    launch = build_launch(SLURM, LaunchOptions(method=LaunchMethod.TORCHRUN), [], {})
    words = launch.command(launch.hosts, "FILE")
    assert [value_after(words, f"--{name}") for name in ("ntasks", "ntasks-per-node")] == ["3", "1"]
    assert [value_after(words, f"--{name}") for name in ("nnodes", "nproc-per-node")] == ["3", "8"]
    assert value_after(words, "--rdzv-endpoint") == "g1:29500"
    assert "WORLD_SIZE" not in launch.environment(launch.hosts)  # torchrun sets its own
    own = build_launch(SLURM, LaunchOptions(method=LaunchMethod.TORCHRUN), [], {"MASTER_ADDR": "head"})
    assert value_after(own.command(own.hosts, "FILE"), "--rdzv-endpoint") == "head:29500"
    alone = build_launch(NOWHERE, LaunchOptions(method=LaunchMethod.TORCHRUN, nproc_per_node=2), [], {}).command(
        (), "FILE"
    )
    assert "--standalone" in alone
    assert "mpiexec" not in alone


def test_every_run_has_a_port_of_its_own_unless_one_is_given() -> None:
    for method in (LaunchMethod.TORCHRUN, LaunchMethod.SRUN):
        first, second = (
            build_launch(SLURM, LaunchOptions(method=method, port=port), [], {}) for port in (20001, 20002)
        )
        assert first.environment(first.hosts)["MASTER_PORT"] == "20001"
        given = build_launch(SLURM, LaunchOptions(method=method, port=20003), [], {"MASTER_PORT": "30000"})
        assert "MASTER_PORT" not in given.environment(given.hosts)
        if method is LaunchMethod.TORCHRUN:
            words = [launch.command(launch.hosts, "FILE") for launch in (first, second, given)]
            assert [value_after(w, "--rdzv-endpoint") for w in words] == ["g1:20001", "g1:20002", "g1:30000"]
            assert len({value_after(w, "--rdzv-id") for w in words}) == 3  # of one id, they would join each other
    with pytest.raises(ConfigError, match="MASTER_PORT='x' is not a port"):
        build_launch(SLURM, LaunchOptions(), [], {"MASTER_PORT": "x"})


@pytest.mark.parametrize(
    ("allocation", "launch_options", "message"),
    [
        (PBS, LaunchOptions(nodes=6, nproc_per_node=1), "--nodes=6 but the job has 5 nodes"),
        (PBS, LaunchOptions(), "--nproc-per-node is missing"),
        (NOWHERE, LaunchOptions(), "--nproc-per-node is missing"),
        (NOWHERE, LaunchOptions(nodes=2, nproc_per_node=1), "--nodes=2 needs a job"),
    ],
)
def test_what_cannot_be_started(allocation: Allocation, launch_options: LaunchOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_launch(allocation, launch_options, [], {})


def test_one_agent_a_node_with_all_its_cores() -> None:
    for allocation, options, expected in (
        (THREE, LaunchOptions(mpi=Mpi.PALS, cpu_bind="list:0-3:4-7"), "-n 3 --ppn 1 --hostfile F --cpu-bind none"),
        (THREE, LaunchOptions(mpi=Mpi.MPICH), "-genvall -n 3 -ppn 1 -f F -disable-auto-cleanup"),
        (SLURM, LaunchOptions(), "--nodes 3 --ntasks 3 --ntasks-per-node 1 --kill-on-bad-exit=0 --no-kill --overlap"),
    ):
        started = build_launch(allocation, replace(options, nproc_per_node=2), [], {})
        assert started.why_no_agents({}) == ""
        words = started.agent_command(allocation.hosts, "F", "cpu")
        assert expected in " ".join(words)
        assert words[-4:] == [sys.executable, "-m", "megatron.optimus.launcher.node_agent", "cpu"]
    words = build_launch(THREE, LaunchOptions(nproc_per_node=2, mpi=Mpi.OPENMPI), [], {}).agent_command(
        THREE.hosts, "F", "cpu"
    )
    passed = {words[i + 1] for i, word in enumerate(words) if word == "-x"}
    assert passed >= set(environment.AGENT_VARIABLES)


def test_where_mpiexec_itself_has_to_start_the_ranks() -> None:
    aurora = build_launch(THREE, LaunchOptions(system=AURORA), [], {})
    assert "CCL_ATL_TRANSPORT=mpi needs ranks that mpiexec has started" in aurora.why_no_agents({})
    own = {"CCL_ATL_TRANSPORT": "ofi", "CCL_PROCESS_LAUNCHER": "none", "CCL_KVS_MODE": "pmi"}
    own |= {"CCL_KVS_USE_MPI_RANKS": "0"}
    without = build_launch(THREE, LaunchOptions(system=AURORA), [], own)
    assert without.why_no_agents(own) == ""
    assert without.agent_cores()[:2] == [[2, 3, 4], [10, 11, 12]] and len(without.agent_cores()) == 12
    bound = build_launch(THREE, LaunchOptions(nproc_per_node=2, cpu_bind="depth"), [], {})
    assert "--cpu-bind=depth is for mpiexec" in bound.why_no_agents({})
    assert build_launch(SLURM, LaunchOptions(nproc_per_node=2, method=LaunchMethod.TORCHRUN), [], {}).why_no_agents({})
    for text, problem in (("list:0-1", "has cores for 1 ranks"), ("list:0:x", "'x' is not of the form")):
        with pytest.raises(ConfigError, match=problem):
            build_launch(THREE, LaunchOptions(nproc_per_node=2, cpu_bind=text), [], {}).agent_cores()
