"""What a source knows of its model besides the tensors: the file beside them, and configurations that are named."""

import json
from pathlib import Path

import pytest

from megatron.optimus.checkpoint import CheckpointError
from megatron.optimus.config.schema import ModelConfig, RunConfig
from megatron.optimus.convert import convert, open_source
from megatron.optimus.convert.sidecar import (
    SIDECAR,
    describe,
    read_model_config,
    read_sidecar,
    token_ids_of,
    write_json,
    write_sidecar,
)
from megatron.optimus.models.huggingface.config import hf_config


def test_a_sidecar_says_what_the_source_was(ours: Path, tmp_path: Path) -> None:
    source = open_source(ours)
    source.token_ids, source.generation = {"eos_token_id": 3}, {"temperature": 0.5}
    write_sidecar(tmp_path, source)
    found = read_sidecar(tmp_path)
    assert found is not None and found == describe(tmp_path, None, "these files")
    assert (found.run.model, found.step, found.consumed_samples) == (source.model, 1, 8)
    assert (found.token_ids, found.generation) == ({"eos_token_id": 3}, {"temperature": 0.5})
    source.close()


def test_a_full_description_goes_through_other_formats(ours: Path, tmp_path: Path) -> None:
    convert(ours, tmp_path / "m", to="megatron")
    [path] = (tmp_path / "m").rglob(SIDECAR)
    assert json.loads(path.read_text())["consumed_samples"] == 8
    again = open_source(tmp_path / "m")
    assert (again.step, again.consumed_samples) == (1, 8)


@pytest.mark.parametrize(
    "change", [{"step": -1}, {"step": True}, {"step": "4"}, {"consumed_samples": None}, {"config": 3}]
)
def test_a_sidecar_of_wrong_types_is_named(ours: Path, tmp_path: Path, change: dict[str, object]) -> None:
    write_sidecar(tmp_path, open_source(ours))
    path = tmp_path / SIDECAR
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(
        CheckpointError, match=rf"{SIDECAR}: config, step or consumed_samples are missing or of the wrong"
    ):
        read_sidecar(tmp_path)


def test_a_model_is_named_by_either_kind_of_configuration(tmp_path: Path) -> None:
    model = ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=4, vocab_size=32, qk_layernorm=False)
    write_json(tmp_path / "config.json", hf_config(model, "float32") | {"eos_token_id": 7})
    (tmp_path / "run.yaml").write_text("model: {num_layers: 2, hidden_size: 16, num_attention_heads: 4}\n")
    for path in (tmp_path, tmp_path / "config.json"):
        theirs = read_model_config(path)
        assert theirs.run.model.hidden_size == 16 and theirs.token_ids == {"eos_token_id": 7}
    own = describe(tmp_path / "nothing", tmp_path / "run.yaml", "files")
    assert own.run == RunConfig(model=ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=4))
    with pytest.raises(
        CheckpointError, match=r"these files do not say what the model looks like; name .* --model-config"
    ):
        describe(tmp_path, None, "these files")
    assert token_ids_of({"bos_token_id": None, "pad_token_id": 0, "vocab_size": 9}) == {"pad_token_id": 0}
