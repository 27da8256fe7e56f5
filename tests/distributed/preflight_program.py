"""``optimus preflight`` as ranks of which some have faults, named by the first word of the command line."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence

import torch

from megatron.optimus.commands import preflight
from megatron.optimus.platform import device_checks


def main(argv: Sequence[str]) -> int:
    device_checks._SECONDS = 0.05
    preflight.FILE_BYTES = 1 << 16
    faults, *words = argv
    if faults == "faults":
        rank = int(os.environ["RANK"])
        if rank == 1:
            _wrong_product()
            preflight.__version__ = "0.0.1"
        if rank == 2:
            now = time.time
            time.time = lambda: now() + 5.0  # type: ignore[assignment]
        if rank == 0:
            usage = shutil.disk_usage
            shutil.disk_usage = lambda path: usage(path)._replace(free=1 << 20)  # type: ignore[assignment]
    return preflight.main(words)


def _wrong_product() -> None:
    """One number of every product is wrong by one, as a stuck multiplier makes it."""
    right = torch.mm

    def wrong(*operands: torch.Tensor) -> torch.Tensor:
        product = right(*operands)
        product[7, 3] += 1
        return product

    torch.mm = wrong  # type: ignore[assignment]
