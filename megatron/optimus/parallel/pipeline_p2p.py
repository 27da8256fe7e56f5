"""Point-to-point communicators between the stages of a pipeline with several chunks: several, used in turn.

What a rank sends and receives over one communicator runs in the order in which it was queued. A receive is queued when
the schedule expects the message, and until that one arrives everything behind it waits, sends that others need
included: with one communicator for all, interleaved 1F1B over four ranks loses 9% and over eight 20% of its time that
way (tests/unit/parallel/test_pipeline_p2p.py counts it). So no rank sends and receives over the same one, and
activations and gradients have different ones.

Stages s and s + 1 share a boundary, of number s. In a loop stage s lies on rank s mod pp, in V shape the second half
runs back (config/stages.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.optimus.config.schema import ParallelConfig, PipelineSchedule
from megatron.optimus.config.stages import num_p2p_groups
from megatron.optimus.platform.mesh import Mesh


def p2p_group_index(boundary: int, pp: int, *, v_shape: bool) -> int:
    """The group of what crosses a boundary in one direction: no rank sends and receives over the same one."""
    if v_shape:
        return boundary % 2 + 2 * (boundary >= pp)
    hop = boundary % pp  # from rank hop to the next one in the loop
    return 2 if pp % 2 and hop == pp - 1 else hop % 2  # a loop of odd length has no two colours


class P2PGroups:
    """The process groups; made by all ranks of the pipeline together."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], pp: int, *, v_shape: bool) -> None:
        """``groups``: twice ``num_p2p_groups``, those of activations first."""
        self._groups, self._pp, self._v_shape = list(groups), pp, v_shape

    def group(self, boundary: int, *, is_gradient: bool) -> dist.ProcessGroup:
        """Over which the activations or the gradients of a boundary travel."""
        index = p2p_group_index(boundary, self._pp, v_shape=self._v_shape)
        return self._groups[index + is_gradient * num_p2p_groups(self._pp, v_shape=self._v_shape)]


def make_p2p_groups(mesh: Mesh, config: ParallelConfig, device: torch.device) -> P2PGroups | None:
    """None for one chunk a rank: 1F1B sends and receives in one operation. Collective over the pipeline."""
    if config.virtual_pipeline_model_parallel_size == 1:
        return None
    pp, v_shape = mesh.size("pp"), config.pipeline_schedule is PipelineSchedule.ZBV
    groups = mesh.more_groups("pp", 2 * num_p2p_groups(pp, v_shape=v_shape))
    for group in groups:
        # A communicator starts when all its ranks first use it; in a schedule they would do so at different times.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    return P2PGroups(groups, pp, v_shape=v_shape)
