"""One named grid of ranks with two views of it.

Dense view, outermost axis first: (pp, dp, cp, tp). Expert view of the same ranks: (pp, edp, ep). Inside a pipeline
stage, the dp*cp*tp ranks in order are cut into consecutive runs of ``ep`` ranks: the run shares the experts of a layer
(axis ``ep``), ranks at the same place of different runs hold the same experts (axis ``edp``). Consecutive ranks sit in
one node, so expert traffic stays inside it as long as ep <= ranks per node.

Attention and experts therefore use different groups over the same ranks; each is a slice of the grid and is passed to
whoever needs it. The axis ``dense`` joins dp and cp: the ranks that hold the same non-expert weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.optimus.config.schema import ConfigError, ParallelConfig

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
        """Raises ConfigError when the sizes do not multiply to the world size."""
        tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
        cp, ep = config.context_parallel_size, config.expert_model_parallel_size
        if world_size % (pp * cp * tp):
            raise ConfigError(
                f"world size {world_size} is not a multiple of pipeline {pp} x context {cp} x tensor {tp} = "
                f"{pp * cp * tp}; change one of these sizes or start {pp * cp * tp} ranks or a multiple"
            )
        stage = world_size // pp
        if stage % ep:
            fits = [size for size in range(1, stage + 1) if stage % size == 0]
            raise ConfigError(
                f"expert_model_parallel_size={ep} must divide the {stage} ranks of a pipeline stage; use one of {fits}"
            )
        return cls(pp=pp, dp=stage // (cp * tp), cp=cp, tp=tp, ep=ep, edp=stage // ep)

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def groups(self, axis: str) -> list[list[int]]:
        """All groups of ranks along an axis, each in axis order; together they hold every rank once."""
        grid = torch.arange(self.world_size).view(self.pp, self.dp, self.cp, self.tp)
        expert_grid = grid.view(self.pp, self.edp, self.ep)
        rows = {
            "pp": lambda: grid.flatten(1).t(),
            "dp": lambda: grid.movedim(1, -1).flatten(0, -2),
            "cp": lambda: grid.movedim(2, -1).flatten(0, -2),
            "tp": lambda: grid.flatten(0, -2),
            "dense": lambda: grid.flatten(1, 2).movedim(1, -1).flatten(0, -2),
            "edp": lambda: expert_grid.movedim(1, -1).flatten(0, -2),
            "ep": lambda: expert_grid.flatten(0, -2),
        }
        return rows[axis]().tolist()


class Mesh:
    """This rank's place in the grid and its process groups. Building it is collective over all ranks."""

    def __init__(self, config: ParallelConfig, *, rank: int, world_size: int) -> None:
        self.layout = Layout.from_config(config, world_size)
        self.rank = rank
        self._ranks: dict[str, list[int]] = {}
        self._groups: dict[str, dist.ProcessGroup | None] = {}
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for axis in AXES:
            for ranks in self.layout.groups(axis):
                # Every rank must call new_group for every group, in the same order; axes that coincide share one.
                group = _group_of(ranks, world_size, made)
                if rank in ranks:
                    self._ranks[axis] = ranks
                    self._groups[axis] = group

    def size(self, axis: str) -> int:
        return len(self._ranks[axis])

    def index(self, axis: str) -> int:
        """This rank's coordinate along the axis."""
        return self._ranks[axis].index(self.rank)

    def ranks(self, axis: str) -> list[int]:
        return self._ranks[axis]

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The process group along the axis; None when this rank is alone there and has nobody to talk to."""
        return self._groups[axis]

    def describe(self) -> str:
        layout = self.layout
        return (
            f"{layout.world_size} ranks: dense view pp={layout.pp} dp={layout.dp} cp={layout.cp} tp={layout.tp}, "
            f"expert view pp={layout.pp} edp={layout.edp} ep={layout.ep}"
        )


def _group_of(
    ranks: list[int], world_size: int, made: dict[tuple[int, ...], dist.ProcessGroup]
) -> dist.ProcessGroup | None:
    if len(ranks) == 1:
        return None
    if len(ranks) == world_size:
        return dist.group.WORLD
    key = tuple(ranks)
    if key not in made:
        made[key] = dist.new_group(ranks)
    return made[key]
