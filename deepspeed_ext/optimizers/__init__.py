"""Update rules: the arithmetic of each optimizer on the shards of deepspeed_ext.zero; base.py has the interface."""

from deepspeed_ext.optimizers.base import (
    MatrixOptimizer,
    Shard,
    ShardableOptimizer,
    ShardOptimizer,
    ShardPolicy,
    StepScalars,
    WholeMatrices,
)
from deepspeed_ext.optimizers.lion import Lion
from deepspeed_ext.optimizers.muon import Muon
from deepspeed_ext.optimizers.select import shard_optimizer_for

__all__ = [
    "Lion",
    "MatrixOptimizer",
    "Muon",
    "Shard",
    "ShardOptimizer",
    "ShardPolicy",
    "ShardableOptimizer",
    "StepScalars",
    "WholeMatrices",
    "shard_optimizer_for",
]
