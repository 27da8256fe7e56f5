"""Forward and backward of a step's micro-batches: on whole models one after the other, or over a pipeline's stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron.optimus.config.checks import gradient_accumulation_steps
from megatron.optimus.config.schema import ModelConfig, RunConfig
from megatron.optimus.data.loader import Batch
from megatron.optimus.models.decoder import Decoder, DecoderOutput
from megatron.optimus.moe.router import Router, RouterStats
from megatron.optimus.parallel.lanes import make_lanes
from megatron.optimus.parallel.mesh import Mesh
from megatron.optimus.parallel.pipeline import Chunk, Pipeline, stage_plan
from megatron.optimus.trainer.engine import DTYPES, Engine


@dataclass(frozen=True)
class MicroBatchRecord:
    """What this rank saw of one micro-batch, without gradients."""

    loss_sum: Tensor | None  # fp32 scalar, nats; None where the loss is on another stage
    stats: Mapping[int, RouterStats]  # of this rank's MoE layers, by their number in the model


class Schedule(Protocol):
    """Both methods are collective over the ranks of a pipeline."""

    routers: dict[int, Router]  # of this rank's MoE layers, by their number in the model

    def forward_backward(self, batches: Sequence[Batch], labels_each: float | Tensor) -> list[MicroBatchRecord]:
        """Accumulates the gradients of the mean over micro-batches; ``engine.step()`` comes next.

        ``labels_each``: labels that count in a micro-batch, on average over those of all ranks.
        """

    def evaluate(self, batches: Sequence[Batch]) -> list[MicroBatchRecord]:
        """Forward only."""


def build_schedule(config: RunConfig, engine: Engine, mesh: Mesh, device: torch.device) -> Schedule:
    """The schedule of a run; collective."""
    group = mesh.group("pp")
    if group is None:
        return WholeModel(engine, config.model)
    training, parallel = config.training, config.parallel
    length = training.seq_length // mesh.size("cp")
    hidden_shape = (training.micro_batch_size, length, config.model.hidden_size)
    if mesh.size("tp") > 1 and parallel.sequence_parallel:
        hidden_shape = (1, training.micro_batch_size * length // mesh.size("tp"), config.model.hidden_size)
    tied = _tied_weight(engine.module)
    if tied is not None:  # both stages add their gradients up; the sum over the two makes them one
        ends = mesh.ends_group("pp")
        assert ends is not None
        engine.optimizer.sum_over(tied, ends)
    reductions = Reductions(engine, config, gradient_accumulation_steps(config, mesh.layout.world_size))
    pipeline = Pipeline(
        engine.module,
        stage_plan(config.model, parallel, mesh.index("pp")),
        parallel.pipeline_schedule,
        group,
        num_micro_batches=gradient_accumulation_steps(config, mesh.layout.world_size),
        tokens_shape=(training.micro_batch_size, length),
        hidden_shape=hidden_shape,
        positions=training.seq_length,
        dtype=DTYPES[training.params_dtype],
        device=device,
        backwards=reductions,
        lanes=make_lanes(mesh, parallel, device),
    )
    return Stages(engine, pipeline)


class Reduce(Enum):
    """When a pipeline's gradients are summed over data-parallel ranks."""

    AFTERWARDS = "when the pipeline is empty"
    IN_LAST_BACKWARD = "while the last micro-batch's backward runs, the others being added up before"
    IN_EACH_BACKWARD = "as above, for every micro-batch and chunk: ZeRO stage 2 keeps no whole gradients"


class Reductions:
    """Tells the optimizer about the backwards of a pipeline, which takes gradients over after each."""

    def __init__(self, engine: Engine, config: RunConfig, num_micro_batches: int) -> None:
        self._optimizer, self._last = engine.optimizer, num_micro_batches - 1
        self._in_chunks = config.parallel.virtual_pipeline_model_parallel_size > 1
        self._buckets: dict[Chunk, set[Any]] = {}  # of several chunks: what a backward brings gradients for
        self._when = Reduce.IN_LAST_BACKWARD
        if config.optimizer.zero_stage == 2:
            self._when = Reduce.IN_EACH_BACKWARD
        elif self._in_chunks:  # a bucket may lie in several chunks
            self._when = Reduce.AFTERWARDS

    def _is_reduced(self, micro_batch: int, is_whole: bool) -> bool:
        if self._when is Reduce.IN_LAST_BACKWARD:
            return is_whole and micro_batch == self._last
        return is_whole and self._when is Reduce.IN_EACH_BACKWARD

    def before(self, micro_batch: int, chunk: Chunk, *, is_whole: bool) -> None:
        if self._in_chunks and chunk not in self._buckets:
            self._buckets[chunk] = self._optimizer.buckets_of(chunk.parameters())
        is_reduced = self._is_reduced(micro_batch, is_whole)
        self._optimizer.set_gradient_accumulation_boundary(is_reduced, only=self._buckets.get(chunk))

    def after(self, micro_batch: int, chunk: Chunk, *, is_whole: bool) -> None:
        if self._is_reduced(micro_batch, is_whole):
            self._optimizer.reduce_gradients()
        else:
            self._optimizer.backward_epilogue()


def _tied_weight(model: Decoder) -> nn.Parameter | None:
    """The embedding, where another pipeline stage has it as well."""
    return next((parameter for parameter in model.parameters() if getattr(parameter, "pipe_tied", False)), None)


def routers_of(model: Decoder) -> dict[int, Router]:
    """Routers of the layers that are here, by the layer's number in the model."""
    blocks = ((int(number), block) for number, block in model.layers.named_children())
    return {number: block.moe.router for number, block in blocks if block.is_moe}  # type: ignore[union-attr,misc]


class WholeModel:
    """No pipeline: micro-batch after micro-batch through the engine."""

    def __init__(self, engine: Engine, config: ModelConfig) -> None:
        self.engine, self.config = engine, config
        self.routers = routers_of(engine.module)

    def forward_backward(self, batches: Sequence[Batch], labels_each: float | Tensor) -> list[MicroBatchRecord]:
        seen = []
        for index, batch in enumerate(batches):
            if index > 0:
                self.engine.step()  # between micro-batches it only counts them
            output = self.engine(batch.tokens_BS, batch.labels_BS, batch.documents, batch.positions_BS)
            loss = output.loss_sum / labels_each
            loss = (
                loss + self.config.moe_aux_loss_coeff * output.aux_loss + self.config.moe_z_loss_coeff * output.z_loss
            )
            self.engine.backward(loss)
            seen.append(self._record(output))
            for number, stats in seen[-1].stats.items():
                self.routers[number].record_micro_batch(stats.counts_E)
        return seen

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> list[MicroBatchRecord]:
        model: Decoder = self.engine.module
        model.eval()
        outputs = [model(b.tokens_BS, b.labels_BS, b.documents, b.positions_BS) for b in batches]
        model.train()
        return [self._record(output) for output in outputs]

    def _record(self, output: DecoderOutput) -> MicroBatchRecord:
        assert output.loss_sum is not None
        stats = (RouterStats(*(value.detach() for value in stats)) for stats in output.router_stats)
        return MicroBatchRecord(output.loss_sum.detach(), dict(zip(self.routers, stats, strict=True)))


class Stages:
    """A pipeline; for the engine all its micro-batches are one."""

    def __init__(self, engine: Engine, pipeline: Pipeline) -> None:
        self.engine, self.pipeline = engine, pipeline
        self.routers = routers_of(engine.module)

    def forward_backward(self, batches: Sequence[Batch], labels_each: float | Tensor) -> list[MicroBatchRecord]:
        self.pipeline.forward_backward(batches, labels_each)
        return self._records(len(batches))

    def evaluate(self, batches: Sequence[Batch]) -> list[MicroBatchRecord]:
        model: Decoder = self.engine.module
        model.eval()
        self.pipeline.evaluate(batches)
        model.train()
        return self._records(len(batches))

    def _records(self, count: int) -> list[MicroBatchRecord]:
        record = self.pipeline.record
        return [
            MicroBatchRecord(
                record.loss_sums[index] if self.pipeline.is_last else None,
                {number: stats[index] for number, stats in sorted(record.stats.items())},
            )
            for index in range(count)
        ]
