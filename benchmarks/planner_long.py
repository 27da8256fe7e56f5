"""Layouts that the planner finds for sequences of 131,072 and 1,048,576 tokens, as a table of docs/planner.md.

    python benchmarks/planner_long.py --search         minutes; benchmarks/results/planner_long.json, and the table
    python benchmarks/planner_long.py --write          what is planned for these layouts today, into docs/planner.md

Each case is a search of `optimus plan` with nothing but the length, the batch and the transport of experts given: once
with all-gather, once with all-to-all, of which the faster counts. On Aurora, where the ring has no kernel, the search
is among Ulysses' layouts. Nodes are the fewest of 1, 2, 4, ... on which something fits. On any machine, nothing is run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installation

from planner_steps import page_with

from megatron.optimus.config.load import load
from megatron.optimus.planner.hardware import machine_named
from megatron.optimus.planner.plan import Plan, plan
from megatron.optimus.planner.report import layout_options, layout_words
from megatron.optimus.planner.search import search

ROOT = Path(__file__).resolve().parents[1]
RAW, PAGE = ROOT / "benchmarks/results/planner_long.json", ROOT / "docs/planner.md"
MARKS = "<!-- begin: benchmarks/planner_long.py --write -->", "<!-- end: planner_long -->"
PRESETS = ["mula-7b-a1b", "mula-20b-a2b", "mula-100b-a7b"]
TOKENS = 2**23  # of a global batch
MOST_NODES = 128
TRANSPORTS = ["allgather", "alltoall"]


def words(preset: str, length: int, system: str, transport: str) -> str:
    around = "--cp-comm-type a2a " if system == "aurora" else ""
    return (
        f"{around}--preset {preset} --seq-length {length} --max-position-embeddings {length} "
        f"--global-batch-size {TOKENS // length} --moe-token-dispatcher-type {transport}"
    )


def best(preset: str, length: int, system: str) -> dict[str, Any]:
    """The case with what was tried, and the options of the layout that is planned to be fastest."""
    machine = machine_named(system)
    fixed_options = {
        word[2:].replace("-", "_") for word in words(preset, length, system, "").split() if word.startswith("--")
    }
    case = {"preset": preset, "length": length, "system": system}
    nodes, tried = 1, 0
    while nodes <= MOST_NODES:
        found: list[tuple[float, str]] = []
        for transport in TRANSPORTS:
            given = words(preset, length, system, transport)
            result = search(
                load(given.split()).config,
                nodes * machine.devices_per_node,
                machine,
                fixed_options=fixed_options,
                keep=1,
            )
            tried += result.tried
            for made in result.best:
                found.append((made.time.tokens_per_second, f"{given} {layout_options(made.config)}"))
        if found:
            return {**case, "nodes": nodes, "tried": tried, "options": max(found)[1]}
        nodes *= 2
    return {**case, "nodes": nodes // 2, "tried": tried, "options": None}


def planned(case: dict[str, Any]) -> Plan | None:
    if case["options"] is None:
        return None
    machine = machine_named(case["system"])
    return plan(load(case["options"].split()).config, case["nodes"] * machine.devices_per_node, machine)


def table(cases: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| model, tokens a sequence | nodes | layout | peak, GiB | of usable | tokens/s a device | MFU |"]
    lines.append("|" + "---|" * 7)
    for case in cases:
        model = case["preset"].split("-")[1].upper()
        start = f"| {model}, {case['length']:,} | {case['nodes']} {case['system']} |"
        made = planned(case)
        if made is None:
            lines.append(f"{start} none of {case['tried']:,} tried fits | | | | |")
            continue
        layout = layout_words(made.config, made.world_size)
        if made.config.parallel.expert_model_parallel_size > 1:
            layout += f", {made.config.parallel.moe_token_dispatcher_type.value}"
        memory = f"{made.worst.peak / 2**30:.1f} | {made.usable / 2**30:.1f}"
        speed = f"{made.time.tokens_per_second_per_device:,.0f} | {made.time.mfu:.1%}"
        lines.append(f"{start} {layout} | {memory} | {speed} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.search:
        cases = [best(p, length, s) for s in ("h200", "aurora") for p in PRESETS for length in (2**17, 2**20)]
        RAW.write_text(json.dumps({"command": "benchmarks/planner_long.py --search", "cases": cases}, indent=1) + "\n")
    text = table(json.loads(RAW.read_text())["cases"])
    if args.write:
        PAGE.write_text(page_with(text, PAGE.read_text(), *MARKS))
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
