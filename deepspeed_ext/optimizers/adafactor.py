"""Adafactor (Shazeer and Stern 2018, arXiv 1804.04235): second moments as one number a row and one a column.

The update is torch.optim.Adafactor's. Row and column means are of whole matrices: every rank adds up its part, one
reduction makes them whole, and all ranks that share a flat buffer keep the same copy, which is too small to shard. A
vector keeps its second moment as it is, as a matrix with one column.

Shapes: T tensors, R rows of all of them, C columns of all of them, on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from deepspeed_ext.optimizers.base import Shard, ShardableOptimizer, StepScalars
from deepspeed_ext.optimizers.blocks import check_options
from deepspeed_ext.optimizers.whole_tensors import (
    Rounds,
    TensorBlock,
    TensorOptimizer,
    TensorRun,
    WholeTensors,
    wide_dtype,
)

ROW, COLUMN = "exp_avg_sq_row", "exp_avg_sq_col"


class _Factors:
    """Where rows and columns of a flat buffer's tensors are among all of them, and in what is summed over ranks.

    Tensor-parallel ranks sum over the dimension that is cut; the other one's numbers differ from rank to rank, so each
    has slots of its own in the sum.
    """

    def __init__(self, tensors: WholeTensors) -> None:
        self.tensors, self.sizes = tensors.tensors, ([0], [0])
        slots: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.num_slots = [0, 0]
        for one in self.tensors:
            if one.num_cuts > 1 and one.cut_dim is None:
                raise ValueError(
                    f"parameter {one.name!r} is cut by tensor parallelism and has no partition_dim, which Adafactor "
                    "needs to know which of its dimensions is whole"
                )
            for dim, length in enumerate(one.shape):
                is_cut = one.num_cuts > 1 and one.cut_dim == dim
                first = self.num_slots[dim] + (tensors.cut_index * length if is_cut else 0)
                slots[dim].append(torch.arange(first, first + length, device=tensors.device))
                self.num_slots[dim] += length * (one.num_cuts if is_cut else 1)
                self.sizes[dim].append(self.sizes[dim][-1] + length)
        self.slots = [torch.cat(parts) for parts in slots]
        whole = [
            [n * (one.num_cuts if one.cut_dim == d else 1) for d, n in enumerate(one.shape)] for one in self.tensors
        ]
        lengths = [torch.tensor([one.shape[dim] for one in self.tensors], device=tensors.device) for dim in (0, 1)]

        def spread(numbers_T: Tensor, dim: int) -> Tensor:
            """A tensor's number for each of its rows (0) or columns (1)."""
            return numbers_T.repeat_interleave(lengths[dim], output_size=self.sizes[dim][-1])

        # What a row's sum is divided by is the number of columns.
        others = [torch.tensor([float(shape[1 - dim]) for shape in whole], device=tensors.device) for dim in (0, 1)]
        self.divisors = [spread(other_T, dim) for dim, other_T in enumerate(others)]
        numbers = torch.arange(len(self.tensors), device=tensors.device)
        self.owner_of_row_R, self.owner_of_column_C = (spread(numbers, dim) for dim in (0, 1))
        self.lengths = [length.to(torch.float32) for length in lengths]
        self.cut_rows_T = torch.tensor(
            [one.num_cuts > 1 and one.cut_dim == 0 for one in self.tensors], device=tensors.device
        )

    def rectangles(self, runs: Sequence[TensorRun]) -> Iterator[tuple[slice, tuple[int, int, int], slice, slice]]:
        """Yields the elements of a block as [B, K, W]: K rows of W columns, of B tensors; and which rows and columns
        these are."""
        for run in runs:
            rows, columns = self.tensors[run.first].shape
            row, column = (sizes[run.first] for sizes in self.sizes)
            if run.count > 1 or run.length == rows * columns:
                last_row, last_column = row + run.count * rows, column + run.count * columns
                yield run.where, (run.count, rows, columns), slice(row, last_row), slice(column, last_column)
                continue
            at, offset, end = run.start, run.offset, run.offset + run.length
            while offset < end:
                k, first = divmod(offset, columns)
                width = min(columns - first, end - offset) if first or end - offset < columns else columns
                height = max(1, (end - offset) // columns) if first == 0 else 1
                count = height * width
                where = slice(at, at + count)
                here = slice(column + first, column + first + width)
                yield where, (1, height, width), slice(row + k, row + k + height), here
                at, offset = at + count, offset + count

    def add(self, runs: Sequence[TensorRun], values_n: Tensor, rows_R: Tensor, columns_C: Tensor) -> None:
        """Adds a block's values to the sums of their rows and columns."""
        for where, shape, rows, columns in self.rectangles(runs):
            part = values_n[where].view(shape)
            rows_R[rows] += part.sum(dim=2).flatten()
            columns_C[columns] += part.sum(dim=1).flatten()

    def product(self, runs: Sequence[TensorRun], rows_R: Tensor, columns_C: Tensor, like_n: Tensor) -> Tensor:
        """Returns row's times column's number for every element of a block; 1 for padding."""
        result = torch.ones_like(like_n)
        for where, (batch, height, width), rows, columns in self.rectangles(runs):
            outer = rows_R[rows].view(batch, height, 1) * columns_C[columns].view(batch, 1, width)
            result[where] = outer.flatten()
        return result


class ShardAdafactor(TensorOptimizer):
    """Options of a parameter group: lr, beta2_decay, eps, clip_threshold, weight_decay (decoupled), maximize."""

    tensor_kinds = (ROW, COLUMN)

    def __init__(self) -> None:
        self._factors: WeakKeyDictionary[WholeTensors, _Factors] = WeakKeyDictionary()

    def new_tensor_state(self, tensors: WholeTensors, options: Mapping[str, Any]) -> dict[str, Tensor]:
        """See TensorOptimizer.new_tensor_state. Raises ValueError for states below fp32."""
        if options.get("state_dtype", "fp32") != "fp32":
            raise ValueError(f"state_dtype={options['state_dtype']!r}: Adafactor's states are small, and stay in fp32")
        sizes = self._factors_of(tensors).sizes
        return {
            kind: torch.zeros(size[-1], device=tensors.device) for kind, size in zip((ROW, COLUMN), sizes, strict=True)
        }

    def _factors_of(self, tensors: WholeTensors) -> _Factors:
        if tensors not in self._factors:
            self._factors[tensors] = _Factors(tensors)
        return self._factors[tensors]

    def update_tensors_(
        self, shards: Sequence[Shard], tensors: WholeTensors, options: Mapping[str, Any], scalars: StepScalars
    ) -> Rounds:
        """See TensorOptimizer.update_tensors_."""
        factors, wide = self._factors_of(tensors), wide_dtype(tensors.device)
        row_R, column_C = tensors.state[ROW], tensors.state[COLUMN]
        rows_R, columns_C = (torch.zeros(len(one), dtype=wide, device=tensors.device) for one in (row_R, column_C))
        weights_T = tensors.zeros()
        for block in tensors.blocks(shards, (), scalars):
            factors.add(block.runs, block.gradient().square(), rows_R, columns_C)
            block.sum_into(weights_T, block.master.square())
        slots = [torch.zeros(number, dtype=wide, device=tensors.device) for number in factors.num_slots]
        for target, index, sums in zip(slots, factors.slots, (rows_R, columns_C), strict=True):
            target[index] = sums
        own = torch.cat([*slots, weights_T])
        sums = yield own
        *slots_now, weights_T = sums.split([*factors.num_slots, len(weights_T)])
        rate = scalars.step ** options["beta2_decay"]
        for state, number, index, divisor in zip(
            (row_R, column_C), slots_now, factors.slots, factors.divisors, strict=True
        ):
            mean = (number[index] / divisor).float()
            state.copy_(torch.where(scalars.skip != 0, state, torch.lerp(state, mean, rate)))

        # The mean of all rows' numbers is that of all columns': taken where this rank has all of them.
        of_rows_T = tensors.zeros().index_add_(0, factors.owner_of_row_R, row_R.to(wide)) / factors.lengths[0]
        of_columns_T = tensors.zeros().index_add_(0, factors.owner_of_column_C, column_C.to(wide)) / factors.lengths[1]
        eps1 = options["eps"][0] or torch.finfo(torch.float32).eps
        means_T = torch.where(factors.cut_rows_T, of_columns_T, of_rows_T).float().clamp(min=eps1)
        is_matrix_C = tensors.is_matrix_T[factors.owner_of_column_C]
        scaled_C = torch.where(is_matrix_C, column_C / means_T[factors.owner_of_column_C], 1.0)

        own = tensors.zeros()
        for block in tensors.blocks(shards, (), scalars, options["maximize"]):
            block.sum_into(own, self._update(block, factors, row_R, scaled_C, eps1).square())
        lengths_T = yield own
        root_T = tensors.numels_T.to(wide).sqrt()
        rho = torch.minimum(scalars.step**-0.5, torch.full_like(scalars.step, options["lr"]))
        sizes_T = (weights_T.sqrt() / root_T).clamp(min=options["eps"][1]) * rho
        steps_T = sizes_T / (lengths_T.sqrt() / (root_T * options["clip_threshold"])).clamp(min=1.0)
        decay = 1 - options["lr"] * options["weight_decay"]
        for block in tensors.blocks(shards, (), scalars, options["maximize"]):
            update = self._update(block, factors, row_R, scaled_C, eps1)
            block.write_weights(block.master * decay - block.spread(steps_T) * update)

    @staticmethod
    def _update(block: TensorBlock, factors: _Factors, row_R: Tensor, scaled_C: Tensor, eps1: float) -> Tensor:
        variance = factors.product(block.runs, row_R, scaled_C, block.master)
        return block.gradient() * variance.clamp(min=eps1**2).rsqrt()


class Adafactor(ShardableOptimizer):
    """Adafactor as torch.optim.Adafactor computes it: no momentum, steps relative to the weights' size.

    Args:
        params: parameters, or parameter groups.
        lr: largest relative step; at step t it is at most 1 / sqrt(t).
        beta2_decay: the second moment's decay rate at step t is 1 - t^beta2_decay.
        eps: least root of a second moment (None: fp32's precision), and least size of weights.
        weight_decay: decoupled.
        clip_threshold: largest root mean square of an update before it is scaled.
        maximize: ascend instead of descend.
        state_dtype: "fp32".

    Raises:
        ValueError: an option is out of range.
    """

    rule = ShardAdafactor

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        weight_decay: float = 0.0,
        clip_threshold: float = 1.0,
        *,
        maximize: bool = False,
        state_dtype: str = "fp32",
    ) -> None:
        check_options(lr, weight_decay, least_size=eps[1], clip_threshold=clip_threshold)
        if not beta2_decay <= 0:
            raise ValueError(f"beta2_decay={beta2_decay} must be 0 or less")
        options = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "weight_decay": weight_decay}
        options |= {"clip_threshold": clip_threshold, "maximize": maximize, "state_dtype": state_dtype}
        super().__init__(params, options)
