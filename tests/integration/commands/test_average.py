"""Moving averages of weights, averages of checkpoints, the noise scale and rate rules through the whole program."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron.optimus.checkpoint import store
from megatron.optimus.commands import average as average_command
from megatron.optimus.commands import convert as convert_command
from megatron.optimus.config.schema import OptimizerConfig, TrainingConfig
from megatron.optimus.training.lr_schedule import RateSchedule
from megatron.optimus.training.metrics import read_metrics
from tests.integration.conftest import Program
from tests.integration.test_pretrain import numbers, succeed, tensors

OPTIONS = "--ema-decay 0.9 --ema-interval 2 --evaluate-ema --log-gradient-noise-scale --save-retain 9".split()
NOISE = ("gradient_noise_scale", "gradient_noise_scale/dense", "gradient_noise_scale/experts")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, train: Program) -> Path:
    """Two ranks with expert parallelism, eight steps, two micro-batches each."""
    run_dir = tmp_path_factory.mktemp("averaged")
    succeed(train(run_dir, *OPTIONS, "--expert-model-parallel-size", 2, ranks=2))
    return run_dir


def step_of(run_dir: Path, step: int) -> Path:
    return run_dir / f"checkpoints/step-{step:08d}"


def test_the_average_is_that_of_the_saved_masters(run: Path) -> None:
    saved = [tensors(step_of(run, step)) for step in (2, 4, 6, 8)]
    names = [name for name, kind in saved[0] if kind == "ema"]
    assert names == [name for name, kind in saved[0] if kind == "master"]
    for before, after in itertools.pairwise(saved):
        for name in names:
            expected = torch.lerp(before[name, "ema"], after[name, "master"], 1 - 0.9**2)
            torch.testing.assert_close(after[name, "ema"], expected, rtol=1e-6, atol=1e-8)
            assert not torch.equal(after[name, "ema"], after[name, "master"])


def test_a_resumed_run_has_the_same_average_and_noise_scale(run: Path, tmp_path: Path, train: Program) -> None:
    shutil.copytree(run, tmp_path / "broken")
    shutil.rmtree(step_of(tmp_path / "broken", 8))
    succeed(train(tmp_path / "broken", *OPTIONS, "--expert-model-parallel-size", 2, ranks=2))
    assert numbers(tmp_path / "broken") == numbers(run)
    noise, expected = (
        [[line.get(name) for name in NOISE] for line in read_metrics(one / "metrics.jsonl")]
        for one in (tmp_path / "broken", run)
    )
    assert noise == expected and any(value for value in noise[-1])
    reference, resumed = (tensors(step_of(one, 8)) for one in (run, tmp_path / "broken"))
    for key, tensor in reference.items():
        assert torch.equal(resumed[key], tensor), key


def test_the_average_is_evaluated_at_another_layout_and_exported(run: Path, tmp_path: Path, train: Program) -> None:
    words = ["--skip-train", "--load", run / "checkpoints"]
    succeed(train(tmp_path / "ema", *words, "--ema-decay", 0.9, "--evaluate-ema"))
    succeed(train(tmp_path / "trained", *words))
    ema, trained = (
        json.loads((tmp_path / name / "evaluation.json").read_text())["validation"]["loss"]
        for name in ("ema", "trained")
    )
    assert ema == pytest.approx(numbers(run)[-1]["valid_loss"], rel=1e-5)
    assert abs(ema - trained) > 1e-3
    assert convert_command.main([str(run), str(tmp_path / "hf"), "--to", "hf", "--weights", "ema", "--verify"]) == 0
    exported, saved = load_file(tmp_path / "hf/model.safetensors"), tensors(step_of(run, 8))
    for name, ours in (("model.norm.weight", "final_norm.weight"), ("model.embed_tokens.weight", "embedding.weight")):
        assert torch.equal(exported[name].flatten(), saved[ours, "ema"])


def test_an_average_of_checkpoints_is_numpys(
    run: Path, tmp_path: Path, train: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [step_of(run, step) for step in (4, 6, 8)]
    words = [*map(str, steps), "--out", str(tmp_path / "soup")]
    assert average_command.main([*words, "--weights", "1,2,0.5"]) == 0
    assert "the average of 3 checkpoints" in capsys.readouterr().out
    found, sources = tensors(tmp_path / "soup"), [tensors(step) for step in steps]
    weights = np.array([1, 2, 0.5], np.float32)
    for (name, kind), tensor in found.items():
        assert kind == "weight" and tensor.dtype == torch.float32
        stack = np.stack([source[name, "master"].numpy() for source in sources])
        assert np.array_equal(tensor.numpy(), np.average(stack, axis=0, weights=weights)), name
    # A Hugging Face folder is a source like any other, and the result loads at another layout.
    assert convert_command.main([str(tmp_path / "soup"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert average_command.main([str(tmp_path / "hf"), str(steps[0]), "--out", str(tmp_path / "both")]) == 0
    both = tensors(tmp_path / "both")
    for (name, _), tensor in both.items():
        mean = np.stack([found[name, "weight"].numpy(), sources[0][name, "master"].numpy()]).mean(0)
        assert np.array_equal(tensor.numpy(), mean), name
    succeed(
        train(
            tmp_path / "load", "--skip-train", "--load", tmp_path / "both", "--tensor-model-parallel-size", 2, ranks=2
        )
    )


def test_rates_follow_the_batch_size_and_go_on(run: Path, tmp_path: Path, train: Program) -> None:
    end = [
        "--train-iters",
        9,
        "--lr-decay-iters",
        16,
        "--min-lr",
        0,
        "--eval-interval",
        0,
        "--log-gradient-noise-scale",
    ]
    rule = ["--load", step_of(run, 8), "--global-batch-size", 16, "--lr-batch-rule", "sqrt"]
    said = succeed(train(tmp_path, *end, *rule))
    assert "global_batch_size 8 -> 16: learning rates times 1.41421 from here on (lr_batch_rule=sqrt)" in said
    assert "the average" not in said
    succeed(train(tmp_path, *end, *rule[2:], "--train-iters", 10))  # the same size: the factor stays, and is no more
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    config = OptimizerConfig(lr=3e-3, min_lr=0, lr_warmup_iters=2, lr_decay_iters=16)
    plain = RateSchedule(config, TrainingConfig(train_iters=10, seq_length=32))
    assert [first["lr"], second["lr"]] == pytest.approx([2**0.5 * plain.learning_rate(step, 0) for step in (8, 9)])
    assert store.load_manifest(step_of(tmp_path, 10)).metadata["lr_batch_factor"] == pytest.approx(2**0.5)
