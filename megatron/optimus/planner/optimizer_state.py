"""Counts the bytes that a rank keeps for its parameters: weights, gradients, master weights and optimizer states.

The parameters are those that models/parameters.py declares, cut to the rank. The sharded optimizer lays parameters that
are updated alike into one flat buffer, each at a multiple of ALIGNMENT elements, and pads it to a multiple of its
group's size (deepspeed_ext/zero/partition.py). Tests hold every byte against the real optimizer.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache, cached_property

from megatron.optimus.config.choices import OPTIMIZER_LIBRARY
from megatron.optimus.config.family import ParameterKind
from megatron.optimus.config.parametrization import UpdateScaling
from megatron.optimus.config.rank_plan import RankPlan
from megatron.optimus.config.schema import OptimizerName
from megatron.optimus.models.parameters import RankParameter, rank_parameters
from megatron.optimus.planner.matrix_states import matrix_state_bytes

ALIGNMENT = 256  # elements
DEFAULT_BUCKET = 1 << 26  # elements


@dataclass(frozen=True)
class PlannedFlatBuffer:
    """Parameters that are updated alike, sharded over ``group_size`` ranks."""

    is_expert: bool
    is_matrix: bool  # an optimizer of whole matrices updates them
    group_size: int
    numels: tuple[tuple[int, int], ...]  # (elements, how many such parameters)
    bucket_limit: int
    num_rows_and_columns: int = 0  # of all its matrices

    @cached_property
    def numel(self) -> int:
        """Elements of the buffer, padding included."""
        unit = self.group_size * ALIGNMENT
        used = sum(round_up(numel, ALIGNMENT) * count for numel, count in self.numels)
        return max(unit, round_up(used, unit))

    @property
    def shard(self) -> int:
        """Elements that each rank of the group owns."""
        return self.numel // self.group_size

    @property
    def bucket(self) -> int:
        """Elements of a full bucket."""
        unit = self.group_size * ALIGNMENT
        return round_up(-(-self.numel // -(-self.numel // max(self.bucket_limit, unit))), unit)

    @property
    def num_buckets(self) -> int:
        """Buckets, of which the last may be smaller."""
        return -(-self.numel // self.bucket)


@dataclass(frozen=True)
class StateBytes:
    """Bytes that stay on a rank from the start to the end of training."""

    parameters: int
    gradients: int
    masters: int
    states: int

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return self.parameters + self.gradients + self.masters + self.states


def round_up(value: int, multiple: int) -> int:
    """The next multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


# ---- flat buffers

BufferKey = tuple[bool, bool, bool, bool, bool, UpdateScaling]


def buffer_key(rank: RankPlan, parameter: RankParameter) -> BufferKey:
    """What the parameters of one flat buffer have in common."""
    options = rank.config.optimizer
    is_decayed = {
        ParameterKind.NORM: options.weight_decay_norms,
        ParameterKind.BIAS: options.weight_decay_biases,
        ParameterKind.EMBEDDING: options.weight_decay_embeddings,
        ParameterKind.MATRIX: True,
    }[parameter.kind]
    is_matrix = options.optimizer.is_for_matrices and parameter.kind is ParameterKind.MATRIX
    is_repeated = rank.layout.tp > 1 and not parameter.is_tp_sharded
    return (parameter.is_expert, is_matrix, is_decayed, is_repeated, parameter.is_tied, parameter.scaling)


def flat_buffers_by_key(rank: RankPlan) -> dict[BufferKey, PlannedFlatBuffer]:
    """The flat buffers of a rank, those of experts last."""
    layout = rank.layout
    members: dict[BufferKey, list[tuple[int, int]]] = {}
    sides: dict[BufferKey, int] = {}
    for parameter, count in rank_parameters(rank).items():
        key = buffer_key(rank, parameter)
        members.setdefault(key, []).append((parameter.numel, count))
        sides[key] = sides.get(key, 0) + parameter.num_rows_and_columns * count
    limit = rank.config.optimizer.ddp_bucket_size or DEFAULT_BUCKET
    return {
        key: PlannedFlatBuffer(
            key[0], key[1], layout.edp if key[0] else layout.dp * layout.cp, tuple(numels), limit, sides[key]
        )
        for key, numels in sorted(members.items(), key=lambda item: item[0][0])
    }


def flat_buffers(rank: RankPlan) -> list[PlannedFlatBuffer]:
    """Lists a rank's flat buffers."""
    return list(flat_buffers_by_key(rank).values())


# ---- bytes


def state_bytes(rank: RankPlan, buffer: PlannedFlatBuffer) -> StateBytes:
    """Counts the bytes of one flat buffer, padding included."""
    kept, sent = rank.gradient_element_bytes, rank.sent_gradient_element_bytes
    shard_width = max(kept, sent)
    is_whole = rank.config.optimizer.zero_stage == 1 or buffer.group_size == 1
    gradients = buffer.numel * kept if is_whole else 0
    if buffer.group_size > 1 and (not is_whole or shard_width != kept):
        gradients += buffer.shard * shard_width
    moments = num_moments(rank, buffer) * int(buffer.shard * rank.config.optimizer.optimizer_state_dtype.element_bytes)
    if rank.config.optimizer.optimizer is OptimizerName.ADAFACTOR:
        moments += 4 * buffer.num_rows_and_columns  # on every rank
    if rank.config.optimizer.ema_decay is not None:
        moments += 4 * buffer.shard
    # fp32 parameters are their own, but for schedule-free optimizers, whose masters are another point.
    is_own = rank.element_bytes == 4 and not rank.config.optimizer.optimizer.is_schedule_free
    masters = 0 if is_own else buffer.shard * 4
    return StateBytes(buffer.numel * rank.element_bytes, gradients, masters, moments)


def total_state_bytes(rank: RankPlan) -> StateBytes:
    """Sums the bytes of all flat buffers of a rank, and of the states of the matrices that it owns."""
    each = [state_bytes(rank, buffer) for buffer in flat_buffers(rank)]
    each.append(StateBytes(0, 0, 0, matrix_state_bytes(rank)))
    return StateBytes(*(sum(getattr(one, name) for one in each) for name in StateBytes.__dataclass_fields__))


def num_moments(rank: RankPlan, buffer: PlannedFlatBuffer) -> int:
    """States of an element."""
    options = rank.config.optimizer
    if options.optimizer is OptimizerName.SGD and not options.sgd_momentum:
        return 0
    if options.optimizer.is_of_library:
        return library_states(options.optimizer)
    is_adams = options.optimizer.is_for_matrices and not buffer.is_matrix
    return 2 if is_adams else options.optimizer.num_states


@cache
def library_states(name: OptimizerName) -> int:
    """Counts the tensors that an optimizer of pytorch_optimizer keeps for a parameter, by a step of it.

    Where the package is not installed, or has none of that name, it is ``name.num_states``.
    """
    import torch  # here, because no other plan needs it

    try:
        library = importlib.import_module("pytorch_optimizer")
    except ModuleNotFoundError:
        return name.num_states
    wanted = name.value.removeprefix(OPTIMIZER_LIBRARY).lower()
    kind = next((one for key, one in vars(library).items() if key.lower() == wanted and isinstance(one, type)), None)
    if kind is None:
        return name.num_states
    weight = torch.ones(3)
    weight.grad = torch.ones(3)
    optimizer = kind([weight])
    optimizer.step()
    return sum(getattr(state, "shape", None) == weight.shape for state in optimizer.state[weight].values())


def sent_copies(rank: RankPlan, buffers: list[PlannedFlatBuffer]) -> int:
    """Copies of gradients in the dtype in which they travel, where that is another: kept until the reduction ends."""
    sent = rank.sent_gradient_element_bytes
    if rank.gradient_element_bytes == sent or rank.config.optimizer.zero_stage == 2:
        return 0
    return sum(buffer.numel * sent for buffer in buffers if buffer.group_size > 1)
