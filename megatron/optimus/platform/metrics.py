"""Metrics that a model records while it trains, summed up over a step and over all ranks.

Anywhere in a forward, ``metrics.record("router_entropy", entropy)`` is enough for ``router_entropy`` to become a field
of metrics.jsonl and of every tracker. The values stay on the device: they are added up over layers and micro-batches,
and one all-reduce at the end of the step adds up all of them over the ranks. The host never waits.

Only a training step records: evaluation does not, nor does the repetition of a recomputed part
(parallel/recompute.py), whose values were recorded in its first run.

Ranks may record different names, as the stages of a pipeline do. They exchange their names in the first step. A name
that a rank records later makes all ranks exchange them again when they read that step; its values count in the steps
that are queued after that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.optimus.platform import device as devices
from megatron.optimus.platform.collectives import is_replaying
from megatron.optimus.platform.ranks import Ranks

Reduce = Literal["mean", "sum", "max", "min"]

_active: list[Recorder] = []  # the last one is that of the step whose forward runs now


def record(name: str, value: Tensor | float, *, reduce: Reduce = "mean", weight: float = 1.0) -> None:
    """Adds a value to the metric ``name`` of this training step; does nothing outside of a training step.

    Args:
        name: the field of metrics.jsonl; a slash groups fields in trackers ("attention/entropy").
        value: a tensor with one element, on any device, of any dtype; gradients are not followed.
        reduce: over everything recorded under the name in the step, in all layers, micro-batches and ranks: "mean"
            (sum of values / sum of weights), "sum", "max" or "min". A value that several ranks record, such as those
            of a tensor-parallel group, counts once for each of them.
        weight: for "mean", the number of items whose sum is ``value``.

    Raises:
        ValueError: ``value`` has more than one element, or ``name`` was recorded with another ``reduce`` before.
    """
    if _active and (torch.compiler.is_compiling() or not is_replaying()):
        _active[-1].add(name, value, reduce, weight)


class Totals(NamedTuple):
    """A step's values over all ranks."""

    metrics: dict[str, float]  # by name; a metric that no rank recorded in the step is absent
    host_values: list[float]  # those given to ``Recorder.reduce``
    tensor: Tensor  # the one given to ``Recorder.reduce``, flat float64 on the host


class PendingTotals:
    """Totals of a step that the device may not have computed yet."""

    def __init__(
        self,
        recorder: Recorder,
        names: Sequence[tuple[str, Reduce]],
        sums: Tensor,  # weights and values of the names, ranks with new names, numbers, the tensor
        extremes: Tensor | None,
        num_numbers: int,
    ) -> None:
        self._recorder, self._names, self._num_numbers = recorder, names, num_numbers
        self.tensor = sums[2 * len(names) + 1 + num_numbers :]  # flat float64 on the device: what ``reduce`` was given
        self._copy = devices.AsyncHostCopy(sums, *([] if extremes is None else [extremes]))

    def read(self) -> Totals:
        """Waits until the device has computed the step, not for what was queued later.

        Every rank must read its steps in the same order: where a rank has recorded a new name, all exchange theirs.
        """
        sums, *extremes = self._copy.read()
        count, head = len(self._names), 2 * len(self._names) + 1 + self._num_numbers
        values = sums[:head].tolist()
        maxima = iter(extremes[0].tolist() if extremes else [])
        metrics: dict[str, float] = {}
        for (name, reduce), weight, total in zip(self._names, values[:count], values[count : 2 * count], strict=True):
            value = total / weight if reduce == "mean" and weight > 0 else total
            if reduce in ("max", "min"):
                value = next(maxima) if reduce == "max" else -next(maxima)
            if weight > 0:
                metrics[name] = value
        num_ranks_with_new_names, *host_values = values[2 * count :]
        if num_ranks_with_new_names > 0:
            self._recorder.exchange_names()
        return Totals(metrics, host_values, sums[head:])


class Recorder:
    """Collects what ``record`` gets during the steps of a run."""

    def __init__(self, ranks: Ranks) -> None:
        """``ranks``: over which values are reduced, on their device."""
        self._ranks = ranks
        self._device = torch.device(ranks.device)
        self._dtype = devices.sum_dtype(self._device)
        self._reduces: dict[str, Reduce] = {}  # of every name that this rank has recorded
        self._names: list[tuple[str, Reduce]] | None = None  # that all ranks reduce, in the same order
        self.values: dict[str, Tensor] = {}  # of this step and rank: scalars of the device's sum_dtype, there
        self.weights: dict[str, float] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Begins a step: inside the context, ``record`` adds to this recorder."""
        self.values, self.weights = {}, {}
        _active.append(self)
        try:
            yield
        finally:
            _active.pop()

    def add(self, name: str, value: Tensor | float, reduce: Reduce, weight: float) -> None:
        """See ``record``."""
        if self._reduces.setdefault(name, reduce) != reduce:
            known = self._reduces[name]
            raise ValueError(f"metric {name!r} is recorded with reduce={known!r} and {reduce!r}; use one of them")
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"metric {name!r} must be one number, got shape {tuple(value.shape)}; reduce it first")
            value = value.detach().reshape(())
        before = self.values.get(name)
        if before is not None and reduce in ("sum", "mean"):
            self.values[name] = before + value
        else:
            # float64: sums of token counts must stay exact, and one dtype makes one all-reduce.
            if isinstance(value, Tensor):
                own = value.to(self._device, self._dtype, copy=True)
            else:
                own = torch.full((), value, dtype=self._dtype, device=self._device)
            bound = torch.maximum if reduce == "max" else torch.minimum
            self.values[name] = own if before is None else bound(before, own)
        self.weights[name] = self.weights.get(name, 0.0) + weight

    def recorded(self) -> list[tuple[str, Tensor, Reduce, float]]:
        """What was added in this step, one entry a name: name, value, reduce and weight as ``record`` takes them."""
        return [(name, value, self._reduces[name], self.weights[name]) for name, value in self.values.items()]

    def exchange_names(self) -> None:
        """Makes all ranks reduce the names that any of them has recorded. Collective.

        Raises ValueError on every rank where two ranks reduce a name differently.
        """
        own = json.dumps(list(self._reduces.items())).encode()
        reduces: dict[str, Reduce] = {}
        for rank, others in enumerate(self._ranks.all_gather_bytes(own)):
            for name, reduce in json.loads(others):
                if reduces.setdefault(name, reduce) != reduce:
                    raise ValueError(
                        f"metric {name!r} is recorded with reduce={reduce!r} on rank {rank} and with "
                        f"{reduces[name]!r} on a lower rank; use one of them"
                    )
        self._names = list(reduces.items())

    def reduce(self, host_values: Sequence[float] = (), tensor: Tensor | None = None) -> PendingTotals:
        """Reduces a step's values over the ranks; ends the step. Collective, without waiting for the device.

        Args:
            host_values: numbers of the host that are summed in the same all-reduce.
            tensor: on the device, summed in the same all-reduce as float64; exact for integers below 2^53.
        """
        if self._names is None:
            self.exchange_names()
        names = self._names or []
        has_new = not self.values.keys() <= {name for name, _ in names}
        zero = torch.zeros((), dtype=self._dtype, device=self._device)
        added = [zero if reduce in ("max", "min") else self.values.get(name, zero) for name, reduce in names]
        of_host = [*(self.weights.get(name, 0.0) for name, _ in names), float(has_new), *host_values]
        on_device = devices.to_device_async(torch.tensor(of_host, dtype=self._dtype), self._device)
        parts = [on_device[: len(names)], torch.stack(added or [zero])[: len(names)], on_device[len(names) :]]
        if tensor is not None:
            parts.append(tensor.to(self._dtype).flatten())
        sums = torch.cat(parts)
        extremes = self._extremes(names)
        if self._ranks.size > 1:
            dist.all_reduce(sums, group=self._ranks.group)
            if extremes is not None:
                dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._ranks.group)
        self.values, self.weights = {}, {}
        return PendingTotals(self, names, sums, extremes, len(host_values))

    def _extremes(self, names: Sequence[tuple[str, Reduce]]) -> Tensor | None:
        """Maxima, and minima with their sign changed, so that one all-reduce finds both; None without any."""
        found = []
        for name, reduce in names:
            if reduce in ("max", "min"):
                value = self.values.get(name)
                if value is None:
                    value = torch.full((), -torch.inf, dtype=self._dtype, device=self._device)
                else:
                    value = value if reduce == "max" else -value
                found.append(value)
        return torch.stack(found) if found else None
