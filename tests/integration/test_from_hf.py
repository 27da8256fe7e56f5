"""Pretraining goes on from a Hugging Face model in one command: its loss is transformers' own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.optimus.checkpoint import load_manifest
from megatron.optimus.config.load import load
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.convert import convert
from megatron.optimus.data.indexed import IndexedDatasetWriter
from megatron.optimus.models.huggingface.config import take_from_hf
from tests.helpers import start_program
from tests.unit.data.tokenize.makers import CORPUS

transformers = pytest.importorskip("transformers")
from tests.unit.convert.convert_cases import hf_model, loaded  # noqa: E402

VOCAB, LENGTH = 512, 32
OPTIONS = (
    f"--seq-length {LENGTH} --params-dtype fp32 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --min-lr 1e-4 "
    "--lr-warmup-iters 1 --eval-interval 0 --split 1,0,0 --save-interval 2 --device cpu --train-iters 2"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense and a MoE model with a tokenizer, and a file whose samples are all the same."""
    from megatron.optimus.data.tokenize.tokenizer import train_bpe

    folder = tmp_path_factory.mktemp("hf")
    for family in ("llama", "olmoe"):
        model = hf_model(family, vocab_size=VOCAB, max_position_embeddings=64)
        model.generation_config.update(eos_token_id=[0, 5], temperature=0.6, do_sample=True)
        model.save_pretrained(folder / family)
        train_bpe(CORPUS * 9, 300, folder / family)
    tokens = np.random.default_rng(3).integers(1, 300, LENGTH)
    np.save(folder / "tokens.npy", tokens)
    with IndexedDatasetWriter(str(folder / "same"), np.dtype(np.uint16)) as writer:
        for _ in range(64):
            writer.add_document(tokens.tolist())
    return folder


def run(folder: Path, family: str, run_dir: Path, *more: object, ranks: int = 1) -> Any:
    words = [*OPTIONS, "--from-hf", folder / family, "--data-path", folder / "same", "--run-dir", run_dir, *more]
    return start_program("megatron.optimus.pretrain", [str(word) for word in words], ranks, timeout=240)


@pytest.mark.parametrize("family, ranks, more", [("llama", 1, []), ("olmoe", 2, ["--expert-model-parallel-size", 2])])
def test_the_first_loss_is_that_of_transformers(
    folder: Path, tmp_path: Path, family: str, ranks: int, more: list[object]
) -> None:
    done = run(folder, family, tmp_path, *more, ranks=ranks)
    assert done.returncode == 0, done.stderr
    tokens = torch.from_numpy(np.load(folder / "tokens.npy"))[None]
    with torch.no_grad():
        expected = loaded(folder / family)(tokens, labels=tokens).loss.item()
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert losses[0] == pytest.approx(expected, abs=1e-4) and losses[1] < losses[0]
    assert f"resumed from {folder / family}: step 0, 0 samples consumed (weights only" in done.stdout
    assert "changed since" not in done.stdout and not (tmp_path / "from_hf").exists()

    # the tokenizer and what the model says of generation leave with the export; the same command resumes
    convert(tmp_path, tmp_path / "out", to="hf")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [0, 5]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        theirs(CORPUS[0])["input_ids"]
        == transformers.AutoTokenizer.from_pretrained(folder / family)(CORPUS[0])["input_ids"]
    )
    loaded(tmp_path / "out").generate(**theirs("the", return_tensors="pt"), max_new_tokens=2, do_sample=False)
    again = run(folder, family, tmp_path, *more, "--train-iters", 3, ranks=ranks)
    assert again.returncode == 0 and "step-00000002: step 2, 16 samples consumed" in again.stdout, again.stderr
    assert load_manifest(tmp_path / "checkpoints" / "step-00000003").config["model"]["hidden_size"] == 32


def test_what_contradicts_the_folder_is_an_error_that_names_both(folder: Path, tmp_path: Path) -> None:
    model = str(folder / "llama")
    shutil.copytree(folder / "llama", tmp_path / "other")
    cases = {
        ("--num-layers", "3"): r"num_layers=3, but .*llama/config\.json says 2; leave --num-layers out",
        ("--preset", "mula-tiny"): r"--preset=mula-tiny and from_hf=.* both name a model",
        ("--load", "runs/x"): r"from_hf=.* and load='runs/x' both say what the run starts from",
        (
            "--tokenizer-model",
            str(tmp_path / "other"),
        ): r"tokenizer_model=.*other', but from_hf=.*llama' has a tokenizer",
        ("--from-hf", str(tmp_path)): r"holds no config\.json; name the folder of a Hugging Face model",
    }
    for words, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            load(["--from-hf", model, *words], take_from_hf=take_from_hf)
    same = ["--num-layers", "2", "--tokenizer-model", f"{model}/tokenizer.json", "--moe-aux-loss-coeff", "0.5"]
    config = load(["--from-hf", model, *same], take_from_hf=take_from_hf).config
    assert (config.model.hidden_size, config.model.kv_channels, config.model.vocab_size) == (32, 12, VOCAB)
    assert load(["--from-hf", model], take_from_hf=take_from_hf).config.data.tokenizer_model == model


def test_weights_of_a_converted_model_name_few_changes(folder: Path, tmp_path: Path) -> None:
    """One line, and none that is false: an import has no options of training, and says what None stands for."""
    convert(folder / "olmoe", tmp_path / "ours", to="optimus")
    words = [*OPTIONS, *"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2".split()]
    words += "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --max-position-embeddings 64".split()
    words += ["--vocab-size", VOCAB, "--data-path", folder / "same", "--finetune", "--load", tmp_path / "ours"]
    words += ["--run-dir", tmp_path / "run", "--output-z-loss-coeff", 1e-4]
    done = start_program("megatron.optimus.pretrain", [str(word) for word in words], 1, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = [
        line.split("changed since that checkpoint: ")[1] for line in done.stdout.splitlines() if "changed s" in line
    ]
    assert lines == ["model.output_z_loss_coeff 0.0 -> 0.0001"]
    # many are counted and named; their values are for --verbose
    for verbose in (False, True):
        more = [
            "--run-dir",
            tmp_path / f"again{verbose}",
            "--load",
            tmp_path / "run",
            *(["--verbose"] if verbose else []),
        ]
        more += ["--seed", 5, "--lr", 2e-3, "--micro-batch-size", 4, "--weight-decay", 0.2, "--train-iters", 3]
        kept = [word for word in words if word != "--finetune"]
        done = start_program("megatron.optimus.pretrain", [str(word) for word in [*kept, *more]], 1, timeout=240)
        lines = [line for line in done.stdout.splitlines() if "changed since" in line]
        assert len(lines) == (6 if verbose else 1) and "5 options (--verbose shows values): optimizer.lr, " in lines[0]
        assert any("training.seed 1234 -> 5" in line for line in lines) == verbose
