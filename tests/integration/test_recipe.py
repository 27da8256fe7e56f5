"""What a recipe asks for, found again in the weights that a run leaves, and the profile of such a run."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from megatron.optimus.training.health import RecentValues
from megatron.optimus.training.metrics import read_metrics
from tests.integration.conftest import Program
from tests.integration.test_pretrain import numbers, succeed, tensors

STEPS, CLIP, SIGMA = 5, 0.01, 0.4
RECIPE = (
    f"--optimizer sgd --sgd-momentum 0 --weight-decay 0 --clip-grad {CLIP} --clip-grad-after-warmup "
    f"--lr 0.1 --min-lr 0.01 --lr-warmup-iters 2 --lr-decay-style WSD --lr-wsd-decay-iters 2 --train-iters {STEPS} "
    f"--save-interval 1 --save-retain {STEPS} --eval-interval 0 --expert-model-parallel-size 2 "
    "--device-peak-tflops 0.5 --straggler-check-interval 3 "
    "--profile --profile-step-start 2 --profile-step-end 3 --profile-ranks 0 1"
)
TRACE = "steps-2-3-rank-{}.trace.json.gz"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, train: Program) -> Path:
    """Two ranks of plain SGD: the length of an update is the learning rate times the norm of what was applied."""
    folder = tmp_path_factory.mktemp("recipe")
    said = succeed(train(folder, *RECIPE.split(), ranks=2))
    assert said.count("devices: 2 ranks took") == 2, said  # before steps 1 and 4
    return folder


def test_updates_have_the_length_that_schedule_and_clipping_give_them(run_dir: Path) -> None:
    lines = read_metrics(run_dir / "metrics.jsonl")
    assert [line["mfu"] for line in lines] == pytest.approx([line["tflops_per_device"] / 0.5 for line in lines])
    assert [line["lr"] for line in lines] == pytest.approx([0.055, 0.1, 0.1, 0.1, 0.055])
    masters = [
        {name: x for (name, kind), x in tensors(run_dir / f"checkpoints/step-{step:08d}").items() if kind == "master"}
        for step in range(1, STEPS + 1)
    ]
    for line, before, after in zip(lines[1:], masters, masters[1:], strict=False):
        moved = sum(float((after[name] - before[name]).double().square().sum()) for name in before) ** 0.5
        applied = line["grad_norm"] if line["step"] <= 2 else CLIP
        assert line["grad_norm"] > 10 * CLIP and moved / line["lr"] == pytest.approx(applied, rel=1e-3)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_profile_has_the_steps_asked_for_and_their_parts(run_dir: Path, rank: int) -> None:
    with gzip.open(run_dir / "profile" / TRACE.format(rank)) as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("part: optimizer step") == names.count("part: forward and backward") == 2
    assert names.count("part: layers.moe.router") == 2 * 2 * 2  # layers, micro-batches, steps
    table = (run_dir / "profile" / TRACE.format(rank).replace(".trace.json.gz", ".txt")).read_text().splitlines()
    parts = {line.split()[3]: line.split() for line in table if "layers." in line}
    assert {"layers.attention", "layers.attention_norm", "layers.moe", "layers.moe.router"} <= parts.keys()
    assert float(parts["layers.moe"][2]) == 4.0 and float(parts["layers.moe"][0]) > float(parts["layers.moe.router"][0])


def test_steps_left_out_change_nothing_and_a_resumed_run_leaves_out_the_same(tmp_path: Path, train: Program) -> None:
    """With so small a sigma ordinary steps count as spikes; the limit is the one computed from the norms reported.
    Steps 10 and 45 are left out by name, with their samples."""
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    options = (
        "--train-iters 48 --save-interval 40 --eval-interval 0 --num-layers 1 --global-batch-size 2 "
        f"--micro-batch-size 1 --iterations-to-skip 10 45 --lr 1e-4 --min-lr 1e-4 --grad-norm-spike-sigma {SIGMA}"
    ).split()
    succeed(train(unbroken, *options))
    lines, recent = read_metrics(unbroken / "metrics.jsonl"), RecentValues()
    for line in lines:
        is_spike = line["grad_norm"] > recent.limit(line["step"], SIGMA)
        assert line.get("skipped", False) == is_spike, line
        recent.add(line["step"], line["grad_norm"])
    skipped = [line["step"] for line in lines if line.get("skipped")]
    assert any(step <= 40 for step in skipped) and any(step > 40 for step in skipped), skipped
    manifest = json.loads((unbroken / "checkpoints/step-00000048/manifest.json").read_text())
    assert manifest["metadata"]["optimizer_step_count"] == 48 - 2 - len(skipped)
    assert [line["step"] for line in lines] == [step for step in range(1, 49) if step not in (10, 45)]
    assert all(line["consumed_tokens"] == line["step"] * 2 * 32 for line in lines)
    shutil.copytree(unbroken, broken)
    shutil.rmtree(broken / "checkpoints/step-00000048")
    assert "step 40," in succeed(train(broken, *options))
    assert numbers(broken) == numbers(unbroken)
    assert [line["step"] for line in read_metrics(broken / "metrics.jsonl") if line.get("skipped")] == skipped
