"""One named grid of ranks with two views of it.

Dense view, outermost axis first: (pp, dp, cp, tp). Expert view of the same ranks: (pp, edp, ep). Inside a pipeline
stage, the dp*cp*tp ranks in order are cut into consecutive runs of ``ep`` ranks: the run shares the experts of a layer
(axis ``ep``), ranks at the same place of different runs hold the same experts (axis ``edp``). Consecutive ranks sit in
one node, so expert traffic stays inside it as long as ep <= ranks per node.

The axis ``dense`` joins dp and cp: the ranks that hold the same non-expert weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.optimus.config.schema import ConfigError, ParallelConfig, divisors, one_of

DENSE_AXES = ("pp", "dp", "cp", "tp")
AXES = (*DENSE_AXES, "dense", "edp", "ep")


@dataclass(frozen=True)
class Layout:
    """Sizes of every axis for a world size; pure arithmetic, no process group."""

    pp: int
    dp: int
    cp: int
    tp: int
    ep: int
    edp: int

    @classmethod
    def from_config(cls, config: ParallelConfig, world_size: int) -> Layout:
        """Raises ConfigError, with the sizes that would work, when they do not fit the number of ranks."""
        tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
        cp, ep = config.context_parallel_size, config.expert_model_parallel_size
        size = pp * cp * tp
        if world_size % size:
            raise ConfigError(
                f"tensor_model_parallel_size={tp} x pipeline_model_parallel_size={pp} x context_parallel_size={cp} = "
                f"{size} must divide the number of ranks {world_size}; start a multiple of {size} ranks, or make the "
                f"product {one_of(divisors(world_size))}"
            )
        stage = world_size // pp
        if stage % ep:
            what = "the data-parallel size" if size == pp else "the ranks of one pipeline stage"
            raise ConfigError(
                f"expert_model_parallel_size={ep} must divide {what} {stage}; use {one_of(divisors(stage))}"
            )
        return cls(pp=pp, dp=stage // (cp * tp), cp=cp, tp=tp, ep=ep, edp=stage // ep)

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def groups(self, axis: str) -> list[list[int]]:
        """All groups of ranks along an axis, each in axis order; together they hold every rank once."""
        grid = np.arange(self.world_size).reshape(self.pp, self.dp, self.cp, self.tp)
        expert_grid = grid.reshape(self.pp, self.edp, self.ep)
        lines = {
            "pp": lambda: np.moveaxis(grid, 0, -1),
            "dp": lambda: np.moveaxis(grid, 1, -1),
            "cp": lambda: np.moveaxis(grid, 2, -1),
            "tp": lambda: grid,
            "dense": lambda: np.moveaxis(grid.reshape(self.pp, self.dp * self.cp, self.tp), 1, -1),
            "edp": lambda: np.moveaxis(expert_grid, 1, -1),
            "ep": lambda: expert_grid,
        }[axis]()
        return lines.reshape(-1, lines.shape[-1]).tolist()
