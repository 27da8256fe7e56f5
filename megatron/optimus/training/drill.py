"""Faults inside a rank, on request of ``optimus drill``: wrong values, a slow rank, a bad disk, lost links, a clock.

``optimus drill`` starts the run with OPTIMUS_DRILL_FOLDER. A rank that finds the file ``rank-<its number>`` there
when a step begins removes it and does what its words say:

    nan                  the output of the first layer with weights is NaN until the process ends
    flip ELEMENT BIT     flips one bit of a master weight
    slow SECONDS STEPS   sleeps in every step
    disk ERRNO           writing to a checkpoint raises OSError of this number; 0: not any more
    cut                  shuts down all TCP connections, to other ranks and to the rendezvous
    clock SECONDS        the time of day jumps by so much, until the process ends

Without the variable nothing is read.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron.optimus.platform import environment, files
from megatron.optimus.training.engine import Engine

_WRITE_AT = files.write_at


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
        if words := self._take():
            kind, *values = words.split()
            if kind == "nan":
                layer = next(one for one in self._model.modules() if list(one.parameters(recurse=False)))
                layer.register_forward_hook(lambda module, inputs, output: output * float("nan"))
            elif kind == "flip":
                self._engine.optimizer.wait_for_params()
                masters = (
                    bucket.shard.master for flat in self._engine.optimizer.flat_buffers for bucket in flat.buckets
                )
                flip_bit(next(one for one in masters if one.numel()), int(values[0]), int(values[1]))
            elif kind == "disk":
                files.write_at = self._failing_write(int(values[0])) if int(values[0]) else _WRITE_AT
            elif kind == "cut":
                cut_connections()
            elif kind == "clock":
                now, jump = time.time, float(values[0])
                time.time = lambda: now() + jump
            else:
                self._pause_seconds, self._slow_steps = float(values[0]), int(values[1])
        if self._slow_steps:
            self._slow_steps -= 1
            time.sleep(self._pause_seconds)

    def _take(self, wanted: str = "") -> str:
        """The words of the file, which is removed first: the next process must not do it again. "": nothing is wanted.

        The thread that saves asks too, for one thing alone.
        """
        assert self._path is not None
        with contextlib.suppress(FileNotFoundError):
            words = self._path.read_text(encoding="utf-8")
            if wanted in ("", words):
                self._path.unlink()
                return words
        return ""

    def _failing_write(self, number: int) -> Callable[..., None]:
        def fail(*args: Any) -> None:
            # Its end may come when there are no more steps: the last save is tried again until it is done.
            if not self._take("disk 0"):
                raise OSError(number, os.strerror(number))
            files.write_at = _WRITE_AT
            _WRITE_AT(*args)

        return fail


def cut_connections() -> None:
    """Shuts down every TCP connection of this process; both ends see that it is lost."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6):
                        one.shutdown(socket.SHUT_RDWR)


def flip_bit(tensor: Tensor, element: int, bit: int) -> None:
    """Flips a bit (0 to 30) of an element of a contiguous fp32 tensor; ``element`` counts modulo its size."""
    bits = tensor.detach().view(-1).view(torch.int32)
    bits[element % bits.numel()] ^= 1 << bit
