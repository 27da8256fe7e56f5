"""Says what one rank of a run holds and works on: layers, micro-batches, tokens, and widths of elements.

Pure arithmetic on the configuration. The parts of the program that declare their costs (config/costs.py) take it, and
the planner adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron.optimus.config.checks import gradient_accumulation_steps
from megatron.optimus.config.costs import LayerCost, layer_cost
from megatron.optimus.config.layout import Layout
from megatron.optimus.config.schema import ModelConfig, PipelineSchedule, Precision, RunConfig
from megatron.optimus.config.stages import stage_layers, stages_of_rank


@dataclass(frozen=True)
class RankPlan:
    """A rank at ``pipeline_rank`` of the pipeline; all ranks there are alike.

    The run must pass the checks of config/checks.py.
    """

    config: RunConfig
    layout: Layout
    layers: tuple[range, ...]  # of every stage
    pipeline_rank: int

    @property
    def model(self) -> ModelConfig:
        """The model section of the run's configuration."""
        return self.config.model

    # ---- layers and micro-batches

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches of a rank in one optimizer step."""
        return gradient_accumulation_steps(self.config, self.layout.world_size)

    @cached_property
    def num_stages(self) -> int:
        """Stages of the whole pipeline: ranks x chunks."""
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
        """Layers on this rank."""
        return sum(map(len, self.chunks))

    @cached_property
    def moe_flags(self) -> list[list[bool]]:
        """For each chunk a list that says for each of its layers whether it has experts."""
        moe_layers = set(self.model.moe_layers)
        return [[layer in moe_layers for layer in chunk] for chunk in self.chunks]

    @cached_property
    def num_moe_layers(self) -> int:
        """Layers with experts on this rank."""
        return sum(map(sum, self.moe_flags))

    @cached_property
    def layer_costs(self) -> dict[bool, LayerCost]:
        """Multiply-adds of a token in a dense layer (False) and in one with experts (True)."""
        length = self.config.training.seq_length
        return {is_moe: layer_cost(self.model, length, is_moe=is_moe) for is_moe in {False, self.model.is_moe}}

    @property
    def num_dense_layers(self) -> int:
        """Layers without experts on this rank."""
        return self.num_layers - self.num_moe_layers

    @property
    def has_embedding(self) -> bool:
        """Whether the first stage is on this rank."""
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

    # ---- tokens and activations of one micro-batch

    @property
    def sequences(self) -> int:
        """Sequences of a micro-batch."""
        return self.config.training.micro_batch_size

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on this rank inside tensor-parallel regions (attention, dense MLP)."""
        return self.sequences * self.config.training.seq_length // self.layout.cp

    @property
    def sequence_parallel_tokens(self) -> int:
        """Tokens of a micro-batch on this rank outside of those regions: in norms, residuals, routers and experts."""
        splits = self.layout.tp > 1 and self.config.parallel.sequence_parallel
        return self.tokens // self.layout.tp if splits else self.tokens

    @property
    def residual_bytes(self) -> int:
        """Bytes of the residual stream outside of regions that tensor parallelism splits."""
        return self.sequence_parallel_tokens * self.model.hidden_size * self.element_bytes

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the residual stream gathered for a tensor-parallel region; 0 without tensor parallelism."""
        return self.tokens * self.model.hidden_size * self.element_bytes if self.layout.tp > 1 else 0

    @property
    def queries(self) -> int:
        """Elements of a layer's queries."""
        return self.tokens * self.model.num_attention_heads * self.model.head_dim // self.layout.tp

    @property
    def keys(self) -> int:
        """Elements of a layer's keys, of which there are as many values."""
        return self.tokens * self.model.num_kv_heads * self.model.head_dim // self.layout.tp

    @property
    def expert_ranks(self) -> int:
        """Ranks that together hold each expert of a layer once."""
        return self.layout.ep * self.layout.etp

    # ---- bytes of an element

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of a weight or an activation."""
        return 2 if self.config.training.params_dtype is Precision.BF16 else 4

    @property
    def gradient_element_bytes(self) -> int:
        """Bytes of an element of a gradient while micro-batches are accumulated."""
        return 4 if self.config.optimizer.accumulate_allreduce_grads_in_fp32 else 2

    @property
    def sent_gradient_element_bytes(self) -> int:
        """Bytes of an element of a gradient in a reduction."""
        return 2 if self.config.optimizer.grad_reduce_in_bf16 else self.gradient_element_bytes

    @property
    def adds_expert_gradients(self) -> bool:
        """Whether the backward accumulates experts' gradients into the main gradients, without a temporary gradient.

        It does where a rank keeps whole gradients and the backward is not split in two (ops/main_grads.py).
        """
        is_whole = self.config.optimizer.zero_stage == 1 or self.layout.edp == 1
        return is_whole and not self.splits_backward

    @property
    def splits_backward(self) -> bool:
        """Whether the pipeline computes gradients of weights apart from those of activations."""
        split = (PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, PipelineSchedule.ZBV)
        return self.layout.pp > 1 and self.config.parallel.pipeline_schedule in split


def rank_plans(config: RunConfig, world_size: int) -> list[RankPlan]:
    """Makes the plan of one rank of every pipeline rank, in order."""
    layout = Layout.from_config(config.parallel, world_size)
    layers = tuple(stage_layers(config.model, config.parallel, config.training.seq_length))
    return [RankPlan(config, layout, layers, rank) for rank in range(layout.pp)]


def first_of_each_kind(ranks: list[RankPlan]) -> list[RankPlan]:
    """Of pipeline ranks that hold alike the first, which has most micro-batches in flight: enough for any extreme."""
    return [alike[0] for alike in group_identical_ranks(ranks)]


def group_identical_ranks(ranks: list[RankPlan]) -> list[list[RankPlan]]:
    """Groups the pipeline ranks that hold alike."""
    found: dict[tuple[object, ...], list[RankPlan]] = {}
    for rank in ranks:
        key = (tuple(map(tuple, rank.moe_flags)), rank.has_embedding, rank.has_head)
        found.setdefault(key, []).append(rank)
    return list(found.values())
