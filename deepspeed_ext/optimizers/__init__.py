"""Update rules: the arithmetic of each optimizer on the shards of deepspeed_ext.zero; base.py has the interface."""

from deepspeed_ext.optimizers.base import (
    MatrixRule,
    RuleOptimizer,
    Shard,
    ShardPolicy,
    StepScalars,
    UpdateRule,
    WholeMatrices,
)
from deepspeed_ext.optimizers.lion import Lion
from deepspeed_ext.optimizers.muon import Muon
from deepspeed_ext.optimizers.select import rule_for

__all__ = [
    "Lion",
    "MatrixRule",
    "Muon",
    "RuleOptimizer",
    "Shard",
    "ShardPolicy",
    "StepScalars",
    "UpdateRule",
    "WholeMatrices",
    "rule_for",
]
