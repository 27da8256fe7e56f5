"""Builds the command line and environment that start the ranks, from an allocation and the launcher's options."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.launcher.cluster import GENERIC, Allocation, BatchSystem, Setting, System
from megatron.optimus.platform.environment import AGENT_VARIABLES, RENDEZVOUS_TOKEN

PROGRAM = "megatron.optimus.pretrain"  # what a rank runs
FORK_SERVER = "megatron.optimus.launcher.forkserver"  # what ranks are forked from, where there is an agent
AGENT = "megatron.optimus.launcher.node_agent"  # one a node
_WITHOUT_MPI = {  # oneCCL, where no mpiexec has started the ranks; the values that it needs then
    "CCL_ATL_TRANSPORT": "ofi",
    "CCL_PROCESS_LAUNCHER": "none",
    "CCL_KVS_MODE": "pmi",
    "CCL_KVS_USE_MPI_RANKS": "0",
}
RENDEZVOUS_REASONS = {  # the reason for each variable that every run needs
    "WORLD_SIZE": "not every launch method tells a rank how many there are",
    "MASTER_ADDR": "where rank 0 listens: the first node, by its name on the fast network, or this machine alone",
    "MASTER_PORT": "another one for every run, so that two on one node do not connect",
}


class LaunchMethod(str, Enum):
    """The program that starts the ranks; values of ``--launcher``."""

    AUTO = "auto"  # mpiexec under PBS, srun under SLURM, local elsewhere
    LOCAL = "local"  # launcher/supervisor.py: several ranks on this machine
    MPIEXEC = "mpiexec"
    SRUN = "srun"
    TORCHRUN = "torchrun"  # one torchrun a node, itself started by mpiexec or srun where there are several


class Mpi(str, Enum):
    """The MPI that mpiexec belongs to, as their options differ; values of ``--mpi``."""

    PALS = "pals"  # HPE's, on Aurora
    MPICH = "mpich"  # hydra: MPICH and Intel MPI
    OPENMPI = "openmpi"


@dataclass(frozen=True)
class LaunchOptions:
    """The options of ``optimus launch`` that decide how ranks are started."""

    nproc_per_node: int | None = None
    nodes: int | None = None  # fewer than allocated: the rest are spares
    method: LaunchMethod = LaunchMethod.AUTO
    mpi: Mpi | None = None
    system: System = GENERIC
    cpu_bind: str | None = None
    port: int = 29500  # where rank 0 listens, unless MASTER_PORT is set


@dataclass(frozen=True)
class Launch:
    """How to start a run; ``command(hosts, hostfile)`` returns the command line for one choice of nodes."""

    method: LaunchMethod
    scheduler: BatchSystem
    mpi: Mpi
    num_nodes: int
    ranks_per_node: int
    cpu_bind: str | None
    host_suffix: str | None
    program: tuple[str, ...]  # command line of a rank
    hosts: tuple[str, ...]  # nodes of the first attempt; empty outside of a job
    spares: tuple[str, ...]
    port: int  # where rank 0 listens; another one for every run, so that two on one machine do not connect
    settings: dict[str, Setting] = field(default_factory=dict)  # variables to set
    user_settings: dict[str, Setting] = field(default_factory=dict)  # variables that the user has set instead
    passed: tuple[str, ...] = (RENDEZVOUS_TOKEN,)  # further variables, which the launcher sets for each attempt

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.num_nodes * self.ranks_per_node

    def command(self, hosts: Sequence[str], hostfile: str) -> list[str]:
        """Returns the command line for these nodes; ``hostfile`` is a file with one node a line."""
        if self.method is LaunchMethod.TORCHRUN:
            torchrun = self._torchrun(hosts)
            return torchrun if self.num_nodes == 1 else [*self._across_nodes(hosts, hostfile, 1), *torchrun]
        return [*self._across_nodes(hosts, hostfile, self.ranks_per_node), *self.program]

    def agent_command(self, hosts: Sequence[str], hostfile: str, device: str) -> list[str]:
        """Returns the command line that starts one agent on each of these nodes, for ranks of ``device``."""
        agents = replace(self, num_nodes=len(hosts), cpu_bind=None, passed=(*self.passed, *AGENT_VARIABLES))
        return [*agents._across_nodes(hosts, hostfile, 1, are_agents=True), sys.executable, "-m", AGENT, device]

    def why_no_agents(self, env: Mapping[str, str]) -> str:
        """Returns why ranks have to be started by mpiexec or srun themselves; "" where agents can.

        Args:
            env: the user's environment.
        """
        if self.method not in (LaunchMethod.MPIEXEC, LaunchMethod.SRUN):
            return f"--launcher={self.method.value} has agents of its own"
        if not self.hosts:
            return "there is no job whose nodes are known"
        for name, without in _WITHOUT_MPI.items():
            value = self.settings[name].value if name in self.settings else env.get(name, without)
            if value != without:
                return f"{name}={value} needs ranks that mpiexec has started; {without} does not"
        if self.cpu_bind is not None and not self.cpu_bind.startswith("list:"):
            return f"--cpu-bind={self.cpu_bind} is for {self.method.value}; list:0-3:4-7 is not"
        return ""

    def agent_cores(self) -> list[list[int]]:
        """Returns the cores of each rank of a node: of list:2-4:10,12 [[2, 3, 4], [10, 12]]; none without a binding.

        Raises:
            ConfigError: it is not such a list, or not one for each rank.
        """
        if self.cpu_bind is None:
            return []
        cores = []
        for entry in self.cpu_bind.removeprefix("list:").split(":"):
            bounds = [re.fullmatch(r"(\d+)(?:-(\d+))?", part) for part in entry.split(",")]
            cores.append([core for m in bounds if m for core in range(int(m[1]), int(m[2] or m[1]) + 1)])
            if None in bounds or not cores[-1]:
                raise ConfigError(f"--cpu-bind={self.cpu_bind}: {entry!r} is not of the form 2-4,6")
        if len(cores) != self.ranks_per_node:
            raise ConfigError(
                f"--cpu-bind={self.cpu_bind} has cores for {len(cores)} ranks, but a node runs {self.ranks_per_node}"
            )
        return cores

    def network_name(self, host: str) -> str:
        """Returns the name of a node on the fast network."""
        return f"{host.split('.', maxsplit=1)[0]}.{self.host_suffix}" if self.host_suffix else host

    def environment(self, hosts: Sequence[str]) -> dict[str, str]:
        """Returns the variables to add for these nodes; with none, MASTER_ADDR is a placeholder."""
        added = {name: setting.value for name, setting in self.settings.items()}
        if self.method is not LaunchMethod.TORCHRUN:
            added["WORLD_SIZE"] = str(self.world_size)  # PALS sets a rank's number but not the world size
        if "MASTER_ADDR" not in self.user_settings:
            added["MASTER_ADDR"] = self._master_address(hosts)
        if "MASTER_PORT" not in self.user_settings:
            added["MASTER_PORT"] = str(self.port)
        return added

    def reason(self, name: str) -> str:
        """Returns why ``environment`` sets a variable, or keeps the user's value."""
        known = self.settings.get(name) or self.user_settings.get(name)
        return RENDEZVOUS_REASONS[name] if known is None else known.reason

    def _master_address(self, hosts: Sequence[str]) -> str:
        if "MASTER_ADDR" in self.user_settings:
            return self.user_settings["MASTER_ADDR"].value
        if self.num_nodes == 1:
            return "127.0.0.1"
        return self.network_name(hosts[0] if hosts else "FIRST_NODE")

    def _torchrun(self, hosts: Sequence[str]) -> list[str]:
        rendezvous = ["--standalone"]
        if self.num_nodes > 1:
            rendezvous = ["--nnodes", str(self.num_nodes), "--rdzv-backend", "c10d"]
            rendezvous += [
                "--rdzv-endpoint",
                f"{self._master_address(hosts)}:{self.port}",
                "--rdzv-id",
                f"optimus-{self.port}",
            ]
        runner = [sys.executable, "-m", "torch.distributed.run", *rendezvous]
        return [*runner, "--nproc-per-node", str(self.ranks_per_node), *self.program[1:]]

    def _across_nodes(
        self, hosts: Sequence[str], hostfile: str, per_node: int, *, are_agents: bool = False
    ) -> list[str]:
        """The words before the program. Agents have all cores of a node, and outlive those of other nodes."""
        bind = self.cpu_bind if per_node == self.ranks_per_node else None
        total, each, nodes = str(self.num_nodes * per_node), str(per_node), str(self.num_nodes)
        torchrun_by_srun = self.method is LaunchMethod.TORCHRUN and self.scheduler is BatchSystem.SLURM
        if self.method is LaunchMethod.SRUN or torchrun_by_srun:
            words = ["srun", "--nodes", nodes, "--ntasks", total, "--ntasks-per-node", each]
            if are_agents:  # --overlap: a check of the nodes runs beside them
                words += ["--kill-on-bad-exit=0", "--no-kill", "--overlap", "--cpu-bind=none", "--export=ALL"]
                return [*words, "--nodelist", ",".join(hosts)]
            words += ["--kill-on-bad-exit=1", "--export=ALL"]  # else ranks would wait for a lost one
            words += ["--nodelist", ",".join(hosts)] if self.spares or len(hosts) < len(self.hosts) else []
            return words + ([f"--cpu-bind={bind}"] if bind else [])
        if self.mpi is Mpi.OPENMPI:
            words = ["mpiexec", "-n", total, "--map-by", f"ppr:{each}:node", "--hostfile", hostfile]
            for name in sorted({*self.environment(hosts), *self.user_settings, *self.passed}):
                words += ["-x", name]  # Open MPI passes on named variables only, the user's values too
            words += ["--enable-recovery"] if are_agents else []
            bind = "none" if are_agents else bind
            return words + (["--bind-to", bind] if bind else [])
        if self.mpi is Mpi.MPICH:
            words = ["mpiexec", "-genvall", "-n", total, "-ppn", each, "-f", hostfile]
            words += ["-disable-auto-cleanup"] if are_agents else []
            return words + (["-bind-to", bind] if bind else [])
        words = ["mpiexec", "--envall", "--line-buffer", "-n", total, "--ppn", each, "--hostfile", hostfile]
        bind = "none" if are_agents else bind
        return words + (["--cpu-bind", bind] if bind else [])


def build_launch(
    allocation: Allocation, launch_options: LaunchOptions, options: Sequence[str], env: Mapping[str, str]
) -> Launch:
    """Decides how to start ``python -m megatron.optimus.pretrain options`` on the allocation's nodes.

    Args:
        allocation: the job's nodes.
        launch_options: options of the launcher.
        options: the command line of pretrain.
        env: the user's environment, which wins over the system's defaults.

    Raises:
        ConfigError: for more nodes than allocated, an unknown number of ranks per node, several nodes without a launch
            method for them, or an invalid MASTER_PORT.
    """
    method = _launch_method(launch_options.method, allocation)
    num_nodes = _num_nodes(launch_options.nodes, allocation, method)
    per_node = launch_options.nproc_per_node or launch_options.system.ranks_per_node or allocation.devices_per_node
    if per_node is None:
        raise ConfigError(
            "--nproc-per-node is missing: neither --system nor the scheduler says how many ranks a node runs; "
            "for one rank, python -m megatron.optimus.pretrain needs no launcher"
        )
    binding = launch_options.cpu_bind
    if binding is None and per_node == launch_options.system.ranks_per_node:
        binding = launch_options.system.cpu_bind  # a list of cores for each rank is valid for this number of ranks only
    system = launch_options.system
    wanted = dict(system.environment)
    if per_node != system.ranks_per_node or any(name in env for name in system.per_rank_inputs):
        for name in system.per_rank_variables:
            del wanted[name]
    port = env.get("MASTER_PORT", str(launch_options.port))
    if not (port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"MASTER_PORT={port!r} is not a port; use 1024 to 65535")
    hosts = allocation.hosts[:num_nodes]
    return Launch(
        method=method,
        scheduler=allocation.scheduler,
        mpi=launch_options.mpi or (Mpi.PALS if launch_options.system.name == "aurora" else Mpi.MPICH),
        num_nodes=num_nodes,
        ranks_per_node=per_node,
        cpu_bind=None if binding == "none" else binding,
        host_suffix=launch_options.system.host_suffix,
        program=(sys.executable, "-m", PROGRAM, *options),
        hosts=hosts,
        spares=allocation.hosts[num_nodes:],
        port=int(port),
        settings={name: setting for name, setting in wanted.items() if name not in env},
        user_settings={
            name: Setting(env[name], "kept: set in your environment")
            for name in (*system.environment, "MASTER_ADDR", "MASTER_PORT")
            if name in env
        },
    )


def _launch_method(requested: LaunchMethod, allocation: Allocation) -> LaunchMethod:
    if requested is LaunchMethod.AUTO:
        return {BatchSystem.PBS: LaunchMethod.MPIEXEC, BatchSystem.SLURM: LaunchMethod.SRUN}.get(
            allocation.scheduler, LaunchMethod.LOCAL
        )
    return requested


def _num_nodes(requested: int | None, allocation: Allocation, method: LaunchMethod) -> int:
    available = len(allocation.hosts)
    if method is LaunchMethod.LOCAL:
        if requested not in (None, 1):
            raise ConfigError(
                f"--nodes={requested} needs a job on several nodes, or --launcher mpiexec, srun or torchrun; "
                "--launcher local starts ranks on this machine only"
            )
        return 1
    if requested is None:
        return available or 1
    if available and requested > available:
        raise ConfigError(
            f"--nodes={requested} but the job has {available} nodes; ask the scheduler for more or lower it"
        )
    return requested
