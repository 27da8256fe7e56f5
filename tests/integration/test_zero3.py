"""zero_stage=3 through the training program: the same numbers as stage 1, and checkpoints that know no stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.optimus.checkpoint.verify import verify
from megatron.optimus.training.metrics import read_metrics
from tests.integration.conftest import Program
from tests.integration.test_pretrain import succeed

KEYS = ("loss", "aux_loss", "grad_norm", "valid_loss")
DENSE = ["--num-experts", "0", "--ffn-hidden-size", "48"]


def numbers(run_dir: Path) -> dict[str, list[float]]:
    lines = read_metrics(run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 9))
    return {key: [line[key] for line in lines if line.get(key) is not None] for key in KEYS}


@pytest.mark.parametrize(
    ("shape", "stages"),
    [
        pytest.param(
            [],
            [
                ["--zero-stage", "3"],
                ["--zero-stage", "3", "--optimizer-cpu-offload", "--param-cpu-offload"],
                ["--zero-stage", "2", "--expert-model-parallel-size", "2"],
                ["--zero-stage", "3"],
            ],
            id="moe",
        ),
        pytest.param(DENSE, [["--zero-stage", "1"], ["--zero-stage", "3", "--optimizer-cpu-offload"]], id="dense"),
    ],
)
def test_stages_take_up_each_others_checkpoints(
    tmp_path: Path, train: Program, shape: list[str], stages: list[list[str]]
) -> None:
    """Eight steps at stage 1, and the same run with another stage every few steps."""
    whole, changing = tmp_path / "whole", tmp_path / "changing"
    succeed(train(whole, *shape, ranks=2))
    each = 8 // len(stages)
    for options in stages:
        said = succeed(train(changing, *shape, *options, "--exit-interval", each, ranks=2))
        newest = sorted((changing / "checkpoints").glob("step-*"))[-1]
        assert verify(newest).layout["zero_stage"] == int(options[1])
    assert f"resumed from {changing / 'checkpoints'}/step-{8 - each:08d}: step {8 - each}," in said
    expected = numbers(whole)
    for key, values in numbers(changing).items():
        assert values == pytest.approx(expected[key], rel=2e-6), key
