"""Every optimizer and kind of state through the whole program: the loss falls, and a resumed run is the same run."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch

from megatron.optimus.convert.formats import MASTER, matrices
from megatron.optimus.convert.optimus import OptimusSource
from megatron.optimus.training.metrics import read_metrics
from tests.integration.conftest import Program
from tests.integration.test_pretrain import numbers, succeed, tensors

COMPLETEP = "--parametrization completep --base-hidden-size 16 --base-num-layers 1"
QK_CLIP = "--qk-layernorm false --qk-clip-threshold 0.01 --qk-clip-interval 3 "
QUIET = ("--eval-interval", 0)


def assert_loss_falls(run_dir: Path) -> None:
    losses = [line["loss"] for line in read_metrics(run_dir / "metrics.jsonl")]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.15, losses


def test_the_loss_falls_under_sgd(tmp_path: Path, train: Program) -> None:
    options = "--optimizer sgd --lr 1 --weight-decay 0 --optimizer-state-dtype bf16 --save-interval 0"
    succeed(train(tmp_path, *options.split(), *QUIET))
    assert_loss_falls(tmp_path)


@pytest.mark.parametrize(
    ("options", "ranks", "kinds"),
    [
        (
            "--optimizer muon --lr 1e-2 --muon-momentum 0.9 --expert-model-parallel-size 2 " + QK_CLIP + COMPLETEP,
            2,
            {"momentum_buffer"},
        ),
        (
            "--optimizer soap --lr 3e-3 --soap-precondition-frequency 3 --tensor-model-parallel-size 2",
            2,
            {"exp_avg", "left_factor", "right_basis"},
        ),
        ("--optimizer lion --lr 2e-3 --optimizer-state-dtype int8 --weight-decay-norms false", 1, {"exp_avg"}),
    ],
)
def test_resumed_run_equals_the_unbroken_one_bit_for_bit(
    options: str, ranks: int, kinds: set[str], tmp_path: Path, train: Program
) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    succeed(train(unbroken, *options.split(), *QUIET, ranks=ranks))
    assert_loss_falls(unbroken)
    shutil.copytree(unbroken, broken)
    shutil.rmtree(broken / "checkpoints/step-00000008")
    assert "step 6, 48 samples" in succeed(train(broken, *options.split(), *QUIET, ranks=ranks))
    assert numbers(broken) == numbers(unbroken)
    clipped = [[line.get("qk_clipped_heads") for line in read_metrics(d / "metrics.jsonl")] for d in (broken, unbroken)]
    assert clipped[0] == clipped[1] and ((clipped[0][6] or 0) > 0) == (QK_CLIP in options), clipped
    resumed, reference = (tensors(run / "checkpoints/step-00000008") for run in (broken, unbroken))
    assert {kind for _, kind in reference} >= {"master"} | kinds
    for key, tensor in reference.items():
        assert torch.equal(resumed[key], tensor), key
    with closing(OptimusSource(unbroken)) as source:  # what generate, evaluate and exports read
        for name, start, stop in matrices(source.model):
            assert torch.equal(source.read(name, MASTER, start, stop), reference[name, MASTER].flatten()[start:stop])
