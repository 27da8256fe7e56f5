"""DeepSpeed's engine with an expert-parallel-aware ZeRO-1 optimizer; usable with any model, see README.md."""

from deepspeed_ext.engine import EPEngine
from deepspeed_ext.groups import ZeroGroups, init_distributed, shutdown
from deepspeed_ext.initialize import initialize
from deepspeed_ext.rules import Lion, Muon
from deepspeed_ext.zero.optimizer import EPZeroOptimizer, StateShard

__all__ = [
    "EPEngine",
    "EPZeroOptimizer",
    "Lion",
    "Muon",
    "StateShard",
    "ZeroGroups",
    "init_distributed",
    "initialize",
    "shutdown",
]
