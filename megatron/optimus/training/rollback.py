"""Rollbacks: the run goes back to a checkpoint and skips the samples of the steps that went wrong.

Health (health.py) judges the steps; every rank sees the same numbers and decides alike. What was skipped, and why, is
part of the checkpoints that follow, so that a resumed run skips the same steps and counts the same rollbacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.optimus.config.schema import TrainingConfig

FIELD = "rollbacks"  # of a checkpoint's metadata: a list of Rollback as JSON


class RollbackRequested(Exception):
    """Steps ``first`` to ``last`` went wrong, and the policy is to go back to before them. Raised on every rank.

    Args:
        first: the first step that went wrong.
        last: the last one.
        reason: what went wrong, one sentence.
        evidence: the numbers that say so, by name.
    """

    def __init__(self, first: int, last: int, reason: str, evidence: Mapping[str, float]) -> None:
        super().__init__(reason)
        self.first, self.last, self.reason, self.evidence = first, last, reason, dict(evidence)


@dataclass(frozen=True)
class Rollback:
    """A rollback that was done, as checkpoints keep it."""

    at_step: int  # after which it was decided
    to_step: int  # of the checkpoint
    first_skipped: int  # steps whose samples are consumed without training
    last_skipped: int
    reason: str
    evidence: dict[str, float]

    def numbers(self) -> dict[str, float]:
        """The numbers that the next line of metrics has, each as ``rollback/NAME``."""
        steps = ("at_step", "to_step", "first_skipped", "last_skipped")
        return {name: getattr(self, name) for name in steps} | self.evidence


class Rollbacks:
    """The rollbacks of a run, and the steps that it skips."""

    def __init__(self, training: TrainingConfig) -> None:
        self._training = training
        self.done: list[Rollback] = []
        self._unlogged: Rollback | None = None

    @property
    def are_left(self) -> bool:
        """Whether ``max_rollbacks`` allows another one."""
        return len(self.done) < self._training.max_rollbacks

    def skipped_steps(self, start: int, stop: int) -> list[int]:
        """The steps in [start, stop) whose samples are consumed without training, from ``iterations_to_skip`` too."""
        ranges = [range(max(start, one.first_skipped), min(stop, one.last_skipped + 1)) for one in self.done]
        given = [step for step in self._training.iterations_to_skip if start <= step < stop]
        return sorted({*given, *(step for one in ranges for step in one)})

    def limits(self, wanted: RollbackRequested) -> tuple[int, int]:
        """Below which step a checkpoint must be: better before all steps that are skipped, else before the bad ones."""
        return wanted.first - self._training.rollback_margin, wanted.first

    def add(self, wanted: RollbackRequested, at_step: int, to_step: int) -> Rollback:
        """Notes a rollback that was done.

        Args:
            wanted: why.
            at_step: the last step that was done.
            to_step: that of the checkpoint.
        """
        margin = self._training.rollback_margin
        first = max(to_step + 1, wanted.first - margin)
        one = Rollback(at_step, to_step, first, wanted.last + margin, wanted.reason, wanted.evidence)
        self.done.append(one)
        self._unlogged = one
        return one

    def take_numbers(self) -> dict[str, float] | None:
        """The numbers of the last rollback for the line of the first step after it; None on all other lines."""
        one, self._unlogged = self._unlogged, None
        return None if one is None else one.numbers()

    def to_json(self) -> dict[str, Any]:
        """What a full checkpoint keeps; nothing without a rollback."""
        return {FIELD: [vars(one) for one in self.done]} if self.done else {}

    def restore(self, kept: Mapping[str, Any], step: int) -> None:
        """Takes what ``to_json`` gave from the metadata of ``step``'s checkpoint; ignores what has another form."""
        found = kept.get(FIELD)
        self.done = [one for item in (found if isinstance(found, list) else []) if (one := _read(item)) is not None]
        is_next = bool(self.done) and self.done[-1].to_step == step  # the line after the rollback is yet to come
        self._unlogged = self.done[-1] if is_next else None


def _read(item: Any) -> Rollback | None:
    try:
        steps = [int(item[name]) for name in ("at_step", "to_step", "first_skipped", "last_skipped")]
        evidence = {str(name): float(value) for name, value in item["evidence"].items()}
        at_step, to_step, first, last = steps
        return Rollback(at_step, to_step, first, last, str(item["reason"]), evidence)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None
