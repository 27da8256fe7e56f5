"""The grid of ranks (config/layout.py) as one rank sees it: its coordinates and its process group along every axis.

Attention and experts use different groups over the same ranks; each is a slice of the grid and is passed to whoever
needs it, never a global.

Start-up must not grow with the number of ranks: a rank creates the few groups it belongs to, together with their
members only. All ranks create groups in the same order of axes, so members that wait for each other do so at the same
axis, and no cycle of waiting ranks is possible.
"""

from __future__ import annotations

import torch.distributed as dist

from megatron.optimus.config.layout import AXES, Layout
from megatron.optimus.config.schema import ParallelConfig
from megatron.optimus.platform.log import counted


class Mesh:
    """This rank's coordinates and process groups. Building it is collective over all ranks.

    Args:
        config: the parallel sizes.
        rank: this rank among all.
        world_size: number of ranks.
        local_world_size: ranks of a node as the launcher says; None means that all ranks are on one node.
    """

    def __init__(
        self, config: ParallelConfig, *, rank: int, world_size: int, local_world_size: int | None = None
    ) -> None:
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
        if key not in self._made:  # axes with the same ranks share one group
            self._made[key] = dist.new_group(ranks, use_local_synchronization=True)
        return self._made[key]

    def node_groups(self, axis: str) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """Returns two groups of ranks along an axis: those on this rank's node, and those with its local rank on every
        node. The axis must cover a whole number of nodes. The first call creates them and is collective over the axis.
        """
        ranks, place = self._ranks[axis], self.index(axis)
        first = place // self.node_size * self.node_size
        within = self._group_of(ranks[first : first + self.node_size])
        return within, self._group_of(ranks[place % self.node_size :: self.node_size])

    def first_and_last_group(self, axis: str) -> dist.ProcessGroup | None:
        """Returns the group of the first and last rank of an axis; None on ranks between. Collective over these two."""
        ranks = self._ranks[axis]
        return self._group_of([ranks[0], ranks[-1]]) if self.rank in (ranks[0], ranks[-1]) else None

    def new_groups(self, axis: str, count: int) -> list[dist.ProcessGroup]:
        """Creates ``count`` more groups of an axis's ranks, each with a communicator. Collective over the axis."""
        return [dist.new_group(self._ranks[axis], use_local_synchronization=True) for _ in range(count)]

    def size(self, axis: str) -> int:
        """Returns the number of ranks along the axis."""
        return len(self._ranks[axis])

    def index(self, axis: str) -> int:
        """Returns this rank's coordinate along the axis."""
        return self._ranks[axis].index(self.rank)

    def ranks(self, axis: str) -> list[int]:
        """Returns the global ranks along the axis through this rank."""
        return self._ranks[axis]

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Returns the process group along the axis; None where the axis has size 1."""
        return self._groups[axis]

    def group_or_self(self, axis: str) -> dist.ProcessGroup:
        """Returns ``group``, or this rank's own group where the axis has size 1: where None would mean all ranks."""
        group = self._groups[axis]
        if group is None:
            group = self._alone = self._alone or dist.new_group([self.rank], use_local_synchronization=True)
        return group

    def describe(self) -> str:
        """Returns the sizes of both views for the log."""
        layout = self.layout
        return (
            f"{counted(layout.world_size, 'rank')}: "
            f"dense view pp={layout.pp} dp={layout.dp} cp={layout.cp} tp={layout.tp}, "
            f"expert view pp={layout.pp} edp={layout.edp} ep={layout.ep}" + f" etp={layout.etp}" * (layout.etp > 1)
        )
