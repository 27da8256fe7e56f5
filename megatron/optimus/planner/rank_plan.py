"""Says which layers a rank of each pipeline stage holds, and how many micro-batches are alive on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron.optimus.config.layout import Layout
from megatron.optimus.config.rank_sizes import RankSizes
from megatron.optimus.config.schema import PipelineSchedule, RunConfig
from megatron.optimus.config.stages import stage_layers, stages_of_rank


@dataclass(frozen=True)
class RankPlan(RankSizes):
    """A rank at ``pipeline_rank`` of the pipeline; all ranks there are alike."""

    layers: tuple[range, ...]  # of every stage
    pipeline_rank: int

    @cached_property
    def num_stages(self) -> int:
        return self.layout.pp * self.config.parallel.virtual_pipeline_model_parallel_size

    @cached_property
    def stages(self) -> list[int]:
        """Stages of the pipeline on this rank, one a chunk."""
        parallel = self.config.parallel
        v_shape = parallel.pipeline_schedule is PipelineSchedule.ZBV and self.layout.pp > 1
        chunks = parallel.virtual_pipeline_model_parallel_size
        return stages_of_rank(self.pipeline_rank, self.layout.pp, chunks, v_shape=v_shape)

    @cached_property
    def chunks(self) -> list[range]:
        """Layers of each chunk."""
        return [self.layers[stage] for stage in self.stages]

    @cached_property
    def num_layers(self) -> int:
        return sum(map(len, self.chunks))

    @cached_property
    def kinds(self) -> list[list[bool]]:
        """Of each chunk, of each of its layers: whether it has experts."""
        moe_layers = set(self.model.moe_layers)
        return [[layer in moe_layers for layer in chunk] for chunk in self.chunks]

    @cached_property
    def num_moe_layers(self) -> int:
        return sum(map(sum, self.kinds))

    @property
    def num_dense_layers(self) -> int:
        return self.num_layers - self.num_moe_layers

    @property
    def has_embedding(self) -> bool:
        return 0 in self.stages

    @property
    def has_head(self) -> bool:
        """Final norm, output projection and loss."""
        return self.num_stages - 1 in self.stages

    @cached_property
    def chunks_in_flight(self) -> int:
        """Most micro-batches x chunks whose activations are kept at one time."""
        pp, chunks, total = self.layout.pp, len(self.stages), self.micro_batches
        schedule = self.config.parallel.pipeline_schedule
        if pp == 1:
            return 1
        if schedule is PipelineSchedule.ONE_F_ONE_B:
            return min(total, pp - self.pipeline_rank) if total >= pp else total
        if schedule is PipelineSchedule.ZBV:
            return min(2 * total, 2 * pp)
        per_round = total // max(1, total // pp)
        warm_up = (chunks - 1) * per_round + 2 * (pp - 1 - self.pipeline_rank)
        return min(chunks * total, warm_up + 1)


def rank_plans(config: RunConfig, world_size: int) -> list[RankPlan]:
    """Makes the plan of a rank of every pipeline rank, in order."""
    layout = Layout.from_config(config.parallel, world_size)
    layers = tuple(stage_layers(config.model, config.parallel, config.training.seq_length))
    return [RankPlan(config, layout, layers, rank) for rank in range(layout.pp)]


def first_of_each_kind(ranks: list[RankPlan]) -> list[RankPlan]:
    """Of pipeline ranks that hold alike the first, which has most micro-batches in flight: enough for any extreme."""
    return [alike[0] for alike in groups_alike(ranks)]


def groups_alike(ranks: list[RankPlan]) -> list[list[RankPlan]]:
    """Groups the pipeline ranks that hold alike."""
    found: dict[tuple[object, ...], list[RankPlan]] = {}
    for rank in ranks:
        key = (tuple(map(tuple, rank.kinds)), rank.has_embedding, rank.has_head)
        found.setdefault(key, []).append(rank)
    return list(found.values())
