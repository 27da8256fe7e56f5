"""Values out of line in a run: warnings at once and in the closing line, and a mark in the checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.optimus.checkpoint import load_manifest, store
from megatron.optimus.checkpoint.values import warnings_of
from megatron.optimus.commands import verify
from megatron.optimus.data.indexed import IndexedDatasetWriter
from tests.integration.conftest import Program

QUIET = ("--eval-interval", 0, "--save-interval", 0)
CLOSING = "look at this run before it is used: "


def _warnings(output: str) -> list[str]:
    words = ("far above", "not finite", "magnitude", CLOSING, "marked")
    return [line for line in output.splitlines() if any(word in line for word in words)]


@pytest.fixture(scope="module")
def trained(train: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty steps from the first on, with warm-up and a steep descent: nothing is out of line."""
    run = tmp_path_factory.mktemp("runs") / "trained"
    result = train(run, *QUIET, "--train-iters", 40, "--lr", "1e-2")
    assert result.returncode == 0 and _warnings(result.stdout + result.stderr) == [], result.stdout
    return run


def test_a_flipped_bit_in_the_moments_is_told(
    train: Program, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    path = store.latest(run / "checkpoints")
    assert path is not None
    manifest = load_manifest(path)
    slices = store.everything(manifest)
    store.load(path, slices)
    [moment] = [s for s in slices if s.kind == "exp_avg" and s.name.endswith("layers.1.norm_attention.weight")] or [
        next(s for s in slices if s.kind == "exp_avg")
    ]
    moment.tensor.view(torch.int32)[0] = torch.tensor(1e36).view(torch.int32)
    shutil.rmtree(path)
    store.save(
        run / "checkpoints", 40, slices, kind="full", consumed_samples=manifest.consumed_samples,
        config=manifest.config, metadata=manifest.metadata,
    )  # fmt: skip
    result = train(run, *QUIET, "--train-iters", 43, "--lr", "1e-2")
    lines = _warnings(result.stdout + result.stderr)
    assert any("was marked when it was saved" in line and moment.name in line for line in lines), lines
    assert any("step 42: loss " in line for line in lines) or any("step 41: loss" in line for line in lines), lines
    assert any("is saved, but" in line and "magnitude" in line for line in lines), lines
    [closing] = [line for line in lines if CLOSING in line]
    assert "loss" in closing and "step-00000043" in closing
    newest = store.latest(run / "checkpoints")
    assert newest is not None and any("loss" in mark for mark in warnings_of(load_manifest(newest).metadata))
    assert verify.main([str(newest)]) == 0
    assert "marked when it was saved" in capsys.readouterr().out


def test_batches_of_noise_are_told_also_right_after_a_resume(train: Program, trained: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    with IndexedDatasetWriter(str(tmp_path / "noise"), np.dtype(np.uint16)) as writer:
        for _ in range(200):
            writer.add_document(rng.integers(0, 64, 60).tolist())
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    result = train(run, *QUIET, "--train-iters", 43, "--lr", "1e-2", "--data-path", tmp_path / "noise")
    assert result.returncode == 0, result.stderr
    lines = _warnings(result.stdout + result.stderr)
    assert "step 41: loss far above the usual" in lines[0], lines
    assert sum("loss far above" in line for line in lines) == 2, "one line at once, one in the end"
    assert CLOSING in lines[-1] and "loss far above the usual in 3 steps, from step 41 to step 43" in lines[-1]
