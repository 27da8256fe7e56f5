"""Evaluate a checkpoint on tasks of lm-eval's harness (docs/evaluation.md).

    optimus evaluate runs/demo --tasks optimus_arithmetic,optimus_science --include-path examples/evaluation
    optimus evaluate runs/demo --tasks hellaswag --num-fewshot 5 --limit 200 --allow-downloads --out results.json

The checkpoint is any that `optimus generate` takes. Needs the package lm_eval: pip install optimus-megatron[eval]. Exit
code: 0, or 2 after one line that says what is wrong.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.optimus.commands.model_options import add_model_options, load_model, run_on_ranks
from megatron.optimus.config.load import Parser, whole_number
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.inference.card import TaskCard, measure
from megatron.optimus.inference.card_page import page
from megatron.optimus.inference.load import TextModel, on_all_ranks
from megatron.optimus.inference.tasks import (
    TaskNames,
    Variant,
    find_tasks,
    load_tasks,
    run_tasks,
    scores,
    short_name,
)
from megatron.optimus.platform.environment import RankEnvironment
from megatron.optimus.platform.files import write_atomically
from megatron.optimus.platform.ranks import Ranks


def _parser() -> Parser:
    parser = Parser("evaluate", __doc__ or "", usage="optimus evaluate CHECKPOINT --tasks TASK[,TASK...] [options]")
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint, or of a run (its newest checkpoint)")
    parser.add_argument("--tasks", required=True, help="names of tasks or groups, with commas between them")
    parser.add_argument("--include-path", type=Path, help="folder with tasks of your own, as YAML files")
    parser.add_argument(
        "--num-fewshot", type=whole_number(0), help="examples before each question; default: the task's"
    )
    parser.add_argument("--limit", type=whole_number(), help="only the first N items of each task")
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    parser.add_argument("--allow-downloads", action="store_true", help="load data that is not on this machine")
    parser.add_argument("--card", type=Path, help="file for a card of evaluation, an HTML page; asks in many ways")
    parser.add_argument("--card-seeds", type=whole_number(), default=3, help="card: drawings of examples; default: 3")
    parser.add_argument("--card-shots", default="0,1,2,4", help="card: numbers of examples; default: 0,1,2,4")
    add_model_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``optimus evaluate``; returns 0, 2 after one line that says what is wrong, or 1 if another rank ended."""
    return run_on_ranks(_parser(), argv, _prepare)


def _prepare(args: argparse.Namespace) -> Callable[[RankEnvironment, Ranks], None]:
    """Checks the options and finds the tasks; returns what every rank runs."""
    names = [name for name in args.tasks.split(",") if name]
    if not names:
        raise ConfigError("--tasks is empty; name tasks with commas between them")
    shots = [word.strip() for word in args.card_shots.split(",")]
    if not all(word.isdecimal() and len(word) < 4 for word in shots):
        raise ConfigError(f"--card-shots {args.card_shots!r}: name numbers below 1000 with commas, such as 0,1,5")
    args.card_shots = sorted({int(word) for word in shots})
    for option, path in (("--card", args.card), ("--out", args.out)):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{option} {path}: there is no folder {path.parent}")
    found = find_tasks(names, args.include_path, "--tasks", downloads=args.allow_downloads)
    return lambda launch, ranks: _run(args, launch, ranks, found)


def _run(args: argparse.Namespace, launch: RankEnvironment, ranks: Ranks, names: TaskNames) -> None:
    tasks = on_all_ranks(ranks, lambda: load_tasks(names), "loading the tasks", ConfigError)
    model = load_model(args, launch, ranks)
    variant = Variant(args.num_fewshot)
    found = run_tasks(model, tasks, batch_size=args.batch_size, limit=args.limit, variant=variant)
    cards = [] if args.card is None else _cards(args, model, tasks)
    if ranks.rank > 0:
        return
    results = scores(found)
    for task, metrics in results.items():
        for key, value in metrics.items():
            print(f"{task:<32} {short_name(key):<24} {value:.6g}")
    if args.out is not None:
        content: dict[str, Any] = {
            "checkpoint": str(args.checkpoint),
            "num_fewshot": args.num_fewshot,
            "limit": args.limit,
        }
        if cards:
            content["card"] = [asdict(card) for card in cards]
        write_atomically(args.out, json.dumps({**content, "results": results}, indent=1) + "\n", sync=False)
    if args.card is not None:
        facts = {"checkpoint": str(args.checkpoint), "evaluated": time.strftime("%Y-%m-%d"), "ranks": str(ranks.size)}
        facts["items of each task"] = "all" if args.limit is None else f"the first {args.limit}"
        write_atomically(args.card, page("Card of evaluation", facts, cards), sync=False)


def _cards(args: argparse.Namespace, model: TextModel, tasks: Any) -> list[TaskCard]:
    """Evaluates in all the ways that the card shows. Collective."""
    return measure(
        model,
        tasks,
        batch_size=args.batch_size,
        limit=args.limit,
        num_fewshot=args.num_fewshot,
        seeds=range(1, args.card_seeds + 1),
        shots=args.card_shots,
    )
