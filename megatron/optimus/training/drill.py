"""Faults inside a rank, on request of ``optimus drill``: a value that is not finite, a flipped bit, a slow rank.

``optimus drill`` starts the run with OPTIMUS_DRILL_FOLDER. A rank that finds the file ``rank-<its number>`` there
when a step begins removes it and does what its words say:

    nan                  the output of the first layer with weights is NaN until the process ends
    flip ELEMENT BIT     flips one bit of a master weight
    slow SECONDS STEPS   sleeps in every step

Without the variable nothing is read.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from megatron.optimus.platform import environment
from megatron.optimus.training.engine import Engine


class DrillFaults:
    """The faults of this rank."""

    def __init__(self, rank: int, model: nn.Module, engine: Engine) -> None:
        folder = environment.drill_folder()
        self._path = None if folder is None else folder / f"rank-{rank}"
        self._model, self._engine = model, engine
        self._pause_seconds, self._slow_steps = 0.0, 0

    def begin_step(self) -> None:
        """Does what is asked for. Call at the beginning of every step."""
        if self._path is None:
            return
        if self._path.exists():
            kind, *values = self._path.read_text(encoding="utf-8").split()
            self._path.unlink()  # before the fault: the next process must not do it again
            if kind == "nan":
                layer = next(one for one in self._model.modules() if list(one.parameters(recurse=False)))
                layer.register_forward_hook(lambda module, inputs, output: output * float("nan"))
            elif kind == "flip":
                masters = (
                    bucket.shard.master for flat in self._engine.optimizer.flat_buffers for bucket in flat.buckets
                )
                flip_bit(next(one for one in masters if one.numel()), int(values[0]), int(values[1]))
            else:
                self._pause_seconds, self._slow_steps = float(values[0]), int(values[1])
        if self._slow_steps:
            self._slow_steps -= 1
            time.sleep(self._pause_seconds)


def flip_bit(tensor: Tensor, element: int, bit: int) -> None:
    """Flips a bit (0 to 30) of an element of a contiguous fp32 tensor; ``element`` counts modulo its size."""
    bits = tensor.detach().view(-1).view(torch.int32)
    bits[element % bits.numel()] ^= 1 << bit
