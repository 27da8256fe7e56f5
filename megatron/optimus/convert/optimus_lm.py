"""Checkpoints of IntelLabs/Optimus-LM as a source: files of torch.save whose ``state_dict`` has Hugging Face's names.

    model_checkpoint.pth           the model
    model_checkpoint_shard-N.pth   its part N = pipeline rank * expert-parallel size + expert-parallel rank, which
                                   counts its layers and its experts from 0

An expert is three matrices, or the experts of a layer are three tensors ``..._merged_weight``. The files do not say
what the model looks like: ``--model-config`` does.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.convert.formats import WEIGHT, Destination, ForeignSource, Format, Options, Source, TensorInfo
from megatron.optimus.convert.hf import hf_tensors
from megatron.optimus.convert.sidecar import read_model_config
from megatron.optimus.convert.torch_files import read_torch

_WHOLE, _SHARD = "model_checkpoint.pth", "model_checkpoint_shard-{}.pth"
_LAYER = re.compile(r"(model\.layers\.)(\d+)(\..+)")
_EXPERT = re.compile(r"(.+\.experts\.)(\d+)(\..+)")
_MERGED = re.compile(r"(.+\.experts)\.(\w+)_merged_weight")


class OptimusLMSource(ForeignSource):
    """The weights of a checkpoint, over any number of pipeline and expert-parallel ranks."""

    def __init__(self, path: Path, model_config: Path | None) -> None:
        if model_config is None:
            raise CheckpointError(
                f"{path}: files of Optimus-LM do not say what the model looks like; name a Hugging Face config.json or "
                "a run's configuration with --model-config"
            )
        found = read_model_config(model_config)
        super().__init__(path, "optimus-lm", found.run, token_ids=found.token_ids)
        self._files = [path / _WHOLE]
        if not self._files[0].is_file():
            count = len(list(path.glob(_SHARD.format("*"))))
            self._files = [path / _SHARD.format(number) for number in range(count)]
        self._tensors = _merged(self.model, self._files)
        if not self.model.untie_embeddings_and_output_weights:
            self._tensors.pop("lm_head.weight", None)
        infos = {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()}
        self.map_tensors(hf_tensors(self.model), {WEIGHT: infos})

    def fetch(self, key: str, kind: str) -> torch.Tensor:
        return self._tensors[key]

    def files_to_check(self) -> list[Path]:
        return self._files


def _merged(model: ModelConfig, files: list[Path]) -> dict[str, torch.Tensor]:
    """The tensors of all files by their names in the whole model. Raises CheckpointError where parts do not fit."""
    shards = [_state_dict(file) for file in files]
    experts = max(1, _counted(_EXPERT, shards[0]), *(len(t) for n, t in shards[0].items() if _MERGED.fullmatch(n)))
    layers = max(1, _counted(_LAYER, shards[0]))
    ep = max(1, model.num_experts // experts) if model.is_moe else 1
    pp = max(1, model.num_layers // layers)
    if len(files) != pp * ep:
        raise CheckpointError(
            f"{files[0].parent}: {files[0].name} has {layers} of {model.num_layers} layers and {experts} of "
            f"{model.num_experts} experts, so {pp * ep} files are expected, and there are {len(files)}"
        )
    result: dict[str, torch.Tensor] = {}
    for number, shard in enumerate(shards):
        first_layer, first_expert = number // ep * layers, number % ep * experts
        for name, tensor in shard.items():
            for whole, part in _separate(_shifted(_LAYER, name, first_layer), tensor):
                result[_shifted(_EXPERT, whole, first_expert)] = part
    return result


def _state_dict(file: Path) -> dict[str, torch.Tensor]:
    content: Any = read_torch(file)
    found = content.get("state_dict") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in found.values()):
        raise CheckpointError(f"{file}: has no state_dict of tensors, as checkpoints of Optimus-LM have")
    return {str(name): tensor for name, tensor in found.items()}


def _counted(pattern: re.Pattern[str], names: dict[str, torch.Tensor]) -> int:
    """One more than the largest number that the pattern finds; 0 where it finds none."""
    return max((int(match[2]) + 1 for name in names if (match := pattern.fullmatch(name))), default=0)


def _shifted(pattern: re.Pattern[str], name: str, by: int) -> str:
    return pattern.sub(lambda match: f"{match[1]}{int(match[2]) + by}{match[3]}", name)


def _separate(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The matrices of the experts that are merged in one tensor, which they share; else the tensor itself."""
    match = _MERGED.fullmatch(name)
    if match is None:
        return [(name, tensor)]
    return [(f"{match[1]}.{expert}.{match[2]}.weight", part) for expert, part in enumerate(tensor)]


def _recognise(path: Path) -> bool:
    return (path / _WHOLE).is_file() or (path / _SHARD.format(0)).is_file()


def _destination(source: Source, options: Options) -> Destination:
    raise CheckpointError("--to optimus-lm: that format is only read")


FORMAT = Format("optimus-lm", _WHOLE, _recognise, OptimusLMSource, _destination)
