"""Counts what optimizers of whole matrices keep with the owners of matrices, and their work: SOAP, Shampoo and others.

A matrix's states and work are those that deepspeed_ext/optimizers declares and does; a test holds the states against
them. The owners of a group's matrices are balanced by cost, so a rank is given its share of the group's sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.optimus.config.costs import FP32, OperationCounts
from megatron.optimus.config.family import ParameterKind, layer_parameters
from megatron.optimus.config.rank_plan import RankPlan
from megatron.optimus.config.schema import OptimizerConfig, OptimizerName, ShampooGraft

# FLOPs of a symmetric eigendecomposition with vectors and of a QR decomposition with Q of a matrix of side n, over n^3.
EIGH, QR = 9.0, 8 / 3


def matrix_state_numel(options: OptimizerConfig, rows: int, columns: int) -> int:
    """Counts the elements of one matrix's fp32 states that its owner keeps."""
    numel, short, long = rows * columns, min(rows, columns), max(rows, columns)
    match options.optimizer:
        case OptimizerName.NORMUON:
            return rows
        case OptimizerName.SOAP:
            return 2 * numel + sum(2 * side * side for side in (rows, columns) if side <= options.soap_max_dim)
        case OptimizerName.SHAMPOO:
            high, wide, count = _blocks(options, rows, columns)
            moments = 2 if options.shampoo_graft is ShampooGraft.RMSPROP else 1
            return moments * numel + 2 * count * (high * high + wide * wide)
        case OptimizerName.GALORE:
            return (short + 2 * long) * min(options.galore_rank, short)
        case OptimizerName.DION:
            return numel + columns * _dion_rank(options, short)
    return 0


def matrix_flops(options: OptimizerConfig, rows: int, columns: int) -> float:
    """Counts the fp32 FLOPs of one matrix's update, those of every n-th step divided by n."""
    numel, short = rows * columns, min(rows, columns)
    match options.optimizer:
        case OptimizerName.SOAP:
            sides = [side for side in (rows, columns) if side <= options.soap_max_dim]
            renewal = sum((2 + QR) * side**3 for side in sides) / options.soap_precondition_frequency
            return sum(8.0 * numel * side for side in sides) + renewal  # a factor, and into its basis twice and back
        case OptimizerName.SHAMPOO:
            high, wide, count = _blocks(options, rows, columns)
            roots = count * (EIGH + 2) * (high**3 + wide**3) / options.shampoo_precondition_frequency
            return 4.0 * numel * (high + wide) + roots
        case OptimizerName.GALORE:
            projector = (2.0 * numel * short + EIGH * short**3) / options.galore_update_proj_gap
            return 4.0 * numel * min(options.galore_rank, short) + projector
        case OptimizerName.DION:
            rank = _dion_rank(options, short)
            return 8.0 * numel * rank + 4.0 * rows * rank * rank
    return 0.0


def matrix_state_bytes(rank: RankPlan) -> int:
    """Counts the bytes of the states of whole matrices that a rank owns."""
    options = rank.config.optimizer
    if not options.optimizer.is_for_matrices:
        return 0
    shares = (-(-count * matrix_state_numel(options, *shape) // ranks) for shape, count, ranks in _matrices(rank))
    return sum(shares) * FP32


def matrix_work(rank: RankPlan) -> OperationCounts:
    """Counts the work of the matrices that a rank owns in one step; Muon's is counted in step_time.py."""
    options = rank.config.optimizer
    shares = list(_matrices(rank))
    flops = sum(count * matrix_flops(options, *shape) / ranks for shape, count, ranks in shares)
    return OperationCounts(wide=flops, memory_bytes=2.0 * matrix_state_bytes(rank))


def _matrices(rank: RankPlan) -> Iterator[tuple[tuple[int, int], int, int]]:
    """(rows, columns), how many of them, and the ranks that own them together, for each kind of whole matrix."""
    layout = rank.layout
    for is_moe, layers in ((True, rank.num_moe_layers), (False, rank.num_dense_layers)):
        for name, spec in layer_parameters(rank.model, is_moe=is_moe).items() if layers else ():
            if spec.kind is not ParameterKind.MATRIX:
                continue
            stacked = 2 if name.endswith("gate_up_weight") else 1
            *leading, rows, columns = spec.shape
            count = layers * stacked * math.prod(leading)
            if spec.is_expert:
                count, ranks = count // layout.ep, layout.edp * layout.etp
            else:
                ranks = layout.dp * layout.cp * (layout.tp if spec.split_dim is not None else 1)
            yield (rows // stacked, columns), count, ranks


def _blocks(options: OptimizerConfig, rows: int, columns: int) -> tuple[int, int, int]:
    high, wide = (min(options.shampoo_block_size, side) for side in (rows, columns))
    return high, wide, -(-rows // high) * -(-columns // wide)


def _dion_rank(options: OptimizerConfig, short: int) -> int:
    return max(1, math.ceil(options.dion_rank_fraction * short))
