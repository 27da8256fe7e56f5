"""Who holds which layers of a pipeline: the stages, and a model cut to those of a rank.

The decoder loses the layers of other stages but keeps its global parameter names. pipeline.py runs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron.optimus.config.schema import ModelConfig, ParallelConfig, PipelineSchedule
from megatron.optimus.config.stages import stage_layers, stages_of_rank
from megatron.optimus.models.decoder import Decoder

# Those that compute the gradients of inputs first and of weights later.
SPLIT_BACKWARDS = (PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, PipelineSchedule.ZBV)


@dataclass(frozen=True)
class StagePlan:
    """Who holds what: pure numbers, the same on every rank."""

    num_stages: int
    mine: tuple[int, ...]  # stages of this rank, in the order of its chunks
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


def keep_stages(model: Decoder, plan: StagePlan) -> None:
    """Removes from the model, in place, what other ranks hold. Parameter names stay those of the whole model.

    Of a tied embedding, the first and the last stage have a copy each, both under the embedding's name; it carries
    ``pipe_tied``, and ``ds_pipe_replicated`` on the last one, where norm and checkpoints leave it out.
    """
    has_first, has_last = 0 in plan.mine, plan.num_stages - 1 in plan.mine
    if model.lm_head.weight is model.embedding.weight and has_first != has_last:
        model.embedding.weight.pipe_tied = True  # type: ignore[attr-defined]
        model.embedding.weight.ds_pipe_replicated = has_last  # type: ignore[attr-defined]
        has_first = True  # the name of the copy
    owned = [number for stage in plan.mine for number in plan.layers[stage]]
    model.layers = StageLayers({number: model.layers[number] for number in sorted(owned)})
    if not has_first:
        model.embedding = None  # type: ignore[assignment]
    if not has_last:
        model.final_norm = model.lm_head = None  # type: ignore[assignment]


def own_stages(model: Decoder, plan: StagePlan | None) -> list[list[nn.Module]]:
    """The layers of each stage of this rank, of a model after ``keep_stages``; without a pipeline it is one stage."""
    if plan is None:
        return [list(model.layers)]
    return [[model.layers[number] for number in plan.layers[stage]] for stage in plan.mine]
