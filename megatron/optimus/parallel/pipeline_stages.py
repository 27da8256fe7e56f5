"""Who holds which layers of a pipeline: the stages, and a model cut to those of a rank.

The decoder loses the layers of other stages but keeps its global parameter names. pipeline.py runs them.

Point-to-point communicators between the stages of a pipeline with several chunks: several, used in turn.

What a rank sends and receives over one communicator runs in the order in which it was queued. A receive is queued when
the schedule expects the message, and until that one arrives everything behind it waits, sends that others need
included: with one communicator for all, interleaved 1F1B over four ranks loses 9% and over eight 20% of its time that
way (tests/unit/parallel/test_pipeline_stages.py counts it). So no rank sends and receives over the same one, and
activations and gradients have different ones.

Stages s and s + 1 share a boundary, of number s. In a loop stage s lies on rank s mod pp, in V shape the second half
runs back (config/stages.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.optimus.config.schema import ModelConfig, ParallelConfig, PipelineSchedule
from megatron.optimus.config.stages import num_p2p_groups, stage_layers, stages_of_rank
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.platform.mesh import Mesh

# Those that compute the gradients of inputs first and of weights later.
SPLIT_BACKWARDS = (PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, PipelineSchedule.ZBV)


@dataclass(frozen=True)
class StagePlan:
    """Who holds what: pure numbers, the same on every rank."""

    num_stages: int
    local_stages: tuple[int, ...]  # stages of this rank, in the order of its chunks
    layers: tuple[range, ...]  # of every stage


def stage_plan(model: ModelConfig, config: ParallelConfig, seq_length: int, pipeline_rank: int) -> StagePlan:
    """The stages of a pipeline rank. Raises ConfigError for layers that do not fit the stages."""
    layers = stage_layers(model, config, seq_length)
    pp, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    v_shape = config.pipeline_schedule is PipelineSchedule.ZBV
    return StagePlan(len(layers), tuple(stages_of_rank(pipeline_rank, pp, chunks, v_shape=v_shape)), tuple(layers))


class StageLayers(nn.ModuleList):
    """The layers of this rank under their numbers in the whole model, so that names such as layers.12 stay."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        super().__init__()
        for number, layer in layers.items():
            self.add_module(str(number), layer)

    def __getitem__(self, key: Any) -> Any:
        """A slice takes by place on this rank, a number the layer of that number."""
        return list(self)[key] if isinstance(key, slice) else self._modules[str(key)]


def keep_local_stages(model: Decoder, plan: StagePlan) -> None:
    """Removes from the model, in place, what other ranks hold. Parameter names stay those of the whole model.

    Of a tied embedding, the first and the last stage have a copy each, both under the embedding's name; it carries
    ``pipe_tied``, and ``ds_pipe_replicated`` on the last one, where norm and checkpoints leave it out.
    """
    has_first, has_last = 0 in plan.local_stages, plan.num_stages - 1 in plan.local_stages
    if model.lm_head.weight is model.embedding.weight and has_first != has_last:
        model.embedding.weight.pipe_tied = True  # type: ignore[attr-defined]
        model.embedding.weight.ds_pipe_replicated = has_last  # type: ignore[attr-defined]
        has_first = True  # the name of the copy
    owned = [number for stage in plan.local_stages for number in plan.layers[stage]]
    model.layers = StageLayers({number: model.layers[number] for number in sorted(owned)})
    if not has_first:
        model.embedding = None  # type: ignore[assignment]
    if not has_last:
        model.final_norm = model.lm_head = None  # type: ignore[assignment]


def local_stages(model: Decoder, plan: StagePlan | None) -> list[list[nn.Module]]:
    """The layers of each stage of this rank after ``keep_local_stages``; without a pipeline there is one stage."""
    if plan is None:
        return [list(model.layers)]
    return [[model.layers[number] for number in plan.layers[stage]] for stage in plan.local_stages]


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
