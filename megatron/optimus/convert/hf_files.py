"""Hugging Face model folders: reading and writing their files (names and shapes are models/hf_map.py's business)."""

from __future__ import annotations

import json
import re
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.manifest import parse_json
from megatron.optimus.checkpoint.shards import ShardItem, ShardReader, torch_dtype, write_shard
from megatron.optimus.platform.files import write_new

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_DEFAULT_EOS = "<|endoftext|>"
_MAX_JSON_BYTES = 1 << 28
_SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of at most 256 MB. Links are followed: the Hugging Face cache is made of them."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would keep us waiting
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


class HFFolder:
    """The weights of a Hugging Face folder: ``model.safetensors``, or the files its index names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if (path / INDEX).exists():
            weight_map = read_json(path / INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(f"{path / INDEX}: weight_map is missing or empty")
            files = list(dict.fromkeys(weight_map.values()))
        elif (path / WEIGHTS).exists():
            files = [WEIGHTS]
        else:
            raise CheckpointError(
                f"{path}: has neither {WEIGHTS} nor {INDEX}; weights in pickle files (.bin, .pt) are not read, "
                "save them with save_pretrained(..., safe_serialization=True) first"
            )
        self._shards: dict[str, ShardReader] = {}
        for file in files:
            if not isinstance(file, str) or not _SHARD_NAME.fullmatch(file):
                raise CheckpointError(f"{path / INDEX}: {file!r} is not the plain name of a .safetensors file")
            reader = ShardReader(path / file)
            for key in sorted(reader.keys):
                if key in self._shards:
                    raise CheckpointError(f"{path}: tensor {key} is both in {self._shards[key].path.name} and {file}")
                self._shards[key] = reader

    @property
    def names(self) -> set[str]:
        return set(self._shards)

    def describe(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """(dtype, shape) of a tensor, from the header."""
        dtype, shape = self._shards[name].describe(name)
        return torch_dtype(dtype), shape

    def read(self, name: str) -> torch.Tensor:
        return self._shards[name].read(name)


def split_by_size(items: Iterable[ShardItem], max_bytes: int) -> list[list[ShardItem]]:
    """Consecutive items in groups of at most ``max_bytes``; a larger item is a group of its own."""
    groups: list[list[ShardItem]] = []
    held = 0
    for item in items:
        if not groups or held + item.num_bytes > max_bytes:
            groups.append([])
            held = 0
        groups[-1].append(item)
        held += item.num_bytes
    return groups


def write_weights(directory: Path, items: list[ShardItem], max_bytes: int) -> None:
    """``model.safetensors``, or numbered files with an index when that would exceed ``max_bytes``."""
    groups = split_by_size(items, max_bytes)
    if len(groups) == 1:
        write_shard(directory / WEIGHTS, groups[0], {"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_shard(directory / file, group, {"format": "pt"})
        weight_map |= {item.key: file for item in group}
    total = sum(item.num_bytes for item in items)
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, value: dict[str, Any]) -> None:
    write_new(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


@dataclass(frozen=True)
class Tokenizer:
    """Tokenizer files on disk: a folder with a tokenizer.json, or such a file (then of any name)."""

    path: Path

    @classmethod
    def find(cls, path: Path) -> Tokenizer | None:
        """The tokenizer at ``path``; None when there is none."""
        file = path / "tokenizer.json" if path.is_dir() else path
        return cls(path) if file.is_file() and file.suffix == ".json" else None

    @property
    def files(self) -> dict[str, Path]:
        """Name in the export -> file."""
        folder = self.path if self.path.is_dir() else self.path.parent
        found = {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
        if not self.path.is_dir():
            found["tokenizer.json"] = self.path
        return found

    def token_ids(self) -> dict[str, int]:
        """{"eos_token_id": 0, ...}: ids of the tokens that tokenizer_config.json names.

        Without one, "<|endoftext|>" ends a text if the vocabulary has it.
        """
        files = self.files
        config = read_json(files["tokenizer_config.json"]) if "tokenizer_config.json" in files else {}
        content = read_json(files["tokenizer.json"])
        model = content.get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
        for token in content.get("added_tokens") or []:
            ids[token["content"]] = token["id"]
        result = {}
        for name in _TOKEN_IDS:
            token = config.get(name.removesuffix("_id"), _DEFAULT_EOS if name == "eos_token_id" else None)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and isinstance(ids.get(token), int):
                result[name] = ids[token]
        return result

    def copy_to(self, directory: Path) -> None:
        """Copies the files; adds a tokenizer_config.json that loads tokenizer.json as it is where none exists."""
        for name, file in self.files.items():
            shutil.copyfile(file, directory / name)
        if "tokenizer_config.json" not in self.files:
            config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
            if "eos_token_id" in self.token_ids():
                config["eos_token"] = _DEFAULT_EOS
            write_json(directory / "tokenizer_config.json", config)


def token_ids_of(config: dict[str, Any]) -> dict[str, Any]:
    """The token ids that a config.json or generation_config.json names."""
    return {name: config[name] for name in _TOKEN_IDS if config.get(name) is not None}
