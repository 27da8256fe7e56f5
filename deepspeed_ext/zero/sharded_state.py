"""The optimizer's state by parameter, for checkpoints at any layout; and DeepSpeed's own files, for one layout only.

``state_shards`` gives what this rank owns of each parameter, whatever buckets and shards it lies in. ``Stage3States``
gives the same of DeepSpeed's ZeRO-3 optimizer, so a checkpoint written from either loads at any other stage and layout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_ext.optimizers.base import AVERAGE
from deepspeed_ext.optimizers.states import StoredState, stored_part
from deepspeed_ext.optimizers.whole_tensors import WholeTensor

if TYPE_CHECKING:
    from deepspeed_ext.zero.flat_buffer import FlatBuffer
    from deepspeed_ext.zero.optimizer import EPZeroOptimizer

_FORMAT = "deepspeed_ext.EPZeroOptimizer/2"
_STAGE3_KINDS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StateShard:
    """What this rank owns of one parameter.

    Writing into ``tensors`` changes the optimizer once ``sync_params_from_master`` is called, before the next step.

    Attributes:
        name: the parameter's.
        param: the local parameter; of ZeRO-3 a stand-in on the meta device with the whole one's shape and dtype.
        start: first element of the flattened local parameter.
        stop: one past the last.
        tensors: fp32 of shape [stop - start]: "master" and the optimizer's states ("exp_avg", "exp_avg_sq" for Adam and
            AdamW). A state that is not kept in fp32 is decoded to host memory when it is first asked for.
        stored: the states that are not kept in fp32, as the optimizer keeps them.
    """

    name: str
    param: nn.Parameter
    start: int
    stop: int
    tensors: Mapping[str, Tensor]
    stored: Mapping[str, StoredState] = field(default_factory=dict)

    def new_copy(self, kind: str) -> Tensor:
        """Returns a copy of a state of ``stored`` in host memory that is to be written whole: it is not decoded."""
        assert isinstance(self.tensors, _DecodedWhenRead)
        self.tensors.copies[kind] = torch.empty(self.stop - self.start, dtype=torch.float32)
        return self.tensors.copies[kind]

    def write(self, kind: str, value: Tensor) -> None:
        """Sets the master or a state of the optimizer at once, from [stop - start] in any float dtype on any device."""
        if kind in self.stored:
            self.stored[kind].write(value.float())
        else:
            self.tensors[kind].copy_(value)


class _DecodedWhenRead(Mapping[str, Tensor]):
    """The tensors of a shard: live views, and copies of stored states that are made when they are asked for."""

    def __init__(self, views: Mapping[str, Tensor | StoredState]) -> None:
        self._views = views
        self.copies: dict[str, Tensor] = {}

    def __getitem__(self, kind: str) -> Tensor:
        view = self._views[kind]
        if isinstance(view, Tensor):
            return view
        if kind not in self.copies:
            self.copies[kind] = view.read()
        return self.copies[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


@dataclass(frozen=True)
class MatrixState:
    """The states of one whole matrix that this rank owns (``MatrixOptimizer.matrix_states``), as live tensors.

    Attributes:
        name: the parameter's.
        param: the local parameter, of which the matrix may be a part or that may hold a part of it.
        index: number of the matrix among the ``count`` that the local parameter holds.
        count: matrices of the local parameter.
        tensors: fp32, each of its state's own shape.
    """

    name: str
    param: nn.Parameter
    index: int
    count: int
    tensors: Mapping[str, Tensor]


def matrix_states(optimizer: EPZeroOptimizer) -> list[MatrixState]:
    """Returns the states of the whole matrices that this rank owns. Over a buffer's group each has one owner."""
    found = []
    for flat_buffer in optimizer.flat_buffers:
        for matrix, tensors in [] if flat_buffer.exchange is None else flat_buffer.exchange.matrix_states():
            param = flat_buffer.params[matrix.name]
            count = param.numel() * matrix.parts // matrix.numel
            if tensors:
                found.append(MatrixState(matrix.name, param, matrix.index, count, tensors))
    return found


def state_shards(optimizer: EPZeroOptimizer) -> list[StateShard]:
    """Returns what this rank owns, without copying anything."""
    shards = []
    for flat_buffer in optimizer.flat_buffers:
        for bucket in flat_buffer.buckets:
            for part in bucket.layout.shard_ranges(flat_buffer.rank):
                views: dict[str, Tensor | StoredState] = {"master": bucket.shard.master[part.where]}
                for kind in flat_buffer.shard_optimizer.state_kinds:
                    views[kind] = stored_part(bucket.shard.state, kind, part.where)
                if bucket.shard.average is not None:
                    views[AVERAGE] = bucket.shard.average[part.where]
                stored = {kind: view for kind, view in views.items() if isinstance(view, StoredState)}
                param = flat_buffer.params[part.name]
                tensors = _DecodedWhenRead(views)
                shards.append(StateShard(part.name, param, part.start, part.stop, tensors, stored))
    return shards


def tensor_states(optimizer: EPZeroOptimizer, *, all_copies: bool) -> list[StateShard]:
    """Returns the states of rows and columns by parameter, see ``EPZeroOptimizer.tensor_states``."""
    found = []
    for flat_buffer in optimizer.flat_buffers:
        tensors = flat_buffer.tensors
        for dim, (kind, state) in enumerate(flat_buffer.tensor_state.items()):
            assert tensors is not None
            start = 0
            for number, (name, param) in enumerate(flat_buffer.params.items()):
                own = [one for one in tensors.tensors if one.name == name]
                stop = start + sum(one.shape[dim] for one in own)
                is_whole = all(one.num_cuts == 1 or one.cut_dim != dim for one in own)
                writes = number % flat_buffer.group_size == flat_buffer.rank and (not is_whole or not tensors.cut_index)
                if (all_copies or writes) and own and (dim == 0 or own[0].is_matrix):
                    whole = _without_dim(param, len(own[0].shape) - dim, own)
                    found.append(StateShard(name, whole, 0, stop - start, {kind: state[start:stop]}))
                start = stop
    return found


def _without_dim(param: nn.Parameter, kept: int, tensors: Sequence[WholeTensor]) -> nn.Parameter:
    """A stand-in for a parameter of whose matrices the rows (``kept`` 2) or columns (1) alone are left, with the marks
    from which checkpoints know what of the whole one it is."""
    is_vector = not tensors[0].is_matrix
    count = [len(tensors)] if param.dim() == 3 else []
    result = nn.Parameter(torch.empty(*count, tensors[0].shape[2 - kept], device="meta"), requires_grad=False)
    for mark in ("expert_ids", "group_name"):
        if hasattr(param, mark):
            setattr(result, mark, getattr(param, mark))
    if hasattr(param, "global_shape"):
        place = len(param.global_shape) - (1 if kept == 2 else 2)  # of the dimension that is dropped

        def drop(values: Any) -> tuple[Any, ...]:
            return tuple(values) if is_vector else (*values[:place], *values[place + 1 :])

        result.global_shape = drop(param.global_shape)  # type: ignore[attr-defined]
        result.global_boxes = tuple(dict.fromkeys(map(drop, param.global_boxes)))  # type: ignore[attr-defined]
    return result


def write_back(shards: Sequence[StateShard]) -> None:
    """Encodes the decoded copies among ``shards`` again."""
    for shard in shards:
        if isinstance(shard.tensors, _DecodedWhenRead):
            for kind, value in shard.tensors.copies.items():
                shard.stored[kind].write(value)


# ---- DeepSpeed's files


def _layout(optimizer: EPZeroOptimizer) -> list[Any]:
    return [
        (
            str(flat_buffer.key),
            [
                (bucket.group_size, bucket.shard_numel, [(p.name, p.start, p.stop, p.offset) for p in bucket.ranges])
                for bucket in flat_buffer.layout.buckets
            ],
        )
        for flat_buffer in optimizer.flat_buffers
    ]


def state_dict(optimizer: EPZeroOptimizer) -> dict[str, Any]:
    """Returns this rank's shards and their layout."""
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {
        "format": _FORMAT,
        "layout": _layout(optimizer),
        "step_count": optimizer.step_count,
        "loss_scale": optimizer.loss_scale_state,
        "param_groups": options,
        "frozen_experts": dict(optimizer.frozen_experts),
        "shards": [
            # A master that is part of the parameters' buffer would be written with all of it. On the host: the copies
            # of all shards are as large as the parameters.
            {
                "master": bucket.shard.master if flat_buffer.has_masters else bucket.shard.master.to("cpu", copy=True),
                **bucket.shard.kept,
            }
            for flat_buffer in optimizer.flat_buffers
            for bucket in flat_buffer.buckets
        ],
        "matrix_states": [dict(one.tensors) for one in matrix_states(optimizer)],
        "tensor_states": [flat_buffer.tensor_state for flat_buffer in optimizer.flat_buffers],
    }


def _state_kinds(optimizer: EPZeroOptimizer) -> list[tuple[str, ...]]:
    """The names of this rank's states: of each bucket, of each whole matrix, of each flat buffer's whole tensors."""
    of_buckets = [bucket.shard.state for flat_buffer in optimizer.flat_buffers for bucket in flat_buffer.buckets]
    of_matrices = [one.tensors for one in matrix_states(optimizer)]
    of_tensors = [flat_buffer.tensor_state for flat_buffer in optimizer.flat_buffers]
    return [tuple(sorted(one)) for one in (*of_buckets, *of_matrices, *of_tensors)]


def _saved_kinds(saved: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """As ``_state_kinds``, of a state dict. Earlier versions wrote no list of states that were all empty."""
    of_buckets = [shard.keys() - {"master", AVERAGE} for shard in saved["shards"]]
    of_tensors = saved.get("tensor_states") or [{}] * len(saved["layout"])
    return [tuple(sorted(one)) for one in (*of_buckets, *saved.get("matrix_states", ()), *of_tensors)]


def has_whole_states(optimizer: EPZeroOptimizer) -> bool:
    """Whether this rank has states of whole matrices or tensors, which DeepSpeed's formats do not know."""
    return bool(matrix_states(optimizer)) or any(flat_buffer.tensor_state for flat_buffer in optimizer.flat_buffers)


def check_state_dict(optimizer: EPZeroOptimizer, saved: Any, load_states: bool) -> None:
    """Raises ValueError if ``saved`` was written at another layout or, with ``load_states``, by another optimizer.

    Local.
    """
    if not isinstance(saved, Mapping) or saved.get("format") != _FORMAT:
        raise ValueError("the checkpoint was not written by this version of EPZeroOptimizer; it cannot be loaded here")
    if saved["layout"] != _layout(optimizer):
        raise ValueError(
            "the checkpoint was written at another parameter, bucket or rank layout; DeepSpeed's files load only at "
            "the layout that wrote them"
        )
    found, kept = _saved_kinds(saved), _state_kinds(optimizer)
    if load_states and found != kept:
        there, here = ("; ".join(sorted({", ".join(one) for one in kinds if one})) for kinds in (found, kept))
        raise ValueError(
            f"the checkpoint holds other optimizer states ({there or 'none'}) than "
            f"{type(optimizer.optimizer).__name__} keeps here ({here or 'none'}); load it with the optimizer and the "
            "state_dtype that wrote it, or use load_optimizer_states=False"
        )
    if missing := optimizer.frozen_experts.keys() - saved.get("frozen_experts", {}).keys():
        raise ValueError(
            f"the checkpoint does not hold the frozen expert {min(missing)!r} of each rank: it was written by an "
            "earlier version of deepspeed_ext, or the expert was trained then; load its weights by your own code"
        )


@torch.no_grad()
def load_masters(optimizer: EPZeroOptimizer, saved: Any, flat_buffers: Collection[FlatBuffer]) -> None:
    """Restores the masters of some flat buffers from a checked state dict, and frozen experts."""
    pairs = [(flat_buffer, bucket) for flat_buffer in optimizer.flat_buffers for bucket in flat_buffer.buckets]
    for (flat_buffer, bucket), shard in zip(pairs, saved["shards"], strict=True):
        if flat_buffer in flat_buffers:
            bucket.shard.master.copy_(shard["master"])
    for name, param in optimizer.frozen_experts.items():
        param.copy_(saved["frozen_experts"][name])


@torch.no_grad()
def load_state_dict(optimizer: EPZeroOptimizer, saved: Any, load_optimizer_states: bool) -> None:
    """Restores masters from a checked state dict, and with ``load_optimizer_states`` states, options and step count."""
    load_masters(optimizer, saved, optimizer.flat_buffers)
    if load_optimizer_states:
        buckets = [bucket for flat_buffer in optimizer.flat_buffers for bucket in flat_buffer.buckets]
        for bucket, shard in zip(buckets, saved["shards"], strict=True):
            for kind, state in bucket.shard.state.items():
                state.copy_(shard[kind])
            if bucket.shard.average is not None:
                bucket.shard.average.copy_(shard.get(AVERAGE, shard["master"]))
        for one, tensors in zip(matrix_states(optimizer), saved.get("matrix_states", []), strict=True):
            for kind, tensor in one.tensors.items():
                tensor.copy_(tensors[kind])
        for flat_buffer, states in zip(optimizer.flat_buffers, saved.get("tensor_states", ()), strict=False):
            for kind, state in flat_buffer.tensor_state.items():
                state.copy_(states[kind])
        for group, options in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group.update(options)
        optimizer.step_count = saved["step_count"]
        optimizer.loss_scale_state = saved.get("loss_scale")
    else:
        optimizer.restart_states()


# ---- DeepSpeed's ZeRO-3


class Stage3States:
    """Reads and writes the AdamW states of an engine with DeepSpeed's ZeRO-3. Every method is local.

    DeepSpeed keeps, for groups of parameters, one flat fp32 tensor of this rank's parts and the optimizer's states of
    the same shape; where a parameter's part lies is in ``grad_position``.

    Args:
        engine: DeepSpeed's.

    Raises:
        ValueError: another optimizer than torch's Adam or AdamW, or states on NVMe.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        basic = self._optimizer.optimizer
        if not isinstance(basic, (torch.optim.Adam, torch.optim.AdamW)):
            raise ValueError(f"checkpoints of ZeRO-3 need torch's Adam or AdamW, not {type(basic).__name__}")
        if self._optimizer.swap_optimizer:
            raise ValueError("checkpoints of ZeRO-3 need the states in device or host memory, not on NVMe")

    def state_shards(self) -> list[StateShard]:
        """Returns what this rank owns, as live views: no padding, nothing of frozen parameters."""
        optimizer = self._optimizer
        shards = []
        for name, param in self._engine.module.named_parameters():
            place = optimizer.grad_position.get(optimizer.get_param_id(param))
            if place is None:  # frozen when the engine was built
                continue
            group, offset, size = place
            start = dist.get_rank(getattr(param, "ds_process_group", optimizer.dp_process_group)) * size
            stop = min(start + size, param.ds_numel)
            if start >= stop:
                continue
            master = optimizer.fp32_partitioned_groups_flat[group]
            flat = {"master": master.detach(), **{kind: self._states(master)[kind] for kind in _STAGE3_KINDS}}
            tensors = {kind: tensor.narrow(0, offset, stop - start) for kind, tensor in flat.items()}
            whole = nn.Parameter(torch.empty(param.ds_shape, dtype=param.dtype, device="meta"), requires_grad=False)
            shards.append(StateShard(name, whole, start, stop, tensors))
        return shards

    def matrix_states(self) -> list[MatrixState]:
        """Returns nothing: AdamW has no states of whole matrices."""
        return []

    def tensor_states(self, *, all_copies: bool) -> list[StateShard]:
        """Returns nothing: all of Adam's states are element-wise."""
        return []

    def restart_states(self) -> None:
        """Does nothing: the states begin with the first step."""

    def restart_average(self) -> None:
        """Does nothing: no moving average is kept."""

    def averaged_parameters(self) -> AbstractContextManager[None]:
        """Does nothing: Adam trains with the weights that it keeps."""
        return nullcontext()

    @property
    def step_count(self) -> int:
        """Optimizer steps applied."""
        return int(self._states(self._optimizer.fp32_partitioned_groups_flat[0])["step"])

    @step_count.setter
    def step_count(self, value: int) -> None:
        for master in self._optimizer.fp32_partitioned_groups_flat:
            self._states(master)["step"].fill_(value)

    def sync_params_from_master(self) -> None:
        """Makes the next forward gather what was written into the masters."""
        optimizer = self._optimizer
        optimizer._partition_all_parameters()  # as its step does: what is whole now would stay as it was
        for group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)

    def _states(self, master: Tensor) -> dict[str, Tensor]:
        """AdamW's, which torch makes in the first step only; a checkpoint may come before."""
        state = self._optimizer.optimizer.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for kind in _STAGE3_KINDS:
                state[kind] = torch.zeros_like(master, requires_grad=False)
        return dict(state)
