"""One rank of a run: which layers it holds, which tokens it sees, and how many micro-batches are alive on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron.optimus.config.checks import gradient_accumulation_steps
from megatron.optimus.config.layout import Layout
from megatron.optimus.config.schema import ModelConfig, PipelineSchedule, Precision, RunConfig, TokenDispatcherType
from megatron.optimus.config.stages import stage_layers, stages_of_rank


@dataclass(frozen=True)
class Share:
    """A rank at ``pipeline_rank`` of the pipeline; all ranks there have the same share. The run must pass the checks
    of config/checks.py."""

    config: RunConfig
    layout: Layout
    layers: tuple[range, ...]  # of every stage
    pipeline_rank: int

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def element(self) -> int:
        """Bytes of a weight and of an activation."""
        return 2 if self.config.training.params_dtype is Precision.BF16 else 4

    @cached_property
    def micro_batches(self) -> int:
        """Of this rank in one optimizer step."""
        return gradient_accumulation_steps(self.config, self.layout.world_size)

    # ---- layers

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

    # ---- tokens of one micro-batch

    @property
    def sequences(self) -> int:
        return self.config.training.micro_batch_size

    @property
    def tokens(self) -> int:
        """Inside regions that tensor parallelism splits: those of the micro-batch, cut by context parallelism."""
        return self.sequences * self.config.training.seq_length // self.layout.cp

    @property
    def tokens_outside(self) -> int:
        """In norms, residuals, routers and experts."""
        splits = self.layout.tp > 1 and self.config.parallel.sequence_parallel
        return self.tokens // self.layout.tp if splits else self.tokens

    @property
    def expert_ranks(self) -> int:
        """Ranks that together hold each expert of a layer once."""
        return self.layout.ep * self.layout.etp

    @property
    def rows(self) -> int:
        """Rows that this rank's experts are given: all tokens of its group with all-gather and symmetric memory, with
        all-to-all those that need an expert here."""
        transport = self.config.parallel.moe_token_dispatcher_type
        if self.expert_ranks == 1 or transport in (TokenDispatcherType.ALLGATHER, TokenDispatcherType.SYMMETRIC):
            return self.tokens_outside * self.expert_ranks
        return self.rows_needed

    @property
    def rows_needed(self) -> int:
        """Tokens of the group that need an expert here, each counted once, when all experts are equally likely."""
        return round(self.tokens_outside * self.expert_ranks * self.share_of_tokens_needed)

    @property
    def share_of_tokens_needed(self) -> float:
        """Probability that a token needs a given rank, its K experts drawn evenly without repetition."""
        experts, here = self.model.num_experts, self.model.num_experts // self.layout.ep
        absent = 1.0
        for draw in range(self.model.moe_router_topk):
            absent *= max(0, experts - here - draw) / (experts - draw)
        return 1.0 - absent


def shares(config: RunConfig, world_size: int) -> list[Share]:
    """The share of a rank of every pipeline rank, in order."""
    layout = Layout.from_config(config.parallel, world_size)
    layers = tuple(stage_layers(config.model, config.parallel, config.training.seq_length))
    return [Share(config, layout, layers, rank) for rank in range(layout.pp)]


def different(members: list[Share]) -> list[Share]:
    """Of pipeline ranks that hold alike the first, which has most micro-batches in flight: enough for any extreme."""
    return [alike[0] for alike in groups_alike(members)]


def groups_alike(members: list[Share]) -> list[list[Share]]:
    """Pipeline ranks that hold alike together."""
    found: dict[tuple[object, ...], list[Share]] = {}
    for share in members:
        key = (tuple(map(tuple, share.kinds)), share.has_embedding, share.has_head)
        found.setdefault(key, []).append(share)
    return list(found.values())
