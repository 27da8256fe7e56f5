"""Every type of tokenizer leaves with the export: AutoTokenizer gives our ids, and the export generates."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch

from megatron.optimus.checkpoint import CheckpointError, Saver, load_manifest, model_slices
from megatron.optimus.checkpoint.manifest import Manifest
from megatron.optimus.checkpoint.tokenizer_files import FOLDER, files_of
from megatron.optimus.config.schema import TokenizerType
from megatron.optimus.config.serialize import to_dict
from megatron.optimus.convert import Options, convert
from megatron.optimus.data.tokenize.tokenizer import build_tokenizer
from megatron.optimus.models.decoder import Decoder
from tests.unit.data.tokenize.makers import TEXTS, tokenizer_of

transformers = pytest.importorskip("transformers")
from .convert_cases import FAMILIES, hf_model, loaded, our_config  # noqa: E402

EMBEDDING = 512  # rows, more than any of the tokenizers has


def save_run(folder: Path, kind: TokenizerType, location: Path | None) -> Path:
    """A checkpoint as a run saves it, whose tokenizer is gone afterwards."""
    run = our_config(vocab_size=EMBEDDING)
    run.data.tokenizer_type, run.data.tokenizer_model = kind, None if location is None else str(location)
    torch.manual_seed(3)
    files = {name: file.read_bytes() for name, file in files_of(kind, location).items()}
    slices = model_slices(Decoder(run.model), dense=True, experts=True)
    saver = Saver(folder, asynchronous=False, tokenizer=files)
    [saved] = saver.start(slices, Manifest("model", 4, 0, to_dict(run), {}, {}, {}), retain=None)
    return saved.path


@pytest.mark.parametrize("kind", list(TokenizerType))
def test_every_type_leaves_with_the_export(tmp_path: Path, kind: TokenizerType) -> None:
    location = tokenizer_of(kind, tmp_path / "source")
    ours = build_tokenizer(kind, location)
    checkpoint = save_run(tmp_path / "run", kind, location)
    load_manifest(checkpoint)
    shutil.rmtree(tmp_path / "source")
    convert(tmp_path / "run", tmp_path / "hf", to="hf", options=Options(dtype="fp32"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in TEXTS:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids, text
        assert theirs.decode(ids) == ours.decode(ids), text
        if kind is not TokenizerType.SENTENCEPIECE:  # which takes spaces away
            assert theirs.decode(ids) == text
    assert len(theirs) <= EMBEDDING and ours.vocab_size <= EMBEDDING
    model = loaded(tmp_path / "hf")
    assert model.config.vocab_size == EMBEDDING == model.get_input_embeddings().num_embeddings
    for config in (model.config, model.generation_config, theirs):
        assert config.eos_token_id == ours.eod_id
        assert config.bos_token_id is not None and config.pad_token_id is not None
    out = model.generate(**theirs("the fox", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert out.shape[1] <= len(ours.encode("the fox")) + 4


def test_transformers_loads_the_export_of_every_architecture(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """For some model types AutoTokenizer takes a class of its own, whatever the files say."""
    location = tokenizer_of(TokenizerType.HF, tmp_path / "source")
    ours = build_tokenizer(TokenizerType.HF, location)
    for family in FAMILIES:
        hf_model(family, vocab_size=EMBEDDING).save_pretrained(tmp_path / family / "hf")
        convert(tmp_path / family / "hf", tmp_path / family / "ours", to="optimus")
        caplog.clear()
        with caplog.at_level(logging.WARNING, "optimus"):
            convert(tmp_path / family / "ours", tmp_path / family / "out", to="hf", options=Options(tokenizer=location))
        is_exact = "AutoTokenizer takes" not in caplog.text
        load = transformers.AutoTokenizer if is_exact else transformers.PreTrainedTokenizerFast
        theirs = load.from_pretrained(tmp_path / family / "out")
        assert all(theirs(text)["input_ids"] == ours.encode(text) for text in TEXTS), family
        assert is_exact == (family != "qwen2")


def test_a_tokenizer_of_other_sizes_or_none_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    location = tokenizer_of(TokenizerType.HF, tmp_path / "source")
    run = our_config(vocab_size=300)
    torch.manual_seed(3)
    saver = Saver(tmp_path / "run", asynchronous=False)
    slices = model_slices(Decoder(run.model), dense=True, experts=True)
    saver.start(slices, Manifest("model", 4, 0, to_dict(run), {}, {}, {}), retain=None)
    with pytest.raises(CheckpointError, match=r"ids up to 3\d\d, the model's embedding has vocab_size=300 rows"):
        convert(tmp_path / "run", tmp_path / "hf", to="hf", options=Options(tokenizer=location))
    with caplog.at_level(logging.WARNING, "optimus"):
        convert(tmp_path / "run", tmp_path / "hf", to="hf")
    assert "carries no tokenizer, and it names none; the export has none: name it in --tokenizer-model" in caplog.text
    options = Options(tokenizer_type=TokenizerType.BYTE)
    convert(tmp_path / "run", tmp_path / "bytes", to="hf", options=options)
    assert json.loads((tmp_path / "bytes" / "generation_config.json").read_text())["eos_token_id"] == 256


def test_the_tokenizer_of_a_hugging_face_folder_stays_with_the_model(tmp_path: Path) -> None:
    """Through one of our checkpoints, from a folder of the hub's cache, whose files are links."""
    location = tokenizer_of(TokenizerType.HF, tmp_path / "source")
    assert location is not None
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0a1b", tmp_path / "models--a--b" / "blobs"
    hf_model("llama", vocab_size=EMBEDDING).save_pretrained(snapshot)
    shutil.copytree(location, snapshot, dirs_exist_ok=True)
    (snapshot / "chat_template.jinja").write_text("{{ messages }}")
    blobs.mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(f"../../blobs/{number}")
    convert(snapshot, tmp_path / "ours", to="optimus")
    names = {file.name for file in (tmp_path / "ours" / FOLDER).iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names
    shutil.rmtree(tmp_path / "models--a--b")
    convert(tmp_path / "ours", tmp_path / "out", to="hf")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (location / name).read_bytes()


def test_a_link_inside_a_checkpoint_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    location = tokenizer_of(TokenizerType.SENTENCEPIECE, tmp_path / "source")
    assert location is not None
    checkpoint = save_run(tmp_path / "run", TokenizerType.SENTENCEPIECE, location)
    file = checkpoint / FOLDER / "tokenizer.model"
    file.unlink()
    file.symlink_to(location)
    with caplog.at_level(logging.WARNING, "optimus"):
        convert(tmp_path / "run", tmp_path / "hf", to="hf")
    assert "the export has no tokenizer" in caplog.text and "links are not followed" in caplog.text
    assert not (tmp_path / "hf" / "tokenizer.json").exists()
