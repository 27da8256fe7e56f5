"""Starts pretraining: ``python -m megatron.optimus.launch [launcher options] [options of megatron.optimus.pretrain]``.

On one machine it starts the ranks itself; in a PBS or SLURM job it composes the mpiexec or srun line from the
scheduler's own variables. ``--dry-run`` prints the command, its environment and what the run would be, on any machine.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.optimus.platform import signals

if __name__ == "__main__":
    signals.end_on_sigint()


from megatron.optimus.config.checks import check, check_trainable
from megatron.optimus.config.load import Parser, load, one_of_names, whole_number
from megatron.optimus.config.schema import ConfigError, RunConfig
from megatron.optimus.describe import describe
from megatron.optimus.launcher.allocation import detect
from megatron.optimus.launcher.compose import Launch, LaunchOptions, Mpi, Starter, compose
from megatron.optimus.launcher.local import run_ranks
from megatron.optimus.launcher.systems import SYSTEMS
from megatron.optimus.launcher.watch import Outcome, run_until_done, run_watched
from megatron.optimus.platform import environment
from megatron.optimus.training.metrics import FILE_NAME

_DESCRIPTION = """Start pretraining: on this machine, or through mpiexec or srun in a PBS or SLURM job.

    optimus launch --nproc-per-node 2 --preset mula-tiny --data-path corpus
    optimus launch --nodes 8 --launcher mpiexec --preset mula-7b-a1b --data-file-list data.txt --dry-run

All options of ``optimus pretrain`` can follow; they go to every rank."""
_LOCAL_RANKS_PER_CORE = 16


@dataclass(frozen=True)
class Request:
    launch_options: LaunchOptions
    max_restarts: int
    stall_seconds: float | None
    dry_run: bool
    options: list[str]  # for megatron.optimus.pretrain


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, that of the first rank that failed, or 2 for a wrong command line."""
    logging.basicConfig(format="[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    try:
        request = _parse(argv)
        env = environment.current()
        config = load(request.options, other_flags=_parser().flags).config  # names misspelt flags of the launcher, too
        launch = compose(detect(env), request.launch_options, request.options, env)
        if request.dry_run:
            sys.stdout.write(_describe(launch, config))
            return 0
        check(config, launch.world_size)  # here, once: not by thousands of ranks, after minutes in a queue
        check_trainable(config)
        _check_ranks(launch)
        starter = launch.command(launch.hosts, "")[0]
        if launch.starter is not Starter.LOCAL and shutil.which(starter) is None:
            raise ConfigError(
                f"{starter} is not on PATH; start from a job's first node, load the module that brings it, or see what "
                "would run with --dry-run"
            )
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return _run(launch, request, env, Path(config.logging.run_dir) / FILE_NAME)


def _check_ranks(launch: Launch) -> None:
    cores = os.cpu_count() or 1
    most = max(64, _LOCAL_RANKS_PER_CORE * cores)
    if launch.starter is Starter.LOCAL and launch.ranks_per_node > most:
        raise ConfigError(
            f"--nproc-per-node={launch.ranks_per_node} is more than this machine of {cores} cores can start; use at "
            f"most {most}"
        )


def _run(launch: Launch, request: Request, env: dict[str, str], metrics: Path) -> int:
    """``metrics``: where rank 0 writes a line for every step."""
    watched = request.max_restarts > 0 or request.stall_seconds is not None
    if launch.starter is Starter.LOCAL and not watched:
        return run_ranks(list(launch.program), launch.ranks_per_node)
    if launch.starter is Starter.LOCAL:  # a launcher of its own, so that one pipe carries the output of all ranks
        inner = ["--launcher", "local", "--nproc-per-node", str(launch.ranks_per_node), *request.options]
        command = [sys.executable, "-m", "megatron.optimus.launch", *inner]
        return run_until_done(
            lambda hosts: run_watched(command, env, request.stall_seconds, metrics), (), (), request.max_restarts
        )
    with tempfile.TemporaryDirectory(prefix="optimus-launch-") as folder:
        hostfile = Path(folder) / "hosts"

        def attempt_on(hosts: Sequence[str]) -> Outcome:
            hostfile.write_text("".join(f"{host}\n" for host in hosts), encoding="utf-8")
            command = launch.command(hosts, str(hostfile))
            return run_watched(command, {**env, **launch.environment(hosts)}, request.stall_seconds, metrics)

        return run_until_done(attempt_on, launch.hosts, launch.spares, request.max_restarts)


def _describe(launch: Launch, config: RunConfig) -> str:
    """What ``--dry-run`` prints. Raises ConfigError for a run that could not work, before a job waits in a queue."""
    nodes, per_node = launch.num_nodes, launch.ranks_per_node
    lines = [
        f"# {nodes} node{'s' * (nodes > 1)} x {per_node} ranks = {launch.world_size} ranks, {launch.starter.value}"
    ]
    if launch.spares:
        lines.append(f"# {len(launch.spares)} spare node{'s' * (len(launch.spares) > 1)}: {', '.join(launch.spares)}")
    kept = {name: setting.value for name, setting in launch.kept.items()}
    if launch.starter is not Starter.LOCAL:
        for name, value in {**kept, **launch.environment(launch.hosts)}.items():
            lines.append(f"export {name}={shlex.quote(value)}  # {launch.reason(name)}")
        lines.append(" ".join(map(_quote, launch.command(launch.hosts, "HOSTFILE"))))
    else:
        lines.append("# each with torchrun's RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT:")
        lines.append(" ".join(map(_quote, launch.program)))
    return "\n".join([*lines, "", describe(config, launch.world_size)])


def _quote(word: str) -> str:
    return "python" if word == sys.executable else shlex.quote(word)


def _parser() -> Parser:
    """The launcher's own flags; ``--dry-run`` prints the command beside what it prints of the run."""
    result = Parser("launch", _DESCRIPTION)
    whole, starters, kinds = whole_number(), [s.value for s in Starter], [m.value for m in Mpi]
    ranks = "ranks on a node (default: what --system or the scheduler says)"
    result.add_argument("--nproc-per-node", type=whole, metavar="N", help=ranks)
    nodes = "nodes to use; further nodes of the job are spares (default: all)"
    result.add_argument("--nodes", type=whole, metavar="N", help=nodes)
    starter = f"what starts the ranks: {', '.join(starters)} (default: auto)"
    result.add_argument("--launcher", type=one_of_names(starters), metavar="NAME", default="auto", help=starter)
    mpi = f"whose mpiexec: {', '.join(kinds)} (default: pals on aurora, else mpich)"
    result.add_argument("--mpi", type=one_of_names(kinds), metavar="NAME", help=mpi)
    system = f"defaults of a machine: {', '.join(SYSTEMS)} (default: generic)"
    result.add_argument("--system", type=one_of_names(SYSTEMS), metavar="NAME", default="generic", help=system)
    cores = "cores of each rank, in the words of the starter; none turns it off"
    result.add_argument("--cpu-bind", metavar="TEXT", help=cores)
    restarts = "start again after a failure, on spare nodes where there are some (default: 0)"
    result.add_argument("--max-restarts", type=whole_number(0), metavar="N", default=0, help=restarts)
    stall = "seconds without output after which the ranks are stopped (default: never)"
    result.add_argument("--stall-timeout", type=whole, metavar="SECONDS", help=stall)
    dry_run = "print the command, its environment and what the run would be, then stop"
    result.add_argument("--dry-run", action="store_true", help=dry_run)
    return result


def _parse(argv: Sequence[str] | None) -> Request:
    """Takes the launcher's flags out of the command line; all other words are for pretrain."""
    args, options = _parser().parse_own(argv)
    launch_options = LaunchOptions(
        nproc_per_node=args.nproc_per_node,
        nodes=args.nodes,
        starter=Starter(args.launcher),
        mpi=None if args.mpi is None else Mpi(args.mpi),
        system=SYSTEMS[args.system],
        cpu_bind=args.cpu_bind,
        port=environment.rendezvous_port(),
    )
    stall = None if args.stall_timeout is None else float(args.stall_timeout)
    return Request(launch_options, args.max_restarts, stall, args.dry_run, options)


if __name__ == "__main__":
    signals.raise_on_sigint()
    sys.exit(main())
