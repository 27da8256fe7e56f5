"""The command ``optimus launch``: starts the ranks of ``optimus pretrain``.

On one machine it starts the ranks itself. In a PBS or SLURM job it builds the mpiexec or srun command line from the
scheduler's variables; with restarts that starts an agent on each node, and the agents start the ranks. ``--dry-run``
prints the command, its environment and the run's configuration, on any machine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from megatron.optimus.platform import missing_packages, signals

if __name__ == "__main__":
    signals.end_on_sigint()
    sys.excepthook = missing_packages.excepthook

from megatron.optimus.config.checks import check, check_trainable
from megatron.optimus.config.load import CommandLine, Parser, load, one_of_names, whole_number
from megatron.optimus.config.schema import ConfigError, RunConfig
from megatron.optimus.describe import describe
from megatron.optimus.launcher import wire
from megatron.optimus.launcher.agent import LocalAgent, run_local_ranks
from megatron.optimus.launcher.cluster import SYSTEMS, detect_allocation
from megatron.optimus.launcher.command import Launch, LaunchMethod, LaunchOptions, Mpi, build_launch
from megatron.optimus.launcher.coordinator import Coordinator
from megatron.optimus.launcher.elastic import ElasticLayouts
from megatron.optimus.launcher.forkserver import ForkServer
from megatron.optimus.launcher.hangs import HangWatch
from megatron.optimus.launcher.job_keeper import JobKeeper, JobState
from megatron.optimus.launcher.node_agent import RanksOfNode
from megatron.optimus.launcher.nodes import FILE_NAME as BAD_NODES
from megatron.optimus.launcher.nodes import NodePool
from megatron.optimus.launcher.preflight import bad_nodes
from megatron.optimus.launcher.supervisor import (
    AttemptResult,
    LaunchProgress,
    run_local,
    run_monitored,
    run_with_restarts,
)
from megatron.optimus.models.huggingface.config import take_from_hf
from megatron.optimus.platform import environment, memory_slots
from megatron.optimus.platform.log import print_error, printable, prints_errors
from megatron.optimus.training.metrics import FILE_NAME

logger = logging.getLogger("optimus")

_DESCRIPTION = """Start pretraining: on this machine, or through mpiexec or srun in a PBS or SLURM job.

    optimus launch --nproc-per-node 2 --preset mula-tiny --data-path data/corpus_text_document
    optimus launch --nodes 8 --launcher mpiexec --preset mula-7b-a1b --data-file-list data.txt --dry-run

All options of ``optimus pretrain`` can follow; they go to every rank."""
PREFLIGHT = "megatron.optimus.commands.preflight"
_LOCAL_RANKS_PER_CORE = 16
_CHECKPOINT = re.compile(r"step-(\d+)(?:\.r\d+)?")  # checkpoint/commit.py


@dataclass(frozen=True)
class LaunchRequest:
    """The command line of ``optimus launch``."""

    launch_options: LaunchOptions
    max_restarts: int
    min_nodes: int | None
    stall_seconds: float | None
    preflight: bool
    dry_run: bool
    options: list[str]  # the command line of pretrain


@prints_errors(ConfigError)
def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``optimus launch``.

    Args:
        argv: the launcher's options and those of pretrain; None takes those of this process.

    Returns:
        0, the exit code of the first rank that failed, or 2 for a wrong command line.
    """
    logging.basicConfig(format="[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    request = _parse(argv)
    env = environment.current()
    # Its errors propose the launcher's flags too.
    run = load(request.options, other_flags=_parser().flags, take_from_hf=take_from_hf)
    config = run.config
    launch = build_launch(detect_allocation(env), request.launch_options, request.options, env)
    uses_agents = request.max_restarts > 0 and not launch.why_no_agents(env)
    if request.dry_run:
        sys.stdout.write(printable(_describe(launch, run, has_agents=uses_agents)))
        return 0
    check(config, launch.world_size)  # once and before the ranks start, not by thousands of ranks
    check_trainable(config)
    elastic = None if request.min_nodes is None else _elastic_layouts(launch, request, config, request.min_nodes)
    if launch.method is LaunchMethod.LOCAL:
        return _run_on_this_machine(launch, request, config)
    if uses_agents:
        launch.agent_cores()  # raises ConfigError
    program = launch.command(launch.hosts, "")[0]
    if shutil.which(program) is None:
        raise ConfigError(
            f"{program} is not on PATH; start from a job's first node, load the module that provides it, or print the "
            "command with --dry-run"
        )
    with tempfile.TemporaryDirectory(prefix="optimus-launch-") as folder:
        return _OnNodes(launch, request, env, config, elastic, Path(folder)).run(uses_agents=uses_agents)


def _elastic_layouts(launch: Launch, request: LaunchRequest, config: RunConfig, min_nodes: int) -> ElasticLayouts:
    """Returns the layouts on fewer nodes. Raises ConfigError where no attempt could use one."""
    if not launch.hosts:
        raise ConfigError(f"--min-nodes={min_nodes} needs the nodes of a PBS or SLURM job; leave it out on one machine")
    if request.max_restarts == 0:
        raise ConfigError(f"--min-nodes={min_nodes} is for restarts, and --max-restarts is 0; give it too")
    result = ElasticLayouts(config, launch.ranks_per_node, launch.num_nodes, min_nodes)
    result.check_min_nodes()
    return result


def _check_ranks(ranks: int) -> None:
    """Checks that this machine can start its ranks, by one error in place of one for each rank."""
    missing_packages.require_packages()
    cores = os.cpu_count() or 1
    most = max(64, _LOCAL_RANKS_PER_CORE * cores)
    if ranks > most:
        raise ConfigError(
            f"--nproc-per-node={ranks} is more than this machine of {cores} cores can start; use at most {most}"
        )


def _has_memory(request: LaunchRequest, config: RunConfig) -> bool:
    return request.max_restarts > 0 and config.checkpoint.memory_checkpoint_interval != 0


def _checking(request: LaunchRequest) -> tuple[str, ...]:
    """The command line of a rank of ``optimus preflight``."""
    return (sys.executable, "-m", PREFLIGHT, *request.options)


def _run_on_this_machine(launch: Launch, request: LaunchRequest, config: RunConfig) -> int:
    _check_ranks(launch.ranks_per_node)
    run_dir = Path(config.logging.run_dir)
    if request.preflight and (code := run_local_ranks(list(_checking(request)), launch.ranks_per_node)):
        return code
    unseen = 60.0 * config.parallel.distributed_timeout_minutes
    watch = partial(HangWatch, stacks=run_dir / "stacks", unseen_seconds=unseen, fixed_seconds=request.stall_seconds)
    with LocalAgent(
        launch.program,
        launch.ranks_per_node,
        fork_server=ForkServer(config.parallel.device.value),
        argv=request.options,
        hangs=None if request.stall_seconds == 0 else watch,
        memory=_has_memory(request, config),
    ) as agent:
        hint = "" if request.max_restarts else "; --max-restarts N would start them again by itself"
        nodes = NodePool((), 0, launch.ranks_per_node)
        attempt = partial(run_local, agent, run_dir / FILE_NAME, hint)
        newest = partial(_newest_step, config, agent.memory_folder)
        return run_with_restarts(
            lambda _: attempt(), nodes, request.max_restarts, newest, config.checkpoint.save_interval
        )


@dataclass(frozen=True)
class _OnNodes:
    """Runs the launch, with its restarts, on the nodes of a job. ``folder`` is for host files."""

    launch: Launch
    request: LaunchRequest
    env: dict[str, str]
    config: RunConfig
    elastic: ElasticLayouts | None
    folder: Path

    def run(self, *, uses_agents: bool) -> int:
        """Returns the exit code. ``uses_agents``: an agent on each node starts the ranks, at a restart too."""
        launch, request = self.launch, self.request
        hosts = [*launch.hosts, *launch.spares]
        if request.preflight and not hosts:
            raise ConfigError("--preflight checks the nodes of a PBS or SLURM job, and there is none")
        nodes = NodePool(
            hosts,
            len(launch.hosts),
            launch.ranks_per_node,
            Path(self.config.logging.run_dir) / BAD_NODES,
            self._check_nodes if request.preflight else None,
            fit=None if self.elastic is None else self.elastic.fit,
            listed=partial(_listed, self.env),
        )
        if bad := nodes.before_start():
            print_error(f"preflight: no spare for the bad nodes {', '.join(bad)}; ask for more nodes")
            return 1
        if uses_agents:
            return self._run_with_agents(nodes)
        if request.max_restarts and launch.hosts and launch.method is not LaunchMethod.TORCHRUN:
            why = launch.why_no_agents(self.env)
            logger.warning("no agents on the nodes, ranks are started anew at a restart: %s", why)
        return self._run_without_agents(nodes)

    def _write_hosts(self, hosts: Sequence[str], name: str = "hosts") -> str:
        path = self.folder / name
        path.write_text("".join(f"{host}\n" for host in hosts), encoding="utf-8")
        return str(path)

    def _variables(self, of: Launch, hosts: Sequence[str]) -> dict[str, str]:
        # By the environment: other users can read a command line.
        return {environment.RENDEZVOUS_TOKEN: secrets.token_hex(16), **self.env, **of.environment(hosts)}

    def _check_nodes(self, hosts: Sequence[str]) -> dict[str, str]:
        of_check = replace(self.launch, num_nodes=len(hosts), program=_checking(self.request))
        command = of_check.command(hosts, self._write_hosts(hosts))
        return bad_nodes(command, self._variables(of_check, hosts), hosts, self.launch.ranks_per_node)

    def _options(self, hosts: Sequence[str]) -> Sequence[str]:
        """The options of a layout on fewer nodes."""
        return () if self.elastic is None else self.elastic.options(len(hosts))

    def _run_without_agents(self, nodes: NodePool) -> int:
        launch, request, config = self.launch, self.request, self.config
        memory = None
        if _has_memory(request, config):
            memory = Path(self.env.get(environment.MEMORY_FOLDER) or memory_slots.shared_folder(secrets.token_hex(8)))

        def attempt_on(hosts: Sequence[str]) -> AttemptResult:
            attempt = replace(
                launch,
                num_nodes=len(hosts) or launch.num_nodes,
                passed=(*launch.passed, environment.MEMORY_FOLDER) if memory else launch.passed,
                program=(*launch.program, *self._options(hosts)),
            )
            variables = self._variables(attempt, hosts)
            if memory:
                variables[environment.MEMORY_FOLDER] = str(memory)
            command = attempt.command(hosts, self._write_hosts(hosts))
            metrics = Path(config.logging.run_dir) / FILE_NAME
            return run_monitored(command, variables, request.stall_seconds or None, metrics, nodes.can_grow)

        newest = partial(_newest_step, config, memory)
        return run_with_restarts(attempt_on, nodes, request.max_restarts, newest, config.checkpoint.save_interval)

    def _run_with_agents(self, nodes: NodePool) -> int:
        """Runs the launch with an agent on each node."""
        launch, request, env, config = self.launch, self.request, self.env, self.config
        device, metrics = config.parallel.device.value, Path(config.logging.run_dir) / FILE_NAME
        this = environment.short_host_name()
        others = [host for host in [*nodes.hosts, *nodes.spares] if host.split(".", maxsplit=1)[0] != this]
        try:
            peer = launch.network_name((others or nodes.hosts)[0])
            listener = wire.listen(env.get(environment.LAUNCH_ADDRESS, ""), peer)
        except OSError as error:
            raise ConfigError(
                f"no address at which the other nodes can reach this one: {error}; export "
                f"{environment.LAUNCH_ADDRESS}=<name or address of this node on the network of the job>"
            ) from error
        token, name, (address, port) = secrets.token_hex(32), secrets.token_hex(8), listener.getsockname()[:2]
        memory = memory_slots.shared_folder(secrets.token_hex(8)) if _has_memory(request, config) else ""

        def start(hosts: Sequence[str], number: int) -> tuple[list[str], dict[str, str]]:
            hostfile = self._write_hosts(hosts, f"agents-{number}")
            # By the environment: other users can read a command line.
            own = {environment.COORDINATOR: f"{address}:{port}", environment.JOB_TOKEN: token}
            variables = {**env, **launch.environment(hosts), **own, environment.STARTER: str(number)}
            return launch.agent_command(hosts, hostfile, device), variables

        def ranks(hosts: Sequence[str], number: int) -> RanksOfNode:
            attempt = replace(launch, num_nodes=len(hosts), port=environment.rendezvous_port())
            variables = {environment.RENDEZVOUS_TOKEN: secrets.token_hex(16), **attempt.environment(hosts)}
            variables |= {environment.MEMORY_FOLDER: memory} if memory else {}
            variables[environment.ATTEMPT] = f"{name}:{number}"
            argv = [*request.options, *self._options(hosts)]
            stacks = "" if request.stall_seconds == 0 else str(Path(config.logging.run_dir).absolute() / "stacks")
            unseen = 60.0 * config.parallel.distributed_timeout_minutes
            of_node = (launch.ranks_per_node, variables, argv, launch.agent_cores())
            return RanksOfNode(number, 0, *of_node, stacks, unseen, request.stall_seconds)

        def coordinate(job: JobState) -> int:
            coordinator = Coordinator(job, ranks, metrics, by_name=launch.method is LaunchMethod.SRUN)
            progress = LaunchProgress(**job.journal.get("progress", {}))
            if job.journal:
                nodes.restore(job.journal["nodes"])
            elif not job.starters:
                coordinator.start_agents([*nodes.hosts, *nodes.spares])

            def attempt_on(hosts: Sequence[str]) -> AttemptResult:
                to_keep = {"progress": asdict(progress), "nodes": nodes.state()}
                return coordinator.run(hosts, to_keep, nodes.can_grow)

            def newest() -> int:
                return max(_newest_step(config, None), coordinator.memory_step)

            limits = (request.max_restarts, newest, config.checkpoint.save_interval)
            try:
                return run_with_restarts(attempt_on, nodes, *limits, progress, coordinator.pause_for)
            finally:
                coordinator.close()

        return JobKeeper(listener, token, start, coordinate).run()


def _listed(env: dict[str, str]) -> Sequence[str]:
    """The job's nodes as they are now; none while the list is being written."""
    with contextlib.suppress(ConfigError):
        return detect_allocation(env).hosts
    return ()


def _newest_step(config: RunConfig, memory: Path | None) -> int:
    """Returns the step of the newest full checkpoint, on disk or in the folder ``memory``; -1 where there is none.

    The package of checkpoints imports torch, for which a launcher does not wait; hence the names are read here.
    """
    try:
        names = os.listdir(config.checkpoint_folder)
    except OSError:
        names = []
    steps = [int(found[1]) for found in map(_CHECKPOINT.fullmatch, names) if found]
    return max([memory_slots.newest_step(memory), *steps])


def _describe(launch: Launch, run: CommandLine, *, has_agents: bool) -> str:
    """Returns what ``--dry-run`` prints. Raises ConfigError for a run that cannot work."""
    nodes, per_node = launch.num_nodes, launch.ranks_per_node
    lines = [f"# {nodes} node{'s' * (nodes > 1)} x {per_node} ranks = {launch.world_size} ranks, {launch.method.value}"]
    if launch.spares:
        lines.append(f"# {len(launch.spares)} spare node{'s' * (len(launch.spares) > 1)}: {', '.join(launch.spares)}")
    users = {name: setting.value for name, setting in launch.user_settings.items()}
    if launch.method is not LaunchMethod.LOCAL:
        for name, value in {**users, **launch.environment(launch.hosts)}.items():
            lines.append(f"export {name}={shlex.quote(value)}  # {launch.reason(name)}")
        if has_agents:
            words = launch.agent_command([*launch.hosts, *launch.spares], "HOSTFILE", run.config.parallel.device.value)
            lines += [" ".join(map(_quote, words)), "# once, on spare nodes too; these agents start the ranks:"]
        words = list(launch.program) if has_agents else launch.command(launch.hosts, "HOSTFILE")
        lines.append(" ".join(map(_quote, words)))
    else:
        lines.append("# each with torchrun's RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT:")
        lines.append(" ".join(map(_quote, launch.program)))
    return "\n".join([*lines, "", describe(run.config, launch.world_size, verbose=run.verbose)])


def _quote(word: str) -> str:
    return "python" if word == sys.executable else shlex.quote(word)


def _parser() -> Parser:
    """Returns the parser of the launcher's options; all others are those of pretrain."""
    result = Parser("launch", _DESCRIPTION)
    whole = whole_number()
    ranks = "ranks on a node (default: from --system or the scheduler)"
    result.add_argument("--nproc-per-node", type=whole, metavar="N", help=ranks)
    nodes = "nodes to use; further nodes of the job are spares (default: all)"
    result.add_argument("--nodes", type=whole, metavar="N", help=nodes)
    method = "program that starts the ranks (default: auto)"
    result.add_enum("--launcher", members=LaunchMethod, default=LaunchMethod.AUTO, help=method)
    mpi = "MPI that mpiexec belongs to (default: pals on aurora, else mpich)"
    result.add_enum("--mpi", members=Mpi, help=mpi)
    system = f"machine whose defaults to use: {', '.join(SYSTEMS)} (default: generic)"
    result.add_argument("--system", type=one_of_names(SYSTEMS), metavar="NAME", default="generic", help=system)
    cores = "CPU cores of each rank, in the syntax of the launcher; none: no binding"
    result.add_argument("--cpu-bind", metavar="TEXT", help=cores)
    restarts = "restarts after a failure, on spare nodes if there are any (default: 0)"
    result.add_argument("--max-restarts", type=whole_number(0), metavar="N", default=0, help=restarts)
    fewest = "go on with as few nodes where one is lost and no spare is left; needs --max-restarts (default: --nodes)"
    result.add_argument("--min-nodes", type=whole, metavar="N", help=fewest)
    stall = "seconds without progress, or on several nodes without agents without output, after the first step, after "
    stall += "which the ranks are stopped; 0: never (default: learned from the steps; without agents never)"
    result.add_argument("--stall-timeout", type=whole_number(0), metavar="SECONDS", help=stall)
    preflight = "check devices, links, folder and versions first; bad nodes are exchanged for spares"
    result.add_argument("--preflight", action="store_true", help=preflight)
    dry_run = "print the command, its environment and what the run would be, then stop"
    result.add_argument("--dry-run", action="store_true", help=dry_run)
    return result


def _parse(argv: Sequence[str] | None) -> LaunchRequest:
    """Splits the command line into the launcher's options and those of pretrain."""
    args, options = _parser().parse_known(argv)
    launch_options = LaunchOptions(
        nproc_per_node=args.nproc_per_node,
        nodes=args.nodes,
        method=args.launcher,
        mpi=args.mpi,
        system=SYSTEMS[args.system],
        cpu_bind=args.cpu_bind,
        port=environment.rendezvous_port(),
    )
    stall = None if args.stall_timeout is None else float(args.stall_timeout)
    return LaunchRequest(
        launch_options, args.max_restarts, args.min_nodes, stall, args.preflight, args.dry_run, options
    )


if __name__ == "__main__":
    signals.raise_on_sigint()
    sys.exit(main())
