"""``<run>/expert_load.json``: how many token slots each expert got, and how balanced that makes the experts' ranks.

``<run>/expert_load_history.jsonl`` has the slots over time: one line for each two-hundredth of the run.

In each layer all ranks wait for the busiest one. The report gives the load of the busiest rank as a multiple of the
mean load, for the placement of the run and for others. That shows what moving experts between ranks would gain.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TextIO

from megatron.optimus.config.placement import (
    LayerPlacement,
    balanced_placement,
    busiest_over_mean,
    from_json,
    regular_placement,
)
from megatron.optimus.config.schema import ConfigError, ExpertPlacement, ParallelConfig, divisors, one_of
from megatron.optimus.platform.files import write_atomically
from megatron.optimus.training.metrics import open_steps

FILE_NAME, HISTORY_NAME = "expert_load.json", "expert_load_history.jsonl"
_HISTORY_LINES = 200  # of a whole run: 7 MB for 48 layers of 128 experts


class ExpertLoad:
    """Adds up the load of every expert since the start of this process. Exists on rank 0 only."""

    def __init__(self, run_dir: Path, config: ParallelConfig, steps_before: int = 0, last_step: int = 0) -> None:
        """``steps_before``: steps done by earlier processes of the run; ``last_step``: of the run."""
        self._path = run_dir / FILE_NAME
        self._steps_before, self._interval = steps_before, max(1, -(-last_step // _HISTORY_LINES))
        self._history: TextIO | None = None
        self._since_line: tuple[int, list[list[int]]] | None = None  # first step and slots of the next line
        self._config = config
        self._first_step = self._step = 0
        self._last_LE: list[list[int]] = []
        self._total_LE: list[list[int]] = []

    def add(self, step: int, load_LE: list[list[int]]) -> None:
        """Adds one step; ``load_LE`` is [] for a dense model."""
        self._first_step = self._first_step or step
        self._step, self._last_LE = step, load_LE
        total = self._total_LE or [[0] * len(layer) for layer in load_LE]
        self._total_LE = _sum(total, load_LE)
        if load_LE:
            first, slots_LE = self._since_line or (step, [[0] * len(layer) for layer in load_LE])
            self._since_line = first, _sum(slots_LE, load_LE)
            if step % self._interval == 0:
                self._write_line()

    def _write_line(self) -> None:
        """Appends the steps since the last line to the history, whose file is opened at its first line."""
        if self._since_line is None:
            return
        (first, slots_LE), self._since_line = self._since_line, None
        if self._history is None:
            self._history, _ = open_steps(self._path.with_name(HISTORY_NAME), self._steps_before)
        line = {"first_step": first, "step": self._step, "slots": slots_LE}
        self._history.write(json.dumps(line, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Writes both files to the last step."""
        self.write()
        self._write_line()
        if self._history is not None:
            self._history.close()

    def write(self) -> None:
        """Replaces the file; does nothing for a model without experts or before the first step."""
        if not self._total_LE:
            return
        record = {
            "step": self._step,
            "slots_per_layer_and_expert": self._last_LE,
            "first_step": self._first_step,
            "total_slots_per_layer_and_expert": self._total_LE,
            "expert_model_parallel_size": self._config.expert_model_parallel_size,
            "moe_expert_placement": self._config.moe_expert_placement.value,
            "moe_expert_placement_file": self._config.moe_expert_placement_file,
        }
        write_atomically(self._path, json.dumps(record) + "\n", sync=False)  # a reader always finds a whole file


def _sum(a_LE: list[list[int]], b_LE: list[list[int]]) -> list[list[int]]:
    return [[a + b for a, b in zip(a_E, b_E, strict=True)] for a_E, b_E in zip(a_LE, b_LE, strict=True)]


@dataclass(frozen=True)
class LayerBalance:
    """One layer: the load of the busiest rank, or expert, as a multiple of the mean; 1 is perfect balance."""

    busiest_expert: float
    present: float  # busiest rank where experts are now
    contiguous: float
    interleaved: float
    balanced: float  # where ``placement`` puts them
    bound: float  # no placement can be below: the mean, or the busiest expert beside the idlest ones
    placement: LayerPlacement


LOADS = tuple(field.name for field in fields(LayerBalance) if field.name != "placement")


@dataclass(frozen=True)
class BalanceReport:
    """The balance of a run's layers over ``num_ranks`` ranks."""

    first_step: int
    last_step: int
    num_ranks: int
    layers: tuple[LayerBalance, ...]

    @property
    def means(self) -> dict[str, float]:
        """Means over layers: how long the experts' part of a step takes, relative to ranks with equal loads."""
        return {name: sum(getattr(layer, name) for layer in self.layers) / len(self.layers) for name in LOADS}


def report(path: Path, num_ranks: int | None = None, *, last_step_only: bool = False) -> BalanceReport:
    """Calculates the balance of a run from its expert_load.json.

    Args:
        path: the file.
        num_ranks: ranks to place the experts on; default: those of the run.
        last_step_only: use the load of the last step instead of the sum over all steps.

    Raises:
        ConfigError: the file cannot be read, or ``num_ranks`` does not divide the experts.
    """
    try:
        record: dict[str, Any] = json.loads(_read(path))
        own_ranks, step = int(record["expert_model_parallel_size"]), int(record["step"])
        name = "slots_per_layer_and_expert" if last_step_only else "total_slots_per_layer_and_expert"
        load_LE = [[int(slots) for slots in layer] for layer in record[name]]
        regular = ExpertPlacement(record["moe_expert_placement"])
        first = step if last_step_only else int(record["first_step"])
        source = record["moe_expert_placement_file"]
        num_experts = len(load_LE[0])
        if num_experts == 0 or {len(load_E) for load_E in load_LE} != {num_experts}:
            raise ValueError("layers of different numbers of experts")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; name an {FILE_NAME}, or its run's folder"
        ) from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(
            f"{path} is no {FILE_NAME} of a run with experts ({type(error).__name__}: {error}); name one, or its folder"
        ) from error
    num_ranks = own_ranks if num_ranks is None else num_ranks
    if num_ranks < 1 or num_experts % num_ranks:
        good = one_of(divisors(num_experts))
        raise ConfigError(f"{num_ranks} ranks must divide the {num_experts} experts of a layer; use {good}")
    present: Sequence[LayerPlacement] = [regular_placement(num_experts, num_ranks, regular)] * len(load_LE)
    if source is not None and num_ranks == own_ranks:
        sizes = dict(num_layers=len(load_LE), num_experts=num_experts, num_ranks=num_ranks)
        present = from_json(_text(Path(source)), source, **sizes)
    layers = tuple(_layer(load_E, place) for load_E, place in zip(load_LE, present, strict=True))
    return BalanceReport(first, step, num_ranks, layers)


def _text(path: Path) -> str:
    try:
        return _read(path)
    except OSError as error:
        raise ConfigError(f"moe_expert_placement_file={path} of that run: {error.strerror}") from error


def _read(path: Path) -> str:
    with open(path, encoding="utf-8", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        return file.read()  # of a pipe that nobody writes, nothing


def _layer(load_E: Sequence[int], present: LayerPlacement) -> LayerBalance:
    num_experts, num_ranks = len(load_E), len(present)
    balanced = balanced_placement(load_E, num_ranks)
    regular = {name: regular_placement(num_experts, num_ranks, name) for name in ExpertPlacement}
    mean = max(sum(load_E), 1) / num_ranks
    idlest = sum(sorted(load_E)[: num_experts // num_ranks - 1])
    return LayerBalance(
        busiest_expert=max(load_E) * num_experts / max(sum(load_E), 1),
        present=busiest_over_mean(load_E, present),
        contiguous=busiest_over_mean(load_E, regular[ExpertPlacement.CONTIGUOUS]),
        interleaved=busiest_over_mean(load_E, regular[ExpertPlacement.INTERLEAVED]),
        balanced=busiest_over_mean(load_E, balanced),
        bound=max(1.0, (max(load_E) + idlest) / mean),
        placement=balanced,
    )
