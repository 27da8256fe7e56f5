"""What a run would need and how fast it would be, before it is queued. The work is in megatron/optimus/planner/.

    python tools/plan.py --preset mula-220b-a10b --nodes 1024 --system aurora      the layout given, and the best ones
    python tools/plan.py --preset mula-7b-a1b --nodes 1 --micro-batch-size 8 --explain         with all the arithmetic
    python tools/plan.py --preset mula-220b-a10b --weak-scaling weak_scaling       OUT.png and OUT.md
    python tools/plan.py --preset mula-220b-a10b --nodes 1024 --system aurora --check-build     builds a real rank

Every option of the training program can follow; the search keeps the ones that are named. A pipeline's layers are split
as the program splits them, which is printed. Needs no GPU, and torch only for --check-build.

  --system NAME        h200 (measured) or aurora (public and assumed figures) [h200]
  --nodes N            nodes of the system; or --world-size N ranks
  --top N              best layouts to list; 0: none [10]
  --explain            parts of a layer, every collective, every constant with its source
  --json               one JSON object instead of text
  --weak-scaling OUT   the curve from 384 to 12,288 ranks [of aurora], into OUT.png and OUT.md; mula-220b-a10b's beside
                       the paper's
  --check-build        builds the first and the last rank of the real program with no world around it

Exit code: 0, 1 where the layout does not fit the memory, or 2 after one line that says what is wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.optimus.platform import interrupts

if __name__ == "__main__":
    interrupts.end_silently()

from megatron.optimus.config.load import load
from megatron.optimus.config.options import build, overrides
from megatron.optimus.config.own_flags import split_flags, whole_number
from megatron.optimus.config.presets import PRESETS
from megatron.optimus.config.schema import ConfigError, RunConfig
from megatron.optimus.planner.fake_world import build_in_a_process, built_text
from megatron.optimus.planner.hardware import Machine, machine_named
from megatron.optimus.planner.plan import Plan, plan
from megatron.optimus.planner.report import findings_text, plan_json, plan_text
from megatron.optimus.planner.search import Findings, search
from megatron.optimus.planner.weak_scaling import PAPER, as_the_paper, draw, table, weak_scaling

WITH_VALUE = ("--system", "--nodes", "--world-size", "--top", "--weak-scaling")
SWITCHES = ("--explain", "--json", "--check-build")
MOST_RANKS = 1_000_000


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or "--help" in words or "-h" in words:
        sys.stdout.write(__doc__ or "")
        return 0
    try:
        own, rest = split_flags(words, WITH_VALUE, SWITCHES)
        config = load(rest, own_flags=(*WITH_VALUE, *SWITCHES)).config
        machine = machine_named(own.get("--system", "h200"))
        if "--weak-scaling" in own:
            return scale(config, machine_named(own.get("--system", "aurora")), Path(own["--weak-scaling"]))
        world_size = ranks(own, machine)
        if "--check-build" in own:
            return check_build(rest, world_size, as_json_object="--json" in own)
        return report(config, world_size, machine, own, named_options(rest))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def named_options(words: Sequence[str]) -> set[str]:
    """Options that the user set by a flag. What a preset or a file says may be varied."""
    return {word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}


def ranks(own: dict[str, str], machine: Machine) -> int:
    """Raises ConfigError for a number that is none, too large, or given twice and not the same."""
    of_nodes = (whole_number(own, "--nodes") or 1) * machine.devices_per_node
    size = whole_number(own, "--world-size") or of_nodes
    if "--nodes" in own and size != of_nodes:
        raise ConfigError(
            f"--nodes={own['--nodes']} of {machine.name} are {of_nodes} ranks, but --world-size={size}; leave one out"
        )
    if size > MOST_RANKS:
        raise ConfigError(f"{size:,} ranks are more than the {MOST_RANKS:,} that are planned here")
    return size


def report(config: RunConfig, world_size: int, machine: Machine, own: dict[str, str], named: set[str]) -> int:
    top = whole_number(own, "--top", least=0)
    top = 10 if top is None else top
    given: Plan | None = None
    refusal = ""
    try:
        given = plan(config, world_size, machine)
    except ConfigError as error:
        if top == 0:
            raise
        refusal = str(error)
    found = search(config, world_size, machine, named=named, keep=top) if top else None
    if "--json" in own:
        sys.stdout.write(json.dumps(as_json(given, refusal, found), indent=1) + "\n")
    else:
        sys.stdout.write(as_text(given, refusal, found, world_size, explain="--explain" in own))
    if given is None:
        return 0 if found is not None and found.best else 2
    return 0 if given.fits else 1


def as_text(given: Plan | None, refusal: str, found: Findings | None, world_size: int, *, explain: bool) -> str:
    text = f"the layout given is refused: {refusal}\n" if given is None else plan_text(given, explain=explain)
    return text if found is None else text + "\n" + findings_text(found, world_size)


def as_json(given: Plan | None, refusal: str, found: Findings | None) -> dict[str, Any]:
    result: dict[str, Any] = {"plan": None if given is None else plan_json(given), "refusal": refusal or None}
    if found is not None:
        result["search"] = {
            "tried": found.tried,
            "refused": {reason: [number, found.examples[reason]] for reason, number in found.refused.items()},
            "best": [plan_json(made) for made in found.best],
            "too_large": [plan_json(made) for made in found.too_large],
        }
    return result


def scale(config: RunConfig, machine: Machine, out: Path) -> int:
    paper = PAPER if config.model == build(overrides(PRESETS["mula-220b-a10b"], "preset")).model else {}
    curves = {
        "predicted, bf16 gradients, nothing overlapped": weak_scaling(as_the_paper(config), machine, paper),
        "predicted, as this library runs it": weak_scaling(config, machine, paper),
    }
    try:
        Path(f"{out}.md").write_text(table(curves))
        draw(curves, f"weak scaling on {machine.name}: model, not measured by us", Path(f"{out}.png"))
    except OSError as error:
        raise ConfigError(f"--weak-scaling={out}: cannot write {error.filename or out}: {error.strerror}") from error
    except ImportError as error:
        raise ConfigError(f"{out}.md is written; {out}.png needs matplotlib: pip install matplotlib") from error
    sys.stdout.write(table(curves))
    return 0


def check_build(words: list[str], world_size: int, *, as_json_object: bool) -> int:
    built = []
    for rank in sorted({0, world_size - 1}):
        built.append(build_in_a_process(words, rank, world_size))
        if not as_json_object:
            sys.stdout.write(built_text(built[-1]) + "\n")
            sys.stdout.flush()
    if as_json_object:
        sys.stdout.write(json.dumps([asdict(one) for one in built], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    interrupts.end_with_reader()
    sys.exit(main())
