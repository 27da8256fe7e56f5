"""What a conversion is asked to do, and what a destination format answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.optimus.checkpoint.convert.source import Source

DEFAULT_MAX_SHARD_BYTES = 5 * 10**9
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Options:
    """``dtype``: "fp32", "bf16", "source" or None, as stored (masters: in the dtype the run computed with)."""

    dtype: str | None = None
    tokenizer: Path | None = None
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES


@dataclass(frozen=True)
class Written:
    """One tensor of the destination."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """``write`` fills an empty folder; ``open`` reads it back, for the comparison."""

    tensors: list[Written]
    write: Callable[[Path], None]
    open: Callable[[Path], Source]
