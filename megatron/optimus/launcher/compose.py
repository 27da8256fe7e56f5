"""The command line and environment that start the ranks: pure functions of an allocation and the launcher's options."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.launcher.allocation import Allocation, Scheduler
from megatron.optimus.launcher.systems import GENERIC, Setting, System

PROGRAM = "megatron.optimus.pretrain"
RENDEZVOUS = {  # why variables are set that every run needs
    "WORLD_SIZE": "not every starter tells a rank how many there are",
    "MASTER_ADDR": "the first node, where rank 0 listens, by its name on the fast network",
    "MASTER_PORT": "of its own for every run, so that two on one node do not meet",
}


class Starter(str, Enum):
    """What starts the ranks."""

    AUTO = "auto"  # mpiexec under PBS, srun under SLURM, local elsewhere
    LOCAL = "local"  # our own, several ranks on this machine
    MPIEXEC = "mpiexec"
    SRUN = "srun"
    TORCHRUN = "torchrun"  # one torchrun a node, itself started by mpiexec or srun where there are several


class Mpi(str, Enum):
    """Whose mpiexec it is: their options differ."""

    PALS = "pals"  # HPE's, on Aurora
    MPICH = "mpich"  # hydra: MPICH and Intel MPI
    OPENMPI = "openmpi"


@dataclass(frozen=True)
class LaunchOptions:
    """The launcher's own options."""

    nproc_per_node: int | None = None
    nodes: int | None = None  # fewer than allocated: the rest are spares
    starter: Starter = Starter.AUTO
    mpi: Mpi | None = None
    system: System = GENERIC
    cpu_bind: str | None = None
    port: int = 29500  # where rank 0 listens, unless MASTER_PORT says


@dataclass(frozen=True)
class Launch:
    """Everything needed to start: ``command(hosts, hostfile)`` gives the words for one choice of nodes."""

    starter: Starter
    scheduler: Scheduler
    mpi: Mpi
    num_nodes: int
    ranks_per_node: int
    cpu_bind: str | None
    host_suffix: str | None
    program: tuple[str, ...]  # what each rank runs
    hosts: tuple[str, ...]  # those to start on; empty where nothing is allocated yet
    spares: tuple[str, ...]
    port: int  # where rank 0 listens; of its own for every run, so that two on one machine do not meet
    settings: dict[str, Setting] = field(default_factory=dict)  # set by us
    kept: dict[str, Setting] = field(default_factory=dict)  # ours would differ, but the user has set them

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    def command(self, hosts: Sequence[str], hostfile: str) -> list[str]:
        """The words to run for these nodes; ``hostfile`` names them, one a line."""
        if self.starter is Starter.TORCHRUN:
            torchrun = self._torchrun(hosts)
            return torchrun if self.num_nodes == 1 else [*self._across_nodes(hosts, hostfile, 1), *torchrun]
        return [*self._across_nodes(hosts, hostfile, self.ranks_per_node), *self.program]

    def environment(self, hosts: Sequence[str]) -> dict[str, str]:
        """Variables to add for these nodes, or for nodes that nobody has named yet."""
        added = {name: setting.value for name, setting in self.settings.items()}
        if self.starter is not Starter.TORCHRUN:
            added["WORLD_SIZE"] = str(self.world_size)  # PALS tells a rank its number but not how many there are
        if "MASTER_ADDR" not in self.kept:
            added["MASTER_ADDR"] = self._head(hosts)
        if "MASTER_PORT" not in self.kept:
            added["MASTER_PORT"] = str(self.port)
        return added

    def reason(self, name: str) -> str:
        """Why ``environment`` has a variable, or why it leaves the user's."""
        known = self.settings.get(name) or self.kept.get(name)
        return RENDEZVOUS[name] if known is None else known.reason

    def _head(self, hosts: Sequence[str]) -> str:
        """Rank 0's node."""
        if "MASTER_ADDR" in self.kept:
            return self.kept["MASTER_ADDR"].value
        host = hosts[0] if hosts else "FIRST_NODE"
        return f"{host.split('.', maxsplit=1)[0]}.{self.host_suffix}" if self.host_suffix else host

    def _torchrun(self, hosts: Sequence[str]) -> list[str]:
        meeting = ["--standalone"]
        if self.num_nodes > 1:
            meeting = ["--nnodes", str(self.num_nodes), "--rdzv-backend", "c10d"]
            meeting += ["--rdzv-endpoint", f"{self._head(hosts)}:{self.port}", "--rdzv-id", f"optimus-{self.port}"]
        runner = [sys.executable, "-m", "torch.distributed.run", *meeting]
        return [*runner, "--nproc-per-node", str(self.ranks_per_node), *self.program[1:]]

    def _across_nodes(self, hosts: Sequence[str], hostfile: str, per_node: int) -> list[str]:
        bind = self.cpu_bind if per_node == self.ranks_per_node else None
        total, each, nodes = str(self.num_nodes * per_node), str(per_node), str(self.num_nodes)
        torchrun_by_srun = self.starter is Starter.TORCHRUN and self.scheduler is Scheduler.SLURM
        if self.starter is Starter.SRUN or torchrun_by_srun:
            words = ["srun", "--nodes", nodes, "--ntasks", total, "--ntasks-per-node", each]
            words += ["--kill-on-bad-exit=1", "--export=ALL"]  # one lost rank must not leave the others waiting
            words += ["--nodelist", ",".join(hosts)] if self.spares else []
            return words + ([f"--cpu-bind={bind}"] if bind else [])
        if self.mpi is Mpi.OPENMPI:
            words = ["mpiexec", "-n", total, "--map-by", f"ppr:{each}:node", "--hostfile", hostfile]
            for name in sorted({*self.environment(hosts), *self.kept}):
                words += ["-x", name]  # Open MPI passes on what it is told to, the user's own values too
            return words + (["--bind-to", bind] if bind else [])
        if self.mpi is Mpi.MPICH:
            words = ["mpiexec", "-genvall", "-n", total, "-ppn", each, "-f", hostfile]
            return words + (["-bind-to", bind] if bind else [])
        words = ["mpiexec", "--envall", "--line-buffer", "-n", total, "--ppn", each, "--hostfile", hostfile]
        return words + (["--cpu-bind", bind] if bind else [])


def compose(
    allocation: Allocation, launch_options: LaunchOptions, options: Sequence[str], env: Mapping[str, str]
) -> Launch:
    """The launch of ``python -m megatron.optimus.pretrain options`` on the allocation's nodes.

    Raises ConfigError for more nodes than allocated, for no number of ranks per node, for a starter that the place does
    not have, or for a MASTER_PORT that is none.
    """
    starter = _starter(launch_options.starter, allocation)
    num_nodes = _num_nodes(launch_options.nodes, allocation, starter)
    per_node = launch_options.nproc_per_node or launch_options.system.ranks_per_node or allocation.devices_per_node
    if per_node is None:
        raise ConfigError(
            "--nproc-per-node is missing: neither --system nor the scheduler says how many ranks a node runs; "
            "for one rank, python -m megatron.optimus.pretrain needs no launcher"
        )
    binding = launch_options.cpu_bind
    if binding is None and per_node == launch_options.system.ranks_per_node:
        binding = launch_options.system.cpu_bind  # a list of cores for each rank fits this number of ranks only
    system = launch_options.system
    wanted = dict(system.environment)
    if per_node != system.ranks_per_node or any(name in env for name in system.for_its_values):
        for name in system.for_its_ranks:
            del wanted[name]
    port = env.get("MASTER_PORT", str(launch_options.port))
    if not (port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"MASTER_PORT={port!r} is not a port; use 1024 to 65535")
    hosts = allocation.hosts[:num_nodes]
    return Launch(
        starter=starter,
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
        kept={
            name: Setting(env[name], "kept: set in your environment")
            for name in (*system.environment, "MASTER_ADDR", "MASTER_PORT")
            if name in env
        },
    )


def _starter(wish: Starter, allocation: Allocation) -> Starter:
    if wish is Starter.AUTO:
        return {Scheduler.PBS: Starter.MPIEXEC, Scheduler.SLURM: Starter.SRUN}.get(allocation.scheduler, Starter.LOCAL)
    return wish


def _num_nodes(wish: int | None, allocation: Allocation, starter: Starter) -> int:
    available = len(allocation.hosts)
    if starter is Starter.LOCAL:
        if wish not in (None, 1):
            raise ConfigError(
                f"--nodes={wish} needs a job on several nodes, or --launcher mpiexec, srun or torchrun; --launcher "
                "local starts ranks on this machine only"
            )
        return 1
    if wish is None:
        return available or 1
    if available and wish > available:
        raise ConfigError(f"--nodes={wish} but the job has {available} nodes; ask the scheduler for more or lower it")
    return wish
