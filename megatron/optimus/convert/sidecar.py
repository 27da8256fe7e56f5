"""What a source must know about its model besides the tensors, and the JSON files that say it.

DeepSpeed's files say nothing about the model, Megatron's only what its own arguments can express. What is written here
in these formats gets a small file with all options beside it (the sidecar), so that it converts back without help.
Checkpoints of others get the options from ``--model-config``.
"""

from __future__ import annotations

import dataclasses
import json
import stat
from pathlib import Path
from typing import Any

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.untrusted import parse_json
from megatron.optimus.config.options import build
from megatron.optimus.config.schema import RunConfig
from megatron.optimus.config.serialize import from_dict, read_file, to_dict
from megatron.optimus.convert.formats import Source
from megatron.optimus.models.huggingface.config import model_config_from_hf
from megatron.optimus.platform.files import write_new
from megatron.optimus.platform.hub import local_folder

SIDECAR = "optimus_model.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_MAX_JSON_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True)
class Description:
    """What a source must know about its model besides the tensors."""

    run: RunConfig
    step: int = 0
    consumed_samples: int = 0
    token_ids: dict[str, Any] = dataclasses.field(default_factory=dict)
    generation: dict[str, Any] = dataclasses.field(default_factory=dict)


def write_sidecar(directory: Path, source: Source) -> None:
    """Writes the description of a source beside tensors that do not carry it."""
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
    """Reads what ``write_sidecar`` wrote; None where there is none. Raises CheckpointError naming what is wrong."""
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
    """Reads ``--model-config``: a Hugging Face config.json (or its folder), or one of our configuration files."""
    path = local_folder(path)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json":
        content = read_json(path)
        if "model_type" in content:
            return Description(RunConfig(model=model_config_from_hf(content)), token_ids=token_ids_of(content))
    return Description(build(read_file(str(path))))


def describe(path: Path, model_config: Path | None, what: str) -> Description:
    """Finds the description of a checkpoint: from ``--model-config``, else from its sidecar.

    Args:
        path: the folder that a sidecar would be in.
        model_config: ``--model-config``, or None.
        what: the format's files, in words for the error.

    Raises:
        CheckpointError: there is neither; the message says how to give it.
    """
    if model_config is not None:
        return read_model_config(model_config)
    found = read_sidecar(path)
    if found is None:
        raise CheckpointError(
            f"{path}: {what} do not say what the model looks like; name a Hugging Face config.json or a run's "
            "configuration with --model-config"
        )
    return found


# ---- JSON


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object of at most 256 MB. Links are followed, since the Hugging Face cache is made of them."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe would not return
            raise CheckpointError(f"{path}: not a regular file")
        size = status.st_size
        if size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {size} bytes, limit {_MAX_JSON_BYTES}")
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    try:
        return parse_json(data, str(path))
    except CheckpointError as error:
        raise CheckpointError(f"{error}; it is damaged, copy it again") from error


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes JSON to a new file and refuses NaN and infinity, which JSON lacks."""
    write_new(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def count_of(value: Any) -> int:
    """A number of steps or samples that a file names; 0 for anything else."""
    return value if type(value) is int and value >= 0 else 0


def token_ids_of(config: dict[str, Any]) -> dict[str, Any]:
    """The token ids that a config.json or generation_config.json names."""
    return {name: config[name] for name in TOKEN_IDS if config.get(name) is not None}
