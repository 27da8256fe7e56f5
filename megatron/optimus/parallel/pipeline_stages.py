"""Stages of a pipeline: which rank holds which layers, the model cut to them, and communicators between stages.

The decoder loses the layers of other stages but keeps its parameter names. pipeline.py runs the stages.

Stages s and s + 1 share boundary s. In a loop stage s is on rank s mod pp; in V shape the second half runs back
(config/stages.py). A pipeline with several chunks a rank uses several communicators. What a rank sends and receives
over one communicator runs in the order in which it was queued. A receive is queued when the schedule expects the
message, and until that one arrives everything queued behind it waits, also sends that other ranks need: with a single
communicator, interleaved 1F1B over four ranks loses 9% of its time and over eight ranks 20%
(tests/unit/parallel/test_pipeline_stages.py counts it). So no rank sends and receives over the same communicator, and
activations and gradients have different ones.
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

# Schedules that compute the gradients of inputs first and of weights later.
SPLIT_BACKWARDS = (PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, PipelineSchedule.ZBV)


@dataclass(frozen=True)
class StagePlan:
    """Assignment of layers to stages and of stages to a rank.

    Attributes:
        num_stages: stages of the whole pipeline.
        local_stages: stages of this rank, in the order of its chunks.
        layers: layer numbers of every stage.
    """

    num_stages: int
    local_stages: tuple[int, ...]
    layers: tuple[range, ...]


def stage_plan(model: ModelConfig, config: ParallelConfig, seq_length: int, pipeline_rank: int) -> StagePlan:
    """The stages of a pipeline rank.

    Args:
        model: its layers and what each of them costs.
        config: pipeline size, chunks a rank and schedule.
        seq_length: tokens of a sequence, by which stages are balanced.
        pipeline_rank: index of the rank in the pipeline.

    Raises:
        ConfigError: for layers that do not fit the stages.
    """
    layers = stage_layers(model, config, seq_length)
    pp, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    v_shape = config.pipeline_schedule is PipelineSchedule.ZBV
    return StagePlan(len(layers), tuple(stages_of_rank(pipeline_rank, pp, chunks, v_shape=v_shape)), tuple(layers))


class StageLayers(nn.ModuleList):
    """The layers of this rank under their numbers in the whole model, so that names such as layers.12 remain."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        super().__init__()
        for number, layer in layers.items():
            self.add_module(str(number), layer)

    def __getitem__(self, key: Any) -> Any:
        """An int is a layer's number in the whole model; a slice counts the layers of this rank."""
        return list(self)[key] if isinstance(key, slice) else self._modules[str(key)]


def keep_local_stages(model: Decoder, plan: StagePlan) -> None:
    """Removes from the model, in place, what other ranks hold. Parameter names stay those of the whole model.

    The first and the last stage each have a copy of a tied embedding under the embedding's name. Both are marked
    ``pipe_tied``. That of the last stage is also marked ``ds_pipe_replicated``: gradient norm and checkpoints skip it.
    """
    has_first, has_last = 0 in plan.local_stages, plan.num_stages - 1 in plan.local_stages
    if model.lm_head.weight is model.embedding.weight and has_first != has_last:
        model.embedding.weight.pipe_tied = True  # type: ignore[attr-defined]
        model.embedding.weight.ds_pipe_replicated = has_last  # type: ignore[attr-defined]
        has_first = True  # the copy has the embedding's name
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
    """Index of the communicator for one direction of a boundary: no rank sends and receives over the same one."""
    if v_shape:
        return boundary % 2 + 2 * (boundary >= pp)
    sender = boundary % pp  # sends to the next rank in the loop
    return 2 if pp % 2 and sender == pp - 1 else sender % 2  # a loop of odd length needs a third colour


class P2PGroups:
    """The communicators of a pipeline with several chunks a rank."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], pp: int, *, v_shape: bool) -> None:
        """Holds groups that all ranks of the pipeline have made together.

        Args:
            groups: twice ``num_p2p_groups``, those of activations first.
            pp: ranks of the pipeline.
            v_shape: whether stages run back over the ranks.
        """
        self._groups, self._pp, self._v_shape = list(groups), pp, v_shape

    def group(self, boundary: int, *, is_gradient: bool) -> dist.ProcessGroup:
        """The group over which the activations or the gradients of a boundary travel."""
        index = p2p_group_index(boundary, self._pp, v_shape=self._v_shape)
        return self._groups[index + is_gradient * num_p2p_groups(self._pp, v_shape=self._v_shape)]


def make_p2p_groups(mesh: Mesh, config: ParallelConfig, device: torch.device) -> P2PGroups | None:
    """Makes the communicators between stages. Collective over the pipeline.

    Returns:
        None for one chunk a rank, as 1F1B sends and receives in one operation.
    """
    if config.virtual_pipeline_model_parallel_size == 1:
        return None
    pp, v_shape = mesh.size("pp"), config.pipeline_schedule is PipelineSchedule.ZBV
    groups = mesh.new_groups("pp", 2 * num_p2p_groups(pp, v_shape=v_shape))
    for group in groups:
        # A communicator starts when all its ranks first use it, which in a schedule is at different times.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    return P2PGroups(groups, pp, v_shape=v_shape)
