"""The machine a launch runs on: the nodes of a PBS or SLURM job, and the defaults of known systems.

A system's defaults are its ranks per node, CPU cores of each rank and communication variables, each with its reason.
Variables that the user has set always win over these.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from megatron.optimus.config.schema import ConfigError

MAX_NODES = 100_000


class BatchSystem(str, Enum):
    """The batch system of the job."""

    PBS = "pbs"
    SLURM = "slurm"
    NONE = "none"  # this machine alone


@dataclass(frozen=True)
class Allocation:
    """The nodes of the job in the scheduler's order; none outside of a job."""

    scheduler: BatchSystem
    hosts: tuple[str, ...]
    devices_per_node: int | None = None  # None where the scheduler does not tell


def detect_allocation(env: Mapping[str, str]) -> Allocation:
    """Reads the job's nodes from the variables of PBS or SLURM. Raises ConfigError where they are unreadable."""
    if env.get("PBS_NODEFILE"):
        return Allocation(BatchSystem.PBS, _hosts_of_file(env["PBS_NODEFILE"]))
    nodes = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if nodes:
        devices = env.get("SLURM_GPUS_ON_NODE", "")
        return Allocation(BatchSystem.SLURM, expand_slurm(nodes), int(devices) if devices.isdecimal() else None)
    return Allocation(BatchSystem.NONE, ())


def _hosts_of_file(path: str) -> tuple[str, ...]:
    """Reads a PBS node file, which repeats a node for each of its chunks; each is returned once."""
    try:
        with open(path, encoding="utf-8") as lines:
            hosts = tuple(dict.fromkeys(line.strip() for line in lines if line.strip()))
    except OSError as error:
        raise ConfigError(f"PBS_NODEFILE={path} cannot be read: {error.strerror}") from error
    if not hosts:
        raise ConfigError(f"PBS_NODEFILE={path} names no node")
    return hosts


def expand_slurm(nodes: str) -> tuple[str, ...]:
    """Expands SLURM's node list: "gpu[003-005,9],r[1-2]n[1-2]" -> gpu003, gpu004, gpu005, gpu9, r1n1, r1n2, ...

    Raises ConfigError for text that is not such a list, and for more than MAX_NODES nodes.
    """
    hosts: list[str] = []
    for entry in map(str.strip, re.split(r",(?![^\[]*\])", nodes)):  # commas outside of brackets
        if re.fullmatch(r"[^\[\]]*(?:\[[^\[\]]+\][^\[\]]*)*", entry) is None or not entry:
            raise ConfigError(f"SLURM_JOB_NODELIST={nodes!r}: {entry!r} is not of the form prefix[003-005,9]")
        texts = re.split(r"\[([^\[\]]*)\]", entry)  # text, ranges, text, ranges, ..., text
        choices = [_numbers(text, nodes) if place % 2 else [text] for place, text in enumerate(texts)]
        if len(hosts) + math.prod(map(len, choices)) > MAX_NODES:
            raise ConfigError(f"SLURM_JOB_NODELIST={nodes[:200]!r} names more than {MAX_NODES:,} nodes")
        hosts += ["".join(parts) for parts in itertools.product(*choices)]
    return tuple(hosts)


def _numbers(ranges: str, nodes: str) -> list[str]:
    """Expands the ranges in brackets: "003-005,9" -> 003, 004, 005, 9."""
    numbers: list[str] = []
    for part in ranges.split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        first, last = (bounds[1], bounds[2] or bounds[1]) if bounds else ("1", "0")
        if not 0 <= int(last) - int(first) < MAX_NODES:
            raise ConfigError(f"SLURM_JOB_NODELIST={nodes!r}: {part!r} is not a number or a range such as 003-005")
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    return numbers


@dataclass(frozen=True)
class Setting:
    """An environment variable's value and why it is set."""

    value: str
    reason: str


@dataclass(frozen=True)
class System:
    """The defaults of a machine."""

    name: str
    ranks_per_node: int | None = None  # None: from the scheduler or the user
    cpu_bind: str | None = None  # in the syntax of PALS mpiexec, one list entry for each rank of a node
    host_suffix: str | None = None  # domain of the fast network's host names, in place of that in the node file
    environment: dict[str, Setting] = field(default_factory=dict)
    per_rank_variables: tuple[str, ...] = ()  # variables that list a core for each rank: valid for ranks_per_node only
    # Variables that those lists depend on: where the user has set one, the lists are not set.
    per_rank_inputs: tuple[str, ...] = ()


GENERIC = System("generic")

# Sources: ALCF's user guide (oneCCL on Aurora, cores reserved for the operating system) and the published launch
# settings of arXiv 2604.00785. Cores 0 and 52 belong to the operating system; a rank's three cores lie on the socket
# of its GPU, and oneCCL's worker has a core of its own between two ranks.
AURORA = System(
    "aurora",
    ranks_per_node=12,
    cpu_bind="list:2-4:10-12:18-20:26-28:34-36:42-44:54-56:62-64:70-72:78-80:86-88:94-96",
    host_suffix="hsn.cm.aurora.alcf.anl.gov",
    environment={
        "ZE_FLAT_DEVICE_HIERARCHY": Setting("FLAT", "a device per tile, 12 a node; a rank picks its own by local rank"),
        "CCL_PROCESS_LAUNCHER": Setting("pmix", "PALS starts the ranks and speaks PMIx"),
        "CCL_ATL_TRANSPORT": Setting("mpi", "oneCCL's transport for several nodes on this network"),
        "CCL_KVS_MODE": Setting("mpi", "key exchange through MPI; sockets do not scale to thousands of ranks"),
        "CCL_KVS_USE_MPI_RANKS": Setting("1", "without it the start of communicators is slow at scale"),
        "CCL_KVS_CONNECTION_TIMEOUT": Setting("600", "seconds; thousands of ranks do not all arrive in the default"),
        "CCL_WORKER_COUNT": Setting("1", "one communication thread a rank"),
        "CCL_WORKER_AFFINITY": Setting(
            "5,13,21,29,37,45,57,65,73,81,89,97", "each worker on a core that no rank is bound to"
        ),
        "CCL_ZE_CACHE_OPEN_IPC_HANDLES_THRESHOLD": Setting(
            "32768", "the default cache of memory handles evicts entries that large groups still use"
        ),
        "CCL_ZE_CACHE_GET_IPC_HANDLES_THRESHOLD": Setting("32768", "as above, on the other side"),
        "CCL_SYCL_SCALEOUT_HOST_BUF_SIZE": Setting("2147483648", "bytes; buckets larger than the default are staged"),
        "FI_MR_CACHE_MONITOR": Setting("userfaultfd", "the other monitors miss freed memory and corrupt messages"),
        "FI_CXI_RX_MATCH_MODE": Setting("hybrid", "message matching falls back to software when hardware is full"),
        "FI_CXI_DEFAULT_CQ_SIZE": Setting("1048576", "completion queue entries for all-to-all among many ranks"),
        "FI_CXI_OFLOW_BUF_SIZE": Setting("8388608", "bytes; room for messages that arrive unexpected"),
        "PALS_PING_PERIOD": Setting("240", "seconds; a busy node is not taken for a lost one"),
        "PALS_RPC_TIMEOUT": Setting("240", "seconds; as above"),
        "NUMEXPR_MAX_THREADS": Setting("1", "no thread pool per rank on cores of other ranks"),
        "HF_HUB_OFFLINE": Setting("1", "nothing is downloaded at launch"),
    },
    per_rank_variables=("CCL_WORKER_AFFINITY",),
    per_rank_inputs=("CCL_WORKER_COUNT",),
)

SYSTEMS = {system.name: system for system in (GENERIC, AURORA)}
