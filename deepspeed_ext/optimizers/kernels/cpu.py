"""The element-wise updates on the CPU: torch's operations, piece by piece, so that a piece stays in the cache.

For AdamW with fp32 states torch's fused kernel does the arithmetic, and the bf16 parameter is rounded while the new
master is still in the cache: that runs at the machine's copy bandwidth, and a C++ kernel of our own measured no faster.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepspeed_ext.optimizers import states
from deepspeed_ext.optimizers.base import Shard, StepScalars
from deepspeed_ext.optimizers.kernels import reference
from deepspeed_ext.optimizers.kernels.options import AdamOptions, LionOptions, MomentumOptions, SgdOptions
from deepspeed_ext.optimizers.kernels.reference import apply_update

__all__ = ["adam", "apply_update", "lion", "momentum", "sgd"]

PIECE = 1 << 18  # elements: 4 MiB of master, gradient and moments; a multiple of the 8-bit block


def _pieces(shard: Shard) -> Iterator[tuple[int, Shard]]:
    """Consecutive parts of a shard as shards of their own (views), with their first positions."""
    for first in range(0, shard.master.numel(), PIECE):
        own, blocks = slice(first, first + PIECE), slice(first // states.BLOCK, (first + PIECE) // states.BLOCK)
        state = {
            kind: tensor[blocks if kind.endswith(states.SCALE_SUFFIX) else own] for kind, tensor in shard.state.items()
        }
        yield first, Shard(shard.master[own], shard.grad[own], shard.param[own], state)


def adam(shard: Shard, options: AdamOptions, scalars: StepScalars) -> None:
    """See reference.adam."""
    if scalars.skip.item():
        return
    is_fp32 = shard.state["exp_avg"].dtype == shard.state["exp_avg_sq"].dtype == torch.float32
    fused = torch._fused_adamw_ if options.decoupled else torch._fused_adam_
    for first, piece in _pieces(shard):
        if not is_fp32:
            reference.adam(piece, options, scalars, first)
            continue
        fused(
            [piece.master],
            [piece.grad.float() * scalars.scale],
            [piece.state["exp_avg"]],
            [piece.state["exp_avg_sq"]],
            [],
            [scalars.step],
            lr=options.lr,
            beta1=options.beta1,
            beta2=options.beta2,
            weight_decay=options.weight_decay,
            eps=options.eps,
            amsgrad=False,
            maximize=options.maximize,
        )
        if piece.param.data_ptr() != piece.master.data_ptr():
            piece.param.copy_(piece.master)


def lion(shard: Shard, options: LionOptions, scalars: StepScalars) -> None:
    """See reference.lion."""
    if not scalars.skip.item():
        for first, piece in _pieces(shard):
            reference.lion(piece, options, scalars, first)


def sgd(shard: Shard, options: SgdOptions, scalars: StepScalars) -> None:
    """See reference.sgd."""
    if not scalars.skip.item():
        for first, piece in _pieces(shard):
            reference.sgd(piece, options, scalars, first)


def momentum(shard: Shard, options: MomentumOptions, scalars: StepScalars, update: torch.Tensor) -> None:
    """See reference.momentum."""
    if not scalars.skip.item():
        for first, piece in _pieces(shard):
            reference.momentum(piece, options, scalars, update[first : first + PIECE], first)
