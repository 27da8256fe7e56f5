"""Finds silent data corruption: flipped bits in weights and optimizer states, and computations that come out wrong.

Three comparisons, all exact (deepspeed_ext/zero/checksums.py):
1. Sharded states (master weights, moments) right after an update and right before the next one, on each rank.
2. Parameters right before an update, over the ranks that hold the same.
3. The gradient of a micro-batch, which another data-parallel copy of the model computes too. The copies take turns.

With ``--integrity-interval auto`` 1 and 2 are done as often as takes a two-hundredth of the steps' time, which is
measured, and with ``--integrity-gradient-interval auto`` 3 is.

The host reads 1 and 2 with the numbers of the step, so a run that goes wrong does one or two more updates; no step is
saved that was not compared. 3 waits for the device, and comes before the update. What is found ends the run: the
launcher starts it again from a checkpoint that is older than what was found, and leaves out a node that was named.
"""

from __future__ import annotations

import json
import logging
import socket
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.optimus.config.layout import Layout
from megatron.optimus.context import RunContext
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.loader import Batch, BatchLoader
from megatron.optimus.platform.device import DeviceEvent
from megatron.optimus.platform.intervals import Interval
from megatron.optimus.platform.metrics import Recorder
from megatron.optimus.training.engine import Engine, StateChecksums, checksum, checksums
from megatron.optimus.training.health import IntegrityError
from megatron.optimus.training.pipeline_schedule import Schedule
from megatron.optimus.training.timing import StepTime

logger = logging.getLogger("optimus")

METRIC = "integrity_errors"  # checksums that differ, over all ranks; only steps that compare have it
_MOST_NAMED = 4


class _Comparison(NamedTuple):
    """The comparisons of one step, whose results are still on the device."""

    step: int
    changed: Tensor | None  # bool, of this rank's states
    replicas: Sequence[tuple[list[int], list[str], Tensor]]  # ranks, names of flat buffers, int64 [ranks, buffers, 2]


class Integrity:
    """The comparisons of a run. Every method is collective over all ranks.

    Args:
        run: configuration, mesh and ranks.
        engine: the model and its optimizer.
        schedule: runs forward and backward.
        data: the training data.
        step: steps done; the state that was loaded counts as good.
    """

    def __init__(self, run: RunContext, engine: Engine, schedule: Schedule, data: BatchLoader, step: int) -> None:
        self._run, self._engine, self._schedule, self._data = run, engine, schedule, data
        training = run.config.training
        self._interval = Interval(training.integrity_interval, "integrity checks", run.ranks)
        saves = run.config.checkpoint.save_interval  # what a checkpoint holds was compared not long before
        self._gradient_interval = Interval(training.integrity_gradient_interval, "gradient checks", run.ranks, saves)
        self._states = StateChecksums(engine.optimizer) if training.integrity_interval else None
        self._queued = step  # the step whose update was queued last
        # With AUTO: when the device took checksums for a step and compared it, and when it compared gradients in one.
        self._spans: dict[int, list[tuple[DeviceEvent, DeviceEvent]]] = {}
        self._gradient_spans: dict[int, tuple[DeviceEvent, DeviceEvent]] = {}
        self._recent: deque[_Comparison] = deque(maxlen=2)  # the host may be one step behind
        self._verified_step = step  # its gradients, and those before, came out right when they were compared last
        self._is_announced = False

    # ---- weights and states

    def before_update(self, step: int, recorder: Recorder) -> None:
        """Compares states and parameters if that is due. Call when all backwards of ``step`` (from 1) are queued."""
        if self._states is None:
            return
        if not self._is_announced:  # a name that comes later is reduced one step late
            recorder.add(METRIC, 0.0, "sum", 0.0)
            self._is_announced = True
        if not self._interval.is_due(step):
            return
        with self._timing(step):
            changed = self._states.changed()
            self._states.forget()  # those of a later step, which are not taken where the step before it is left out
            replicas = self._states.replicas()
        self._interval.done(step)
        self._recent.append(_Comparison(step, changed, replicas))
        counts = [(sums != sums[:1]).sum() for _, _, sums in replicas] + ([] if changed is None else [changed.sum()])
        count = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64)
        recorder.add(METRIC, count, "sum", 1.0)

    def after_update(self, step: int) -> None:
        """Takes the checksums that the next step compares. Call when the update of ``step`` is queued."""
        self._queued = step
        if self._states is not None and self._interval.is_due(step + 1):
            with self._timing(step + 1):
                self._states.record()

    @contextmanager
    def _timing(self, compared_step: int) -> Iterator[None]:
        begin = DeviceEvent(self._run.device)
        yield
        if self._interval.is_auto:
            self._spans.setdefault(compared_step, []).append((begin, DeviceEvent(self._run.device)))

    def choose_intervals(self, step: int, time: StepTime) -> None:
        """With AUTO, chooses the steps to the next comparison after one, from its cost. Collective then.

        Args:
            step: whose numbers the host has just read.
            time: of that step, comparisons included.
        """
        gradient_s = 0.0
        if step in self._gradient_spans:
            begin, end = self._gradient_spans.pop(step)
            gradient_s = end.work_seconds_since(begin)
            self._gradient_interval.choose(gradient_s, time.work_seconds - gradient_s, earliest=self._queued + 1)
        if step not in self._spans:
            return
        spans = self._spans.pop(step)  # of the step before, and of this one
        costs = [end.work_seconds_since(begin) for begin, end in spans]
        step_s = time.work_seconds - costs[-1] - gradient_s
        for begin, end in self._spans.get(step + 1, [])[:1]:  # its checksums were taken in this step
            step_s -= end.work_seconds_since(begin)
        self._interval.choose(sum(costs), step_s, earliest=self._queued + 2)  # checksums are taken a step before

    def forget(self) -> None:
        """Drops the checksums of states. Call when states have changed by other means than an update."""
        if self._states is not None:
            self._states.forget()

    def judge(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises IntegrityError on every rank where the numbers of a step say that checksums differed."""
        if not metrics.get(METRIC, 0.0) or self._states is None:
            return
        found = next(one for one in reversed(self._recent) if one.step == step)
        flags = [] if found.changed is None else found.changed.tolist()
        changed = [name for name, is_changed in zip(self._states.names(), flags, strict=False) if is_changed]
        suspects = [suspects_of(ranks, names, sums.cpu()) for ranks, names, sums in found.replicas]
        own = json.dumps([socket.gethostname(), changed, [one for one in suspects if one is not None]])
        everyone = [json.loads(part) for part in self._run.ranks.all_gather_bytes(own.encode())]
        raise IntegrityError(f"silent data corruption in step {step}: {describe(everyone)}", step - 2)

    # ---- gradients

    def check_gradients(self, step: int, consumed_samples: int, batches: Sequence[Batch]) -> None:
        """Compares a gradient with what another rank computes, if that is due. Call before the forwards of ``step``.

        Args:
            step: from 1.
            consumed_samples: before the step.
            batches: this rank's micro-batches of the step, on the device.

        Raises:
            IntegrityError: on every rank, where any two of them differ.
        """
        if not self._gradient_interval.is_due(step):
            return
        begin, mesh = DeviceEvent(self._run.device), self._run.mesh
        source = gradient_source(mesh.layout, mesh.index("dp"), step // self._gradient_interval.steps)
        read = partial(self._data.batch_of_rank, consumed_samples, source, count=1)
        [other] = self._run.ranks.run_on_all_ranks(read, "reading another rank's data", DataError)
        both = (batches[0], other.to(self._run.device))
        first = self._exchange(both, source)
        bad = differing(first)
        if not bad:
            self._verified_step = step - 1
            self._gradient_interval.done(step)
            if self._gradient_interval.is_auto:
                self._gradient_spans[step] = begin, DeviceEvent(self._run.device)
            return
        again = self._exchange(both, source)
        text, is_unsteady = describe_gradients(first, again, bad)
        # What comes out differently the second time was a passing fault, and it has changed nothing yet.
        good = step - 1 if is_unsteady else self._verified_step
        raise IntegrityError(f"silent data corruption in step {step}: {text}", good)

    def _exchange(self, both: Sequence[Batch], source: int) -> list[GradientChecksums]:
        sums = [self._gradient(batch).tolist() for batch in both]
        own = json.dumps([socket.gethostname(), self._run.mesh.ranks("dp")[source], *sums])
        return [GradientChecksums(*json.loads(part)) for part in self._run.ranks.all_gather_bytes(own.encode())]

    def _gradient(self, batch: Batch) -> Tensor:
        """Checksums of the loss and of this rank's gradients of one micro-batch: int64 [N, 2]."""
        optimizer = self._engine.optimizer
        with self._counting_nothing(), self._engine.discarding_gradients():
            losses = self._schedule.forward_backward([batch], batch.labels_BS.numel(), with_router_losses=False)
            tensors = [*losses, *optimizer.local_gradients()]
            sums = checksums(tensors, optimizer.device)
        return checksum(sums)

    @contextmanager
    def _counting_nothing(self) -> Iterator[None]:
        counts = {router: router.step_counts_E.clone() for router in self._schedule.routers.values()}
        try:
            yield
        finally:
            for router, count in counts.items():
                router.step_counts_E.copy_(count)


class GradientChecksums(NamedTuple):
    """Checksums of two gradients that a rank has computed."""

    host: str
    source: int  # the rank whose micro-batch the second one is of
    own: list[int]
    other: list[int]


def block_of_copies(layout: Layout) -> int:
    """How many neighbours along dp together hold one copy of all weights."""
    return max(1, layout.ep * layout.etp // (layout.cp * layout.tp))


def gradient_source(layout: Layout, index: int, turn: int) -> int:
    """The data-parallel index whose micro-batch the one with ``index`` computes too, in another copy each turn."""
    block = block_of_copies(layout)
    distance = 1 + turn % (layout.dp // block - 1)
    return (index + distance * block) % layout.dp


def differing(gradients: Sequence[GradientChecksums]) -> list[tuple[int, int]]:
    """Pairs of ranks whose gradients of the same micro-batch differ: the one that has it, and the other."""
    return [(one.source, rank) for rank, one in enumerate(gradients) if one.other != gradients[one.source].own]


def describe_gradients(
    first: Sequence[GradientChecksums], again: Sequence[GradientChecksums], bad: Sequence[tuple[int, int]]
) -> tuple[str, bool]:
    """Says which ranks to suspect, and whether they computed something else the second time."""
    pairs = ", ".join(f"{a} and {b}" for a, b in bad[:_MOST_NAMED])
    text = f"ranks {pairs} computed different gradients from the same samples"
    hosts = [one.host for one in first]
    unsteady = [rank for rank, (one, two) in enumerate(zip(first, again, strict=True)) if one != two]
    if unsteady:
        return f"{text}, and something else at a second time, {_named(unsteady, hosts)}", True
    counts = Counter(rank for pair in bad for rank in pair)
    most = max(counts.values())
    always = [rank for rank, count in counts.items() if count == most]
    if most > 1 and len(always) == 1:
        return f"{text}, {_named(always, hosts)}", False
    return f"{text}; one of them is wrong, and a further copy would be needed to say which", False


def _named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """``hosts``: of every rank."""
    more = f" (and on ranks {', '.join(map(str, ranks[1 : _MOST_NAMED + 1]))})" if len(ranks) > 1 else ""
    return f"first on rank {ranks[0]} of node {hosts[ranks[0]]}{more}"


def suspects_of(ranks: Sequence[int], names: Sequence[str], sums: Tensor) -> tuple[str, list[int], bool] | None:
    """Finds the ranks of a group whose parameters differ from those of the others.

    Args:
        ranks: the group.
        names: of the flat buffers.
        sums: int64 [ranks, flat buffers, 2].

    Returns:
        The first flat buffer that differs, the ranks to suspect, and whether a majority says so; None if all are equal.
    """
    for index, name in enumerate(names):
        found = [tuple(one) for one in sums[:, index].tolist()]
        [(usual, count), *others] = Counter(found).most_common()
        if others:
            is_majority = count > len(found) / 2
            odd = [rank for rank, one in zip(ranks, found, strict=True) if one != usual or not is_majority]
            return name, odd, is_majority
    return None


def describe(everyone: Sequence[tuple[str, list[str], list[tuple[str, list[int], bool]]]]) -> str:
    """Describes what was found, for the error.

    Args:
        everyone: of each rank its host, the states that changed there, and what ``suspects_of`` found.
    """
    hosts = [host for host, _, _ in everyone]
    changed = {rank: names for rank, (_, names, _) in enumerate(everyone) if names}
    if changed:
        first = next(iter(changed.values()))[0]
        return f"{first} changed between two updates, {_named([*changed], hosts)}"
    name, odd, is_majority = next(found[0] for _, _, found in everyone if found)
    what = f"the weights from {name} on are not the same on all data-parallel ranks"
    if is_majority:
        return f"{what}: they differ {_named(odd, hosts)}"
    named = ", ".join(f"{rank} ({hosts[rank]})" for rank in odd[:_MOST_NAMED])
    return f"{what}: one of ranks {named} has wrong ones, and a further copy would be needed to say which"
