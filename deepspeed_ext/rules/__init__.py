"""Update rules: the arithmetic of each optimizer on the shards of deepspeed_ext.zero; base.py has the interface."""

from deepspeed_ext.rules.base import (
    MatrixRule,
    RuleOptimizer,
    Shard,
    ShardPolicy,
    StepScalars,
    UpdateRule,
    WholeMatrices,
)
from deepspeed_ext.rules.lion import Lion
from deepspeed_ext.rules.muon import Muon
from deepspeed_ext.rules.select import rule_for

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
