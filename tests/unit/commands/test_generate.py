"""The command line of ``optimus generate``: what it writes, and one line for what is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.optimus.commands.generate import main
from tests.unit.inference.cases import checkpoint

CHECKPOINT = "the checkpoint"
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"), "moe")


@pytest.fixture
def command(model: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command on a checkpoint; returns exit code, stdout and stderr."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(model), "--device", "cpu", *map(str, words)])
        return code, *capsys.readouterr()

    return run


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_one_prompt_is_answered_as_text(command: Command) -> None:
    words = ["--max-new-tokens", 8, "--temperature", 0, "--ignore-eos", "--prompt", "once"]
    code, text, err = command(*words)
    assert code == 0 and text.endswith("\n")
    assert "loaded in " in err and "prompt: 4 tokens in " in err and "generated: 7 tokens in " in err
    _, both, _ = command(*words, "--prompt", "again")
    first, second = lines(both)
    assert first["text"] + "\n" == text
    assert (first["index"], first["prompt"], second["index"], second["prompt"]) == (0, "once", 1, "again")
    assert len(first["token_ids"]) == 8 and first["finish_reason"] == "length" and "logprobs" not in first


def test_a_file_of_prompts_becomes_a_file_of_completions(command: Command, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "word " * count}) + "\n" for count in range(5)))
    words = ["--prompts", prompts, "--max-new-tokens", 5, "--logprobs", "--seed", 7, "--stop", "e", "--stop", "a"]
    code, text, _ = command(*words, "--out", out, "--batch-size", 2)
    assert (code, text) == (0, "")
    found = lines(out.read_text())
    assert [line["prompt"] for line in found] == ["word " * count for count in range(5)]  # the first is empty
    assert all(len(line["logprobs"]) == len(line["token_ids"]) for line in found)
    _, text, _ = command(*words, "--batch-size", 5)
    assert [line["token_ids"] for line in lines(text)] == [line["token_ids"] for line in found]
    code, _, err = command(*words, "--out", out)
    assert code == 2 and f"--out {out}: is there already; name a new file" in err
    assert lines(out.read_text()) == found


def test_scores(command: Command) -> None:
    code, text, _ = command("--prompt", "abc", "--score", "--prompt", "d")
    assert code == 0
    first, second = lines(text)
    assert first["token_ids"] == [97, 98, 99] and first["logprobs"][0] is None
    assert first["sum"] == pytest.approx(math.fsum(first["logprobs"][1:])) and first["sum"] < 0
    assert (second["logprobs"], second["sum"]) == ([None], 0.0)
    # What generation says of its tokens is what scoring says of them.
    _, generated, _ = command("--prompt", "ab", "--prompt", "x", "--logprobs", "--max-new-tokens", 1, "--seed", 3)
    token, logprob = lines(generated)[0]["token_ids"][0], lines(generated)[0]["logprobs"][0]
    if token < 128:
        _, text, _ = command("--prompt", "ab" + chr(token), "--score")
        assert lines(text)[0]["logprobs"][2] == pytest.approx(logprob, abs=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to continue; give --prompt TEXT or --prompts FILE"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature -1.0 must be 0 (greedy) or above"),
        (["--prompt", "a", "--temperature", "warm"], "--temperature"),
        (["--prompt", "a", "--top-p", "0"], "--top-p 0.0 must be above 0"),
        (["--prompt", "a", "--top-k", "-3"], "--top-k"),
        (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["--prompt", "a", "--stop", ""], "--stop is empty"),
        (["--prompt", "a", "--temprature", "1"], "unknown option --temprature (value '1'); did you mean --temperature"),
        (["--prompt", "a" * 64], "prompt 1 has 64 tokens"),
        (["--prompt", "a" * 66, "--score"], "text 1 has 66 tokens"),
        (["--prompt", "a\udcff"], "--prompt 1 is not valid UTF-8"),
        (["--prompts", "nothing.jsonl"], "nothing.jsonl: No such file"),
        (["--prompt", "a", "--out", "nowhere/out"], "--out nowhere/out: No such file"),
        (["--prompt", "a", "--tensor-model-parallel-size", "2"], "tensor_model_parallel_size=2"),
        (["--prompt", "a", "--tokenizer", "nothing", "--tokenizer-type", "HuggingFaceTokenizer"], "nothing: no such"),
        (
            ["--prompt", "a", "--tokenizer", "some"],
            "reads no file; name the type of --tokenizer-model some",
        ),
    ],
)
def test_what_is_wrong_is_one_line(
    words: list[str], message: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text, err = command(*words)
    assert (code, text) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_a_failed_run_leaves_no_empty_file(command: Command, tmp_path: Path) -> None:
    code, *_ = command("--prompt", "a" * 64, "--out", tmp_path / "out.jsonl")
    assert code == 2 and list(tmp_path.iterdir()) == []
