"""What a conversion is asked to do, and what a destination format answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.shards import ShardItem
from megatron.optimus.convert.source import MOMENTS, WEIGHT, Source
from megatron.optimus.convert.tensor_map import Part, gather
from megatron.optimus.models.parameters import parameter_shapes

DEFAULT_MAX_SHARD_BYTES = 5 * 10**9
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Options:
    """``dtype``: "fp32", "bf16", "source" or None, as stored (masters: in the dtype the run computed with).

    ``names``: of parameters in DeepSpeed's formats, one of ``names.NAMES``. ``tp``, ``pp``, ``ep``: ranks of Megatron's
    files. ``transformer_engine``: Megatron's names for its modules rather than those of the local ones.
    """

    dtype: str | None = None
    tokenizer: Path | None = None
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES
    names: str = "optimus"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    transformer_engine: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in (None, "source", *DTYPES):
            raise CheckpointError(f"--dtype {self.dtype}: must be one of {', '.join(DTYPES)}, source")
        if self.max_shard_bytes < 1:
            raise CheckpointError(f"--max-shard-size: {self.max_shard_bytes} bytes must be at least 1")
        for flag, value in (("tensor", self.tp), ("pipeline", self.pp), ("expert", self.ep)):
            if value < 1:
                raise CheckpointError(f"--target-{flag}-parallel-size {value}: must be at least 1")


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


def written_dtype(source: Source, name: str, kind: str, dtype: str | None) -> torch.dtype:
    """What --dtype asks for; by default as stored, masters in the dtype the run computed with, moments always fp32."""
    stored = source.dtypes[name, kind]
    if dtype == "source" or (dtype is None and kind == WEIGHT) or kind in MOMENTS:
        return stored
    return DTYPES[dtype or source.run.training.params_dtype.value]


def part_items(source: Source, parts: Iterable[Part], kind: str, options: Options) -> list[ShardItem]:
    """The foreign tensors of one kind, each made when its turn has come."""
    shapes = parameter_shapes(source.model)

    def read_range(name: str, start: int, stop: int) -> torch.Tensor:
        return source.read(name, kind, start, stop)

    items = []
    for part in parts:
        name = part.blocks[0].name if part.blocks else "embedding.weight"  # a rank may hold nothing but padding
        dtype = written_dtype(source, name, kind, options.dtype)
        read = partial(gather, part, shapes, read_range, dtype)
        items.append(ShardItem(part.key, dtype, part.shape, read))
    return items
