"""Which ranks compute which gradients twice, and which rank is named when checksums differ."""

from __future__ import annotations

import pytest
import torch

from megatron.optimus.config.checks import check
from megatron.optimus.config.layout import Layout
from megatron.optimus.config.load import load
from megatron.optimus.config.schema import ConfigError, ParallelConfig
from megatron.optimus.launcher.nodes import lost_hosts
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
