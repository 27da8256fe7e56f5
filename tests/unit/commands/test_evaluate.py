"""The command line of ``optimus evaluate``, on the tasks in examples/evaluation."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from megatron.optimus.commands import evaluate
from tests.helpers import start_program
from tests.unit.inference.cases import checkpoint

ROOT = Path(__file__).resolve().parents[3]
needs_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"), "moe")


@needs_lm_eval
def test_tasks_give_numbers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    words = [str(model), "--include-path", "examples/evaluation", "--device", "cpu", "--limit", "4"]
    words += ["--tasks", "optimus_arithmetic,optimus_science,optimus_text", "--out", str(tmp_path / "results.json")]
    assert evaluate.main([*words, "--card", str(tmp_path / "card.html"), "--card-shots", "0,1,9"]) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    results = found["results"]
    card = {one["name"]: one for one in found["card"]}["optimus_science"]
    assert card["scores"]["acc"][0] == results["optimus_science"]["acc,none"] == card["calibration"]["accuracy"]
    assert card["by_seed"].keys() == {"1", "2", "3"} and len(card["by_instruction"]) == 4
    assert card["by_shots"].keys() == {"0", "1"}, "the task has no nine examples"
    assert "optimus_arithmetic" in (tmp_path / "card.html").read_text()
    assert set(results) == {"optimus_arithmetic", "optimus_science", "optimus_text"}
    assert 0 <= results["optimus_science"]["acc,none"] <= 1
    assert 0 < results["optimus_text"]["bits_per_byte,none"] < 20
    assert "exact_match" in capsys.readouterr().out

    words[-1] = str(tmp_path / "two.json")
    ranks = start_program(evaluate.__name__, [*words, "--expert-model-parallel-size", "2"], 2, timeout=120)
    assert ranks.returncode == 0, ranks.stderr
    assert ranks.stdout.count("bits_per_byte") == 1  # of rank 0 alone
    over_two = json.loads((tmp_path / "two.json").read_text())["results"]
    for task, metrics in results.items():
        assert over_two[task] == pytest.approx(metrics, rel=1e-6)


@needs_lm_eval
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "optimus_sciense"], "there is no task 'optimus_sciense'; did you mean optimus_science"),
        (["--tasks", ","], "--tasks is empty"),
        (["--tasks", "optimus_text", "--include-path", "nowhere"], "the folder of tasks nowhere: no such folder"),
        (["--tasks", "optimus_text", "--limit", "0"], "--limit"),
        ([], "--tasks"),
        (["--tasks", "optimus_text", "--card-shots", "0,x"], "--card-shots '0,x': name numbers"),
        (["--tasks", "optimus_text", "--card", "nowhere/card.html"], "there is no folder nowhere"),
        (["--tasks", "optimus_text", "--out", "nowhere/results.json"], "there is no folder nowhere"),  # before it works
        (["--tasks", "optimus_science", "--num-fewshot", "5"], "the evaluation on optimus_science failed: "),
        (["--tasks", "hellaswag"], "--tasks hellaswag: it cannot be loaded: "),
    ],
)
def test_what_is_wrong_is_one_line(
    words: list[str], message: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    if "--include-path" not in words:
        words = [*words, "--include-path", "examples/evaluation"]
    assert evaluate.main([str(model), "--device", "cpu", *words]) == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith("error: ") and message in err.splitlines()[-1]


def test_without_the_package_the_line_names_it(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert evaluate.main([str(model), "--tasks", "x"]) == 2
    assert capsys.readouterr().err == ("error: --tasks needs the package lm_eval: pip install optimus-megatron[eval]\n")
