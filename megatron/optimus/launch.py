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
from enum import Enum
from pathlib import Path
from typing import TypeVar

from megatron.optimus.platform import interrupts

if __name__ == "__main__":
    interrupts.end_silently()

from megatron.optimus.config.checks import check, check_trainable
from megatron.optimus.config.load import load
from megatron.optimus.config.options import did_you_mean
from megatron.optimus.config.own_flags import split_flags, whole_number
from megatron.optimus.config.schema import ConfigError, RunConfig, one_of
from megatron.optimus.describe import describe
from megatron.optimus.launcher.allocation import detect
from megatron.optimus.launcher.compose import Launch, LaunchOptions, Mpi, Starter, compose
from megatron.optimus.launcher.local import run_ranks
from megatron.optimus.launcher.systems import SYSTEMS
from megatron.optimus.launcher.watch import Outcome, run_until_done, run_watched
from megatron.optimus.platform import environment as launch_env
from megatron.optimus.training.metrics import FILE_NAME

_FLAGS = {
    "--nproc-per-node": "ranks on a node (default: what --system or the scheduler says)",
    "--nodes": "nodes to use; further nodes of the job are spares (default: all)",
    "--launcher": f"what starts the ranks: {', '.join(s.value for s in Starter)} (default: auto)",
    "--mpi": f"whose mpiexec: {', '.join(m.value for m in Mpi)} (default: pals on aurora, else mpich)",
    "--system": f"defaults of a machine: {', '.join(SYSTEMS)} (default: generic)",
    "--cpu-bind": "cores of each rank, in the words of the starter; none turns it off",
    "--max-restarts": "start again after a failure, on spare nodes where there are some (default: 0)",
    "--stall-timeout": "seconds without output after which the ranks are stopped (default: never)",
}
_LOCAL_RANKS_PER_CORE = 16
_E = TypeVar("_E", bound=Enum)


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
    words = list(sys.argv[1:] if argv is None else argv)
    if "--help" in words or "-h" in words:
        sys.stdout.write(_help())
        return 0
    try:
        request = _parse(words)
        env = launch_env.current()
        config = load(request.options, own_flags=_FLAGS).config  # first: a misspelt flag of ours is named here
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


def _parse(words: list[str]) -> Request:
    """Takes the launcher's options out of the command line; all other words are for pretrain."""
    given, options = split_flags(words, _FLAGS, ["--dry-run"])
    launch_options = LaunchOptions(
        nproc_per_node=whole_number(given, "--nproc-per-node"),
        nodes=whole_number(given, "--nodes"),
        starter=_choice(given, "--launcher", Starter) or Starter.AUTO,
        mpi=_choice(given, "--mpi", Mpi),
        system=SYSTEMS[_member(given, "--system", list(SYSTEMS)) or "generic"],
        cpu_bind=given.get("--cpu-bind"),
        port=launch_env.rendezvous_port(),
    )
    stall = whole_number(given, "--stall-timeout")
    return Request(
        launch_options,
        whole_number(given, "--max-restarts", 0) or 0,
        float(stall) if stall else None,
        "--dry-run" in given,
        options,
    )


def _choice(given: dict[str, str], flag: str, kind: type[_E]) -> _E | None:
    name = _member(given, flag, [str(member.value) for member in kind])
    return None if name is None else kind(name)


def _member(given: dict[str, str], flag: str, names: list[str]) -> str | None:
    text = given.get(flag)
    if text is not None and text not in names:
        raise ConfigError(f"{flag}={text!r} is not one of {one_of(names)}; {did_you_mean(text, names, 'see --help')}")
    return text


def _help() -> str:
    lines = ["python -m megatron.optimus.launch [launcher options] [options of megatron.optimus.pretrain]", ""]
    lines += [f"  {flag:<20} {text}" for flag, text in _FLAGS.items()]
    lines += [f"  {'--dry-run':<20} print the command, its environment and what the run would be, then stop", ""]
    return "\n".join([*lines, "All other options go to every rank: python -m megatron.optimus.pretrain --help", ""])


if __name__ == "__main__":
    interrupts.raise_again()
    sys.exit(main())
