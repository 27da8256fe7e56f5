"""This rank's place in the grid of ranks (config/layout.py) and its process groups along every axis.

Attention and experts use different groups over the same ranks; each is a slice of the grid and is passed to whoever
needs it, never a global.
"""

from __future__ import annotations

import torch.distributed as dist

from megatron.optimus.config.layout import AXES, Layout
from megatron.optimus.config.schema import ParallelConfig


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
