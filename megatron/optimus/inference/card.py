"""What a card of evaluation says of a model: correctness, calibration, reliability, the number of shots, and speed.

The criteria are those of AuroraGPT's evaluation. Reliability is the spread of a score when the question stays the same
and its form does not: other examples before it (seeds), and other words of instruction.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.inference.load import TextModel
from megatron.optimus.inference.tasks import FEWSHOT_SEED, Variant, run_tasks, scores, short_name

INSTRUCTIONS = (
    "Answer the following question.",
    "Please give the correct answer.",
    "Below is a task. Complete it well.",
)
NUM_BINS = 10
_PREFERRED = ("acc,none", "exact_match,none", "acc_norm,none")  # the score of a task that the card follows


@dataclass(frozen=True)
class Bin:
    """A bin of the reliability diagram: answers of similar confidence."""

    count: int
    confidence: float  # mean
    accuracy: float


@dataclass(frozen=True)
class Calibration:
    """Whether the probability that a model gives its choice is how often the choice is right.

    The expected calibration error is that of arXiv 1706.04599: the mean over answers of the difference between the
    confidence and the accuracy of their bin.
    """

    ece: float
    confidence: float
    accuracy: float
    bins: list[Bin | None]  # of equal width from 0 to 1; None where no answer lies


@dataclass
class TaskCard:
    """The results of one task on the card."""

    name: str
    metric: str  # the score that ``by_seed``, ``by_instruction`` and ``by_shots`` have
    num_items: int
    num_fewshot: int
    scores: dict[str, tuple[float, float | None]]  # by metric: value, and its standard error where it is a mean
    seconds: float
    num_requests: int
    calibration: Calibration | None = None  # of multiple choice
    by_seed: dict[int, float] = field(default_factory=dict)
    by_instruction: dict[str, float] = field(default_factory=dict)
    by_shots: dict[int, float] = field(default_factory=dict)


def measure(
    model: TextModel,
    tasks: Any,
    *,
    batch_size: int,
    limit: int | None,
    num_fewshot: int | None,
    seeds: Sequence[int],
    shots: Sequence[int],
    progress: Callable[[str], None] = lambda text: None,
) -> list[TaskCard]:
    """Evaluates a model on each task with several seeds, instructions and numbers of examples. Collective.

    Args:
        model: in evaluation mode.
        tasks: as ``load_tasks`` gives them.
        batch_size: texts at a time on each rank that has texts of its own.
        limit: only the first items of each task.
        num_fewshot: examples before each question; None: as the task says.
        seeds: of the examples, for reliability.
        shots: numbers of examples; those that a task has not are left out.
        progress: told what is done next.

    Returns:
        A card for each task, the same on all ranks.
    """
    cards = []
    for name, task in tasks["tasks"].items():
        alone = {"tasks": {name: task}}

        def run(variant: Variant, alone: Any = alone, *, samples: bool = False) -> dict[str, Any]:
            return run_tasks(model, alone, batch_size=batch_size, limit=limit, variant=variant, samples=samples)

        progress(name)
        began = time.perf_counter()
        found = run(Variant(num_fewshot), samples=True)
        card = _card(name, task, found, time.perf_counter() - began, num_fewshot)
        cards.append(card)
        score = _score_of(name, card.metric)
        if card.num_fewshot:
            for seed in seeds:
                progress(f"{name}, seed {seed}")
                card.by_seed[seed] = score(run(Variant(num_fewshot, seed)))
        if task.OUTPUT_TYPE != "loglikelihood_rolling":  # a text has no prompt
            for instruction in ("", *INSTRUCTIONS):
                progress(f"{name}, {instruction or 'no instruction'}")
                card.by_instruction[instruction] = score(run(Variant(num_fewshot, FEWSHOT_SEED, instruction)))
            for count in shots if card.num_fewshot or task.get_config("num_fewshot") != 0 else ():
                progress(f"{name}, {count} shots")
                with contextlib.suppress(ConfigError):  # the task has fewer examples
                    card.by_shots[count] = score(run(Variant(count)))
    return cards


def _score_of(name: str, metric: str) -> Callable[[dict[str, Any]], float]:
    def score(found: dict[str, Any]) -> float:
        return next(value for key, value in scores(found)[name].items() if short_name(key) == metric)

    return score


def _card(name: str, task: Any, found: dict[str, Any], seconds: float, num_fewshot: int | None) -> TaskCard:
    values, samples = scores(found)[name], found["samples"][name]
    own = task.get_config("num_fewshot") or 0
    is_fixed = num_fewshot is None or task.get_config("num_fewshot") == 0
    metric = next((key for key in _PREFERRED if key in values), next(iter(values)))
    return TaskCard(
        name=name,
        metric=short_name(metric),
        num_items=len({sample["doc_id"] for sample in samples}),
        num_fewshot=own if is_fixed else num_fewshot or 0,
        scores={short_name(key): (value, _standard_error(key, value, samples)) for key, value in values.items()},
        seconds=seconds,
        num_requests=sum(len(sample["resps"]) for sample in samples),
        calibration=calibration(_answers(samples)) if task.OUTPUT_TYPE == "multiple_choice" else None,
    )


def _standard_error(key: str, value: float, samples: Sequence[dict[str, Any]]) -> float | None:
    """That of a score which is the mean over its items."""
    metric, _, its_filter = key.partition(",")
    own = [sample.get(metric) for sample in samples if sample["filter"] == its_filter]
    numbers = [float(one) for one in own if isinstance(one, int | float)]
    if len(numbers) < 2 or len(numbers) < len(own) or not math.isclose(fmean(numbers), value, abs_tol=1e-9):
        return None
    return stdev(numbers) / math.sqrt(len(numbers))


def _answers(samples: Sequence[dict[str, Any]]) -> list[tuple[float, bool]]:
    """For each item the probability of the choice, among the choices alone, and whether it was right."""
    answers = []
    for sample in samples:
        if "acc" in sample:
            logprobs = [choice[0] for choice in sample["filtered_resps"]]
            largest = max(logprobs)
            answers.append((1 / sum(math.exp(one - largest) for one in logprobs), bool(sample["acc"])))
    return answers


def calibration(answers: Sequence[tuple[float, bool]]) -> Calibration | None:
    """Compares confidence and accuracy in bins of equal width.

    Args:
        answers: confidence, from 0 to 1, and whether the answer was right.

    Returns:
        The comparison; None without answers.
    """
    if not answers:
        return None
    members: list[list[tuple[float, bool]]] = [[] for _ in range(NUM_BINS)]
    for confidence, is_right in answers:
        members[min(int(confidence * NUM_BINS), NUM_BINS - 1)].append((confidence, is_right))
    bins = [Bin(len(own), fmean(c for c, _ in own), fmean(r for _, r in own)) if own else None for own in members]
    ece = sum(one.count * abs(one.confidence - one.accuracy) for one in bins if one is not None) / len(answers)
    return Calibration(ece, fmean(c for c, _ in answers), fmean(r for _, r in answers), bins)
