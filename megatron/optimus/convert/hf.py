"""Hugging Face folders: config.json, safetensors with or without an index, tokenizer files.

Names and shapes of their tensors are in models/huggingface/names.py, configurations in config.py there.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.shards import WriteItem, torch_dtype, write_shard
from megatron.optimus.checkpoint.tokenizer_files import NAMES, CopyGuard
from megatron.optimus.checkpoint.untrusted import parse_json
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
from megatron.optimus.convert.sidecar import TOKEN_IDS, read_json, token_ids_of, write_json
from megatron.optimus.convert.tensor_map import ForeignTensor, rows_of, stack_rows
from megatron.optimus.models.huggingface.config import hf_config, model_config_from_hf
from megatron.optimus.models.huggingface.names import buffers_to_hf, to_hf
from megatron.optimus.models.parameters import parameter_shapes
from megatron.optimus.platform.files import write_new

_GENERATION = "generation_config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DEFAULT_EOS = "<|endoftext|>"
_SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")

log = logging.getLogger("optimus")


def _recognise(path: Path) -> bool:
    return (path / "config.json").is_file()


def hf_tensors(model: ModelConfig) -> list[ForeignTensor]:
    """Lists the tensors of the Hugging Face model. Raises ConfigError when none computes the same as ours."""
    found: dict[str, ForeignTensor] = {}
    for name in parameter_shapes(model):
        for theirs in to_hf(model, name):
            one = rows_of(theirs.name, name, theirs.shape, theirs.start)
            found[one.key] = stack_rows(found[one.key], one) if one.key in found else one
    return list(found.values())


class HFSource(ForeignSource):
    """Weights of a folder that transformers' save_pretrained wrote."""

    def __init__(self, path: Path) -> None:
        config = read_json(path / "config.json")
        try:
            run = RunConfig(model=model_config_from_hf(config))
        except ConfigError as error:
            raise ConfigError(f"{path / 'config.json'}: {str(error).removeprefix('config.json: ')}") from error
        tokenizer = path if TokenizerFiles.find(path, CopyGuard(path)) else None
        if tokenizer is None and any((path / name).exists() for name in NAMES):
            log.warning("%s: its tokenizer stays behind: there is no tokenizer.json; transformers can make one", path)
        if tokenizer is not None:
            run.data.tokenizer_type, run.data.tokenizer_model = TokenizerType.HF, str(path.resolve())
        generation = read_json(path / _GENERATION) if (path / _GENERATION).exists() else {}
        ids = token_ids_of(config)
        super().__init__(path, "hf", run, token_ids=ids, generation=generation, tokenizer=tokenizer)
        self._weights = _Weights(path)
        found = {name: TensorInfo(*self._weights.describe(name)) for name in self._weights.names}
        if not run.model.untie_embeddings_and_output_weights and "lm_head.weight" in found:
            # Some writers store the tied weight twice; the second must be the first.
            if not torch.equal(self.fetch("lm_head.weight", WEIGHT), self.fetch("model.embed_tokens.weight", WEIGHT)):
                raise CheckpointError(f"{path}: lm_head.weight differs from the embedding that it is tied to")
            del found["lm_head.weight"]
        for ours, theirs in buffers_to_hf(run.model).items():
            info = found.pop(theirs, None)
            if info is None or info.shape != (run.model.num_experts,):
                raise CheckpointError(f"{path}: {theirs} is missing or not of shape ({run.model.num_experts},)")
            self.buffers[ours] = self._weights.read(theirs).float()
        self.map_tensors(hf_tensors(run.model), {WEIGHT: found})

    def fetch(self, key: str, kind: str) -> torch.Tensor:
        return self._weights.read(key)


def _destination(source: Source, options: Options) -> Destination:
    """Prepares a folder that transformers loads."""
    _refuse_buffers(source)
    kind = source.weight_kind(options.dtype)
    items = write_items(source, hf_tensors(source.model), kind, options)
    for ours, theirs in buffers_to_hf(source.model).items():
        bias = source.buffers[ours]
        items.append(WriteItem(theirs, bias.dtype, tuple(bias.shape), partial(torch.clone, bias)))
    tokenizer = _find_tokenizer(options.tokenizer, source)
    config = hf_config(source.model, str(items[0].dtype).removeprefix("torch."))
    ids = source.token_ids or (tokenizer.token_ids() if tokenizer is not None else {})

    def write(directory: Path) -> None:
        write_json(directory / "config.json", config | ids)
        write_json(directory / _GENERATION, source.generation or {"_from_model_config": True, **ids})
        if tokenizer is not None:
            tokenizer.copy_to(directory)
        _write_weights(directory, items, options.max_shard_bytes)

    return Destination(output_tensors(items), write, HFSource)


def _refuse_buffers(source: Source) -> None:
    """Refuses biases of the routing where the architecture has none: then only a bias of zeros can be left out."""
    named = buffers_to_hf(source.model)
    for name, buffer in source.buffers.items():
        if name not in named and bool(buffer.any()):
            raise CheckpointError(
                f"{source.path}: buffer {name} is not zero and has no place in a Hugging Face model of this kind "
                "(moe_router_enable_expert_bias); its experts would be chosen differently"
            )


def _find_tokenizer(path: Path | None, source: Source) -> TokenizerFiles | None:
    """Finds the tokenizer that is asked for, else the source's own if it still is where its configuration says."""
    if path is not None:
        found = TokenizerFiles.find(path, CopyGuard.of_command_line(path))
        if found is None:
            raise CheckpointError(f"--tokenizer {path}: neither a tokenizer.json nor a folder that holds one")
        return found
    own = source.run.data.tokenizer_model
    if own is None or source.run.data.tokenizer_type is not TokenizerType.HF:
        return None
    found = TokenizerFiles.find(Path(own), CopyGuard.of_checkpoint(source.path, source.tokenizer_hashes))
    if found is None:
        log.warning("tokenizer_model=%s is not there; the export has no tokenizer (name one with --tokenizer)", own)
        return None
    try:
        found.read()
    except CheckpointError as error:
        log.warning("the export has no tokenizer: %s", error)
        return None
    return found


# ---- weights


class _SafetensorsFile:
    """An open safetensors file of any writer. Tensors are memory-mapped, so only what is touched is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_file():  # opening a pipe would not return
            raise CheckpointError(f"{path}: not a regular file")
        try:
            self._file = safe_open(str(path), framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: header is damaged: {error}; copy the file again") from error
        self.keys = frozenset(self._file.keys())

    def describe(self, key: str) -> tuple[str, tuple[int, ...]]:
        """(dtype name, shape) of a tensor, from the header alone."""
        view = self._file.get_slice(key)
        return view.get_dtype(), tuple(view.get_shape())

    def read(self, key: str) -> torch.Tensor:
        try:
            return self._file.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path}: tensor {key}: cannot be read: {error}; copy the file again") from error


class _Weights:
    """The weights of a Hugging Face folder: ``model.safetensors``, or the files that its index names."""

    def __init__(self, path: Path) -> None:
        self.path = path
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
        self._files: dict[str, _SafetensorsFile] = {}
        for file in files:
            if not isinstance(file, str) or not _SHARD_NAME.fullmatch(file):
                raise CheckpointError(f"{path / _INDEX}: {file!r} is not the plain name of a .safetensors file")
        for file in dict.fromkeys(files):
            opened = _SafetensorsFile(path / file)
            for key in sorted(opened.keys):
                if key in self._files:
                    raise CheckpointError(f"{path}: tensor {key} is both in {self._files[key].path.name} and {file}")
                self._files[key] = opened

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def describe(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """(dtype, shape) of a tensor, from the header."""
        dtype, shape = self._files[name].describe(name)
        return torch_dtype(dtype), shape

    def read(self, name: str) -> torch.Tensor:
        return self._files[name].read(name)


def _write_weights(directory: Path, items: list[WriteItem], max_bytes: int) -> None:
    """Writes ``model.safetensors``, or numbered files with an index when that would exceed ``max_bytes``."""
    groups = split_by_size(items, max_bytes)
    if len(groups) == 1:
        write_shard(directory / _WEIGHTS, groups[0], {"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_shard(directory / file, group, {"format": "pt"})
        weight_map |= {item.key: file for item in group}
    total = sum(item.num_bytes for item in items)
    write_json(directory / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


# ---- tokenizers


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of a tokenizer: a folder with a tokenizer.json, or such a file under any name."""

    path: Path
    guard: CopyGuard

    @classmethod
    def find(cls, path: Path, guard: CopyGuard) -> TokenizerFiles | None:
        """Finds the tokenizer at ``path``, of which only what ``guard`` lets through is read; None without one."""
        file = path / "tokenizer.json" if path.is_dir() else path
        return cls(path, guard) if file.is_file() and file.suffix == ".json" else None

    def read(self) -> dict[str, bytes]:
        """Reads the files, by their names in the export. Raises CheckpointError for one that must not be copied."""
        folder = self.path if self.path.is_dir() else self.path.parent
        found = {name: folder / name for name in NAMES if (folder / name).exists()}
        if not self.path.is_dir():
            found["tokenizer.json"] = self.path
        return {name: self.guard.read(file) for name, file in found.items()}

    def token_ids(self) -> dict[str, int]:
        """Finds the ids of the tokens that tokenizer_config.json names, such as {"eos_token_id": 0}.

        Without that file, "<|endoftext|>" ends a text if the vocabulary has it.
        """
        files = self.read()
        config, content = (
            parse_json(files.get(name, b"{}"), str(self.path / name))
            for name in ("tokenizer_config.json", "tokenizer.json")
        )
        model = content.get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
        added = content.get("added_tokens")
        for token in added if isinstance(added, list) else []:
            if isinstance(token, dict) and isinstance(token.get("content"), str):
                ids[token["content"]] = token.get("id")
        result = {}
        for name in TOKEN_IDS:
            token = config.get(name.removesuffix("_id"), _DEFAULT_EOS if name == "eos_token_id" else None)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and isinstance(ids.get(token), int):
                result[name] = ids[token]
        return result

    def copy_to(self, directory: Path) -> None:
        """Copies the files, and writes a tokenizer_config.json that loads tokenizer.json where there is none."""
        files = self.read()
        for name, content in files.items():
            write_new(directory / name, content)
        if "tokenizer_config.json" not in files:
            config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
            if "eos_token_id" in self.token_ids():
                config["eos_token"] = _DEFAULT_EOS
            write_json(directory / "tokenizer_config.json", config)


FORMAT = Format("hf", "config.json", _recognise, lambda path, _: HFSource(path), _destination)
