"""Hugging Face folders: config.json, safetensors with or without an index, tokenizer files.

Names and shapes of their tensors are in models/huggingface/names.py, configurations in config.py there.
"""

from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.shards import WriteItem, torch_dtype, write_shard
from megatron.optimus.checkpoint.tokenizer_files import NAMES, files_of
from megatron.optimus.config.schema import ConfigError, ModelConfig, RunConfig, TokenizerType
from megatron.optimus.convert.formats import (
    WEIGHT,
    Destination,
    ForeignSource,
    Format,
    Options,
    Source,
    TensorInfo,
    output_tensors,
    split_by_size,
    write_items,
)
from megatron.optimus.convert.model_card import model_card
from megatron.optimus.convert.sidecar import read_json, token_ids_of, write_json
from megatron.optimus.convert.tensor_map import ForeignTensor, rows_of, stack_rows
from megatron.optimus.convert.tokenizer import find_tokenizer
from megatron.optimus.models.huggingface.architectures import Architecture, architecture_of, exported_architecture
from megatron.optimus.models.huggingface.config import hf_config, model_config_from_hf, supported_architecture
from megatron.optimus.models.huggingface.export import model_code
from megatron.optimus.models.huggingface.names import buffers_to_hf, to_hf
from megatron.optimus.models.huggingface.serving import not_honoured
from megatron.optimus.models.parameters import parameter_shapes
from megatron.optimus.platform.files import write_new

_GENERATION = "generation_config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")

log = logging.getLogger("optimus")


def _recognise(path: Path) -> bool:
    return (path / "config.json").is_file()


def hf_tensors(model: ModelConfig, architecture: Architecture | None = None) -> list[ForeignTensor]:
    """Lists the tensors of the Hugging Face model. Raises ConfigError when none computes the same as ours.

    ``architecture``: None is the one of transformers' own that computes the model.
    """
    architecture = architecture or architecture_of(model)
    found: dict[str, ForeignTensor] = {}
    for name in parameter_shapes(model):
        for theirs in to_hf(model, name, architecture):
            one = rows_of(theirs.name, name, theirs.shape, theirs.start)
            found[one.key] = stack_rows(found[one.key], one) if one.key in found else one
    return list(found.values())


class HFSource(ForeignSource):
    """Weights of a folder that transformers' save_pretrained wrote."""

    def __init__(self, path: Path) -> None:
        config = read_json(path / "config.json")
        try:
            run = RunConfig(model=model_config_from_hf(config))
            _, architecture = supported_architecture(config)
        except ConfigError as error:
            raise ConfigError(f"{path / 'config.json'}: {str(error).removeprefix('config.json: ')}") from error
        tokenizer = path if files_of(TokenizerType.HF, path) else None
        if tokenizer is None and any((path / name).exists() for name in NAMES):
            log.warning("%s: its tokenizer stays behind: there is no tokenizer.json; transformers can make one", path)
        if tokenizer is not None:
            run.data.tokenizer_type, run.data.tokenizer_model = TokenizerType.HF, str(path.resolve())
        generation = read_json(path / _GENERATION) if (path / _GENERATION).exists() else {}
        ids = token_ids_of(config)
        super().__init__(path, "hf", run, token_ids=ids, generation=generation, tokenizer=tokenizer)
        self._weights = _Weights(path)
        found = self._weights.infos()
        if not run.model.untie_embeddings_and_output_weights and "lm_head.weight" in found:
            # Some writers store the tied weight twice; the second must be the first.
            if not torch.equal(self.fetch("lm_head.weight", WEIGHT), self.fetch("model.embed_tokens.weight", WEIGHT)):
                raise CheckpointError(f"{path}: lm_head.weight differs from the embedding that it is tied to")
            del found["lm_head.weight"]
        for ours, theirs in buffers_to_hf(run.model, architecture).items():
            info = found.pop(theirs, None)
            if info is None or info.shape != (run.model.num_experts,):
                raise CheckpointError(f"{path}: {theirs} is missing or not of shape ({run.model.num_experts},)")
            self.buffers[ours] = self._weights.read(theirs).float()
        self.map_tensors(hf_tensors(run.model, architecture), {WEIGHT: found})

    def fetch(self, key: str, kind: str) -> torch.Tensor:
        return self._weights.read(key)


def _destination(source: Source, options: Options) -> Destination:
    """Prepares a folder that transformers loads."""
    model = source.model
    biased = model.moe_router_enable_expert_bias and any(bool(bias.any()) for bias in source.buffers.values())
    architecture, reason = exported_architecture(model, biased=biased)
    for line in not_honoured(model, architecture.model_type):
        log.warning(line)
    if architecture.has_own_code:
        log.warning("%s: the export has modelling code of its own, and loads with trust_remote_code=True", reason)
    kind = source.weight_kind(options.dtype)
    items = write_items(source, hf_tensors(model, architecture), kind, options)
    for ours, theirs in buffers_to_hf(model, architecture).items():
        bias = source.buffers.get(ours, torch.zeros(model.num_experts))  # older checkpoints lack those of zeros
        items.append(WriteItem(theirs, bias.dtype, tuple(bias.shape), partial(torch.clone, bias)))
    tokenizer = find_tokenizer(source, options)
    config = hf_config(model, str(items[0].dtype).removeprefix("torch."), architecture)
    if tokenizer is not None:
        tokenizer.check_fits(model.vocab_size, config["model_type"])
    ids = (tokenizer.token_ids() if tokenizer is not None else {}) | source.token_ids
    files = dict(tokenizer.files) if tokenizer is not None else {}
    files |= model_code() if architecture.has_own_code else {}
    files |= model_card(source, architecture, config["torch_dtype"], options.card)
    groups = split_by_size(items, options.max_shard_bytes)

    def write(directory: Path) -> None:
        write_json(directory / "config.json", config | ids)
        write_json(directory / _GENERATION, source.generation or {"_from_model_config": True, **ids})
        for name, content in files.items():
            write_new(directory / name, content)
        _write_weights(directory, groups)

    index = [_INDEX] if len(groups) > 1 else []
    names = ("config.json", _GENERATION, *files, *index, *(_file_of(number, groups) for number in range(len(groups))))
    return Destination(output_tensors(items), write, HFSource, names)


# ---- weights


class _Weights:
    """The weights of a Hugging Face folder: ``model.safetensors``, or the files that its index names.

    Tensors are memory-mapped, so only what is touched is read.
    """

    def __init__(self, path: Path) -> None:
        if (path / _INDEX).exists():
            weight_map = read_json(path / _INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(f"{path / _INDEX}: weight_map is missing or empty")
            files = list(weight_map.values())
        elif (path / _WEIGHTS).exists():
            files = [_WEIGHTS]
        else:
            raise CheckpointError(
                f"{path}: has neither {_WEIGHTS} nor {_INDEX}; weights in pickle files (.bin, .pt) are not read, "
                "save them with save_pretrained(..., safe_serialization=True) first"
            )
        for file in files:
            if not isinstance(file, str) or not _SHARD_NAME.fullmatch(file):
                raise CheckpointError(f"{path / _INDEX}: {file!r} is not the plain name of a .safetensors file")
        self._files: dict[str, tuple[Path, Any]] = {}  # of each tensor: the file, and what safe_open made of it
        for file in dict.fromkeys(files):
            opened = _open_safetensors(path / file)
            for key in sorted(opened.keys()):
                if key in self._files:
                    raise CheckpointError(f"{path}: tensor {key} is both in {self._files[key][0].name} and {file}")
                self._files[key] = path / file, opened

    def infos(self) -> dict[str, TensorInfo]:
        """Dtype and shape of every tensor, from the headers."""
        views = {name: file.get_slice(name) for name, (_, file) in self._files.items()}
        return {name: TensorInfo(torch_dtype(one.get_dtype()), tuple(one.get_shape())) for name, one in views.items()}

    def read(self, name: str) -> torch.Tensor:
        path, file = self._files[name]
        try:
            return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: tensor {name}: cannot be read: {error}; copy the file again") from error


def _open_safetensors(path: Path) -> Any:
    if path.exists() and not path.is_file():  # opening a pipe would not return
        raise CheckpointError(f"{path}: not a regular file")
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: header is damaged: {error}; copy the file again") from error


def _file_of(number: int, groups: list[list[WriteItem]]) -> str:
    """The name of the file of a group."""
    return _WEIGHTS if len(groups) == 1 else f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"


def _write_weights(directory: Path, groups: list[list[WriteItem]]) -> None:
    """Writes ``model.safetensors``, or numbered files with an index where there are several groups."""
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups):
        file = _file_of(number, groups)
        write_shard(directory / file, group, {"format": "pt"})
        weight_map |= {item.key: file for item in group}
    if len(groups) == 1:
        return
    total = sum(item.num_bytes for group in groups for item in group)
    write_json(directory / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


FORMAT = Format("hf", "config.json", _recognise, lambda path, _: HFSource(path), _destination)
