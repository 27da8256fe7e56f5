"""What of a model and its optimizer goes into a checkpoint, as slices of global tensors.

The same slices serve both directions: they are live views, so ``store.save`` reads the training state through them and
``store.load`` writes into it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from megatron.optimus.checkpoint.manifest import Manifest
from megatron.optimus.checkpoint.slices import Place, TensorSlice, global_ranges, place_in_boxes


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
    how many ranks its dim 0 is spread. One that tensor parallelism cut carries ``global_shape`` and ``global_boxes``,
    the boxes of the whole tensor that are, flattened one after the other, its own elements (slices.local_boxes).
    """
    whole = getattr(param, "global_shape", None)
    if whole is not None:
        return name, tuple(whole)
    shape = tuple(param.shape)
    expert_ids = getattr(param, "expert_ids", None)
    if expert_ids is None:
        return name, shape
    expert_parallel_size = int(param.group_name.rsplit("_", 1)[1])  # type: ignore[attr-defined]
    return name, (len(expert_ids) * expert_parallel_size, *shape[1:])


def training_slices(model: nn.Module, optimizer: ShardedOptimizer, *, buffers: bool) -> list[TensorSlice]:
    """Everything a run resumes from but random generators: this rank's master weights and moments, and the buffers.

    ``buffers``: True to load (every rank needs them); to save, True on one rank only (all hold the same).
    """
    slices = []
    for shard in optimizer.state_shards():
        slices += _slices(shard.name, shard.param, shard.start, shard.stop, shard.tensors)
    return slices + (buffer_slices(model) if buffers else [])


def weight_slices(model: nn.Module, optimizer: ShardedOptimizer, *, buffers: bool) -> list[TensorSlice]:
    """What a model-only checkpoint holds: the parameters as the model computes with them (kind "weight"), and buffers.

    Each rank gives the part whose masters it owns, cast to the parameter's dtype when it is stored: the same bits as
    the parameter, spread over all ranks, and right whether or not the last update has been published to it.
    """
    slices = []
    for shard in optimizer.state_shards():
        parts = _master_slices(shard, "weight")
        slices += [replace(part, stored_dtype=shard.param.dtype) for part in parts]
    return slices + (buffer_slices(model) if buffers else [])


def model_slices(model: nn.Module, *, dense: bool, experts: bool) -> list[TensorSlice]:
    """A model without an optimizer: its parameters (kind "weight") and persistent buffers, whole as this rank has them.

    To load, both are True. To save, ``dense`` is True on one rank (it writes the buffers too), ``experts`` on one
    replica of every expert (the ranks with expert-data-parallel index 0).
    """
    slices = []
    for name, param in model.named_parameters():
        if experts if hasattr(param, "expert_ids") else dense:
            slices += _slices(name, param, 0, param.numel(), {"weight": param.detach().view(-1)})
    return slices + (buffer_slices(model) if dense else [])


def weight_requests(model: nn.Module, optimizer: ShardedOptimizer, manifest: Manifest) -> list[TensorSlice]:
    """Only the weights of a checkpoint, full or model-only, into the optimizer's master weights; buffers where stored.

    To be loaded with ``cast``. Moments and step are left alone. The caller then writes the masters into the parameters
    (``optimizer.sync_params_from_master()``).
    """
    kind = "master" if manifest.kind == "full" else "weight"
    slices = [part for shard in optimizer.state_shards() for part in _master_slices(shard, kind)]
    return slices + [part for part in buffer_slices(model) if (part.name, "buffer") in manifest.tensors]


def rng_slices(states: Mapping[str, torch.Tensor], rank: int, world_size: int) -> list[TensorSlice]:
    """States of random generators (1-D, the same length on every rank) as rows of one tensor each, kind "rng"."""
    return [
        TensorSlice(name, "rng", (world_size, len(state)), rank * len(state), (rank + 1) * len(state), state)
        for name, state in states.items()
    ]


def _master_slices(shard: StateShard, kind: str) -> list[TensorSlice]:
    return _slices(shard.name, shard.param, shard.start, shard.stop, {kind: shard.tensors["master"]})


def _slices(
    name: str, param: torch.Tensor, start: int, stop: int, tensors: Mapping[str, torch.Tensor]
) -> list[TensorSlice]:
    """``tensors``: of each kind, elements [start, stop) of the flattened local parameter."""
    name, shape = global_name_shape(name, param)
    boxes = getattr(param, "global_boxes", None)
    if boxes is not None:
        placed = place_in_boxes(shape, boxes, start, stop)
    else:
        ranges = global_ranges(shape, getattr(param, "expert_ids", None), start, stop)
        placed = [(Place(shape, low, high), local) for low, high, local in ranges]
    slices = []
    for kind, tensor in tensors.items():
        for place, local in placed:
            begin = local - start
            part = tensor[begin : begin + place.stop - place.start]
            slices.append(TensorSlice(name, kind, shape, place.start, place.stop, part, place.box))
    return slices


def buffer_slices(model: nn.Module) -> list[TensorSlice]:
    persistent = model.state_dict().keys()
    return [
        TensorSlice(name, "buffer", tuple(buffer.shape), 0, buffer.numel(), buffer.view(-1))
        for name, buffer in model.named_buffers()
        if name in persistent
    ]
