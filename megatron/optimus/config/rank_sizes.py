"""Computes what one rank works on in a micro-batch: tokens, activations of attention, and widths of elements."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron.optimus.config.checks import gradient_accumulation_steps
from megatron.optimus.config.layout import Layout
from megatron.optimus.config.schema import ModelConfig, PipelineSchedule, Precision, RunConfig


@dataclass(frozen=True)
class RankSizes:
    """Sizes of a rank, the same on all ranks. The run must pass the checks of config/checks.py."""

    config: RunConfig
    layout: Layout

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches of a rank in one optimizer step."""
        return gradient_accumulation_steps(self.config, self.layout.world_size)

    # ---- tokens and activations of one micro-batch

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
    def stream(self) -> int:
        """Bytes of the residual stream outside of regions that tensor parallelism splits."""
        return self.tokens_outside * self.model.hidden_size * self.element

    @property
    def gathered(self) -> int:
        """Bytes of it that tensor-parallel ranks gather for such a region; 0 without tensor parallelism."""
        return self.tokens * self.model.hidden_size * self.element if self.layout.tp > 1 else 0

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
    def element(self) -> int:
        """Of a weight and of an activation."""
        return 2 if self.config.training.params_dtype is Precision.BF16 else 4

    @property
    def gradient_element(self) -> int:
        """Of a gradient as micro-batches are added up."""
        return 4 if self.config.optimizer.accumulate_allreduce_grads_in_fp32 else 2

    @property
    def sent_gradient_element(self) -> int:
        """Of a gradient on the wire."""
        return 2 if self.config.optimizer.grad_reduce_in_bf16 else self.gradient_element

    @property
    def adds_expert_gradients(self) -> bool:
        """Whether the backward adds experts' gradients where they are kept, so that they never exist apart.

        So it is where whole gradients are kept and a backward is in one piece (ops/main_grads.py).
        """
        is_whole = self.config.optimizer.zero_stage == 1 or self.layout.edp == 1
        return is_whole and not self.splits_backward

    @property
    def splits_backward(self) -> bool:
        """Whether the pipeline computes gradients of weights apart from those of activations."""
        split = (PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, PipelineSchedule.ZBV)
        return self.layout.pp > 1 and self.config.parallel.pipeline_schedule in split
