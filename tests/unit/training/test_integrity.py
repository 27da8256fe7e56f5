"""Which ranks compute which gradients twice, and which rank is named when checksums differ."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from megatron.optimus.config.checks import check
from megatron.optimus.config.layout import Layout
from megatron.optimus.config.load import load
from megatron.optimus.config.schema import ConfigError, ParallelConfig
from megatron.optimus.launcher.nodes import lost_hosts
from megatron.optimus.platform.intervals import AUTO
from megatron.optimus.platform.metrics import Recorder
from megatron.optimus.platform.ranks import Ranks
from megatron.optimus.training import integrity
from megatron.optimus.training.integrity import GradientChecksums, describe, describe_gradients, differing, suspects_of


@pytest.mark.parametrize(("ep", "tp", "block"), [(1, 1, 1), (4, 1, 4), (2, 2, 1), (4, 2, 2)])
def test_each_copy_is_compared_with_every_other_one_in_turn(ep: int, tp: int, block: int) -> None:
    parallel = ParallelConfig(expert_model_parallel_size=ep, tensor_model_parallel_size=tp)
    layout = Layout.from_config(parallel, 16)
    assert integrity.block_of_copies(layout) == block
    copies = layout.dp // block
    for index in range(layout.dp):
        sources = [integrity.gradient_source(layout, index, turn) for turn in range(copies - 1)]
        # the same place in each of the other copies, so that experts get the same tokens from the same peers
        assert sorted(sources) == [place for place in range(index % block, layout.dp, block) if place != index]


class States:
    """Checksums that take 10 ms, and comparisons that take 14 ms."""

    now = 0.0

    def __init__(self) -> None:
        self.recorded_after: list[int] = []
        self.compared: list[int] = []
        self.step = 0

    def record(self) -> None:
        self.recorded_after.append(self.step)
        States.now += 0.010

    def changed(self) -> None:
        self.compared.append(self.step)
        States.now += 0.014

    def replicas(self) -> list[object]:
        return []

    def forget(self) -> None:
        pass


class Event:
    def __init__(self, device: torch.device) -> None:
        self.time = States.now

    def work_seconds_since(self, earlier: Event) -> float:
        return self.time - earlier.time


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(("others_s", "every"), [(0.41, 12), (6.0, 1), (0.0505, 96)])
def test_auto_is_chosen_from_what_comparisons_cost(
    delay: int, others_s: float, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``delay``: steps by which the host is behind the device. Each comparison has the checksums of the step before."""
    monkeypatch.setattr(integrity, "DeviceEvent", Event)
    config = load("--integrity-interval auto --device cpu".split()).config
    assert config.training.integrity_interval == AUTO
    run = SimpleNamespace(config=config, device=torch.device("cpu"), ranks=Ranks.alone())
    checks = integrity.Integrity(run, SimpleNamespace(optimizer=None), None, None, 10)  # type: ignore[arg-type]
    states = checks._states = States()  # type: ignore[assignment]
    recorder, began, seconds = Recorder(Ranks.alone()), States.now, {}
    for step in range(11, 500):
        states.step = step
        States.now += others_s
        checks.before_update(step, recorder)
        checks.after_update(step)
        seconds[step], began = States.now - began, States.now
        if step - delay in seconds:
            checks.choose_intervals(step - delay, SimpleNamespace(work_seconds=seconds[step - delay]))  # type: ignore[arg-type]
    assert states.compared[:2] == [13, 16] and {step + 1 for step in states.recorded_after} >= {*states.compared}
    distances = {later - earlier for earlier, later in itertools.pairwise(states.compared[3:])}
    assert distances == {every}
    first = states.compared[3]  # from here on every interval costs the same
    cost_s = sum(seconds[step] - others_s for step in range(first, first + every))
    assert cost_s <= 0.005 * every * others_s


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(("saves", "every"), [(0, 40), (25, 25)])
def test_auto_is_chosen_from_what_gradients_cost(
    delay: int, saves: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comparisons of 20 ms in steps of 100 ms, and at least every ``save_interval``."""
    monkeypatch.setattr(integrity, "DeviceEvent", Event)
    words = f"--integrity-gradient-interval auto --save-interval {saves} --device cpu".split()
    mesh = SimpleNamespace(layout=Layout.from_config(ParallelConfig(), 4), index=lambda axis: 0, ranks=lambda axis: [0])
    run = SimpleNamespace(config=load(words).config, device=torch.device("cpu"), ranks=Ranks.alone(), mesh=mesh)
    data = SimpleNamespace(batch_of_rank=lambda position, source, count: [torch.zeros(1)])
    checks = integrity.Integrity(run, SimpleNamespace(optimizer=None), None, data, 10)  # type: ignore[arg-type]
    compared: list[int] = []

    def exchange(both: object, source: int) -> list[GradientChecksums]:
        States.now += 0.0198
        compared.append(step)
        return [GradientChecksums("host", 0, [1], [1])]

    monkeypatch.setattr(checks, "_exchange", exchange)
    seconds, began = {}, States.now
    for step in range(11, 300):
        checks.check_gradients(step, 0, [torch.zeros(1)])  # type: ignore[list-item]
        States.now += 0.1
        checks.after_update(step)
        seconds[step], began = States.now - began, States.now
        if step - delay in seconds:
            checks.choose_intervals(step - delay, SimpleNamespace(work_seconds=seconds[step - delay]))  # type: ignore[arg-type]
    assert compared[:3] == [13, 16, 16 + every]
    assert {later - earlier for earlier, later in itertools.pairwise(compared[2:])} == {every}


def test_a_majority_names_the_rank() -> None:
    sums = torch.zeros(3, 2, 2, dtype=torch.int64)
    assert suspects_of([4, 6, 8], ["a", "b"], sums) is None
    sums[1, 1, 0] = 5
    assert suspects_of([4, 6, 8], ["a", "b"], sums) == ("b", [6], True)
    assert suspects_of([4, 6], ["a", "b"], sums[:2]) == ("b", [4, 6], False)
    odd = [("host0", [], [("b", [1], True)]), ("host1", [], [("b", [1], True)])]
    assert lost_hosts([describe(odd)], ["host0", "host1"]) == ["host1"]
    both = [("host0", [], [("b", [0, 1], False)]), ("host1", [], [("b", [0, 1], False)])]
    assert "one of ranks 0 (host0), 1 (host1)" in describe(both) and not lost_hosts([describe(both)], ["host0"])
    states = [("host0", [], [("b", [0, 1], False)]), ("host1", ["exp_avg"], [("b", [0, 1], False)])]
    assert lost_hosts([describe(states)], ["host0", "host1"]) == ["host1"]  # known exactly


def test_a_second_time_tells_a_passing_fault() -> None:
    def ring(own: list[int], other: list[int]) -> list[GradientChecksums]:
        return [GradientChecksums(f"host{r}", (r + 1) % 3, [own[r]], [other[r]]) for r in range(3)]

    clean = ring([1, 2, 3], [2, 3, 1])
    assert differing(clean) == []
    once = ring([1, 9, 3], [2, 3, 1])
    assert differing(once) == [(1, 0)]
    text, is_unsteady = describe_gradients(once, clean, [(1, 0)])
    assert is_unsteady and lost_hosts([text], ["host0", "host1", "host2"]) == ["host1"]
    always = ring([1, 9, 3], [2, 8, 1])  # rank 1 computes its own and those of rank 2 wrongly
    text, is_unsteady = describe_gradients(always, always, differing(always))
    assert not is_unsteady and lost_hosts([text], ["host0", "host1", "host2"]) == ["host1"]
    text, is_unsteady = describe_gradients(once, once, [(1, 0)])
    assert not is_unsteady and "one of them is wrong" in text and "of node" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--integrity-interval 1 --zero-stage 3",
            "with zero_stage=3: use 0, or zero_stage=1 or 2",
        ),
        ("--integrity-gradient-interval 1 --zero-stage 2", "use 0, or zero_stage=1"),
        ("--integrity-gradient-interval 1 --expert-model-parallel-size 2", "dp=2 and copies of experts edp=1"),
        ("--integrity-gradient-interval 1 --pipeline-model-parallel-size 2", "not pipeline stages"),
        ("--integrity-gradient-interval 9 --save-interval 8", "exceeds save_interval=8; use at most 8"),
    ],
)
def test_layouts_that_cannot_be_compared_are_refused(options: str, message: str) -> None:
    config = load(["--preset", "mula-tiny", *options.split()]).config
    with pytest.raises(ConfigError, match=message):
        check(config, 2)
