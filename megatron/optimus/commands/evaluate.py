"""Evaluate a checkpoint on tasks of lm-eval's harness (docs/evaluation.md).

    optimus evaluate runs/demo --tasks optimus_arithmetic,optimus_science --include-path examples/evaluation
    optimus evaluate runs/demo --tasks hellaswag --num-fewshot 5 --limit 200 --allow-downloads --out results.json

The checkpoint is any that `optimus generate` takes. Needs the package lm_eval: pip install optimus-megatron[eval]. Exit
code: 0, or 2 after one line that says what is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.optimus.commands.model_options import add_model_options, load_model, run_on_ranks
from megatron.optimus.config.load import Parser, whole_number
from megatron.optimus.config.options import did_you_mean
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.inference.load import on_all_ranks
from megatron.optimus.platform import environment
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
    add_model_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``optimus evaluate``; returns 0, 2 after one line that says what is wrong, or 1 if another rank ended."""
    return run_on_ranks(_parser(), argv, _prepare)


def _prepare(args: argparse.Namespace) -> Callable[[RankEnvironment, Ranks], None]:
    """Checks the options and finds the tasks; returns what every rank runs."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("optimus evaluate needs the package lm_eval: pip install optimus-megatron[eval]")
    if args.include_path is not None and not args.include_path.is_dir():
        raise ConfigError(f"--include-path {args.include_path}: no such folder")
    if not args.allow_downloads:  # before the libraries that read these are imported
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            environment.set_default(name, "1")
    if environment.detect().rank > 0:
        environment.set_default("TQDM_DISABLE", "1")  # one rank shows the harness's progress
    names = [name for name in args.tasks.split(",") if name]
    if not names:
        raise ConfigError("--tasks is empty; name tasks with commas between them")
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if args.include_path is None else str(args.include_path))
    for name in names:
        if name not in manager.all_tasks:
            hint = did_you_mean(name, manager.all_tasks, "`lm_eval ls tasks` lists all")
            raise ConfigError(f"--tasks: there is no task {name!r}; {hint}")
    return lambda launch, ranks: _run(args, launch, ranks, manager, names)


def _run(args: argparse.Namespace, launch: RankEnvironment, ranks: Ranks, manager: Any, names: list[str]) -> None:
    from lm_eval import simple_evaluate

    from megatron.optimus.inference.harness import HarnessModel

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    tasks = on_all_ranks(ranks, lambda: _load_tasks(manager, names), "loading the tasks", ConfigError)
    model = HarnessModel(load_model(args, launch, ranks), args.batch_size)
    found = simple_evaluate(
        model,
        tasks=tasks,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=False,
    )
    if ranks.rank > 0:
        return
    results = {
        task: {key: value for key, value in metrics.items() if _is_number(value)}
        for task, metrics in found["results"].items()
    }
    for task, metrics in results.items():
        for key, value in metrics.items():
            print(f"{task:<32} {key.replace(',none', ''):<24} {value:.6g}")
    if args.out is not None:
        content = {"checkpoint": str(args.checkpoint), "num_fewshot": args.num_fewshot, "limit": args.limit}
        write_atomically(args.out, json.dumps({**content, "results": results}, indent=1) + "\n", sync=False)


def _load_tasks(manager: Any, names: list[str]) -> list[str]:
    """Loads the tasks' data once, so that what is missing is said before the model is loaded."""
    for name in names:
        try:
            manager.load([name])
        except Exception as error:  # of the harness, its data sets and its templates
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            hint = "; --allow-downloads lets it be loaded" if isinstance(error, ConnectionError) else ""
            raise ConfigError(f"--tasks {name}: it cannot be loaded: {first}{hint}") from error
    return names


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
