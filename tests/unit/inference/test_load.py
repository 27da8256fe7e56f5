"""Checkpoints of every kind and format give the same model; what is wrong with one is said in one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from megatron.optimus.checkpoint import CheckpointError
from megatron.optimus.config.schema import ConfigError, ParallelConfig, TokenizerType
from megatron.optimus.convert import Options, convert
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.tokenize.tokenizer import train_bpe
from megatron.optimus.inference.load import load_text_model
from megatron.optimus.platform.ranks import Ranks
from tests.unit.inference.cases import MODELS, checkpoint, decoder, loaded

ALONE = Ranks.alone()


def assert_same_weights(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    left, right = found.state_dict(), expected.state_dict()
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("kind", ["full", "model"])
@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_of_ours(name: str, kind: str, tmp_path: Path) -> None:
    checkpoint(tmp_path / "checkpoints", name, kind)
    text_model = loaded(tmp_path)  # the folder of a run
    assert_same_weights(text_model.model, decoder(name))
    assert not text_model.model.training
    assert text_model.end_ids == {256}  # of the byte-level tokenizer


@pytest.mark.parametrize(("name", "to"), [("moe", "hf"), ("dense", "hf"), ("moe", "megatron"), ("shared", "universal")])
def test_other_formats(name: str, to: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "ours", name)
    convert(source, tmp_path / "there", to=to, options=Options(dtype="fp32"))
    text_model = load_text_model(tmp_path / "there", ParallelConfig(), ALONE, tokenizer_type=TokenizerType.BYTE)
    assert_same_weights(text_model.model, decoder(name))


def test_the_dtype_is_the_runs_unless_another_is_asked_for(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "ours", "dense")
    assert loaded(source).model.embedding.weight.dtype == torch.float32
    half = load_text_model(source, ParallelConfig(), ALONE, dtype=torch.bfloat16)
    assert half.model.embedding.weight.dtype == torch.bfloat16
    convert(source, tmp_path / "hf", to="hf", options=Options(dtype="bf16"))
    assert loaded(tmp_path / "hf").model.embedding.weight.dtype == torch.bfloat16


def test_a_hugging_face_folder_names_the_tokens_that_end_a_text(tmp_path: Path) -> None:
    convert(checkpoint(tmp_path / "ours", "moe"), tmp_path / "hf", to="hf")
    assert loaded(tmp_path / "hf").end_ids == {256}
    (tmp_path / "hf" / "generation_config.json").write_text('{"eos_token_id": [3, 7]}')
    assert loaded(tmp_path / "hf").end_ids == {3, 7}


def test_a_damaged_checkpoint_names_the_tensor(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "dense", "model")
    [file] = path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tensor .* damaged: xxh3_128"):
        loaded(path)


def test_an_unfinished_checkpoint_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoints", "dense")
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        loaded(tmp_path)
    shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="no such folder"):
        loaded(tmp_path / "nothing")


def test_another_models_tokenizer_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "ours", "dense")  # 264 rows
    train_bpe(["many words of some text, others too " * 20], 280, tmp_path / "bpe")
    with pytest.raises(DataError, match=r"bpe has 280 tokens, the model's vocab_size is 264: .*--tokenizer-model"):
        load_text_model(
            path,
            ParallelConfig(),
            ALONE,
            tokenizer_type=TokenizerType.HF,
            tokenizer_model=str(tmp_path / "bpe"),
        )


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (dict(tensor_model_parallel_size=2), "tensor_model_parallel_size=2"),
        (dict(expert_model_parallel_size=2), "expert_model_parallel_size=2"),
    ],
)
def test_sizes_that_do_not_fit_the_ranks_are_refused(parallel: dict[str, int], message: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "moe")
    with pytest.raises(ConfigError, match=message):
        load_text_model(path, ParallelConfig(**parallel), ALONE)
