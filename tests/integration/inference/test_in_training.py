"""Tasks of lm-eval's harness during training: scores are those of the checkpoint, and training is as without them."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

from megatron.optimus.commands import evaluate
from megatron.optimus.config.checks import tasks_fit_layout
from megatron.optimus.config.load import load
from megatron.optimus.pretrain import main
from megatron.optimus.training.metrics import read_metrics
from tests.integration.conftest import ROOT, TINY, Program
from tests.integration.test_pretrain import numbers, succeed, tensors

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval")

NAMES = "optimus_arithmetic,optimus_science,optimus_text"
BYTES = ["--vocab-size", 264, "--tokenizer-type", "ByteLevelTokenizer", "--train-iters", 4, "--eval-interval", 2]
TASKS = ["--eval-tasks", NAMES, "--eval-tasks-interval", 2, "--eval-tasks-limit", 3]
TASKS += ["--eval-tasks-include-path", "examples/evaluation"]
LAYOUTS = {
    "experts": ["--expert-model-parallel-size", 2],
    "tensor": ["--tensor-model-parallel-size", 2, "--sequence-parallel", "--tp-comm-overlap"],
    "context": ["--context-parallel-size", 2, "--expert-model-parallel-size", 2],
}


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The tasks' files are named from there."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets"))


def scores_of_checkpoint(run_dir: Path, out: Path) -> dict[str, float]:
    """As `optimus evaluate` gives them, on one rank."""
    words = [str(run_dir), "--tasks", NAMES, "--include-path", "examples/evaluation", "--limit", "3", "--device", "cpu"]
    assert evaluate.main([*words, "--out", str(out)]) == 0
    results = json.loads(out.read_text())["results"]
    return {
        f"task/{task}/{metric.removesuffix(',none').replace(',', '/')}": value
        for task, own in results.items()
        for metric, value in own.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_those_of_the_checkpoint_and_training_is_as_without(
    layout: str, tmp_path: Path, train: Program
) -> None:
    options = [*BYTES, *LAYOUTS[layout]]
    out = succeed(train(tmp_path / "with", *options, *TASKS, ranks=2))
    assert out.count("tasks at step 2: ") == out.count("tasks at step 4: ") == 1
    lines = read_metrics(tmp_path / "with/metrics.jsonl")
    found = [{key: value for key, value in line.items() if key.startswith("task/")} for line in lines]
    for line in (lines[1], lines[3]):  # every token is a byte
        assert line["bits_per_byte/validation"] == pytest.approx(line["valid_loss"] / math.log(2))
    assert [bool(scores) for scores in found] == [False, True, False, True]
    assert found[3] == pytest.approx(scores_of_checkpoint(tmp_path / "with", tmp_path / "scores.json"), rel=1e-6)
    assert "task/optimus_arithmetic/exact_match/strict" in found[3]
    if layout == "context":  # no need to train so often
        return
    succeed(train(tmp_path / "without", *options, ranks=2))
    assert numbers(tmp_path / "with") == numbers(tmp_path / "without")
    own, reference = (tensors(tmp_path / name / "checkpoints/step-00000004") for name in ("with", "without"))
    assert own.keys() == reference.keys() and all(torch.equal(own[key], reference[key]) for key in own)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--zero-stage", 3], "zero_stage=3: a rank lacks weights"),
        (["--tokenizer-type", "none"], "are texts: name the run's tokenizer"),
    ],
)
def test_what_cannot_be_is_one_line(
    options: list[object], message: str, tokens: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, "--data-path", str(tokens), *map(str, [*BYTES, "--eval-tasks", NAMES, *options])]
    assert main(words) == 2
    assert message in capsys.readouterr().err
    run = load([*words, "--pipeline-model-parallel-size", "2"]).config
    assert "pipeline_model_parallel_size=2: a rank lacks layers" in (tasks_fit_layout(run, 2) or "")


def test_tasks_that_are_not_there_end_the_run_before_training(tmp_path: Path, train: Program) -> None:
    words = [*BYTES, "--eval-tasks", NAMES, "--eval-tasks-include-path", "nowhere"]
    result = train(tmp_path, *words, ranks=2)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert result.returncode == 2 and len(errors) == 1 and "the folder of tasks nowhere: no such folder" in errors[0]
    assert not (tmp_path / "checkpoints").exists() and "step=" not in result.stdout
