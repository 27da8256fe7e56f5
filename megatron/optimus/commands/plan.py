"""Predict what a run needs and how fast it is, before it is queued.

    optimus plan --preset mula-220b-a10b --nodes 1024 --system aurora
    optimus plan --preset mula-7b-a1b --nodes 1 --micro-batch-size 8 --explain
    optimus plan --preset mula-220b-a10b --weak-scaling weak_scaling
    optimus plan --preset mula-220b-a10b --nodes 1024 --system aurora --check-build
    optimus plan --preset mula-220b-a10b --system aurora --nodes 1024 --mtbf-hours 6300
    optimus plan --measure mine.yaml
    optimus plan --preset mula-7b-a1b --nodes 4 --system mine.yaml

Prints the layout of the command line and the best layouts found. All options of `optimus pretrain` can follow; the
search does not vary those given as flags. Needs no GPU, and torch only for --check-build and --measure, which measures
the devices of this machine for less than a minute.

Exit code: 0, 1 where the layout does not fit the memory, or 2 after one line that says what is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.optimus.config.load import CommandLine, Parser, load, whole_number
from megatron.optimus.config.options import build, read_sections
from megatron.optimus.config.presets import PRESETS
from megatron.optimus.config.schema import ConfigError, RunConfig
from megatron.optimus.models.huggingface.config import take_from_hf
from megatron.optimus.planner import reliability
from megatron.optimus.planner.fake_world import build_in_a_process, built_text
from megatron.optimus.planner.hardware import MACHINES, Machine, machine_named
from megatron.optimus.planner.plan import Plan, plan
from megatron.optimus.planner.reliability import SIZES, effective_time
from megatron.optimus.planner.report import plan_json, plan_text, search_text
from megatron.optimus.planner.search import SearchResult, search
from megatron.optimus.planner.weak_scaling import PAPER, panel, table, weak_scaling, with_paper_settings
from megatron.optimus.platform.files import naming_write_errors
from megatron.optimus.platform.log import prints_errors
from megatron.optimus.report import figure

MAX_RANKS = 1_000_000


@prints_errors(ConfigError)
def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``optimus plan`` on ``argv``, or on the options of this process. SystemExit with code 0 after ``--help``.

    Returns:
        0, also for a layout that is refused where the search finds others; 1 for a layout that does not fit the memory;
        2 after a line that begins with "error:", and for a refused layout where the search finds none.
    """
    parser = _parser()
    args, run_words = parser.parse_known(argv)
    if args.measure is not None:
        return measure_machine(args.measure)
    run = load(run_words, "plan", other_flags=parser.flags, take_from_hf=take_from_hf)
    machine = machine_named(args.system or "h200")
    if args.weak_scaling is not None:
        return write_weak_scaling(run.config, machine_named(args.system or "aurora"), args.weak_scaling)
    if args.effective_time is not None and args.mtbf_hours is None:
        raise ConfigError(f"--effective-time={args.effective_time} needs --mtbf-hours: how often a node fails")
    world_size = _num_ranks(args, machine)
    if args.mtbf_hours is not None:
        return write_effective_time(run.config, machine, args, world_size)
    if args.check_build:
        return check_build(run_words, world_size, as_json_object=args.json)
    return print_plan(run, world_size, machine, args)


def _parser() -> Parser:
    result = Parser("plan", __doc__ or "")
    result.add_argument(
        "--system",
        metavar="NAME",
        help=f"machine: {', '.join(MACHINES)} (h200 is measured, the others are public and assumed figures), "
        "or the path of a YAML file [h200]",
    )
    result.add_argument(
        "--measure", type=Path, metavar="FILE", help="measure this machine and write FILE (.yaml) for --system"
    )
    result.add_argument("--nodes", type=whole_number(), metavar="N", help="nodes of the system")
    result.add_argument("--world-size", type=whole_number(), metavar="N", help="ranks; instead of --nodes")
    result.add_argument(
        "--top", type=whole_number(0), metavar="N", default=10, help="number of best layouts to list; 0: no search [10]"
    )
    result.add_argument(
        "--explain",
        action="store_true",
        help="also print the modules of a layer, collectives, and constants with their sources",
    )
    result.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    curve = (
        "weak scaling from 384 to 12,288 ranks [of aurora], into OUT.png and OUT.md; of mula-220b-a10b with the paper's"
    )
    result.add_argument("--weak-scaling", type=Path, metavar="OUT", help=curve)
    hours = "predict the effective time where a node fails so often on average, to the size given [384 to 12,288 ranks]"
    result.add_argument("--mtbf-hours", type=float, metavar="H", help=hours)
    effective = "write that table and its plot into OUT.md and OUT.png"
    result.add_argument("--effective-time", type=Path, metavar="OUT", help=effective)
    result.add_argument(
        "--check-build", action="store_true", help="build the model of the first and last rank and measure it"
    )
    return result


def _num_ranks(args: argparse.Namespace, machine: Machine) -> int:
    """Returns the number of ranks. Raises ConfigError where it is too large, or --nodes and --world-size contradict."""
    of_nodes = (args.nodes or 1) * machine.devices_per_node
    size: int = args.world_size or of_nodes
    if args.nodes is not None and size != of_nodes:
        raise ConfigError(
            f"--nodes={args.nodes} of {machine.name} are {of_nodes} ranks, but --world-size={size}; leave one out"
        )
    if size > MAX_RANKS:
        raise ConfigError(f"{size:,} ranks are more than the {MAX_RANKS:,} that are planned here")
    return size


def print_plan(run: CommandLine, world_size: int, machine: Machine, args: argparse.Namespace) -> int:
    """Prints the plan of the run's layout and the best layouts; returns the exit code."""
    config, top = run.config, args.top
    requested_plan: Plan | None = None
    refusal = ""
    try:
        requested_plan = plan(config, world_size, machine)
    except ConfigError as error:
        if top == 0:
            raise
        refusal = str(error)
    found = search(config, world_size, machine, fixed_options=set(run.given), keep=top) if top else None
    if args.json:
        sys.stdout.write(json.dumps(_format_json(requested_plan, refusal, found), indent=1) + "\n")
    else:
        sys.stdout.write(_format_text(requested_plan, refusal, found, world_size, explain=args.explain))
    if requested_plan is None:
        return 0 if found is not None and found.best else 2
    return 0 if requested_plan.fits else 1


def _format_text(
    requested_plan: Plan | None, refusal: str, found: SearchResult | None, world_size: int, *, explain: bool
) -> str:
    text = (
        f"the layout given is refused: {refusal}\n"
        if requested_plan is None
        else plan_text(requested_plan, explain=explain)
    )
    return text if found is None else text + "\n" + search_text(found, world_size)


def _format_json(requested_plan: Plan | None, refusal: str, found: SearchResult | None) -> dict[str, Any]:
    result: dict[str, Any] = {
        "plan": None if requested_plan is None else plan_json(requested_plan),
        "refusal": refusal or None,
    }
    if found is not None:
        result["search"] = {
            "tried": found.tried,
            "refused": {reason: [number, found.examples[reason]] for reason, number in found.refused.items()},
            "best": [plan_json(made) for made in found.best],
            "too_large": [plan_json(made) for made in found.too_large],
        }
    return result


def write_weak_scaling(config: RunConfig, machine: Machine, out: Path) -> int:
    """Writes the weak-scaling table and plot; returns 0."""
    paper = PAPER if config.model == build(read_sections(PRESETS["mula-220b-a10b"], "preset")).model else {}
    curves = {
        "predicted, bf16 gradients, nothing overlapped": weak_scaling(with_paper_settings(config), machine, paper),
        "predicted, as this library runs it": weak_scaling(config, machine, paper),
    }
    title = f"weak scaling on {machine.name}: model, not measured by us"
    _write_table("--weak-scaling", out, table(curves), panel(curves, title))
    sys.stdout.write(table(curves))
    return 0


def _write_table(option: str, out: Path, text: str, picture: figure.Panel) -> None:
    """Writes OUT.md and OUT.png. Raises ConfigError, also without matplotlib."""
    with naming_write_errors(f"{option}={out}: {out}.md"):
        Path(f"{out}.md").write_text(text)
    try:
        figure.draw(Path(f"{out}.png"), [picture])
    except ConfigError as error:
        raise ConfigError(f"{out}.md is written; {error}") from error


def write_effective_time(config: RunConfig, machine: Machine, args: argparse.Namespace, world_size: int) -> int:
    """Prints the effective time by size and recovery, and writes it where that is asked; returns 0."""
    hours, out = args.mtbf_hours, args.effective_time
    if not 0.1 <= hours <= 1e7:
        raise ConfigError(
            f"--mtbf-hours={hours} must be 0.1 to 1e7; Llama 3's nodes of 8 GPUs failed every 6,300 hours"
        )
    is_sized = args.nodes is not None or args.world_size is not None
    sizes = [size for size in SIZES if size < world_size] + [world_size] if is_sized else list(SIZES)
    rows = effective_time(config, machine, hours, sizes)
    text = reliability.table(rows)
    if out is not None:
        title = f"{machine.name}, a node fails every {hours:,.0f} hours: model"
        _write_table("--effective-time", out, text, reliability.panel(rows, title))
    sys.stdout.write(text)
    return 0


def measure_machine(out: Path) -> int:
    """Measures this machine into a file for ``--system``; returns 0. Raises ConfigError where it cannot be written."""
    from megatron.optimus.planner import measure  # needs torch

    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--measure={out}: the name must end in .yaml or .yml")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--measure={out}: no folder {out.absolute().parent}")
    text = measure.measured_yaml(lambda line: sys.stdout.write(f"{line}\n"))
    with naming_write_errors(f"--measure={out}"):
        out.write_text(text)
    sys.stdout.write(f"written: optimus plan --system {out} ...\n")
    return 0


def check_build(words: list[str], world_size: int, *, as_json_object: bool) -> int:
    """Builds the first and the last rank in processes of their own and prints what they hold; returns 0."""
    built = []
    for rank in sorted({0, world_size - 1}):
        built.append(build_in_a_process(words, rank, world_size))
        if not as_json_object:
            sys.stdout.write(built_text(built[-1]) + "\n")
            sys.stdout.flush()
    if as_json_object:
        sys.stdout.write(json.dumps([asdict(one) for one in built], indent=1) + "\n")
    return 0
