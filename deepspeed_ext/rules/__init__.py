"""Update rules: the arithmetic of each optimizer on the shards of deepspeed_ext.zero; base.py has the interface."""

from deepspeed_ext.rules.base import Matrix, RuleOptimizer, Shard, ShardPolicy, StepScalars, UpdateRule, whole_matrices
from deepspeed_ext.rules.select import rule_for

__all__ = [
    "Matrix",
    "RuleOptimizer",
    "Shard",
    "ShardPolicy",
    "StepScalars",
    "UpdateRule",
    "rule_for",
    "whole_matrices",
]
