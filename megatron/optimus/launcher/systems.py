"""What a machine needs around the command: ranks per node, CPU cores of each rank, communication variables.

Every variable carries its reason. The user's own environment always wins over these values.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Setting:
    """An environment variable's value and why it is set."""

    value: str
    reason: str


@dataclass(frozen=True)
class System:
    """A machine's defaults; ``cpu_bind`` in the words of PALS mpiexec, one list entry a rank of the node."""

    name: str
    ranks_per_node: int | None = None  # None: the scheduler or the user says it
    cpu_bind: str | None = None
    host_suffix: str | None = None  # of the fast network's names, put in place of the node file's domain
    environment: dict[str, Setting] = field(default_factory=dict)
    for_its_ranks: tuple[str, ...] = ()  # variables that list a core for each rank: of ranks_per_node ranks only
    # And of these variables' values; where the user has set one, the lists are left to them as well.
    for_its_values: tuple[str, ...] = ()


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
    for_its_ranks=("CCL_WORKER_AFFINITY",),
    for_its_values=("CCL_WORKER_COUNT",),
)

SYSTEMS = {system.name: system for system in (GENERIC, AURORA)}
