"""A trained run generates as its export does in transformers; the command as real processes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.optimus.commands.generate import main
from megatron.optimus.convert import Options, convert
from tests.helpers import start_program
from tests.integration.conftest import Program, environment

NEW_TOKENS, PROMPTS = 8, 100
DENSE = ["--num-experts", 0, "--moe-router-topk", 1, "--qk-layernorm", "false", "--ffn-hidden-size", 48]


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, train: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks whose vocabulary holds bytes; weights large enough that few tokens are nearly equal."""
    folder = tmp_path_factory.mktemp(request.param)
    options = ["--vocab-size", 264, "--tokenizer-type", "ByteLevelTokenizer", "--init-method-std", 0.3]
    options += DENSE if request.param == "dense" else ["--expert-model-parallel-size", 2]
    result = train(folder, *options, ranks=2)
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


def write_prompts(file: Path) -> list[str]:
    generator = random.Random(5)
    texts = [
        "".join(chr(generator.randrange(32, 127)) for _ in range(generator.randint(1, 22))) for _ in range(PROMPTS)
    ]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return texts


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("run", ["moe", "dense"], indirect=True)
def test_greedy_tokens_and_scores_equal_those_of_transformers(run: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    texts = write_prompts(tmp_path / "prompts.jsonl")
    words = [str(run), "--prompts", str(tmp_path / "prompts.jsonl"), "--device", "cpu", "--batch-size", "16"]
    greedy = ["--temperature", "0", "--ignore-eos", "--max-new-tokens", str(NEW_TOKENS), "--logprobs"]
    assert main([*words, *greedy, "--out", str(tmp_path / "greedy.jsonl")]) == 0
    assert main([*words, "--score", "--out", str(tmp_path / "scores.jsonl")]) == 0

    convert(run, tmp_path / "hf", to="hf", options=Options(dtype="fp32"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    for text, completion, score in zip(
        texts, read(tmp_path / "greedy.jsonl"), read(tmp_path / "scores.jsonl"), strict=True
    ):
        ids = torch.tensor([list(text.encode())])
        whole = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert completion["token_ids"] == whole[0, ids.shape[1] :].tolist(), text
        with torch.no_grad():
            logprobs = model(whole).logits[0].log_softmax(dim=-1)[:-1].gather(1, whole[0, 1:, None])[:, 0].tolist()
        prompt, new = logprobs[: ids.shape[1] - 1], logprobs[ids.shape[1] - 1 :]
        assert score["logprobs"][1:] == pytest.approx(prompt, abs=1e-4)
        assert completion["logprobs"] == pytest.approx(new, abs=1e-4)


@pytest.mark.parametrize("run", ["moe"], indirect=True)
def test_text_streams_from_the_process_while_it_computes(run: Path) -> None:
    words = ["--prompt", "abc", "--max-new-tokens", "28", "--ignore-eos", "--seed", "3", "--device", "cpu"]
    command = [sys.executable, "-u", "-m", "megatron.optimus", "generate", str(run), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None and process.stderr is not None
        pieces = []
        while piece := os.read(process.stdout.fileno(), 65536):
            pieces.append(piece)
        err = process.stderr.read().decode()
        assert process.wait(60) == 0, err
    text = b"".join(pieces).decode()  # pieces end with whole characters
    assert len(pieces) > 4 and text.endswith("\n")
    for piece in pieces:
        piece.decode()
    assert "generated: 27 tokens in" in err and err.count("\n") == 1


@pytest.mark.parametrize("run", ["dense"], indirect=True)
def test_two_processes_write_what_one_does(run: Path, tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    words = [str(run), "--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "4", "--device", "cpu"]
    assert main([*words, "--out", str(tmp_path / "one.jsonl"), "--batch-size", "50"]) == 0
    words += ["--tensor-model-parallel-size", "2", "--batch-size", "50", "--out", str(tmp_path / "two.jsonl")]
    result = start_program("megatron.optimus.commands.generate", words, 2, timeout=240)
    assert result.returncode == 0, result.stderr
    assert read(tmp_path / "two.jsonl") == read(tmp_path / "one.jsonl")
    assert result.stderr.count("loaded in") == 1  # rank 0 alone
    again = start_program("megatron.optimus.commands.generate", words, 2, timeout=240)
    assert again.returncode == 2
    assert again.stderr.startswith("error: ") and again.stderr.count("\n") == 1 and "is there already" in again.stderr
