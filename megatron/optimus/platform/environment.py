"""Reads rank, local rank and world size from the launcher's environment; no other module uses os.environ.

Launchers pass these through variables of their own:

    torchrun                 RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    mpiexec (Open MPI)       OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}
    mpiexec (MPICH, Intel)   PMI_{RANK,SIZE}, MPI_LOCALRANKID, MPI_LOCALNRANKS
    mpiexec (PALS, Aurora)   PALS_RANKID or PMIX_RANK, PALS_LOCAL_RANKID, PALS_LOCAL_SIZE; the size may be missing
    srun                     SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_STEP_NODELIST

The first complete set in this order counts: torchrun may itself be started by mpiexec or srun, and mpiexec inside a
SLURM allocation, where every process inherits the batch script's SLURM_PROCID=0. MASTER_ADDR and MASTER_PORT, where
the user sets them, always count.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import re
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from megatron.optimus.config.schema import ConfigError

_LOCAL_RANK = ("LOCAL_RANK", "PALS_LOCAL_RANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK")
_LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "PALS_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
# What a process has that mpiexec or srun has started, and a rank that an agent has forked must not take for its own.
_STARTED_PROCESS = re.compile(
    r"(PALS|PMI|PMIX|OMPI|PRTE|MPI)_.*|(SLURM_(PROCID|LOCALID|NODEID|NTASKS|NPROCS|GTIDS|TASK_PID|TASKS_PER_NODE|STEP_.*))"
)
_PROCESS_NUMBER = ("PALS_RANKID", "PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_DEFAULT_PORT = 29500
RENDEZVOUS_TOKEN = "OPTIMUS_RENDEZVOUS_TOKEN"  # a secret of the run; `optimus launch` makes one
COORDINATOR = "OPTIMUS_COORDINATOR"  # where the agents of the nodes find it: address and port
JOB_TOKEN = "OPTIMUS_JOB_TOKEN"  # a secret that coordinator and agents share
STARTER = "OPTIMUS_STARTER"  # which mpiexec or srun of the launch has started this agent
AGENT_VARIABLES = (COORDINATOR, JOB_TOKEN, STARTER)
ATTEMPT = "OPTIMUS_ATTEMPT"  # which attempt of which launch a rank belongs to, from 1 on
LAUNCH_ADDRESS = "OPTIMUS_LAUNCH_ADDRESS"  # of this machine, where the coordinator listens; the user's choice
AGENT_FOLDER = "OPTIMUS_AGENT_FOLDER"  # where the launcher on this machine reads the heartbeats of its ranks
DRILL_FOLDER = "OPTIMUS_DRILL_FOLDER"  # where `optimus drill` asks ranks for faults; unset in every other run
MEMORY_FOLDER = "OPTIMUS_MEMORY_FOLDER"  # where ranks keep memory checkpoints, on each node; outlives them


class Launcher(str, Enum):
    """The launcher whose variables were found."""

    TORCHRUN = "torchrun"
    MPI = "mpi"
    SLURM = "slurm"
    ALONE = "alone"  # no launcher: a run of one process


@dataclass(frozen=True)
class RankEnvironment:
    """Rank and world size of this process, and where rank 0 listens."""

    rank: int
    world_size: int
    local_rank: int  # among the processes of this node
    local_world_size: int  # processes on this node; world_size where the launcher does not say
    master_addr: str  # where rank 0 listens
    master_port: int
    launcher: Launcher
    is_one_machine: bool = False  # the launcher says that all processes are on this node

    def __post_init__(self) -> None:
        for what, index, size in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
        ):
            if not 0 <= index < size:
                raise ConfigError(
                    f"{self.launcher.value} environment: {what} {index} is outside 0..{size - 1} (of {size} processes);"
                    " unset variables left over from another launch"
                )
        if self.local_world_size > self.world_size:
            raise ConfigError(
                f"{self.launcher.value} environment: {self.local_world_size} processes on this node but "
                f"{self.world_size} in all; unset variables left over from another launch"
            )
        if not 0 < self.master_port < 65536:
            raise ConfigError(f"MASTER_PORT={self.master_port} is not a port; use 1024 to 65535")


def detect(environ: Mapping[str, str] | None = None) -> RankEnvironment:
    """Reads the rank environment from ``environ`` (default: that of this process).

    Raises:
        ConfigError: where variables contradict each other, or nothing says where rank 0 listens.
    """
    env = os.environ if environ is None else environ
    found = _rank_and_size(env)
    if found is None:
        return RankEnvironment(0, 1, 0, 1, "127.0.0.1", free_port(), Launcher.ALONE, True)
    launcher, rank, world_size = found
    stated_local_size = _local_size(env, launcher)
    # A guess too high only costs CPU threads; one too low would oversubscribe the node.
    local_size = stated_local_size or world_size
    local_rank = _local_rank(env, launcher, world_size)
    single_node = world_size in (1, stated_local_size)
    port = _integer(env, "MASTER_PORT")
    address = env.get("MASTER_ADDR") or _master_addr(env, launcher, single_node)
    port = port or _port_of_job(env)
    return RankEnvironment(rank, world_size, local_rank, local_size, address, port, launcher, single_node)


def worker_index_and_count(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Returns (index, count) of this process among those that share independent work, such as files.

    Counts the processes of one launch, as ``detect`` does, times the tasks of a SLURM job array. Unlike ``detect`` it
    needs no address of rank 0, as these processes do not communicate. PBS does not tell the number of an array's tasks.
    """
    env = os.environ if environ is None else environ
    found = _rank_and_size(env)
    rank, size = (found[1], found[2]) if found is not None else (0, 1)
    task, tasks = _integer(env, "SLURM_ARRAY_TASK_ID"), _integer(env, "SLURM_ARRAY_TASK_COUNT")
    if task is None or tasks is None:
        return rank, size
    first, step = _integer(env, "SLURM_ARRAY_TASK_MIN") or 0, _integer(env, "SLURM_ARRAY_TASK_STEP") or 1
    number = (task - first) // step
    if not 0 <= number < tasks:
        raise ConfigError(f"SLURM_ARRAY_TASK_ID={task} does not fit an array of {tasks} tasks from {first} by {step}")
    return number * size + rank, tasks * size


def export(launch: RankEnvironment, device_type: str) -> None:
    """Sets torchrun's variables in this process, for libraries that read nothing else (DeepSpeed: LOCAL_RANK).

    Args:
        launch: what to write.
        device_type: "cpu", "cuda" or "xpu", so that DeepSpeed chooses the same accelerator.
    """
    os.environ.update(
        RANK=str(launch.rank),
        WORLD_SIZE=str(launch.world_size),
        LOCAL_RANK=str(launch.local_rank),
        LOCAL_WORLD_SIZE=str(launch.local_world_size),
        MASTER_ADDR=launch.master_addr,
        MASTER_PORT=str(launch.master_port),
        DS_ACCELERATOR=device_type,
    )


def current() -> dict[str, str]:
    """Returns a copy of this process's environment, to start other processes with."""
    return dict(os.environ)


def for_local_rank(rank: int, num_ranks: int, master_port: int, token: str = "") -> dict[str, str]:
    """Returns this environment plus torchrun's variables for one of ``num_ranks`` ranks on this machine."""
    return {
        RENDEZVOUS_TOKEN: token,
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master_port),
    }


def for_agents_rank(rank: int, local_rank: int, num_local: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a rank that a node's agent starts: ``variables``, and torchrun's.

    Variables of mpiexec and srun about their process are left out: they tell of the agent.
    """
    own = {name: value for name, value in os.environ.items() if not _STARTED_PROCESS.fullmatch(name)}
    own = {name: value for name, value in own.items() if name not in AGENT_VARIABLES}
    place = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(num_local)}
    if os.environ.get("CCL_PROCESS_LAUNCHER") == "none":  # then oneCCL asks here
        place |= {"CCL_LOCAL_RANK": str(local_rank), "CCL_LOCAL_SIZE": str(num_local)}
    return {**own, **variables, **place}


def coordinator() -> tuple[str, int, str]:
    """Returns address and port of the job's coordinator, and the token. Raises ConfigError outside of a job's agent."""
    host, _, port = os.environ.get(COORDINATOR, "").rpartition(":")
    if not port.isdecimal() or not os.environ.get(JOB_TOKEN):
        raise ConfigError(f"{COORDINATOR} and {JOB_TOKEN} are not set; `optimus launch` starts the agents of a job")
    return host, int(port), os.environ[JOB_TOKEN]


def agent_place() -> dict[str, str | int | None]:
    """Returns which process of which start this agent is, as mpiexec or srun number them, and the node's SLURM name."""
    return {
        "starter": _integer(os.environ, STARTER),
        "number": _integer(os.environ, *_PROCESS_NUMBER),
        "name": os.environ.get("SLURMD_NODENAME"),
    }


def import_path() -> dict[str, str]:
    """Returns the variable with which a process that this one starts finds the same modules."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def rendezvous_token() -> str | None:
    """Returns the secret under which the ranks of this run meet; None where the launcher gave none."""
    return os.environ.get(RENDEZVOUS_TOKEN) or None


def attempt() -> tuple[str, int] | None:
    """Returns the launch and the number of the attempt that this rank belongs to; None where neither is known."""
    launch, _, number = os.environ.get(ATTEMPT, "").rpartition(":")
    return (launch, int(number)) if launch and number.isdecimal() else None


def is_restart() -> bool:
    """Whether the launcher has started this rank again after an attempt that failed."""
    known = attempt()
    return known is not None and known[1] > 1


def agent_folder() -> Path | None:
    """Returns the folder of heartbeats; None without a launcher on this machine that reads them."""
    named = os.environ.get(AGENT_FOLDER)
    return Path(named) if named else None


def drill_folder() -> Path | None:
    """Returns the folder in which ``optimus drill`` asks this rank for faults; None in every other run."""
    named = os.environ.get(DRILL_FOLDER)
    return Path(named) if named else None


def memory_folder() -> Path | None:
    """Returns the folder of memory checkpoints; None without a launcher that would start the ranks again."""
    named = os.environ.get(MEMORY_FOLDER)
    return Path(named) if named else None


def hides_cuda() -> bool:
    """Returns whether CUDA_VISIBLE_DEVICES hides every device from CUDA."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")


def replace(variables: Mapping[str, str]) -> None:
    """Makes ``variables`` the environment of this process, for one that was forked before they were known."""
    os.environ.clear()
    os.environ.update(variables)


def has_torchrun_store() -> bool:
    """Whether torchrun runs the store of the ranks that it has started."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def torchrun_attempt() -> str | None:
    """How often torchrun has started the ranks again; None with several nodes, whose agents may count differently."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT") if os.environ.get("GROUP_WORLD_SIZE") == "1" else None


def set_default(name: str, value: str) -> None:
    """Sets a variable that a library reads (cuBLAS workspace), unless the user has set it."""
    os.environ.setdefault(name, value)


def keep_hugging_face_offline(*, quiet: bool = False) -> None:
    """Has Hugging Face's libraries load nothing from the network, unless the user has set it otherwise.

    They read this when they are imported. ``quiet``: neither they nor lm-eval draw progress bars.
    """
    names = ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"]
    for name in [*names, *(["TQDM_DISABLE", "HF_DATASETS_DISABLE_PROGRESS_BARS"] if quiet else [])]:
        set_default(name, "1")


def requested_threads() -> int | None:
    """Returns OMP_NUM_THREADS (its first level) if the user has set it, else None.

    The 1 that torchrun sets where the user set nothing does not count.

    Raises:
        ConfigError: where it is not a positive number.
    """
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not text or (text == "1" and "TORCHELASTIC_RUN_ID" in os.environ):
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"environment variable OMP_NUM_THREADS={text!r} is not a number of threads; correct or unset it"
        )
    return int(text)


def shows_traceback() -> bool:
    """Returns whether OPTIMUS_TRACEBACK=1 asks for the traceback of an error that one line explains."""
    return os.environ.get("OPTIMUS_TRACEBACK", "") not in ("", "0")


def tiles_file() -> Path:
    """Returns the file of tuned Triton tile sizes: OPTIMUS_TILES, or one in the user's cache folder."""
    named = os.environ.get("OPTIMUS_TILES", "")
    if named:
        return Path(named)
    home = os.path.expanduser("~")  # a user without a home, as in some containers, stays "~"
    return Path(tempfile.gettempdir() if home == "~" else home) / ".cache/optimus/triton_tiles.json"


def node_name() -> str:
    """Returns a name that is unique to this machine; the host name is not, where every node is called ``localhost``."""
    return f"{socket.gethostname()} {boot_id()}"


def short_host_name() -> str:
    """Returns the name of this machine without its domain."""
    return socket.gethostname().split(".", maxsplit=1)[0]


def boot_id() -> str:
    """Returns the boot id of the running kernel; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def free_port() -> int:
    """Returns a TCP port that is free on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rendezvous_port() -> int:
    """Returns a port for rank 0, which may run on another node: free here, and not one of those that operating systems
    give to outgoing connections."""
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    return free_port()


def _integer(env: Mapping[str, str], *names: str) -> int | None:
    """Returns the first of the variables that is set. Raises ConfigError unless it is a whole number >= 0."""
    for name in names:
        text = env.get(name, "").strip()
        if text:
            if not text.isdecimal():
                raise ConfigError(f"environment variable {name}={text!r} is not a whole number; correct or unset it")
            return int(text)
    return None


def _rank_and_size(env: Mapping[str, str]) -> tuple[Launcher, int, int] | None:
    """Returns (launcher, rank, world size), or None without a launcher."""
    for launcher, rank_name, size_names in (
        (Launcher.TORCHRUN, "RANK", ("WORLD_SIZE",)),
        (Launcher.MPI, "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
        (Launcher.MPI, "PMI_RANK", ("PMI_SIZE",)),
        (Launcher.MPI, "PALS_RANKID", ("PMI_SIZE", "WORLD_SIZE")),
        (Launcher.SLURM, "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
        (Launcher.MPI, "PMIX_RANK", ("WORLD_SIZE",)),
    ):
        rank, size = _integer(env, rank_name), _integer(env, *size_names)
        if rank is not None and size is not None:
            return launcher, rank, size
    mpi_rank = _integer(env, "PALS_RANKID", "PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK")
    if mpi_rank is not None:  # PMIx hands out ranks without the size: only MPI itself knows it
        if not _has_mpi4py():
            raise ConfigError(
                f"mpiexec gave this process rank {mpi_rank} but not the number of processes; "
                "pass it (mpiexec --env WORLD_SIZE=<n>) or pip install mpi4py"
            )
        return Launcher.MPI, mpi_rank, _mpi_size()
    if "RANK" in env:
        raise ConfigError(f"RANK={env['RANK']} is set without WORLD_SIZE; set both, or unset RANK to run alone")
    return None


def _local_size(env: Mapping[str, str], launcher: Launcher) -> int | None:
    if launcher is not Launcher.SLURM:
        return _integer(env, *_LOCAL_SIZE)
    per_node: list[int] = []  # "4(x2),3" means 4, 4, 3
    for entry in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if match:
            per_node += [int(match[1])] * int(match[2] or 1)
    node = _integer(env, "SLURM_NODEID")
    if node is not None and node < len(per_node):
        return per_node[node]
    return None


def _local_rank(env: Mapping[str, str], launcher: Launcher, world_size: int) -> int:
    names = ("SLURM_LOCALID",) if launcher is Launcher.SLURM else _LOCAL_RANK
    local_rank = _integer(env, *names)
    if local_rank is not None:
        return local_rank
    if world_size == 1:
        return 0
    raise ConfigError(
        f"{launcher.value} environment: nothing says which process of its node this is; set one of {', '.join(names)}"
    )


def _master_addr(env: Mapping[str, str], launcher: Launcher, single_node: bool) -> str:
    """Host of rank 0 where MASTER_ADDR is not set. Ranks are placed in blocks, so it is the first host."""
    if single_node:
        return "127.0.0.1"
    if launcher is Launcher.SLURM:
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
        if nodes:
            return _first_slurm_host(nodes)
        if env.get("SLURM_LAUNCH_NODE_IPADDR"):  # where srun ran: right when that is the first compute node
            return env["SLURM_LAUNCH_NODE_IPADDR"]
    if env.get("PBS_NODEFILE"):
        try:
            with open(env["PBS_NODEFILE"], encoding="utf-8") as lines:
                host = lines.readline().strip()
        except OSError as error:
            raise ConfigError(f"PBS_NODEFILE={env['PBS_NODEFILE']} cannot be read: {error.strerror}") from error
        if host:
            return host
    if launcher is Launcher.MPI and _has_mpi4py():
        return _mpi_host_of_rank_0()
    raise ConfigError(
        f"{launcher.value} environment: nothing says on which host rank 0 runs; export MASTER_ADDR=<host of rank 0> "
        "(and MASTER_PORT) before the launch"
    )


def _first_slurm_host(nodes: str) -> str:
    """The first host of a SLURM list: "gpu[003-006,9],x1" -> "gpu003"."""
    match = re.match(r"([^,\[]+)(?:\[([0-9]+)[^\]]*\]([^,]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes


def _port_of_job(env: Mapping[str, str]) -> int:
    """Returns a port from the job's number: the same on all ranks, seldom that of another job on the node."""
    digits = re.match(r"\d+", env.get("SLURM_JOB_ID") or env.get("PBS_JOBID") or "")
    return 20000 + int(digits[0]) % 10000 if digits else _DEFAULT_PORT


def _has_mpi4py() -> bool:
    return importlib.util.find_spec("mpi4py") is not None


def _mpi_size() -> int:
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.Get_size())


def _mpi_host_of_rank_0() -> str:
    from mpi4py import MPI

    return str(MPI.COMM_WORLD.bcast(socket.gethostname(), root=0))
