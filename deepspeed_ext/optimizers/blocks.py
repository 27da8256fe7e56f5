"""Updates in plain torch, written for one block of a shard: the base of optimizers without a kernel of their own.

A block is small enough that the temporaries of its update stay in the cache of a CPU, or take little of a GPU's memory.
The base reads states in any dtype as fp32, rounds them when they are written, and keeps a skipped step from changing
anything, so that an optimizer is its formula.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.optimizers import states
from deepspeed_ext.optimizers.base import Shard, ShardOptimizer, StepScalars

CPU_BLOCK = 1 << 17  # elements: half a megabyte a tensor
DEVICE_BLOCK = 1 << 23  # large enough that launching kernels costs little, 32 MB a temporary
_STREAM = 1 << 24  # further random bits are those of a step as far away


def block_numel(device: torch.device) -> int:
    """Returns the elements of a block on a device, a multiple of the 8-bit states' blocks."""
    return CPU_BLOCK if device.type == "cpu" else DEVICE_BLOCK


@dataclass
class ShardBlock:
    """A part of a shard in a step. What it reads is fp32 [n]; what it writes changes nothing in a skipped step.

    Attributes:
        shard: views of the part.
        first: position of its first element in the rank's shard.
        scalars: of the step.
        kinds: the optimizer's states, by whose order random bits are dealt.
        maximize: ascend: gradients have the opposite sign.
    """

    shard: Shard
    first: int
    scalars: StepScalars
    kinds: Sequence[str] = ()
    maximize: bool = False
    _bits: dict[int, Tensor] = field(default_factory=dict, init=False)  # of the stream written last, for two states

    @property
    def where(self) -> slice:
        """The block's elements in the shard."""
        return slice(self.first, self.first + self.shard.master.numel())

    @property
    def master(self) -> Tensor:
        """The master weights: the live tensor, to be read."""
        return self.shard.master

    def gradient(self) -> Tensor:
        """Returns the gradient, averaged and clipped."""
        scale = -self.scalars.scale if self.maximize else self.scalars.scale
        return self.shard.grad.float() * scale

    def read(self, kind: str) -> Tensor:
        """Returns a state: the live tensor if it is kept in fp32, which must not be changed in place."""
        return states.read(self.shard.state, kind)

    def write(self, kind: str, value: Tensor) -> None:
        """Stores a state, rounded stochastically if it is kept in fewer bits."""
        stored, scale = self.shard.state[kind], None
        if stored.dtype != torch.float32:
            stream, half = divmod(self.kinds.index(kind), 2)
            if stream not in self._bits:
                step = self.scalars.step + stream * _STREAM
                self._bits = {stream: states.random_bits(self.first, value.numel(), step)}
            bits = self._bits[stream] >> 16 if half else self._bits[stream] & 0xFFFF
            if stored.dtype == torch.bfloat16:
                value = states.round_to_bf16(value, bits)
            else:
                value, scale = states.encode(value, signed=stored.dtype == torch.int8, bits=bits)
        self._store(stored, value)
        if scale is not None:
            self._store(self.shard.state[kind + states.SCALE_SUFFIX], scale)

    def write_weights(self, master: Tensor, param: Tensor | None = None) -> None:
        """Stores new master weights and the parameters: their copy, or ``param`` where the model computes elsewhere."""
        self._store(self.shard.master, master)
        if self.shard.param.data_ptr() != self.shard.master.data_ptr():
            self._store(self.shard.param, master if param is None else param)

    def _store(self, target: Tensor, value: Tensor) -> None:
        target.copy_(torch.where(self.scalars.skip != 0, target, value.to(target.dtype)))


def blocks_of(shard: Shard, kinds: Sequence[str], scalars: StepScalars, maximize: bool = False) -> Iterator[ShardBlock]:
    """Yields the blocks of a shard one after the other; none on a CPU in a skipped step.

    Args:
        shard: of which views are given; its states have the shard's length.
        kinds: names of the optimizer's states.
        scalars: of the step.
        maximize: ascend instead of descend.
    """
    if scalars.skip.device.type == "cpu" and scalars.skip.item():
        return
    numel = block_numel(shard.master.device)
    for first in range(0, shard.master.numel(), numel):
        part = slice(first, first + numel)
        scales = slice(first // states.BLOCK, (first + numel) // states.BLOCK)
        state = {
            key: tensor[scales if key.endswith(states.SCALE_SUFFIX) else part] for key, tensor in shard.state.items()
        }
        yield ShardBlock(
            Shard(shard.master[part], shard.grad[part], shard.param[part], state), first, scalars, kinds, maximize
        )


class BlockOptimizer(ShardOptimizer):
    """Base of element-wise optimizers in plain torch: ``update_block`` is the formula."""

    def update_(self, shard: Shard, options: Mapping[str, Any], scalars: StepScalars) -> None:
        """See ShardOptimizer.update_."""
        for block in blocks_of(shard, self.state_kinds, scalars, bool(options.get("maximize"))):
            self.update_block(block, options)

    @abstractmethod
    def update_block(self, block: ShardBlock, options: Mapping[str, Any]) -> None:
        """Takes one step on a block: reads gradient, master weights and states, and writes them anew.

        Args:
            block: part of a shard.
            options: the parameter group.
        """


def wide_dtype(device: torch.device) -> torch.dtype:
    """Returns fp64, or fp32 on a device without it."""
    return torch.float32 if device.type == "mps" else torch.float64


def bias_correction(beta: float | Tensor, step: Tensor) -> Tensor:
    """Returns 1 - beta^step in fp32, computed in fp64 where the device has it; ``beta``: one or several."""
    return (1 - torch.pow(beta, step.to(wide_dtype(step.device)))).float()


def check_options(lr: float, weight_decay: float, betas: Sequence[float] = (), **not_negative: float) -> None:
    """Raises ValueError where lr, weight decay or another option is negative, or a decay rate not in [0, 1)."""
    for name, value in {"lr": lr, "weight_decay": weight_decay, **not_negative}.items():
        if not value >= 0:
            raise ValueError(f"{name}={value} must not be negative")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={tuple(betas)} are out of range; use 0 <= beta < 1")
