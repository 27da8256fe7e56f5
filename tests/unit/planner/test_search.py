"""The line on a pipeline with too few micro-batches: its numbers against plans of their own."""

from __future__ import annotations

import re

import pytest

from megatron.optimus.commands import plan as plan_command
from megatron.optimus.config.load import load
from megatron.optimus.planner.hardware import AURORA, H200
from megatron.optimus.planner.plan import Plan, plan
from megatron.optimus.planner.search import bubble_hint, enough_micro_batches

LARGE = "--preset mula-220b-a10b"
SMALL = "--preset mula-1b --micro-batch-size 2 --pipeline-model-parallel-size 4"
INTERLEAVED = " --pipeline-schedule interleaved-1f1b --virtual-pipeline-model-parallel-size 2"


def planned(words: str, ranks: int = 8) -> Plan:
    return plan(load(words.split()).config, ranks, H200)


def test_the_large_presets_own_batch_on_1024_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    tool = plan_command
    command = f"{LARGE} --nodes 1024 --system aurora --top 0".split()
    assert tool.main(command) == 0
    found = re.search(
        r"^bubble (\d+)% of the step: 2 micro-batches a step \(global batch 3072\) over 8 pipeline stages; "
        r"--global-batch-size (\d+), (\d+) micro-batches, would make it (\d+)%$",
        capsys.readouterr().out,
        re.M,
    )
    assert found is not None
    now, batch, count, then = map(int, found.groups())
    ranks = 1024 * AURORA.devices_per_node
    sizes = (3072, batch, batch - 1536 * 8)
    configs = [load(f"{LARGE} --global-batch-size {size}".split()).config for size in sizes]
    shares = {size: plan(one, ranks, AURORA).time.bubble_share for size, one in zip(sizes, configs, strict=True)}
    assert batch == count * 1536 and count % 8 == 0
    assert (now, then) == (round(100 * shares[3072]), round(100 * shares[batch])) and now > 50
    assert shares[batch] <= 0.10 < shares[batch - 1536 * 8]
    assert tool.main([*command, "--global-batch-size", str(batch)]) == 0
    assert "micro-batches a step" not in capsys.readouterr().out


@pytest.mark.parametrize("schedule", ["", INTERLEAVED])
def test_the_hint_ends_with_the_bubbles_limit(schedule: str) -> None:
    """From four micro-batches on: those of 20% and less have none, all others one and the same remedy."""
    hints, shares = {}, {}
    for count in (4, 8, 12, 16, 32, 64):
        made = planned(f"{SMALL}{schedule} --global-batch-size {4 * count}")
        hints[count], shares[count] = bubble_hint(made), made.time.bubble_share
    assert {count for count in hints if hints[count]} == {count for count in shares if shares[count] > 0.20}
    assert hints[4] and not hints[64]
    remedies = {hint.split("; ")[1] for hint in hints.values() if hint}
    assert len(remedies) == 1
    larger = enough_micro_batches(planned(f"{SMALL}{schedule} --global-batch-size 16"))
    assert larger is not None and f"--global-batch-size {larger.config.training.global_batch_size}," in remedies.pop()
    assert larger.ranks[0].micro_batches % 4 == 0 and larger.time.bubble_share <= 0.10


def test_one_micro_batch_and_no_pipeline() -> None:
    assert "1 micro-batch a step (global batch 4) over 4" in bubble_hint(planned(f"{SMALL} --global-batch-size 4"))
    assert bubble_hint(planned("--preset mula-1b --global-batch-size 8")) == ""


def test_a_larger_batch_that_does_not_fit_or_that_the_run_does_not_allow() -> None:
    """Memory grows with the micro-batches in flight; a ramp of sizes must end at the batch."""
    words = f"{SMALL} --seq-length 4096 --micro-batch-size 24 --global-batch-size"
    small, full = planned(f"{words} 24", ranks=4), planned(f"{words} 480", ranks=4)
    assert small.fits and not full.fits and full.time.bubble_share <= 0.10
    assert "--global-batch-size 480, 20 micro-batches" in (hint := bubble_hint(small))
    assert f", but needs {full.worst.peak / 2**30:.2f} of {full.usable / 2**30:.2f} usable GiB" in hint
    ramp = planned(f"{SMALL} --train-samples 900000 --global-batch-size 32 --rampup-batch-size 8 24 1000")
    larger = enough_micro_batches(ramp)
    assert larger is not None and (larger.config.training.global_batch_size - 8) % 24 == 0
    short = planned(f"{SMALL} --train-samples 20 --lr-warmup-iters 1 --global-batch-size 16")
    assert bubble_hint(short).endswith(
        "over 4 pipeline stages; no batch with a multiple of these that the run allows makes it 10%; use fewer stages"
    )
