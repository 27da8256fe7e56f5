"""What every part of a run needs to know about it, built once and passed as one argument."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron.optimus.config.schema import ParallelConfig, Precision, RunConfig
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.platform.ranks import Ranks
from megatron.optimus.platform.startup import StartupClock

DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP32: torch.float32}


@dataclass(frozen=True)
class RunContext:
    """A run as one rank sees it."""

    config: RunConfig
    mesh: Mesh
    device: torch.device  # of this rank
    ranks: Ranks  # all ranks of the run, for errors and small messages
    startup: StartupClock = field(default_factory=StartupClock, compare=False)  # of what comes before the first step
    tokenizer: dict[str, Any] | None = None  # fields of its identity (data/tokenize), as checkpoints record it

    @classmethod
    def of(cls, config: RunConfig, mesh: Mesh, device: torch.device) -> RunContext:
        """The context of all ranks of the process group, or of this process alone where there is no group."""
        return cls(config, mesh, device, Ranks(None, device))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and activations."""
        return DTYPES[self.config.training.params_dtype]

    def with_parallel(self, parallel: ParallelConfig) -> RunContext:
        """The same run with other options of the section ``parallel``."""
        return replace(self, config=replace(self.config, parallel=parallel))
