"""Metrics recorded in a model: what counts, how it is reduced, and that nothing is recorded twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.optimus.platform import metrics
from megatron.optimus.platform.collectives import recording_contexts
from megatron.optimus.platform.metrics import Recorder
from megatron.optimus.platform.ranks import Ranks


class Toy(nn.Module):
    """Records its largest input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        metrics.record("toy/input", x.abs().max(), reduce="max")
        metrics.record("toy/mean", x.mean())
        return self.linear(x)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(Ranks.alone())


def test_every_reduction_over_the_records_of_a_step(recorder: Recorder) -> None:
    for factor in (1.0, 10.0):  # two steps: the second one begins anew
        with recorder.recording():
            for value in (1.0, 2.0, 6.0):
                for reduce in ("mean", "sum", "max", "min"):
                    metrics.record(reduce, torch.tensor(factor * value), reduce=reduce)  # type: ignore[arg-type]
            metrics.record("per label", torch.tensor(9.0), weight=3)
            metrics.record("per label", torch.tensor(1.0), weight=1)
            metrics.record("number", 4)
        totals = recorder.reduce([0.5, 2.0], torch.arange(6).view(2, 3)).read()
        expected = {"mean": 3 * factor, "sum": 9 * factor, "max": 6 * factor, "min": factor}
        assert totals.metrics == expected | {"per label": 2.5, "number": 4.0}
        assert totals.host_values == [0.5, 2.0] and totals.tensor.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_metric_that_a_step_does_not_record_is_absent_from_it(recorder: Recorder) -> None:
    with recorder.recording():
        metrics.record("always", 1.0)
        metrics.record("sometimes", 2.0, reduce="min")
    assert recorder.reduce().read().metrics == {"always": 1.0, "sometimes": 2.0}
    with recorder.recording():
        metrics.record("always", 1.0)
    assert recorder.reduce().read().metrics == {"always": 1.0}


def test_a_new_name_counts_once_its_ranks_have_heard_of_it(recorder: Recorder) -> None:
    def step(*names: str) -> metrics.PendingTotals:
        with recorder.recording():
            for name in names:
                metrics.record(name, 1.0)
        return recorder.reduce()

    assert step("a").read().metrics == {"a": 1.0}
    second = step("a", "b")
    third = step("a", "b")  # queued before the second is read, as on a device that runs behind
    assert second.read().metrics == {"a": 1.0}
    assert third.read().metrics == {"a": 1.0}
    assert step("a", "b").read().metrics == {"a": 1.0, "b": 1.0}


def test_nothing_is_recorded_outside_of_a_training_step(recorder: Recorder) -> None:
    Toy()(torch.ones(2, 4))
    assert recorder.reduce().read().metrics == {}


def test_a_recomputed_part_records_once(recorder: Recorder) -> None:
    toy, x = Toy(), torch.ones(2, 4, requires_grad=True)
    with recorder.recording():
        y = checkpoint(toy, x, use_reentrant=False, context_fn=recording_contexts)
        y.sum().backward()
    assert recorder.weights == {"toy/input": 1.0, "toy/mean": 1.0}


def test_gradients_are_not_followed_and_sums_of_counts_are_exact(recorder: Recorder) -> None:
    x = torch.ones(3, requires_grad=True)
    with recorder.recording():
        metrics.record("count", torch.tensor(2**40 + 1), reduce="sum")
        metrics.record("count", torch.tensor(1.0), reduce="sum")
        metrics.record("x", x.sum().unsqueeze(0))
    assert not recorder.values["x"].requires_grad
    assert recorder.reduce().read().metrics == {"count": 2**40 + 2, "x": 3.0}


def test_what_cannot_be_reduced_is_refused(recorder: Recorder) -> None:
    with recorder.recording():
        with pytest.raises(ValueError, match=r"metric 'v' must be one number, got shape \(3,\)"):
            metrics.record("v", torch.zeros(3))
        metrics.record("a", 1.0)
        with pytest.raises(ValueError, match=r"metric 'a' is recorded with reduce='mean' and 'sum'"):
            metrics.record("a", 1.0, reduce="sum")


def test_a_compiled_layer_records_without_a_break_in_its_graph(recorder: Recorder) -> None:
    torch.compiler.reset()
    toy = Toy()
    compiled = torch.compile(toy, backend="aot_eager", fullgraph=True)
    for step in range(1, 4):
        with recorder.recording():
            for _ in range(2):  # micro-batches
                compiled(torch.full((2, 4), float(step))).sum().backward()
        assert recorder.reduce().read().metrics == {"toy/input": step, "toy/mean": step}
