"""Inject faults into a small run under optimus launch, and check that it recovers by itself and exactly.

    optimus drill --out runs/drill                                   every kind of fault once, 4 ranks
    optimus drill --faults kill,stop,flip --count 100 --seed 7 --out runs/drill
    optimus drill --device cuda --ranks 4 --out runs/drill           on four GPUs
    optimus drill --device cuda --ranks 2 --out runs/drill           on one GPU: faults of agents and coordinators
    optimus drill --seconds 420 --seed 3 --out runs/part-3           a part of a long campaign
    optimus drill --join runs/part-* --out runs/drill                one table of all parts

A tiny MoE model trains on random tokens with memory checkpoints, integrity checks and restarts. First without faults,
then in rounds: each is a run of the same steps, into which up to five faults are injected, at moments that the seed
chooses. Losses, weights, moments and generators are compared with the undisturbed run bit by bit. The table goes to the
terminal, and to drill.md and drill.json in --out.

Exit code: 0; 1 where a promise was broken; 2 after one line that says what is wrong with the command line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megatron.optimus.checkpoint import CheckpointError
from megatron.optimus.checkpoint.verify import compare
from megatron.optimus.commands.drill_faults import FAULTS, Fault, LaunchEnded, Target, agents_of, named
from megatron.optimus.commands.drill_nodes import make_job
from megatron.optimus.config.load import Parser, whole_number
from megatron.optimus.config.options import did_you_mean
from megatron.optimus.config.schema import ConfigError, Device
from megatron.optimus.data.indexed import IndexedDatasetWriter
from megatron.optimus.platform import environment
from megatron.optimus.platform.device import device_count
from megatron.optimus.platform.log import prints_errors

PER_ROUND = 5
_STEPS, _STEPS_ON_DEVICE = 90, 300  # of a round: steps on an accelerator are short
_LIMIT_SECONDS = 240.0  # for anything that should take seconds; collectives end after 2 minutes
_KEYS = ("step", "consumed_tokens", "loss", "grad_norm", "lr")  # of a line of metrics, the same in every run
_OPTIONS = (
    "--preset mula-tiny --num-layers 2 --hidden-size 32 --num-attention-heads 4 --moe-ffn-hidden-size 32 "
    "--vocab-size 256 --seq-length 32 --micro-batch-size 1 --lr 1e-3 --lr-warmup-iters 2 --eval-interval 0 "
    "--log-interval 1000 --save-interval 10 --memory-checkpoint-interval 3 --integrity-interval 1 "
    "--straggler-check-interval 10 --max-restarts 1000 --distributed-timeout-minutes 2"
).split()
# The kernels that training has there are in 16 bits; two runs have the same bits with --deterministic alone.
_ON_DEVICE = "--params-dtype bf16 --hidden-size 128 --moe-ffn-hidden-size 128 --deterministic".split()


@dataclass
class Outcome:
    """What one fault did."""

    round: int
    fault: str
    step: int  # done when it was injected
    ranks: list[int]
    noticed_s: float | None = None
    named: int | None = None
    recovered_s: float | None = None  # to the first step that is new
    steps_lost: int = 0
    identical: bool | None = None  # losses up to the next fault, and the state at the end of the round
    broken: str = ""  # the promise that was


class DrilledRun:
    """A run under ``optimus launch``; the same command can be given again.

    ``spares``: it is in a job of simulated nodes with agents, so many of which wait; None: on this machine without.
    """

    def __init__(
        self, folder: Path, options: argparse.Namespace, data: Path, seed: str, spares: int | None = None
    ) -> None:
        self.folder, self.log, self.hooks = folder, folder / "log", folder / "hooks"
        self.has_agents = spares is not None
        self.hooks.mkdir(parents=True)
        per_node, self._job = options.ranks, dict[str, str]()
        words = [*_OPTIONS, "--device", options.device.value]
        if spares is not None:
            per_node //= options.nodes
            gpus = 0 if options.device is Device.CPU else per_node
            self._job = make_job(folder / "job", options.nodes + spares, gpus)
            words += ["--launcher", "mpiexec", "--mpi", "pals", "--nodes", str(options.nodes)]
        words += ["--nproc-per-node", str(per_node)]
        words += [] if options.device is Device.CPU else _ON_DEVICE
        words += ["--train-iters", str(options.steps)]
        words += ["--global-batch-size", str(2 * options.ranks)]
        self._command = [sys.executable, "-m", "megatron.optimus.launch", *words]
        self._command += ["--data-path", str(data), "--run-dir", str(folder)]
        self.target = Target(
            *(0, options.ranks, options.ranks // options.nodes, folder, self.log, data.with_suffix(".bin"), self.hooks),
            *(random.Random(seed), self.is_alive),
        )
        self.start()

    def start(self) -> None:
        """Gives the command."""
        env = environment.current() | {"OMP_NUM_THREADS": "1", environment.DRILL_FOLDER: str(self.hooks)} | self._job
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=env | environment.import_path())
        self.target.launcher = self.process.pid

    def is_alive(self) -> bool:
        """Whether the launcher has not ended."""
        return self.process.poll() is None

    def text(self, offset: int) -> str:
        """The log from a byte on."""
        return self.log.read_bytes()[offset:].decode(errors="replace")

    def lines(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl."""
        with suppress(OSError):
            text = (self.folder / "metrics.jsonl").read_text(encoding="utf-8")
            return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]
        return []

    def last_step(self) -> int:
        """The last step in metrics.jsonl; 0 before the first."""
        lines = self.lines()
        return int(lines[-1]["step"]) if lines else 0

    def end(self) -> None:
        """Kills the launcher and its ranks."""
        pids = [*self.target.ranks(), *agents_of(self.process.pid)] if self.is_alive() else []
        self.process.kill()
        self.process.wait()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Drill:
    """The undisturbed run, then rounds with faults."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out = options, options.out
        self.outcomes: list[Outcome] = []
        self.rounds = 0
        self.data = self.out / "tokens"
        self.out.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(0)
        with IndexedDatasetWriter(str(self.data), np.uint16) as writer:
            for _ in range(400):
                writer.add_document(rng.integers(0, 256, 500))
        self.references: dict[bool, DrilledRun] = {}  # undisturbed; True: with agents
        # NCCL sums in another order over simulated nodes than inside a host; gloo has one order for both.
        for kind in sorted({one.needs_agents and options.device is not Device.CPU for one in options.faults}):
            self._run_undisturbed(kind)

    def _run_undisturbed(self, has_agents: bool) -> None:
        name = "undisturbed-agents" if has_agents else "undisturbed"
        launch = DrilledRun(self.out / name, self.options, self.data, "", 0 if has_agents else None)
        self.references[has_agents] = launch
        if not has_agents:
            self._leave_out_fork_server(launch)
        code = self._wait_for_end(launch)
        if code:
            errors = [line for line in launch.text(0).splitlines() if "error" in line]
            told = f"; {errors[0]}" if errors else ""
            raise ConfigError(f"the undisturbed run ended with exit code {code}; see {launch.log}{told}")

    def _leave_out_fork_server(self, launch: DrilledRun) -> None:
        """Removes the faults that need forked ranks where the launcher does not fork them."""
        fault = FAULTS["fork-server"]
        with suppress(LaunchEnded):
            launch.target.wait(lambda: len(launch.target.ranks()) == self.options.ranks)
        is_forked = launch.target.fork_server() is not None
        if fault not in self.options.faults or is_forked or not launch.is_alive():
            return
        print("fork-server is left out: ranks are new interpreters here, not forked", flush=True)
        self.options.faults.remove(fault)
        if not self.options.faults:
            launch.end()
            raise ConfigError("--faults fork-server: ranks are new interpreters here; name other faults too")

    def run_round(self, faults: Sequence[Fault]) -> None:
        """One run with these faults, compared with the undisturbed one."""
        self.rounds += 1
        seed = f"{self.options.seed}/{self.rounds}"
        spares = sum(one.name == "agent" for one in faults) if faults[0].needs_agents else None
        launch = DrilledRun(self.out / f"round-{self.rounds}", self.options, self.data, seed, spares)
        done: list[Outcome] = []
        try:
            for fault in sorted(faults, key=lambda one: not one.at_start):
                if not self._wait_for_moment(launch, fault, bool(done)):
                    if launch.process.poll():  # not by a fault
                        done.append(Outcome(self.rounds, fault.name, launch.last_step(), []))
                        done[-1].broken = self._how_it_ended(launch, "") + ", before the fault"
                    break  # too few steps are left: it comes in another round
                done.append(self._inject(launch, fault))
                self._show(done[-1])
                if done[-1].recovered_s is None:
                    break
            if done and done[-1].recovered_s is not None:
                self._finish(launch, done)
        finally:
            launch.end()
            self.outcomes += done
        if not any(one.broken for one in done):
            shutil.rmtree(launch.folder)

    def _wait_for_moment(self, launch: DrilledRun, fault: Fault, is_later: bool) -> bool:
        """Waits for some more steps; False where the run is too near its end."""
        if fault.at_start:
            return not is_later
        step = launch.last_step() + launch.target.rng.randint(4, 9)
        steps = self.options.steps
        if step + (max(12, steps // 8) if fault.restarts else max(40, 4 * steps // 9)) > steps:
            return False
        with suppress(LaunchEnded):
            launch.target.wait(lambda: launch.last_step() >= step)
            time.sleep(launch.target.rng.uniform(0.0, 0.1))
            return True
        return False

    def _inject(self, launch: DrilledRun, fault: Fault) -> Outcome:
        """Injects a fault, watches the run until it does new steps, and judges it."""
        target, before = launch.target, launch.last_step()
        undo = None
        outcome = Outcome(self.rounds, fault.name, before, [])
        try:
            undo = fault.strike(target)
            outcome.ranks, before = target.victims, launch.last_step()
            if fault.notice:
                self._notice(launch, fault, outcome)
            if undo is not None:
                saved = target.newest_save()
                if fault.by_command:
                    launch.process.wait(_LIMIT_SECONDS)
                undo()
                undo = None
            if fault.by_command:
                self._give_command_again(launch, fault, outcome)
            began = target.begun
            if not fault.restarts:
                self._until(launch, lambda: launch.last_step() > before + 3, "no further step")
                is_again = self._started(launch, began) and not fault.at_start
                if is_again or "; the next one starts" in launch.text(target.log_size):
                    raise TimeoutError("the ranks were started again")
                if fault.name.startswith("disk"):
                    self._until(launch, lambda: target.newest_save() > saved, "no further checkpoint")
            else:
                self._until(launch, lambda: self._started(launch, began), "not started again")
                self._until(launch, lambda: launch.last_step() > before, "no new step")
                outcome.steps_lost = max(0, before - int(self._started(launch, began)[0]["step"]) + 1)
            outcome.recovered_s = round(time.time() - began, 2)
        except (LaunchEnded, TimeoutError, subprocess.TimeoutExpired) as error:
            outcome.broken = self._how_it_ended(launch, str(error))
        finally:
            if undo is not None:
                undo()
        if fault.names and not outcome.broken and outcome.named not in outcome.ranks:
            outcome.broken = f"rank {outcome.named} was named"
        return outcome

    def _how_it_ended(self, launch: DrilledRun, what: str) -> str:
        """What went wrong, with the last line of an error since the last fault."""
        errors = [one for one in launch.text(launch.target.log_size).splitlines() if one.startswith("error")]
        what = what or f"the launch ended with exit code {launch.process.poll()}"
        return f"{what} after {errors[-1]!r}" if errors else what

    def _notice(self, launch: DrilledRun, fault: Fault, outcome: Outcome) -> None:
        """Waits until the log tells of the fault."""

        def is_told() -> bool:
            found, outcome.named = named(launch.text(launch.target.log_size), fault)
            return found

        deadline = time.monotonic() + _LIMIT_SECONDS
        while not is_told():
            has_ended = not launch.is_alive() and fault.name != "launcher" and not is_told()
            if has_ended or time.monotonic() > deadline:
                raise TimeoutError(f"not noticed{', and the launch ended' if has_ended else ''}")
            time.sleep(0.02)
        outcome.noticed_s = round(time.time() - launch.target.begun, 2)

    def _give_command_again(self, launch: DrilledRun, fault: Fault, outcome: Outcome) -> None:
        """After the launcher's end, and that of its ranks."""
        launch.process.wait(_LIMIT_SECONDS)
        lock, deadline = launch.folder / "checkpoints" / ".claim", time.monotonic() + _LIMIT_SECONDS
        while lock.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the ranks live on without their launcher")
            time.sleep(0.02)
        if fault.name == "data-cut" and launch.process.returncode != 2:
            outcome.broken = f"exit code {launch.process.returncode}"
        launch.start()

    def _started(self, launch: DrilledRun, since: float) -> list[dict[str, Any]]:
        """The first step of the newest process that began after a time of day."""
        return [line for line in launch.lines() if "startup_s/total" in line and line["wall_time"] > since][-1:]

    def _until(self, launch: DrilledRun, condition: Any, problem: str) -> None:
        deadline = time.monotonic() + _LIMIT_SECONDS
        while not condition():
            if not launch.is_alive() and not condition():
                raise LaunchEnded
            if time.monotonic() > deadline:
                raise TimeoutError(f"{problem} in {_LIMIT_SECONDS:.0f} s")
            time.sleep(0.02)

    def _wait_for_end(self, launch: DrilledRun) -> int:
        try:
            return launch.process.wait(_LIMIT_SECONDS + 2 * self.options.steps)
        except subprocess.TimeoutExpired:
            launch.end()
            return 124

    def _finish(self, launch: DrilledRun, done: list[Outcome]) -> None:
        """Waits for the end of the run, compares it with the undisturbed one, and judges its faults."""
        code = self._wait_for_end(launch)
        different = f"the run ended with exit code {code}" if code else self._difference(launch)
        for one in done:
            one.identical = not different
            if different:
                one.broken = one.broken or different
        names = ", ".join(one.fault for one in done)
        print(f"round {self.rounds} ({names}): {different or 'bit-identical to the undisturbed run'}", flush=True)

    def _difference(self, launch: DrilledRun) -> str:
        """The first difference to the undisturbed run, "" where there is none."""
        reference = self.references.get(launch.has_agents) or self.references[False]
        for ours, theirs in zip(launch.lines(), reference.lines(), strict=False):
            for key in _KEYS:
                if ours.get(key) != theirs.get(key):
                    return f"step {theirs['step']}: {key} {ours.get(key)} in place of {theirs.get(key)}"
        name = f"checkpoints/step-{self.options.steps:08}"
        try:
            found = compare(reference.folder / name, launch.folder / name)
        except CheckpointError as error:
            return str(error)
        bad = [one for one in found if not one.is_same or one.only_in is not None]
        return f"{len(bad)} tensors differ, such as {bad[0].name} {bad[0].kind}" if bad else ""

    def _show(self, one: Outcome) -> None:
        told = "not noticed" if one.noticed_s is None else f"noticed after {one.noticed_s} s"
        back = "" if one.recovered_s is None else f", back after {one.recovered_s} s, {one.steps_lost} steps lost"
        print(f"{one.fault} of ranks {one.ranks} at step {one.step}: {told}{back}{one.broken and ': ' + one.broken}")


@prints_errors(ConfigError)
def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``optimus drill``; returns the exit code."""
    options = _parse(argv)
    if options.join:
        return _join(options)
    drill = Drill(options)
    began, queue = time.monotonic(), _order(options)
    while queue and time.monotonic() - began < options.seconds:
        kind = queue[0].needs_agents
        others = [one for one in queue if not one.alone and one.needs_agents == kind]
        together = queue[:1] if queue[0].alone else others[:PER_ROUND]
        before = len(drill.outcomes)
        drill.run_round(together)
        for one in drill.outcomes[before:]:
            queue.remove(FAULTS[one.fault])
        if len(drill.outcomes) == before:
            raise ConfigError(f"no fault could be injected in {options.steps} steps; give more --steps")
        _write(options, drill.outcomes, rounds=drill.rounds, seconds=round(time.monotonic() - began))
    print(_table(drill.outcomes))
    return int(any(one.broken for one in drill.outcomes))


def _order(options: argparse.Namespace) -> list[Fault]:
    """All faults to inject, in the seed's order."""
    count, rng = options.count or len(options.faults), random.Random(options.seed)
    result: list[Fault] = []
    if options.count is None and options.seconds < float("inf"):
        count = 10_000  # more than fit
    while len(result) < count:
        result += rng.sample(options.faults, len(options.faults))
    return result[:count]


def _table(outcomes: Sequence[Outcome]) -> str:
    """One row for each kind of fault."""
    rows = [
        "| fault | times | noticed after, s | named right | by itself, new step after, s | steps lost | bit-identical |"
    ]
    rows.append("|---|---|---|---|---|---|---|")
    for name, fault in FAULTS.items():
        found = [one for one in outcomes if one.fault == name]
        if not found:
            continue
        right = sum(one.named in one.ranks for one in found) if fault.names else "-"
        back = [one.recovered_s for one in found if one.recovered_s is not None]
        same = sum(bool(one.identical) for one in found)
        again = " (same command given again)" if fault.by_command else ""
        noticed = _spread([one.noticed_s for one in found if one.noticed_s is not None])
        rows.append(
            f"| {fault.what} | {len(found)} | {noticed} | "
            f"{right} | {len(back)}: {_spread(back)}{again} | {_spread([one.steps_lost for one in found])} | {same} |"
        )
    broken = [f"{one.fault} in round {one.round}: {one.broken}" for one in outcomes if one.broken]
    text = [f"{len(outcomes)} faults, median (largest); {len(broken)} broken promises", *broken]
    return "\n".join([*rows, "", *text])


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.3g} ({max(values):.3g})" if values else "-"


def _join(options: argparse.Namespace) -> int:
    """Writes the tables of earlier drills as one; returns the exit code. Their rounds are counted on."""
    outcomes: list[Outcome] = []
    rounds = seconds = 0
    commands, load = [], 0.0
    facts: dict[str, Any] = {}  # of the machines that the drills ran on, which may be another one
    for folder in options.join:
        path = folder / "drill.json" if folder.is_dir() else folder
        try:
            part = json.loads(path.read_text(encoding="utf-8"))
            found = [Outcome(**one) for one in part["faults"]]
            unknown = {one.fault for one in found} - FAULTS.keys()
            if unknown:
                raise ValueError(f"it has the unknown fault {min(unknown)!r}")
            commands.append(part["command"])
            for one in found:
                one.round += rounds
            rounds, seconds = rounds + part["rounds"], seconds + part["seconds"]
            facts, load = {key: part[key] for key in ("ranks", "cores", "steps")}, max(load, part["load"])
            facts["device"] = part.get("device", "cpu")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--join: {path} is not the drill.json of a drill: {error}") from error
        outcomes += found
    if len(set(commands)) < len(commands):
        repeated = next(one for one in commands if commands.count(one) > 1)
        raise ConfigError(f"--join: two parts have the same command, and so the same faults: {repeated}")
    options.out.mkdir(parents=True, exist_ok=True)
    options.words = [Path(word).name if Path(word) in options.join else word for word in options.words]
    _write(options, outcomes, **facts, load=load, rounds=rounds, seconds=seconds, parts=commands)
    print(_table(outcomes))
    return int(any(one.broken for one in outcomes))


def _write(options: argparse.Namespace, outcomes: Sequence[Outcome], **numbers: Any) -> None:
    """Writes drill.md and drill.json."""
    words = ("DIR" if word == str(options.given_out) else word for word in options.words)
    about = {
        "command": " ".join(["optimus drill", *words]),
        "device": options.device.value,
        "ranks": options.ranks,
        "cores": os.cpu_count(),
    }
    about |= {"steps": options.steps, "load": os.getloadavg()[0], **numbers}
    promises = {name: FAULTS[name].promise for name in sorted({one.fault for one in outcomes})}
    content = {**about, "promises": promises, "faults": [asdict(one) for one in outcomes]}
    (options.out / "drill.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (options.out / "drill.md").write_text(_table(outcomes) + "\n", encoding="utf-8")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("drill", __doc__ or "")
    parser.add_argument("--faults", metavar="LIST", help=f"commas between: {', '.join(FAULTS)} (default: all)")
    device = "of the ranks; one each (in runs with agents two nodes may share GPUs), or the CPU for all [cpu]"
    parser.add_enum("--device", members=(Device.CPU, Device.CUDA, Device.XPU), default=Device.CPU, help=device)
    parser.add_argument("--ranks", type=whole_number(), default=4, metavar="N", help="on this machine [4]")
    parser.add_argument("--nodes", type=whole_number(), default=2, metavar="N", help="simulated nodes they are on [2]")
    parser.add_argument("--count", type=whole_number(), metavar="N", help="faults (default: each kind once)")
    parser.add_argument("--seconds", type=whole_number(), metavar="S", help="start no further round after S seconds")
    parser.add_argument(
        "--steps", type=whole_number(), metavar="N", help=f"of a round [{_STEPS}; GPUs {_STEPS_ON_DEVICE}]"
    )
    parser.add_argument("--seed", type=whole_number(0), default=0, metavar="N", help="of kinds, ranks and moments [0]")
    parser.add_argument("--join", type=Path, nargs="+", metavar="DIR", help="--out of drills, to join; none is run")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder for tables and runs")
    options = parser.parse(argv)
    options.words = list(sys.argv[1:] if argv is None else argv)
    is_cpu = options.device is Device.CPU
    options.steps = options.steps or (_STEPS if is_cpu else _STEPS_ON_DEVICE)
    if options.ranks < 2 or options.ranks % options.nodes:
        raise ConfigError(f"--ranks={options.ranks} must be 2 or more and a multiple of --nodes={options.nodes}")
    problems = {name: _problem(fault, options) for name, fault in FAULTS.items()}
    possible = [name for name, fault in FAULTS.items() if not problems[name] and (is_cpu or not fault.needs_tcp)]
    names = possible if options.faults is None else options.faults.split(",")
    if not names:
        raise ConfigError(problems["kill"])
    for name in names:
        if name not in FAULTS:
            raise ConfigError(f"unknown fault {name!r} in --faults; {did_you_mean(name, FAULTS, 'see --help')}")
        if problems[name]:
            raise ConfigError(f"--faults={name}: {problems[name]}")
    if options.out.exists() and any(options.out.iterdir()):
        raise ConfigError(f"{options.out} is not empty; name a new folder with --out")
    options.faults = [FAULTS[name] for name in names]
    options.seconds = float("inf") if options.seconds is None else float(options.seconds)
    options.given_out, options.out = options.out, options.out.absolute()
    return options


def _problem(fault: Fault, options: argparse.Namespace) -> str:
    """Why a fault cannot be injected into such a run on this machine, "" where it can."""
    kind = options.device.value
    if fault.name == "two-nodes" and options.nodes < 2:
        return "it needs --nodes=2 or more"
    if options.device is Device.CPU:
        return ""
    if fault.needs_agents and options.device is not Device.CUDA:
        return f"--device={kind} cannot be divided among simulated nodes; use --device=cpu or cuda"
    seen, needed = device_count(kind), options.ranks // (options.nodes if fault.needs_agents else 1)
    if needed <= seen:
        return ""
    where = "a simulated node" if fault.needs_agents else "this machine"
    text = f"{where} has {needed} ranks, each on a {kind} device of its own, and {seen} are seen"
    return f"{text}; use fewer --ranks, or --device=cpu"
