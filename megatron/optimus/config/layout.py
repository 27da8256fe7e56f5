"""The grid of ranks, with a dense view for attention and an expert view for MoE layers: sizes and groups of every axis.

Dense view, outermost axis first: (pp, dp, cp, tp). Expert view of the same ranks: (pp, edp, ep, etp), independent of
how the dense view divides them. Inside a pipeline stage, the dp*cp*tp ranks in order form consecutive groups of ep*etp
ranks: a group has all experts of a layer, distributed over ``ep`` ranks, each expert split over ``etp`` of them. Ranks
with the same index in different groups hold the same experts (axis ``edp``). Consecutive ranks are on one node, so
expert traffic stays inside it as long as ep*etp <= ranks per node.

Combined axes: ``dense`` (dp, cp) are the ranks that hold the same non-expert weights, ``sequence`` (cp, tp) those that
share a micro-batch, ``stage`` (dp, cp, tp) all ranks of a pipeline stage, ``model`` (pp, tp) those that hold one copy
of the non-expert weights, ``experts`` (ep, etp) those that together hold each expert of a layer once, ``edp_etp``
(edp, etp) those that hold shards or replicas of the same experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.optimus.config.schema import ConfigError, ParallelConfig, divisors, one_of

DENSE_AXES = ("pp", "dp", "cp", "tp")
AXES = (*DENSE_AXES, "world", "dense", "sequence", "stage", "model", "edp", "ep", "etp", "experts", "edp_etp")


@dataclass(frozen=True)
class Layout:
    """The size of every axis; arithmetic only, without process groups."""

    pp: int
    dp: int
    cp: int
    tp: int
    ep: int
    edp: int
    etp: int = 1

    @classmethod
    def from_config(cls, config: ParallelConfig, world_size: int) -> Layout:
        """Returns the layout of ``world_size`` ranks. Raises ConfigError where the sizes do not divide them."""
        tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
        cp, ep = config.context_parallel_size, config.expert_model_parallel_size
        etp = config.expert_tensor_parallel_size
        size = pp * cp * tp
        if world_size % size:
            raise ConfigError(
                f"tensor_model_parallel_size={tp} x pipeline_model_parallel_size={pp} x context_parallel_size={cp} = "
                f"{size} must divide the number of ranks {world_size}; start a multiple of {size} ranks, or make the "
                f"product {one_of(divisors(world_size))}"
            )
        stage = world_size // pp
        if stage % etp:
            raise ConfigError(
                f"expert_tensor_parallel_size={etp} must divide the ranks of one pipeline stage {stage}; "
                f"use {one_of(divisors(stage))}"
            )
        if stage // etp % ep:
            what = "the data-parallel size" if size == pp else "the ranks of one pipeline stage"
            shared = f" / expert_tensor_parallel_size={etp}" if etp > 1 else ""
            raise ConfigError(
                f"expert_model_parallel_size={ep} must divide {what} {stage}{shared}; "
                f"use {one_of(divisors(stage // etp))}"
            )
        return cls(pp=pp, dp=stage // (cp * tp), cp=cp, tp=tp, ep=ep, edp=stage // (ep * etp), etp=etp)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    def hierarchy_problem(self, node_size: int) -> str | None:
        """Returns why the hierarchical dispatcher does not support nodes of this size, with a remedy; or None."""
        ranks, shards = self.ep * self.etp, self.etp
        if ranks % node_size == 0 and 1 < node_size < ranks and node_size % shards == 0:
            return None
        fitting = [size for size in divisors(ranks) if 1 < size < ranks and size % shards == 0]
        remedy = f"set moe_hierarchical_node_size to {one_of(fitting)}, or use alltoall" if fitting else "use alltoall"
        split = f" and be a multiple of expert_tensor_parallel_size={shards}" if shards > 1 else ""
        return (
            f"moe_token_dispatcher_type=hierarchical needs experts over several nodes: the {node_size} ranks of a node "
            f"must be 2 or more, divide the {ranks} ranks that share the experts, be fewer than these{split}; {remedy}"
        )

    def groups(self, axis: str) -> list[list[int]]:
        """Returns all groups of ranks along an axis, each in axis order; every rank is in one of them."""
        return self._lines(axis).tolist()

    def group_of(self, axis: str, rank: int) -> list[int]:
        """Returns the ranks along an axis through ``rank``, in axis order."""
        lines = self._lines(axis)
        line, _ = np.argwhere(lines == rank)[0]
        return lines[line].tolist()

    def _lines(self, axis: str) -> npt.NDArray[np.int64]:
        pp, cp, tp = self.pp, self.cp, self.tp
        grid = np.arange(self.world_size).reshape(pp, self.dp, cp, tp)
        expert_grid = grid.reshape(pp, self.edp, self.ep, self.etp)
        lines = {
            "pp": lambda: np.moveaxis(grid, 0, -1),
            "dp": lambda: np.moveaxis(grid, 1, -1),
            "cp": lambda: np.moveaxis(grid, 2, -1),
            "tp": lambda: grid,
            "dense": lambda: np.moveaxis(grid.reshape(pp, self.dp * cp, tp), 1, -1),
            "sequence": lambda: grid.reshape(pp, self.dp, cp * tp),
            "world": lambda: grid.reshape(1, -1),
            "stage": lambda: grid.reshape(pp, -1),
            "model": lambda: np.moveaxis(grid, 0, 2).reshape(-1, pp * tp),
            "edp": lambda: np.moveaxis(expert_grid, 1, -1),
            "ep": lambda: np.moveaxis(expert_grid, 2, -1),
            "etp": lambda: expert_grid,
            "experts": lambda: expert_grid.reshape(pp, self.edp, -1),
            "edp_etp": lambda: np.moveaxis(expert_grid, 2, 1).reshape(pp, self.ep, -1),
        }[axis]()
        return lines.reshape(-1, lines.shape[-1])
