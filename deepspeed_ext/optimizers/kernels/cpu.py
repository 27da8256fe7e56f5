"""The element-wise updates on the CPU: torch's operations on one cache-sized chunk after the other.

AdamW with fp32 states uses torch's fused kernel, and the bf16 parameter is rounded while the new master is still in the
cache. This runs at the machine's copy bandwidth; a C++ kernel of our own measured no faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from deepspeed_ext.optimizers import states
from deepspeed_ext.optimizers.base import Shard, StepScalars
from deepspeed_ext.optimizers.kernels import reference
from deepspeed_ext.optimizers.kernels.options import AdamOptions, LionOptions, MomentumOptions, SGDOptions
from deepspeed_ext.optimizers.kernels.reference import apply_update

__all__ = ["adam", "apply_update", "lion", "momentum", "sgd"]

CHUNK = 1 << 18  # elements: 4 MiB of master, gradient and moments; a multiple of the 8-bit block

_Options = TypeVar("_Options", LionOptions, SGDOptions)


def _chunks(shard: Shard) -> Iterator[tuple[int, Shard]]:
    """Yields consecutive chunks of a shard as shards of their own (views), with the position of their first element."""
    for first in range(0, shard.master.numel(), CHUNK):
        part, blocks = slice(first, first + CHUNK), slice(first // states.BLOCK, (first + CHUNK) // states.BLOCK)
        state = {
            kind: tensor[blocks if kind.endswith(states.SCALE_SUFFIX) else part] for kind, tensor in shard.state.items()
        }
        yield first, Shard(shard.master[part], shard.grad[part], shard.param[part], state)


def adam(shard: Shard, options: AdamOptions, scalars: StepScalars) -> None:
    """See reference.adam."""
    if scalars.skip.item():
        return
    is_fp32 = shard.state["exp_avg"].dtype == shard.state["exp_avg_sq"].dtype == torch.float32
    fused = torch._fused_adamw_ if options.decoupled_weight_decay else torch._fused_adam_
    for first, chunk in _chunks(shard):
        if not is_fp32:
            reference.adam(chunk, options, scalars, first)
            continue
        fused(
            [chunk.master],
            [chunk.grad.float() * scalars.scale],
            [chunk.state["exp_avg"]],
            [chunk.state["exp_avg_sq"]],
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
        if chunk.param.data_ptr() != chunk.master.data_ptr():
            chunk.param.copy_(chunk.master)


def _in_chunks(
    update: Callable[[Shard, _Options, StepScalars, int], None],
) -> Callable[[Shard, _Options, StepScalars], None]:
    """Makes a function of reference.py work on chunks."""

    def update_chunks(shard: Shard, options: _Options, scalars: StepScalars) -> None:
        if not scalars.skip.item():
            for first, chunk in _chunks(shard):
                update(chunk, options, scalars, first)

    return update_chunks


lion = _in_chunks(reference.lion)
sgd = _in_chunks(reference.sgd)


def momentum(shard: Shard, options: MomentumOptions, scalars: StepScalars, update: torch.Tensor) -> None:
    """See reference.momentum."""
    if not scalars.skip.item():
        for first, chunk in _chunks(shard):
            reference.momentum(chunk, options, scalars, update[first : first + CHUNK], first)
