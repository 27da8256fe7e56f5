"""What of a model and its optimizer goes into a checkpoint, as slices of global tensors.

The same slices serve both directions: they are live views, so ``store.save`` reads the training state through them and
``store.load`` writes into it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from megatron.optimus.checkpoint.slices import TensorSlice, global_ranges
from megatron.optimus.checkpoint.store import load, load_manifest


class StateShard(Protocol):
    """The part of one parameter's optimizer state that this rank owns (deepspeed_ext's StateShard)."""

    @property
    def name(self) -> str: ...
    @property
    def param(self) -> nn.Parameter: ...
    @property
    def start(self) -> int: ...  # of the flattened local parameter
    @property
    def stop(self) -> int: ...
    @property
    def tensors(self) -> Mapping[str, torch.Tensor]: ...  # kind -> live 1-D view of stop - start elements


class ShardedOptimizer(Protocol):
    """An optimizer whose states are sharded over ranks (deepspeed_ext's)."""

    def state_shards(self) -> Sequence[StateShard]: ...


def global_name_shape(name: str, param: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """A parameter's name and shape in the whole model.

    A parameter sharded by experts carries ``expert_ids`` and DeepSpeed's ``group_name`` ("ep_size_4"), which says over
    how many ranks its dim 0 is spread.
    """
    shape = tuple(param.shape)
    expert_ids = getattr(param, "expert_ids", None)
    if expert_ids is None:
        return name, shape
    expert_parallel_size = int(param.group_name.rsplit("_", 1)[1])  # type: ignore[attr-defined]
    return name, (len(expert_ids) * expert_parallel_size, *shape[1:])


def training_slices(model: nn.Module, optimizer: ShardedOptimizer, *, buffers: bool) -> list[TensorSlice]:
    """Everything a run resumes from: this rank's master weights and moments, and the persistent buffers.

    ``buffers``: True to load (every rank needs them); to save, True on one rank only (all hold the same).
    """
    slices = []
    for shard in optimizer.state_shards():
        for kind, tensor in shard.tensors.items():
            slices += _slices(shard.name, kind, shard.param, shard.start, shard.stop, tensor)
    return slices + (_buffer_slices(model) if buffers else [])


def model_slices(model: nn.Module, *, dense: bool, experts: bool) -> list[TensorSlice]:
    """The parameters as the model computes with them (kind "weight") and the persistent buffers.

    To load, both are True. To save, ``dense`` is True on one rank (it writes the buffers too), ``experts`` on one
    replica of every expert (the ranks with expert-data-parallel index 0).
    """
    slices = []
    for name, param in model.named_parameters():
        if experts if hasattr(param, "expert_ids") else dense:
            slices += _slices(name, "weight", param, 0, param.numel(), param.detach().view(-1))
    return slices + (_buffer_slices(model) if dense else [])


def load_weights(path: Path, model: nn.Module, optimizer: ShardedOptimizer, *, verify: bool = True) -> None:
    """Only the weights of a checkpoint, full or model-only, into the optimizer's master weights; buffers where stored.

    Moments and step are left alone. The caller then writes the masters into the parameters
    (``optimizer.sync_params_from_master()``).
    """
    manifest = load_manifest(path)
    kind = "master" if manifest.kind == "full" else "weight"
    slices = training_slices(model, optimizer, buffers=True)
    requests = [replace(piece, kind=kind) for piece in slices if piece.kind == "master"]
    requests += [piece for piece in slices if piece.kind == "buffer" and (piece.name, "buffer") in manifest.tensors]
    load(path, requests, verify=verify, cast=True)


def _slices(
    name: str, kind: str, param: torch.Tensor, start: int, stop: int, tensor: torch.Tensor
) -> list[TensorSlice]:
    """``tensor``: elements [start, stop) of the flattened local parameter."""
    name, shape = global_name_shape(name, param)
    return [
        TensorSlice(name, kind, shape, low, high, tensor[local - start : local - start + high - low])
        for low, high, local in global_ranges(shape, getattr(param, "expert_ids", None), start, stop)
    ]


def _buffer_slices(model: nn.Module) -> list[TensorSlice]:
    persistent = model.state_dict().keys()
    return [
        TensorSlice(name, "buffer", tuple(buffer.shape), 0, buffer.numel(), buffer.view(-1))
        for name, buffer in model.named_buffers()
        if name in persistent
    ]
