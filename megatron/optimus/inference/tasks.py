"""Tasks of lm-eval's harness: found by name, loaded once, and run on a model that is in memory.

The package lm_eval (extra [eval]) brings the tasks, their metrics and their file format, which is what results are
compared by. It takes seconds to import, so it is imported inside these functions.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.optimus.config.options import did_you_mean
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.inference.load import TextModel
from megatron.optimus.platform import environment, process_groups
from megatron.optimus.platform.log import first_line
from megatron.optimus.platform.memory import is_out_of_memory, needs_memory
from megatron.optimus.platform.ranks import REPORTED_BY_ANOTHER_RANK

FEWSHOT_SEED = 1234  # lm-eval's own


@dataclass(frozen=True)
class TaskNames:
    """Tasks that exist, and what loads them.

    Attributes:
        manager: lm-eval's ``TaskManager``.
        names: of tasks and groups.
        option: the option that named them, for messages.
    """

    manager: Any
    names: list[str]
    option: str


@dataclass(frozen=True)
class Variant:
    """One way of asking the questions of a task.

    Attributes:
        num_fewshot: examples before each question; None: as the task says.
        seed: which examples these are, where the task draws them.
        instruction: a line before the prompt.
    """

    num_fewshot: int | None = None
    seed: int = FEWSHOT_SEED
    instruction: str = ""


AS_THE_TASK_SAYS = Variant()


def find_tasks(names: Sequence[str], include_path: Path | None, option: str, *, downloads: bool = False) -> TaskNames:
    """Looks tasks up without loading their data.

    Args:
        names: of tasks and groups.
        include_path: a folder with further tasks, as YAML files.
        option: what the names were given with, for messages.
        downloads: whether data sets may be loaded from the network.

    Returns:
        The tasks.

    Raises:
        ConfigError: lm_eval is missing, the folder is missing, or a task is.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(f"{option} needs the package lm_eval: pip install optimus-megatron[eval]")
    if include_path is not None and not include_path.is_dir():
        raise ConfigError(f"the folder of tasks {include_path}: no such folder")
    is_quiet = environment.detect().rank > 0  # one rank shows the harness's progress
    if not downloads:
        environment.keep_hugging_face_offline(quiet=is_quiet)
    elif is_quiet:
        environment.set_default("TQDM_DISABLE", "1")
    if include_path is not None:
        own = _manager(str(include_path), with_harness=False)
        if set(names) <= set(own.all_subtasks):
            return TaskNames(own, list(names), option)
    manager = _manager(None if include_path is None else str(include_path), with_harness=True)
    for name in names:
        if name not in manager.all_tasks:
            hint = did_you_mean(name, manager.all_tasks, "`lm_eval ls tasks` lists all")
            raise ConfigError(f"{option}: there is no task {name!r}; {hint}")
    return TaskNames(manager, list(names), option)


@functools.cache
def _manager(include_path: str | None, *, with_harness: bool) -> Any:
    """Lists the tasks of a folder, and those of the harness, of which 14,000 take many seconds."""
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return TaskManager(include_path=include_path, include_defaults=with_harness)


def load_tasks(tasks: TaskNames) -> Any:
    """Loads the tasks with their data, as lm-eval's ``TaskDict``.

    Raises:
        ConfigError: a task cannot be loaded.
    """
    for name in tasks.names:
        try:
            tasks.manager.load([name])
        except Exception as error:  # of the harness, its data sets and its templates
            hint = "; --allow-downloads lets it be loaded" if isinstance(error, ConnectionError) else ""
            raise ConfigError(f"{tasks.option} {name}: it cannot be loaded: {first_line(error)}{hint}") from error
    try:
        return tasks.manager.load(tasks.names)
    except ValueError as error:  # a task of two groups
        raise ConfigError(f"{tasks.option}: {first_line(error)}") from error


@needs_memory("an evaluation on tasks")
def run_tasks(
    model: TextModel,
    tasks: Any,
    *,
    batch_size: int,
    limit: int | None = None,
    variant: Variant = AS_THE_TASK_SAYS,
    samples: bool = False,
) -> dict[str, Any]:
    """Evaluates a model on tasks. Collective over the model's ranks, which all get the results.

    The generators of random numbers are as before afterwards. Tasks keep nothing of it.

    Args:
        model: in evaluation mode.
        tasks: as ``load_tasks`` gives them.
        batch_size: texts at a time on each rank that has texts of its own.
        limit: only the first items of each task.
        variant: how the questions are asked.
        samples: whether the results have the answer to each question.

    Returns:
        What lm-eval's ``evaluate`` returns: ``results`` by task, ``samples`` by task.

    Raises:
        ConfigError: a task raises an error; the message says which.
    """
    from lm_eval import evaluate

    from megatron.optimus.inference.harness import HarnessModel

    with kept_random_numbers(model.device), _as_asked(tasks["tasks"], variant):
        _seed()
        try:
            found: dict[str, Any] = evaluate(
                HarnessModel(model, batch_size),
                tasks,
                limit=limit,
                bootstrap_iters=0,
                log_samples=samples,
                system_instruction=variant.instruction or None,
            )
        except Exception as error:
            if isinstance(error, ConfigError) or is_out_of_memory(error):
                raise
            if isinstance(error, RuntimeError) and process_groups.lost_peer_reason(error) is not None:
                raise
            names = ", ".join(tasks["tasks"])
            raised = ConfigError(f"the evaluation on {names} failed: {type(error).__name__}: {first_line(error)}")
            # Every rank asks the same questions and gets the same answers, so all fail alike.
            setattr(raised, REPORTED_BY_ANOTHER_RANK, model.mesh.rank > 0)
            raise raised from error
    return found


def scores(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The numbers of an evaluation, by task and metric as the harness names it ("acc,none")."""
    return {
        task: {key: float(value) for key, value in metrics.items() if key != "sample_len" and _is_number(value)}
        for task, metrics in found["results"].items()
    }


def short_name(metric: str) -> str:
    """The name of a metric in log lines and trackers: its filter follows a slash, if it has one."""
    return metric.removesuffix(",none").replace(",", "/")


@contextmanager
def kept_random_numbers(device: torch.device) -> Iterator[None]:
    """Restores the state of every generator of random numbers: loading and running tasks draws from them."""
    kept = random.getstate(), np.random.get_state()
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        try:
            yield
        finally:
            random.setstate(kept[0])
            np.random.set_state(kept[1])


def _seed() -> None:
    """Seeds as lm-eval's ``simple_evaluate`` does."""
    random.seed(0)
    np.random.seed(FEWSHOT_SEED)
    torch.manual_seed(FEWSHOT_SEED)


@contextmanager
def _as_asked(tasks: dict[str, Any], variant: Variant) -> Iterator[None]:
    """Sets the number and the seed of few-shot examples inside, and restores the number afterwards."""
    before = {name: task.get_config("num_fewshot") for name, task in tasks.items()}
    for name, task in tasks.items():
        # A task that says 0 has no examples, or its prompt is not made for them.
        wanted = before[name] if variant.num_fewshot is None or before[name] == 0 else variant.num_fewshot
        task.set_config(key="num_fewshot", value=wanted or 0)
        task.set_fewshot_seed(seed=variant.seed)
    try:
        yield
    finally:
        for name, task in tasks.items():
            task.set_config(key="num_fewshot", value=before[name])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
