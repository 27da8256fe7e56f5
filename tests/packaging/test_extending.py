"""Every recipe of docs/extending.md is performed: its code blocks are applied to a copy of the source, which is run."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

from megatron.optimus.training.metrics import read_metrics
from tests.integration.conftest import write_corpus
from tests.packaging import recipes
from tests.packaging.recipes import HF_TOKENS, LR, OPTIMIZER_STEPS, PAGE, ROW, optimizer_input, optimizer_model


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recipes.extended_copy(tmp_path_factory.mktemp("extended"))


@pytest.fixture(scope="module")
def performed(extended: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of the runs, and what ``recipes.main`` wrote."""
    folder = tmp_path_factory.mktemp("runs")
    write_corpus(folder / "counting")
    write_models(folder)
    environment = {**os.environ, "PYTHONPATH": str(extended), "OMP_NUM_THREADS": "1"}  # the copy before this source
    command = [sys.executable, "-m", "tests.packaging.recipes", str(folder)]
    done = subprocess.run(
        command, cwd=extended, env=environment, check=False, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    results = json.loads((folder / "results.json").read_text())
    for name, run in results["runs"].items():
        assert run["code"] == 0, f"{name}: {run['err']}"
    assert all(path.startswith(str(extended.resolve())) for path in results["sources"])
    return folder, results


def write_models(folder: Path) -> None:
    """Tiny models of Hugging Face's transformers; nothing where that is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return
    transformers = importlib.import_module("transformers")
    torch.manual_seed(3)
    shape: dict[str, Any] = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=32,
    )  # fmt: skip
    mistral = transformers.MistralConfig(**shape, sliding_window=None)
    transformers.MistralForCausalLM(mistral).save_pretrained(folder / "mistral")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    laguna = transformers.LagunaConfig(
        **shape, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, gating="per-element",
        shared_expert_intermediate_size=24, rope_parameters={"full_attention": rope},
    )  # fmt: skip
    model = transformers.LagunaForCausalLM(laguna)
    model.model.layers[1].mlp.gate.e_score_correction_bias.data.normal_()
    model.save_pretrained(folder / "laguna")


def losses(folder: Path, run: str) -> list[float]:
    return [line["loss"] for line in read_metrics(folder / run / "metrics.jsonl")]


def test_the_table_counts_what_the_blocks_touch() -> None:
    page = PAGE.read_text(encoding="utf-8")
    counted = {
        title.lower(): (sum(not block.is_diff for block in blocks), sum(block.lines_added for block in blocks))
        for title, blocks in recipes.recipes().items()
    }
    rows = {title.lower(): (int(files), int(lines)) for title, _, files, lines in ROW.findall(page)}
    assert rows == counted
    assert all(anchor == title.lower().replace(" ", "-") for title, anchor, *_ in ROW.findall(page))


def test_a_dispatcher_trains_as_all_gather_does(performed: tuple[Path, dict[str, Any]]) -> None:
    folder, results = performed
    assert losses(folder, "plain") == losses(folder, "all-gather") and len(losses(folder, "plain")) == 3
    assert "on each rank, plain," in results["runs"]["plain"]["out"]
    assert results["planned"][0] == results["planned"][1] > 0


def test_a_metric_and_a_tracker(performed: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = performed
    lines = read_metrics(folder / "plain" / "metrics.jsonl")
    assert all(0.25 < line["router/top_score"] < 1 for line in lines)
    table = [line.split(",") for line in (folder / "plain" / "metrics.csv").read_text().splitlines()]
    for name in ("loss", "router/top_score"):
        assert [(int(step), float(value)) for step, key, value in table if key == name] == [
            (line["step"], line[name]) for line in lines
        ]


def test_a_converter_changes_the_model_that_is_trained(performed: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = performed
    rounded, exact = losses(folder, "float8"), losses(folder, "all-gather")
    assert all(0 < abs(a - b) < 0.05 * b for a, b in zip(rounded, exact, strict=True))


def oracle(name: str) -> list[torch.Tensor]:
    """The weights after the same steps of the mean of two ranks' losses, by the formula."""
    model = optimizer_model()
    weights = list(model.parameters())
    momenta = [torch.zeros_like(weight) for weight in weights]
    for step in range(OPTIMIZER_STEPS):
        loss = sum(model(optimizer_input(step, rank)).square().mean() for rank in range(2)) / 2
        for weight, momentum, grad in zip(weights, momenta, torch.autograd.grad(loss, weights), strict=True):
            momentum.lerp_(grad, 0.1)
            update = momentum.sign() if name == "Signum" else normalize(grad.flatten(), dim=0).view_as(grad)
            weight.data.sub_(update, alpha=LR)
    return weights


@pytest.mark.parametrize("name", ["Signum", "Normalized"])
def test_an_optimizer_takes_the_steps_of_its_formula(name: str, performed: tuple[Path, dict[str, Any]]) -> None:
    _, results = performed
    for got, expected in zip(results["optimizers"][name], oracle(name), strict=True):
        torch.testing.assert_close(torch.tensor(got), expected.detach().flatten(), atol=2e-6, rtol=0)


def test_an_optimizer_as_an_option_trains(performed: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = performed
    others = losses(folder, "all-gather")
    assert losses(folder, "signum")[0] == others[0] and losses(folder, "signum")[1] != others[1]


def test_a_preset_has_the_parameters_that_its_test_says(extended: Path, performed: tuple[Path, dict[str, Any]]) -> None:
    source = ast.parse((extended / "tests/unit/models/test_parameters.py").read_text())
    [totals] = [
        node.value
        for node in source.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "TOTALS"
    ]
    total, active = ast.literal_eval(totals)["mula-2b"]
    assert f"{total:,} total, {active:,} active" in performed[1]["runs"]["dry run"]["out"]


def test_a_family_trains_split_and_resumes_at_another_layout(performed: tuple[Path, dict[str, Any]]) -> None:
    folder, results = performed
    assert losses(folder, "family") != losses(folder, "all-gather")
    assert losses(folder, "family, split") == pytest.approx(losses(folder, "family"), rel=1e-5)
    assert len(losses(folder, "family")) == 3
    assert "expert parallelism: 2 of 4 experts" in results["runs"]["family, split"]["out"]


def test_a_family_is_what_it_declares(performed: tuple[Path, dict[str, Any]]) -> None:
    found = performed[1]["family"]
    assert found["declared"] == found["real"] and "layers.1.attention.g_proj.weight" in found["real"]
    planned, real = found["elements of ranks"]
    assert planned == real
    assert found["bytes declared"] == found["bytes kept"]["laguna"] - found["bytes kept"]["decoder"] > 0


def test_a_family_is_planned_without_torch_and_reports_mfu(performed: tuple[Path, dict[str, Any]]) -> None:
    folder, results = performed
    found = results["family"]
    assert found["flops"] - found["flops of the decoder"] == 6 * 2 * 32 * 32  # both layers' gates
    assert results["plan"].endswith("\nFalse\n") and "MFU" in results["plan"]
    for line in read_metrics(folder / "family" / "metrics.jsonl"):
        rate = line["tokens_per_second_per_device"]
        assert line["mfu"] == pytest.approx(rate * found["flops"] / 1e9, rel=1e-6)


@pytest.mark.parametrize("name", ["mistral", "laguna", "exported"])
def test_an_architecture_gives_the_logits_of_transformers(
    name: str, performed: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Of models that transformers wrote, and of the export of what the family has trained."""
    transformers = pytest.importorskip("transformers")
    folder, results = performed
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / name).eval()
    assert type(theirs).__name__ == ("MistralForCausalLM" if name == "mistral" else "LagunaForCausalLM")
    with torch.no_grad():
        expected = theirs(torch.arange(HF_TOKENS)[None]).logits
    torch.testing.assert_close(torch.tensor(results["logits"][name]), expected, atol=1e-5, rtol=1e-4)
