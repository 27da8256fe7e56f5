"""The gradient's noise, measured in the passes of a step (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1).

A step's gradient is the mean over K units of equally many samples: a unit is what one rank computes between two
reductions, or in the first micro-batch of those that it accumulates. With s the squared norm of a unit's gradient and g
that of the mean, (K g - s) / (K - 1) is an unbiased estimate of |G|^2, the squared norm of the true gradient, and
(s - g) / (K - 1) one of tr(Sigma) / B, the noise of a batch of B samples. Both are linear in s and g, so parameters of
different K (experts have other replicas than the rest) are added up. The simple noise scale is tr(Sigma) / |G|^2, the
ratio of the two times B, and needs averages over steps of both.

Of every rank one unit is measured, by reading its gradients once more; g comes from the reduced shards. The sums travel
in the all-reduce of the gradient norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepspeed_ext.zero.grad_scaling import total_of_squares

if TYPE_CHECKING:
    from deepspeed_ext.zero.bucket import Bucket
    from deepspeed_ext.zero.flat_buffer import FlatBuffer

# Rows of what is measured: an optimizer of matrices (Muon) has the matrices that are no experts' in a row of their own.
GROUPS = ("dense", "matrices", "experts")


class GradientUnit:
    """The squared norm of the first unit's gradient in one bucket on this rank, and what counts the units."""

    __slots__ = ("_is_launch", "_launches", "_squares")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Starts a new step."""
        self._squares: Tensor | None = None
        self._is_launch, self._launches = False, 0

    def measure_backward(self, parts: Sequence[Tensor]) -> None:
        """Reads the gradients that one backward has left, where nothing was measured before; it reduced nothing."""
        if self._squares is None:
            self._squares = total_of_squares(parts, parts[0].device)

    def measure_launch(self, parts: Sequence[Tensor]) -> None:
        """Reads the gradients that are about to be reduced, where nothing was measured before."""
        self._launches += 1
        if self._squares is None:
            self._squares, self._is_launch = total_of_squares(parts, parts[0].device), True

    def result(self, num_backwards: int) -> tuple[Tensor, int] | None:
        """Returns the squared norm, fp64 [1], and the units of the step on this rank; None without a measurement."""
        if self._squares is None:
            return None
        return self._squares, self._launches if self._is_launch else num_backwards


def partial_sums(
    flat_buffers: Sequence[FlatBuffer],
    units: Mapping[Bucket, tuple[Tensor, int]],
    param_groups: Sequence[Mapping[str, Any]],
    device: torch.device,
) -> Tensor:
    """Returns this rank's part of |G|^2 and of tr(Sigma) / B for each of GROUPS, fp64 of shape [2 * len(GROUPS)].

    Summed over all ranks and divided by the squared gradient divisor they are the estimates of the step; both are zero
    where nothing could be measured, since a step has one unit only. Weights that pipeline stages share are left out.
    """
    total = total_of_squares([], device)
    rows = total.new_zeros(len(GROUPS), 2)
    for flat_buffer in flat_buffers:
        key = flat_buffer.key
        if key.is_pipe_tied or not flat_buffer.in_norm:
            continue
        is_matrix = bool(param_groups[key.param_group].get("use_muon", False))
        row = rows[2 if key.expert_group is not None else int(is_matrix)]
        for bucket in flat_buffer.buckets:
            squares, per_rank = units.get(bucket, (total, 1))
            count = per_rank * flat_buffer.group_size
            if count == 1:
                continue
            # A unit's gradient is one of ``count`` addends of the sum; every rank of the group has measured one unit.
            unit = squares[0] * (count**2 / flat_buffer.group_size)
            mean = total_of_squares([bucket.shard.grad], device)[0]
            row += torch.stack([count * mean - unit, unit - mean]) / (count - 1)
    return rows.view(-1)
