# mypy: disable-error-code=no-untyped-def
"""A kernel that holds some of a GPU's multiprocessors while something else is measured, as NCCL's do in training."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WARPS = 32  # of a program: no block of a matrix product finds the registers that it needs beside them


@triton.jit
def _hold(holding_ptr, released_ptr):
    tl.atomic_add(holding_ptr, 1)
    while tl.atomic_add(released_ptr, 0) == 0:
        pass


class Held:
    """Holds ``count`` multiprocessors from ``start`` until the current stream has come to ``release``.

    ``holding`` counts those that it holds.
    """

    def __init__(self, count: int, device: str = "cuda") -> None:
        self.count = count
        self.holding, self.released = torch.zeros(2, 1, dtype=torch.int32, device=device)
        self.side = torch.cuda.Stream()

    def start(self) -> None:
        self.holding.zero_()
        self.released.zero_()
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            _hold[(self.count,)](self.holding, self.released, num_warps=WARPS)

    def release(self) -> None:
        self.released.fill_(1)
