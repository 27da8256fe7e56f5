"""The text of a dry run."""

from __future__ import annotations

import pytest

from megatron.optimus.config.load import load
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.describe import describe, smallest_world
from megatron.optimus.planner.hardware import machine_named
from megatron.optimus.planner.plan import plan


def test_dry_run_of_the_paper_layout() -> None:
    config = load(["--preset", "mula-220b-a10b"]).config
    assert smallest_world(config) == 96
    text = describe(config, 3072)
    assert len(text.splitlines()) <= 15 and "num_layers: 64" not in text, "what matters, in a glance"
    assert "data: none given: --data-path" in text and "checkpoints every 1,000 steps and at the end in runs/" in text
    memory = plan(config, 3072, machine_named("h200")).worst
    assert f"memory of a rank: {memory.peak / 2**30:.2f} GiB at the peak on a GPU, of them weights 5.08, " in text
    text = describe(config, 3072, verbose=True)
    assert "220,205,681,664 total, 10,020,719,616 active" in text
    assert "pp=8 dp=384 cp=1 tp=1, expert view pp=8 edp=32 ep=12" in text
    assert "experts per rank: 20 of 240" in text
    assert "num_layers: 64" in text


def test_dry_run_counts_the_whole_run() -> None:
    text = describe(load(["--preset", "mula-tiny"]).config, 1)
    assert "in all: 300 steps, 4,800 sequences, 1,228,800 tokens" in text and "ramp:" not in text
    words = "--preset mula-tiny --rampup-batch-size 4 4 48 --train-samples 1000".split()
    text = describe(load(words).config, 1)
    assert "in all: 67 steps, 1,000 sequences, 256,000 tokens" in text
    assert "ramp: 4 sequences a step, 4 more in each further stage of 16 sequences; 16 after 8 steps" in text


def test_dry_run_says_why_memory_is_not_estimated() -> None:
    text = describe(load(["--preset", "mula-tiny", "--zero-stage", "3"]).config, 1)
    assert "memory of a rank: not estimated (zero_stage=3 is not planned here" in text


def test_dry_run_on_a_laptop_describes_the_smallest_world() -> None:
    assert "layout of 12 ranks" in describe(load(["--preset", "mula-20b-a2b"]).config, 1)


def test_dry_run_refuses_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match="expert_model_parallel_size=12"):
        describe(load(["--preset", "mula-20b-a2b"]).config, 8)
