"""Attention of long sequences: predictions against what was measured on H200."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.optimus.config.load import load
from megatron.optimus.config.rank_plan import rank_plans
from megatron.optimus.config.schema import Recompute
from megatron.optimus.models.activations import XPU, half_the_keys, half_the_queries, ring_sizes, sums_bytes
from megatron.optimus.models.work import layer_work
from megatron.optimus.planner.hardware import AURORA, H200, Machine
from megatron.optimus.planner.step_time import attention_rate, step_time
from tests.unit.planner.test_plan import script

BEFORE = script("benchmarks/planner_steps.py").BEFORE  # as what is compared with was measured
RESULTS = Path(__file__).resolve().parents[3] / "benchmarks/results"
LONG = "--preset mula-1b --num-layers 4 --seq-length 131072 --max-position-embeddings 131072 --micro-batch-size 1 "


def long_sequence(ranks: int, words: str) -> Any:
    """The share of a rank that has a part of one sequence of 131,072 tokens; the model's attention is that measured."""
    config = load(f"{LONG} --global-batch-size 1 --context-parallel-size {ranks} {words}".split()).config
    [share] = rank_plans(config, ranks)
    return share


@pytest.mark.parametrize(("kernel", "within"), [("CUDNN", 0.04), ("FLASH", 0.07)])
def test_kernels_of_the_ring_measured_on_h200_are_predicted(kernel: str, within: float) -> None:
    """Time of the slower rank, and the peak of each rank's backward, without the wire."""
    lines = (RESULTS / "ring_kernels_h200.txt").read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    for ranks in (2, 8):
        words = "--deterministic" if kernel == "FLASH" else ""
        share, whole = long_sequence(ranks, f"--cp-comm-type p2p {words}"), long_sequence(ranks, words)
        work, other = (layer_work(one, frozenset(), is_moe=one.model.is_moe) for one in (share, whole))
        beside = (work.memory_bytes - other.memory_bytes) / H200.traffic.value
        seconds = work.attention / attention_rate(share, H200) + beside
        measured = [row for row in rows if re.match(f"ring of {ranks}, rank ., {kernel}", row["what"])]
        assert len(measured) == 2
        assert seconds * 1e3 == pytest.approx(max(row["together_ms"] for row in measured), rel=within)
        sizes = ring_sizes(long_sequence(ranks, "--cp-comm-type p2p"), H200.kernels)
        if kernel == "FLASH":  # one sum; --deterministic, which has more, was not measured
            sizes = replace(sizes, scratch=2 * 2 + 4)
        queries = sizes.queries * sizes.element_bytes
        for row in measured:
            cuts_queries = "rank 0" in row["what"]
            step = half_the_queries(sizes) if cuts_queries else half_the_keys(sizes) + queries  # output, copied here
            peak = sums_bytes(sizes) + sizes.travelling + step
            assert peak / 2**30 == pytest.approx(row["backward_peak_gib"], rel=0.005), row["what"]


@pytest.mark.parametrize(
    ("file", "ranks", "variant", "words", "hardware"),
    [
        ("layout_speed_h200x2.json", 2, "ulysses", "", H200),
        ("layout_speed_h200x2.json", 2, "ring", "--cp-comm-type p2p", H200),
        ("layout_speed_cp_h200x4.json", 4, "ulysses", "", BEFORE),
        ("layout_speed_cp_h200x4.json", 4, "ring", "--cp-comm-type p2p", BEFORE),  # with cuDNN's kernels
    ],
)
def test_a_step_with_a_long_sequence_measured_on_h200_is_predicted(
    file: str, ranks: int, variant: str, words: str, hardware: Machine
) -> None:
    sections = json.loads((RESULTS / file).read_text())["sections"]
    [measured] = [row["step_ms"] for row in sections["cp"]["results"] if row["variant"] == variant]
    assert step_time([long_sequence(ranks, words)], hardware).total * 1e3 == pytest.approx(measured, rel=0.07)


def test_a_ring_without_a_kernel_is_planned_by_its_scores() -> None:
    """Aurora: products in fp32 instead of attention, every score through memory; Ulysses has torch's kernel."""
    ring, whole = long_sequence(8, "--cp-comm-type p2p"), long_sequence(1, "")
    work, other = (
        layer_work(ring, frozenset(), XPU, is_moe=ring.model.is_moe),
        layer_work(whole, frozenset(), XPU, is_moe=whole.model.is_moe),
    )
    scores = 16 * 131072**2 / 2 * (8 + 1) / 8 / 8  # a rank's own block is whole
    assert (work.attention, work.wide) == (0.0, pytest.approx(14 * 128 * scores))
    beside = layer_work(ring, frozenset(), BEFORE.kernels, is_moe=ring.model.is_moe).memory_bytes
    assert work.memory_bytes - beside == pytest.approx(128 * scores)
    assert other.wide == 0.0 and other.attention == pytest.approx(12 * 128 * 16 * 131072**2 / 2)
    again = layer_work(
        ring, frozenset({Recompute.ATTENTION}), XPU, is_moe=ring.model.is_moe
    )  # the ring's result is kept
    assert again.wide == work.wide
    slow, fast = (step_time([long_sequence(8, f"--cp-comm-type {kind}")], AURORA).total for kind in ("p2p", "a2a"))
    assert slow > 5 * fast


def test_a_deterministic_ring_takes_longer_and_holds_more() -> None:
    """FlashAttention-2 then keeps gradients of queries for each of 132 / 16 groups of blocks, 9."""
    usual, strict = (long_sequence(8, f"--cp-comm-type p2p {words}") for words in ("", "--deterministic"))
    assert step_time([strict], H200).total > 1.4 * step_time([usual], H200).total
    more = ring_sizes(strict, H200.kernels).scratch - ring_sizes(usual, H200.kernels).scratch
    assert more == 2 * 2 + 9 * 4 - 4
