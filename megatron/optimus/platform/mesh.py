"""This rank's place in the grid of ranks (config/layout.py) and its process groups along every axis.

Attention and experts use different groups over the same ranks; each is a slice of the grid and is passed to whoever
needs it, never a global.

Start-up must not grow with the number of ranks: a rank creates the few groups it belongs to, together with their
members only, and never hears of the others. All ranks go through the axes in the same order, so members that wait for
each other do so at the same axis and none can wait in a circle.
"""

from __future__ import annotations

import torch.distributed as dist

from megatron.optimus.config.layout import AXES, Layout
from megatron.optimus.config.schema import ParallelConfig
from megatron.optimus.platform.log import counted


class Mesh:
    """This rank's place in the grid and its process groups. Building it is collective over all ranks."""

    def __init__(
        self, config: ParallelConfig, *, rank: int, world_size: int, local_world_size: int | None = None
    ) -> None:
        """``local_world_size``: ranks of a node as the launcher says; None: all ranks are one node."""
        self.layout = Layout.from_config(config, world_size)
        self.rank = rank
        self.node_size = config.moe_hierarchical_node_size or local_world_size or world_size
        self._ranks = {axis: self.layout.group_of(axis, rank) for axis in AXES}
        self._groups: dict[str, dist.ProcessGroup | None] = {}
        self._alone: dist.ProcessGroup | None = dist.group.WORLD if world_size == 1 else None
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {(rank,): None}
        if world_size > 1:
            self._made[tuple(range(world_size))] = dist.group.WORLD
        for axis, ranks in self._ranks.items():
            self._groups[axis] = self._group_of(ranks)

    def _group_of(self, ranks: list[int]) -> dist.ProcessGroup | None:
        key = tuple(ranks)
        if key not in self._made:  # axes that coincide share one group
            self._made[key] = dist.new_group(ranks, use_local_synchronization=True)
        return self._made[key]

    def node_groups(self, axis: str) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """The ranks of an axis on this rank's node, and those at its place of every node; the ranks must be a whole
        number of nodes. Made at the first call, which is collective over the axis.
        """
        ranks, place = self._ranks[axis], self.index(axis)
        first = place // self.node_size * self.node_size
        within = self._group_of(ranks[first : first + self.node_size])
        return within, self._group_of(ranks[place % self.node_size :: self.node_size])

    def first_and_last_group(self, axis: str) -> dist.ProcessGroup | None:
        """The first and the last rank of an axis; None on ranks between them. Collective over these two."""
        ranks = self._ranks[axis]
        return self._group_of([ranks[0], ranks[-1]]) if self.rank in (ranks[0], ranks[-1]) else None

    def new_groups(self, axis: str, count: int) -> list[dist.ProcessGroup]:
        """Groups of the same ranks with communicators of their own, made at every call. Collective over the axis."""
        return [dist.new_group(self._ranks[axis], use_local_synchronization=True) for _ in range(count)]

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

    def group_or_self(self, axis: str) -> dist.ProcessGroup:
        """Like ``group``, but a group of its own for a rank that is alone: where None would mean all ranks."""
        group = self._groups[axis]
        if group is None:
            group = self._alone = self._alone or dist.new_group([self.rank], use_local_synchronization=True)
        return group

    def describe(self) -> str:
        layout = self.layout
        return (
            f"{counted(layout.world_size, 'rank')}: "
            f"dense view pp={layout.pp} dp={layout.dp} cp={layout.cp} tp={layout.tp}, "
            f"expert view pp={layout.pp} edp={layout.edp} ep={layout.ep}" + f" etp={layout.etp}" * (layout.etp > 1)
        )
