"""Flat buffers on one rank: the parameters, gradients and fp32 masters of a parameter group, cut into buckets.

Sizes, with P parameters in the buffer over n ranks, padding aside: parameters P (the model's dtype; the module's
parameters are views of it), masters P/n fp32, the optimizer's states. fp32 parameters are their own masters: each
shard's master is its part of the parameters. Gradients: stage 1 P in grad_dtype, in which the reduction leaves its
result; stage 2 P/n (the buckets' sums) and the buffers of the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_ext.groups import ZeroGroups, expert_group_name, ranks_of
from deepspeed_ext.optimizers.base import MatrixOptimizer, Shard, ShardOptimizer
from deepspeed_ext.optimizers.whole_tensors import TensorOptimizer, WholeTensors, tensors_of
from deepspeed_ext.zero.bucket import Bucket
from deepspeed_ext.zero.matrix_exchange import MatrixExchange
from deepspeed_ext.zero.matrix_partition import ParamMatrices
from deepspeed_ext.zero.options import ZeroOptions
from deepspeed_ext.zero.partition import BufferLayout, flat_layout

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FlatBufferKey:
    """What the parameters of one flat buffer have in common.

    Attributes:
        param_group: index in the wrapped optimizer's param_groups.
        expert_group: name of the expert group; None: dense.
        dtype: of the parameters.
        is_tensor_replica: the same on all tensor-parallel ranks.
        is_pipe_replica: another pipeline stage counts these parameters in the norm.
        is_pipe_tied: another pipeline stage has a copy.
    """

    param_group: int
    expert_group: str | None
    dtype: torch.dtype
    # Replicated parameters must not share buckets with parts of cut ones: what all ranks repeat has to be summed in the
    # same order everywhere, or the copies drift apart. The same holds for copies on pipeline stages.
    is_tensor_replica: bool = False
    is_pipe_replica: bool = False
    is_pipe_tied: bool = False

    def __str__(self) -> str:
        """Returns the text that identifies the buffer in DeepSpeed's checkpoint files, which must not change."""
        return (
            f"FamilyKey(param_group={self.param_group!r}, expert_group={self.expert_group!r}, dtype={self.dtype!r}, "
            f"is_tensor_replica={self.is_tensor_replica!r}, is_pipe_replica={self.is_pipe_replica!r}, "
            f"is_pipe_tied={self.is_pipe_tied!r})"
        )


class FlatBuffer:
    """Parameters that are updated alike, with their gradients and masters.

    Building it moves the parameters into the buffer; they stay views of it.

    Args:
        key: what the parameters have in common.
        params: the parameters by name.
        layout: where they lie.
        group: the process group over which they are sharded; None: this rank alone.
        shard_optimizer: updates the shards.
        options: the optimizer's.
        matrix_group: over which the parts of cut matrices are brought together, as ``ZeroGroups.matrices``.
        cuts: the ranks among which tensor parallelism has cut each of the parameters; None: they are whole.
    """

    def __init__(
        self,
        key: FlatBufferKey,
        params: Mapping[str, nn.Parameter],
        layout: BufferLayout,
        group: dist.ProcessGroup | None,
        shard_optimizer: ShardOptimizer,
        options: ZeroOptions,
        matrix_group: dist.ProcessGroup | None = None,
        cuts: dist.ProcessGroup | None = None,
    ) -> None:
        self.key = key
        self.group = group
        self.layout = layout
        self.params = dict(params)
        self.shard_optimizer = shard_optimizer
        self.in_norm = True  # False: another rank of the model-parallel group counts these same parameters
        self.rank = ranks_of(group).index(dist.get_rank())
        self.group_size = layout.buckets[0].group_size
        self.exchange: MatrixExchange | None = None
        self.tensors: WholeTensors | None = None
        self.sum_groups: list[dist.ProcessGroup] = []  # over which sums over whole tensors go
        if isinstance(shard_optimizer, MatrixOptimizer):
            self.exchange = self._new_exchange(matrix_group)
        device = next(iter(params.values())).device
        if isinstance(shard_optimizer, TensorOptimizer):
            self.tensors = self._whole_tensors(device, cuts)
            self.sum_groups = [one for one in (group, cuts) if one is not None and len(ranks_of(one)) > 1]
        self.param_buffer = torch.zeros(layout.numel, dtype=key.dtype, device=device)
        # Beside the parameters, which are their own masters otherwise.
        self.has_masters = key.dtype != torch.float32 or bool(shard_optimizer.weight_kinds)
        self.masters = torch.zeros(layout.shard_numel if self.has_masters else 0, dtype=torch.float32, device=device)
        self.grad_buffer: Tensor | None = None
        if options.stage == 1 or self.group_size == 1:
            self.grad_buffer = torch.zeros(layout.numel, dtype=options.grad_dtype, device=device)
        self.ranges = {name: layout.ranges.get(name, []) for name in params}
        self.buckets = self._make_buckets(options)
        self._move_params_into_buffer()
        self.read_masters_from_params()

    def _new_exchange(self, matrix_group: dist.ProcessGroup | None) -> MatrixExchange:
        matrices = {name: param_matrices(name, param) for name, param in self.params.items()}
        parts = max((one.parts for one in matrices.values()), default=1)
        if parts == 1:
            return MatrixExchange(self.layout, matrices, self.rank, self.group)
        ranks = ranks_of(matrix_group)
        if len(ranks) != parts * self.group_size:
            raise ValueError(
                f"parameter {next(iter(matrices))!r} is one of {parts} parts over {self.group_size} data-parallel "
                f"ranks; pass their {parts * self.group_size} ranks in ZeroGroups(matrices=...), which has {len(ranks)}"
            )
        return MatrixExchange(self.layout, matrices, ranks.index(dist.get_rank()), matrix_group)

    def _whole_tensors(self, device: torch.device, cuts: dist.ProcessGroup | None) -> WholeTensors:
        """The tensors of the buffer and where this rank's shards hold them."""
        num_cuts = len(ranks_of(cuts))
        tensors = [
            tensor
            for name, param in self.params.items()
            for tensor in tensors_of(name, param.shape, num_cuts, getattr(param, "partition_dim", None))
        ]
        shards = (
            [(part.name, part.start, part.stop, part.offset) for part in bucket.shard_ranges(self.rank)]
            for bucket in self.layout.buckets
        )
        return WholeTensors(tensors, shards, device, 0 if cuts is None else dist.get_rank(cuts))

    def _make_buckets(self, options: ZeroOptions) -> list[Bucket]:
        buckets, first = [], 0
        for layout in self.layout.buckets:
            whole = slice(layout.start, layout.start + layout.numel)
            param = self.param_buffer[whole]
            own = slice(self.rank * layout.shard_numel, (self.rank + 1) * layout.shard_numel)
            shard = Shard(
                master=self.masters[first : first + layout.shard_numel] if self.has_masters else param[own],
                grad=self.masters.new_empty(0),  # set when the bucket has been reduced
                param=param[own],
            )
            storage = self.grad_buffer[whole] if self.grad_buffer is not None else None
            buckets.append(Bucket(layout, self.group, self.rank, shard, param, storage, options))
            first += layout.shard_numel
        return buckets

    def new_states(self, options: Mapping[str, Any]) -> None:
        """Creates the optimizer's states of this rank's shards; ``options`` is the optimizer's parameter group."""
        for bucket in self.buckets:
            bucket.shard.state = self.shard_optimizer.new_state(bucket.shard, options)
        if self.exchange is not None:
            assert isinstance(self.shard_optimizer, MatrixOptimizer)
            self.exchange.new_states(self.shard_optimizer, options, self.param_buffer.device)
        if self.tensors is not None and isinstance(self.shard_optimizer, TensorOptimizer):
            self.tensors.state = self.shard_optimizer.new_tensor_state(self.tensors, options)

    @property
    def tensor_state(self) -> dict[str, Tensor]:
        """The states of whole tensors, of which every rank of the group has a copy."""
        return {} if self.tensors is None else self.tensors.state

    def state_tensors(self) -> list[Tensor]:
        """Returns all states of the optimizer on this rank."""
        of_shards = [tensor for bucket in self.buckets for tensor in bucket.shard.kept.values()]
        of_matrices = [] if self.exchange is None else self.exchange.state_tensors()
        return of_shards + [tensor for states in of_matrices for tensor in states.values()]

    def slice_of(self, name: str) -> slice:
        """Returns where a parameter lies in the flat buffer."""
        if not self.ranges[name]:  # a parameter without elements
            return slice(0, 0)
        index, part = self.ranges[name][0]
        start = self.layout.buckets[index].start + part.offset
        return slice(start, start + self.params[name].numel())

    @torch.no_grad()
    def _move_params_into_buffer(self) -> None:
        for name, param in self.params.items():
            view = self.param_buffer[self.slice_of(name)].view(param.shape)
            view.copy_(param)
            param.data = view

    @torch.no_grad()
    def read_masters_from_params(self) -> None:
        """Sets the masters to the parameters' present values."""
        for bucket in self.buckets if self.has_masters else ():
            bucket.shard.master.copy_(bucket.shard.param)

    @torch.no_grad()
    def write_params_from_masters(self) -> None:
        """Casts the masters into this rank's part of the parameters; the other parts are not touched."""
        for bucket in self.buckets if self.has_masters else ():
            bucket.shard.param.copy_(bucket.shard.master)

    @torch.no_grad()
    def scale_rows(
        self, bucket: Bucket, scales: Mapping[nn.Parameter, Tensor], skip: Tensor, options: Mapping[str, Any]
    ) -> None:
        """Multiplies this rank's rows of the parameters in ``scales``, as ``scale_rows_after_update`` says.

        ``options`` is the optimizer's parameter group.
        """
        weight_kinds, state = self.shard_optimizer.weight_kinds, bucket.shard.state
        for part in bucket.layout.shard_ranges(self.rank):
            factors_R = scales.get(self.params[part.name])
            if factors_R is None:
                continue
            columns = self.params[part.name].numel() // len(factors_R)
            first, last = part.start // columns, (part.stop - 1) // columns
            factors = torch.where(skip != 0, 1.0, factors_R[first : last + 1]).repeat_interleave(columns)
            for weights in (bucket.shard.master, *(state[kind] for kind in weight_kinds)):
                weights[part.where] *= factors[part.start - first * columns :][: part.numel]
            bucket.shard.param[part.where] = bucket.shard.master[part.where]
        if weight_kinds:
            self.shard_optimizer.write_training_point(bucket.shard, options)

    @torch.no_grad()
    def write_training_point(self, options: Mapping[str, Any]) -> None:
        """Writes what the model is trained with into this rank's part of the parameters."""
        for bucket in self.buckets if self.has_masters else ():
            self.shard_optimizer.write_training_point(bucket.shard, options)

    def memory_bytes(self) -> dict[str, int]:
        """Returns bytes by kind, as ``EPZeroOptimizer.memory_bytes``."""
        full = 0 if self.grad_buffer is None else self.grad_buffer.nbytes
        flat_states = sum(tensor.nbytes for bucket in self.buckets for tensor in bucket.shard.kept.values())
        states = sum(tensor.nbytes for tensor in self.state_tensors())
        shared = sum(tensor.nbytes for tensor in self.tensor_state.values())
        unowned = sum(
            bucket.shard_numel - sum(part.numel for part in bucket.shard_ranges(self.rank))
            for bucket in self.layout.buckets
        )
        kept = self.masters.nbytes + flat_states
        each = self.param_buffer.element_size() + (0 if self.grad_buffer is None else self.grad_buffer.element_size())
        return {
            "parameters": self.param_buffer.nbytes,
            "gradients": full + sum(bucket.gradient_bytes() for bucket in self.buckets),
            "masters": self.masters.nbytes,
            "states": states + shared,
            "padding": self.layout.padding * each + unowned * (kept // self.layout.shard_numel),
        }


def param_matrices(name: str, param: Tensor) -> ParamMatrices:
    """Reads what the matrices of a parameter are from its marks.

    ``stacked_matrices`` says how many matrices lie one below the other. Of one that model-parallel ranks have cut,
    ``partition_dim`` and ``partition_count`` say how, as Megatron's ``partition_stride`` that each of the stacked ones
    was cut. A parameter that is marked ``tensor_model_parallel`` alone has whole matrices (experts on other ranks).

    Raises:
        ValueError: the cut is not along rows or columns, or cuts across stacked matrices.
    """
    stacked = getattr(param, "stacked_matrices", 1)
    parts, dim = getattr(param, "partition_count", 1), getattr(param, "partition_dim", -1)
    if parts == 1:
        return ParamMatrices(param.shape, stacked)
    by_columns = dim == param.dim() - 1
    stride = 1 if by_columns else stacked
    if dim < param.dim() - 2 or getattr(param, "partition_stride", 1) != stride:
        raise ValueError(
            f"parameter {name!r} is cut along dim {dim} with partition_stride={getattr(param, 'partition_stride', 1)}; "
            f"an optimizer of whole matrices needs a cut of rows or columns with stride {stride}"
        )
    return ParamMatrices(param.shape, stacked, parts, by_columns)


def _key(index: int, param: nn.Parameter, groups: ZeroGroups) -> FlatBufferKey:
    """Reads the parameter's marks.

    Tensor-parallel ranks hold different parts of a parameter marked ``tensor_model_parallel = True`` and the same
    values of any other; pipeline stages repeat those marked ``pipe_tied = True``, all but one of which carry
    ``ds_pipe_replicated = True``, as in DeepSpeed.
    """
    repeats = groups.tensor is not None and len(ranks_of(groups.tensor)) > 1
    return FlatBufferKey(
        param_group=index,
        expert_group=expert_group_name(param),
        dtype=param.dtype,
        is_tensor_replica=repeats and not getattr(param, "tensor_model_parallel", False),
        is_pipe_replica=bool(getattr(param, "ds_pipe_replicated", False)),
        is_pipe_tied=bool(getattr(param, "pipe_tied", False)),
    )


def _cutting_group(
    key: FlatBufferKey, params: Mapping[str, nn.Parameter], groups: ZeroGroups
) -> dist.ProcessGroup | None:
    """The ranks among which each parameter of a flat buffer is cut; None where they are whole.

    Experts that tensor-parallel ranks do not share as a whole are marked ``tensor_model_parallel`` too; only those that
    are cut have Megatron's mark ``partition_dim``.
    """
    if key.expert_group is None:
        return None if key.is_tensor_replica else groups.tensor
    is_cut = any(hasattr(param, "partition_dim") for param in params.values())
    return (groups.expert_tensor or groups.tensor) if is_cut else None


def build_flat_buffers(
    param_groups: Sequence[Sequence[nn.Parameter]],
    shard_optimizers: Sequence[ShardOptimizer],
    param_names: Mapping[nn.Parameter, str],
    groups: ZeroGroups,
    options: ZeroOptions,
) -> list[FlatBuffer]:
    """Builds one flat buffer per parameter group x expert group x dtype.

    Parameters that are cut, repeated or tied over model-parallel ranks get flat buffers of their own.

    Args:
        param_groups: the parameters of each of the optimizer's parameter groups.
        shard_optimizers: the update rule of each group.
        param_names: names of all parameters, in the order of the forward.
        groups: the process groups.
        options: the optimizer's.

    Returns:
        The buffers in the order of their first parameters. Inside, parameters are in the opposite of ``param_names``'
        order, in which backward is expected to reach them.

    Raises:
        ValueError: a name that occurs twice, a dtype that is not supported, or an expert group without a process group.
    """
    names = [param_names[param] for members in param_groups for param in members]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"parameter {twice[0]!r} occurs twice; each element needs exactly one owner")
    positions = {param: index for index, param in enumerate(param_names)}
    by_key: dict[FlatBufferKey, dict[str, nn.Parameter]] = {}
    for index, members in enumerate(param_groups):
        for param in sorted(members, key=lambda param: -positions[param]):
            name = param_names[param]
            if param.dtype not in SUPPORTED_DTYPES:
                raise ValueError(f"parameter {name!r} is {param.dtype}; use float32, bfloat16 or float16")
            key = _key(index, param, groups)
            if key.expert_group is not None and key.expert_group not in groups.expert:
                raise ValueError(
                    f"parameter {name!r} is marked as expert of group {key.expert_group!r}, which has no process "
                    f"group; known groups: {sorted(groups.expert)}"
                )
            by_key.setdefault(key, {})[name] = param
    flat_buffers = []
    for key, params in by_key.items():
        shard_optimizer, group = shard_optimizers[key.param_group], groups.of(key.expert_group)
        sizes = [(name, param.numel()) for name, param in params.items()]
        layout = flat_layout(sizes, len(ranks_of(group)), options.bucket_numel)
        flat_buffer = FlatBuffer(
            key,
            params,
            layout,
            group,
            shard_optimizer,
            options,
            groups.matrices.get(key.expert_group),
            _cutting_group(key, params, groups),
        )
        flat_buffer.in_norm = not key.is_pipe_replica and (groups.is_first_tensor_rank or not key.is_tensor_replica)
        flat_buffers.append(flat_buffer)
    return flat_buffers


def norm_groups(groups: ZeroGroups) -> list[dist.ProcessGroup]:
    """Returns the groups over which squares are summed one after the other so that every rank is counted once."""
    if groups.model is None:
        return [groups.dense]
    if dist.get_world_size(groups.dense) * dist.get_world_size(groups.model) == dist.get_world_size():
        assert dist.group.WORLD is not None
        return [dist.group.WORLD]  # together they are all ranks: one reduction
    return [groups.dense, groups.model]
