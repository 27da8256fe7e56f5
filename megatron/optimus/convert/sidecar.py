"""The model's options beside formats that have no place for them.

DeepSpeed's files say nothing about the model, Megatron's only what its own arguments can express. What we write there
gets a small file with our options, so that it converts back without help; a foreign checkpoint gets them from
``--model-config``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.config.options import build
from megatron.optimus.config.schema import RunConfig
from megatron.optimus.config.serialize import from_dict, read_file, to_dict
from megatron.optimus.convert.hf_files import read_json, token_ids_of, write_json
from megatron.optimus.convert.source import Source
from megatron.optimus.models.huggingface.config import model_config_from_hf

SIDECAR = "optimus_model.json"


@dataclasses.dataclass(frozen=True)
class Description:
    """What a source needs to know besides its tensors."""

    run: RunConfig
    step: int = 0
    consumed_samples: int = 0
    token_ids: dict[str, Any] = dataclasses.field(default_factory=dict)
    generation: dict[str, Any] = dataclasses.field(default_factory=dict)


def write_sidecar(directory: Path, source: Source) -> None:
    write_json(
        directory / SIDECAR,
        {
            "config": to_dict(source.run),
            "step": source.step,
            "consumed_samples": source.consumed_samples,
            "token_ids": source.token_ids,
            "generation": source.generation,
        },
    )


def read_sidecar(directory: Path) -> Description | None:
    """What ``write_sidecar`` wrote; None where there is none."""
    path = directory / SIDECAR
    if not path.exists():
        return None
    content = read_json(path)
    config, step, samples = content.get("config"), content.get("step"), content.get("consumed_samples")
    if not isinstance(config, dict) or type(step) is not int or type(samples) is not int or min(step, samples) < 0:
        raise CheckpointError(f"{path}: config, step or consumed_samples are missing or of the wrong type")
    ids, generation = content.get("token_ids"), content.get("generation")
    return Description(
        from_dict(config, str(path)),
        step,
        samples,
        token_ids_of(ids) if isinstance(ids, dict) else {},
        generation if isinstance(generation, dict) else {},
    )


def read_model_config(path: Path) -> Description:
    """``--model-config``: a Hugging Face config.json (or its folder), or one of our configuration files."""
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json":
        content = read_json(path)
        if "model_type" in content:
            return Description(RunConfig(model=model_config_from_hf(content)), token_ids=token_ids_of(content))
    return Description(build(read_file(str(path))))


def describe(path: Path, model_config: Path | None, what: str) -> Description:
    """The options of a checkpoint in ``path``. Raises CheckpointError saying how to give them."""
    if model_config is not None:
        return read_model_config(model_config)
    found = read_sidecar(path)
    if found is None:
        raise CheckpointError(
            f"{path}: {what} do not say what the model looks like; name a Hugging Face config.json or a run's "
            "configuration with --model-config"
        )
    return found
