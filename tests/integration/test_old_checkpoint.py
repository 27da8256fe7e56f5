"""A checkpoint that version 0.5.0 wrote is read, and a run goes on from it as version 0.5.0 itself did.

``tests/fixtures/checkpoint_v0_5`` holds, as that version left them, two ranks (gloo, EP 2, fp32) of a tiny MoE:

    config.yaml                     of the run
    checkpoints/step-00000004/      masters, moments, buffers, generators
    metrics.jsonl                   its steps 1 to 8
    metrics_one_rank.jsonl          steps 5 to 8 of one rank that went on from step 4, without expert parallelism
    counting.bin, counting.idx      the corpus, indexed by that version too
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megatron.optimus.checkpoint import store, verify
from megatron.optimus.training.metrics import read_metrics
from tests.helpers import start_program
from tests.integration.conftest import command_of, environment

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "checkpoint_v0_5"
STEP = FIXTURE / "checkpoints" / "step-00000004"
COMPUTED = {"loss", "aux_loss", "z_loss", "grad_norm", "valid_loss"}


def go_on(run_dir: Path, ranks: int) -> None:
    """Continues the fixture's run in ``run_dir``, at ``ranks`` ranks of as many expert-parallel ones."""
    words = ["--config", str(FIXTURE / "config.yaml"), "--data-path", str(FIXTURE / "counting")]
    words += ["--run-dir", str(run_dir), "--expert-model-parallel-size", str(ranks)]
    if torch.accelerator.is_available():  # DeepSpeed has chosen it, so a forked process cannot run on the CPU
        done = subprocess.run(
            [*command_of(ranks), *words], check=False, capture_output=True, text=True, timeout=240, env=environment()
        )
    else:
        done = start_program("megatron.optimus.pretrain", words, ranks, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def test_every_tensor_of_it_is_good_and_loads() -> None:
    manifest = verify(STEP)
    assert (manifest.step, manifest.consumed_samples, manifest.packages["optimus"]) == (4, 32, "0.5.0")
    requests = store.everything(manifest)
    store.load(STEP, requests)
    kinds = {request.kind for request in requests}
    assert kinds == {"master", "exp_avg", "exp_avg_sq", "buffer", "rng"}
    for request in requests:
        if request.kind in ("master", "exp_avg_sq"):
            assert request.tensor.isfinite().all() and request.tensor.any(), request.name


@pytest.mark.parametrize("ranks, recorded", [(2, "metrics.jsonl"), (1, "metrics_one_rank.jsonl")])
def test_a_run_goes_on_from_it_as_the_version_that_wrote_it_did(tmp_path: Path, ranks: int, recorded: str) -> None:
    """Bit for bit on the machine that recorded it; elsewhere another CPU may round differently."""
    shutil.copytree(FIXTURE / "checkpoints", tmp_path / "checkpoints")
    go_on(tmp_path, ranks)
    found = read_metrics(tmp_path / "metrics.jsonl")
    expected = [line for line in read_metrics(FIXTURE / recorded) if line["step"] > 4]
    assert [line["step"] for line in found] == [5, 6, 7, 8]
    for ours, theirs in zip(found, expected, strict=True):
        for field in COMPUTED & theirs.keys():
            assert ours[field] == pytest.approx(theirs[field], rel=1e-6), (ours["step"], field)
