"""From a corpus over a run to the export, with a tokenizer that belongs to the data, and with ones that do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron.optimus.checkpoint import load_manifest
from megatron.optimus.commands import convert as convert_command
from megatron.optimus.commands import generate as generate_command
from megatron.optimus.config.schema import TokenizerType
from megatron.optimus.data.tokenize.preprocess import preprocess
from megatron.optimus.data.tokenize.tokenizer import build_tokenizer, train_bpe
from tests.integration.conftest import Program, write_corpus
from tests.unit.data.tokenize.makers import CORPUS, tokenizer_of

SHORT = ("--train-iters", 2, "--eval-interval", 0, "--split", "1,0,0", "--vocab-size", 4608, "--save-interval", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model, data made with it, and another tokenizer."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in CORPUS * 90))
    location = tokenizer_of(TokenizerType.SENTENCEPIECE, folder / "pieces")
    preprocess([str(folder / "c.jsonl")], str(folder / "x"), tokenizer_model=str(location), append_eod=True)
    train_bpe(CORPUS * 9, 300, folder / "other")
    return folder


def test_a_run_exports_with_its_tokenizer_and_refuses_others(
    train: Program, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    pieces = folder / "pieces" / "sp.model"
    data = (*SHORT, "--data-path", folder / "x_text_document")
    refused = train(tmp_path / "run", *data, "--tokenizer-model", folder / "other")
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    [line] = refused.stderr.splitlines()
    assert f"was made with the tokenizer SentencePieceTokenizer {pieces}" in line and "--tokenizer-model" in line
    assert f"but this run has HuggingFaceTokenizer {folder / 'other'}" in line
    copy = tmp_path / "copy.model"
    shutil.copy(pieces, copy)
    done = train(tmp_path / "run", *data, "--tokenizer-model", copy)
    assert done.returncode == 0, done.stderr
    assert f"tokenizer_type=SentencePieceTokenizer, guessed from {copy}" in done.stdout
    assert "do not say which tokenizer" not in done.stdout
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert load_manifest(checkpoint).metadata["tokenizer"]["fingerprint"]
    copy.unlink()

    words = [str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf"]
    assert convert_command.main([*words, "--tokenizer-model", str(folder / "other")]) == 2
    assert "was trained on ids of SentencePieceTokenizer" in capsys.readouterr().err
    others = ["--tokenizer-model", str(folder / "other"), "--tokenizer-type", "HuggingFaceTokenizer"]
    assert generate_command.main([str(tmp_path / "run"), "--prompt", "the", *others]) == 2  # of 300 ids, which fit
    assert "was trained on ids of SentencePieceTokenizer" in capsys.readouterr().err
    assert convert_command.main(words) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs(CORPUS[0])["input_ids"] == build_tokenizer(TokenizerType.SENTENCEPIECE, pieces).encode(CORPUS[0])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    model.generate(**theirs("the", return_tensors="pt"), max_new_tokens=3)

    # an evaluation compares too
    evaluation = ("--skip-train", "--split", "0,1,0", "--eval-iters", 1, "--tokenizer-model", folder / "other")
    refused = train(tmp_path / "run", *SHORT, "--data-path", folder / "x_text_document", *evaluation)
    assert refused.returncode == 2 and "but this run has HuggingFaceTokenizer" in refused.stderr


def test_data_of_others_is_one_warning_and_ids_beyond_the_tokenizer_an_error(
    train: Program, folder: Path, tmp_path: Path
) -> None:
    words = ("--data-path", write_corpus(tmp_path / "foreign"), "--tokenizer-model", folder / "other")
    done = train(tmp_path / "run", *SHORT, *words, ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("do not say which tokenizer made them") == 1
    # 4,096 ids, of a file that does not say so
    for kind in ("bin", "idx"):
        shutil.copy(folder / f"x_text_document.{kind}", tmp_path / f"large.{kind}")
    refused = train(tmp_path / "run2", *SHORT, "--data-path", tmp_path / "large", *words[2:])
    assert refused.returncode == 2
    assert "outside the vocabulary of 300" in refused.stderr and "that of the tokenizer HuggingFace" in refused.stderr
