"""The state of a model and its optimizer as slices of global tensors.

The slices are live views: ``store.save`` reads the training state through them and ``store.load`` writes into it. Only
states in fewer than 32 bits differ: a save copies them as they are and decodes them when it writes; a load of 8-bit
ones fills copies in host memory, which the optimizer encodes in ``sync_params_from_master``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from megatron.optimus.checkpoint.manifest import Manifest
from megatron.optimus.checkpoint.slices import Encoded, Region, TensorSlice, global_ranges, regions_in_boxes


class StateShardLike(Protocol):
    """The part of one parameter's optimizer state that this rank owns, as deepspeed_ext's StateShardLike has it."""

    @property
    def name(self) -> str:
        """Name of the parameter in the whole model."""

    @property
    def param(self) -> nn.Parameter:
        """The parameter on this rank."""

    @property
    def start(self) -> int:
        """First element of the shard in the flattened local parameter."""

    @property
    def stop(self) -> int:
        """The element after the shard's last one."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Kind -> live 1-D view of stop - start elements."""

    @property
    def stored(self) -> Mapping[str, Encoded]:
        """Kind -> encoded state, of those ``tensors`` that are not kept in fp32."""

    def new_copy(self, kind: str) -> torch.Tensor:
        """Returns an fp32 tensor in host memory for a stored state that is to be written whole: it is not decoded."""


class MatrixStateLike(Protocol):
    """The states of one whole matrix that this rank owns, as deepspeed_ext's MatrixStateLike has them."""

    @property
    def name(self) -> str:
        """Name of the parameter in the whole model."""

    @property
    def param(self) -> nn.Parameter:
        """The parameter on this rank."""

    @property
    def index(self) -> int:
        """Number of the matrix among those of the local parameter."""

    @property
    def count(self) -> int:
        """How many matrices the local parameter has."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Kind -> live tensor of the state's own shape."""


class ShardedOptimizer(Protocol):
    """An optimizer whose states are sharded over ranks, as that of deepspeed_ext is."""

    def state_shards(self) -> Sequence[StateShardLike]:
        """The states of this rank that are as long as their shard of a parameter."""

    def matrix_states(self) -> Sequence[MatrixStateLike]:
        """The states of whole matrices that this rank owns."""

    def tensor_states(self, *, all_copies: bool) -> Sequence[StateShardLike]:
        """The states with a number for each row or column of a tensor; no masters."""


def global_shape(param: torch.Tensor) -> tuple[int, ...]:
    """Returns a parameter's shape in the whole model.

    A parameter sharded by experts has ``expert_ids``, and DeepSpeed's ``group_name`` ("ep_size_4") that says over how
    many ranks its dim 0 is spread. One that tensor parallelism has cut has ``global_shape`` and ``global_boxes``: boxes
    of the whole tensor that, flattened one after the other, are its own elements.
    """
    if hasattr(param, "global_shape"):
        return tuple(param.global_shape)
    shape = tuple(param.shape)
    expert_ids = getattr(param, "expert_ids", None)
    if expert_ids is None:
        return shape
    expert_parallel_size = int(param.group_name.rsplit("_", 1)[1])  # type: ignore[attr-defined]
    return len(expert_ids) * expert_parallel_size, *shape[1:]


def training_slices(
    model: nn.Module,
    optimizer: ShardedOptimizer,
    *,
    buffers: bool,
    to_load: bool = False,
    all_copies: bool = False,
) -> list[TensorSlice]:
    """Makes the slices of a full checkpoint except random generators: master weights, moments and buffers of this rank.

    Args:
        model: on this rank.
        optimizer: with this rank's shards.
        buffers: to load, True, since every rank needs them; to save, True on one rank only, since all hold the same.
        to_load: whether they are loaded, not saved.
        all_copies: with what other ranks give too, so that this rank can be restored from its own slices.
    """
    slices = []
    for shard in optimizer.state_shards():
        tensors: dict[str, torch.Tensor | Encoded] = {}
        for kind in shard.tensors:
            encoded = shard.stored.get(kind)
            if encoded is None:
                tensors[kind] = shard.tensors[kind]
            elif to_load and encoded.scale is not None:  # a block can be encoded when all of it has come
                tensors[kind] = shard.new_copy(kind)
            else:
                tensors[kind] = encoded
        slices += _slices(shard.name, shard.param, shard.start, shard.stop, tensors)
    for matrix in optimizer.matrix_states():
        slices += _matrix_state_slices(matrix)
    for shard in optimizer.tensor_states(all_copies=to_load or all_copies):
        slices += _slices(shard.name, shard.param, shard.start, shard.stop, shard.tensors)
    return slices + (_buffer_slices(model) if buffers else [])


def weight_slices(model: nn.Module, optimizer: ShardedOptimizer, *, buffers: bool) -> list[TensorSlice]:
    """Makes the slices of a model-only checkpoint: the parameters as the model computes with them, and buffers.

    Each rank gives the part whose masters it owns, cast to the parameter's dtype when it is stored: the same bits as
    the parameter, spread over all ranks, and right even before the last update's all-gather of parameters.

    Args:
        model: on this rank.
        optimizer: with this rank's shards.
        buffers: True on one rank only.
    """
    slices = []
    for shard in optimizer.state_shards():
        slices += [replace(one, stored_dtype=shard.param.dtype) for one in _master_slices(shard, "weight")]
    return slices + (_buffer_slices(model) if buffers else [])


def model_slices(model: nn.Module, *, dense: bool, experts: bool) -> list[TensorSlice]:
    """Makes the slices of a model without an optimizer: parameters (kind "weight") and buffers as this rank has them.

    Args:
        model: on this rank.
        dense: include what is no expert's. To load, True; to save, True on one rank, which writes the buffers too.
        experts: include experts. To load, True; to save, True on one replica of every expert.
    """
    slices = []
    for name, param in model.named_parameters():
        if experts if hasattr(param, "expert_ids") else dense:
            slices += _slices(name, param, 0, param.numel(), {"weight": param.detach().view(-1)})
    return slices + (_buffer_slices(model) if dense else [])


def weight_requests(model: nn.Module, optimizer: ShardedOptimizer, manifest: Manifest) -> list[TensorSlice]:
    """Makes requests that load only the weights of a checkpoint into the optimizer's master weights, and its buffers.

    Load them with ``cast``. The moments stay as they are. Afterwards the caller writes the masters into the parameters
    (``optimizer.sync_params_from_master()``).

    Args:
        model: on this rank.
        optimizer: with this rank's shards.
        manifest: of a full or a model-only checkpoint.
    """
    kind = "master" if manifest.kind == "full" else "weight"
    slices = [one for shard in optimizer.state_shards() for one in _master_slices(shard, kind)]
    return slices + [one for one in _buffer_slices(model) if (one.name, "buffer") in manifest.tensors]


def rng_slices(states: Mapping[str, torch.Tensor], rank: int, world_size: int) -> list[TensorSlice]:
    """Makes slices of random generators' states: each kind of state is one tensor, kind "rng", with a row a rank.

    Args:
        states: name -> 1-D tensor, equally long on every rank.
        rank: the row.
        world_size: rows.
    """
    return [
        TensorSlice(name, "rng", (world_size, len(state)), rank * len(state), (rank + 1) * len(state), state)
        for name, state in states.items()
    ]


def _master_slices(shard: StateShardLike, kind: str) -> list[TensorSlice]:
    return _slices(shard.name, shard.param, shard.start, shard.stop, {kind: shard.tensors["master"]})


def _slices(
    name: str, param: torch.Tensor, start: int, stop: int, tensors: Mapping[str, torch.Tensor | Encoded]
) -> list[TensorSlice]:
    """Slices of elements [start, stop) of the flattened local parameter, which ``tensors`` holds of each kind."""
    shape = global_shape(param)
    boxes = getattr(param, "global_boxes", None)
    if boxes is not None:
        regions = regions_in_boxes(shape, boxes, start, stop)
    else:
        ranges = global_ranges(shape, getattr(param, "expert_ids", None), start, stop)
        regions = [(Region(shape, low, high), local) for low, high, local in ranges]
    slices = []
    for kind, tensor in tensors.items():
        for region, local in regions:
            first, last = local - start, local - start + region.numel
            where = (name, kind, shape, region.start, region.stop)
            if isinstance(tensor, torch.Tensor):
                slices.append(TensorSlice(*where, tensor[first:last], region.box))
            else:
                part = tensor.part(first, last)
                slices.append(TensorSlice(*where, part.values, region.box, torch.float32, part))
    return slices


def _matrix_state_slices(matrix: MatrixStateLike) -> list[TensorSlice]:
    """Slices of one matrix's states: each kind is a tensor [matrices of the whole parameter, *its own shape]."""
    number, count = matrix.index, matrix.count
    expert_ids = getattr(matrix.param, "expert_ids", None)
    if expert_ids is not None:
        each = count // len(expert_ids)  # matrices of an expert
        number = expert_ids[number // each] * each + number % each
        count = global_shape(matrix.param)[0] * each
    return [
        TensorSlice(
            matrix.name, kind, (count, *one.shape), number * one.numel(), (number + 1) * one.numel(), one.reshape(-1)
        )
        for kind, one in matrix.tensors.items()
    ]


def _buffer_slices(model: nn.Module) -> list[TensorSlice]:
    persistent = model.state_dict().keys()
    return [
        TensorSlice(name, "buffer", tuple(buffer.shape), 0, buffer.numel(), buffer.view(-1))
        for name, buffer in model.named_buffers()
        if name in persistent
    ]
