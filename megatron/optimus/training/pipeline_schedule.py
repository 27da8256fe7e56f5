"""Forward and backward of a step's micro-batches: on whole models one after the other, or over a pipeline's stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron.optimus.config.checks import micro_batches
from megatron.optimus.config.schema import ModelConfig, RunConfig
from megatron.optimus.context import RunContext
from megatron.optimus.data.loader import Batch
from megatron.optimus.models.decoder import Decoder, DecoderOutput
from megatron.optimus.moe.router import Router, RouterStats
from megatron.optimus.parallel.pipeline import Chunk, Pipeline
from megatron.optimus.parallel.pipeline_p2p import make_p2p_groups
from megatron.optimus.parallel.stages import stage_plan
from megatron.optimus.training.engine import Engine, set_micro_batches


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

        Steps may differ in their number of micro-batches, on every rank alike.
        ``labels_each``: labels that count in a micro-batch, on average over those of all ranks.
        """

    def evaluate(self, batches: Sequence[Batch]) -> list[MicroBatchRecord]:
        """Forward only."""


def build_schedule(run: RunContext, engine: Engine) -> Schedule:
    """The schedule of a run; collective."""
    config, mesh, device = run.config, run.mesh, run.device
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
    pipeline = Pipeline(
        engine.module,
        stage_plan(config.model, parallel, training.seq_length, mesh.index("pp")),
        parallel.pipeline_schedule,
        group,
        num_micro_batches=micro_batches(config, mesh.layout.world_size)[0],  # fewest: what they cannot do, none can
        tokens_shape=(training.micro_batch_size, length),
        hidden_shape=hidden_shape,
        positions=training.seq_length,
        dtype=run.dtype,
        device=device,
        backward_hooks=Reductions(engine, config),
        p2p_groups=make_p2p_groups(mesh, parallel, device),
    )
    return Stages(engine, pipeline)


class Reduce(Enum):
    """When a pipeline's gradients are summed over data-parallel ranks."""

    IN_LAST_BACKWARD = "while the last backward of a chunk runs, the micro-batches before being added up"
    IN_EACH_BACKWARD = "as above, for every micro-batch: ZeRO stage 2 keeps no whole gradients"


class Reductions:
    """Tells the optimizer about the backwards of a pipeline, which takes gradients over after each.

    A bucket may lie in several chunks. Stage 1 reduces it in the last backward of the one that finishes last, behind
    those that lie in that chunk alone and are complete while the backward runs. Which buckets a backward reduces, in
    which order, follows from the schedule and the layers of the rank, which are the same on all ranks of each group.
    """

    def __init__(self, engine: Engine, config: RunConfig) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        self._num_micro_batches = 0  # of the present step
        self._num_chunks = config.parallel.virtual_pipeline_model_parallel_size
        self._buckets: dict[tuple[Chunk, ...], list[Any]] = {}
        self._done: Counter[Chunk] = Counter()  # backwards of this step, those of inputs alone not counted
        self._finished: tuple[Chunk, ...] = ()  # that have no further backward in this step, in their order
        self._is_reduced = False  # by the present backward
        each = config.optimizer.zero_stage == 2
        self._when = Reduce.IN_EACH_BACKWARD if each else Reduce.IN_LAST_BACKWARD

    def begin(self, num_micro_batches: int) -> None:
        self._num_micro_batches = num_micro_batches

    def before(self, micro_batch: int, chunk: Chunk, *, is_whole: bool) -> None:
        is_last = is_whole and self._done[chunk] + 1 == self._num_micro_batches
        self._is_reduced = is_last or (is_whole and self._when is Reduce.IN_EACH_BACKWARD)
        only = None
        if self._num_chunks > 1:
            completes = is_last and self._when is Reduce.IN_LAST_BACKWARD
            only = self._completed_by((*self._finished, chunk)) if completes else self._reached_by(chunk)
        self._optimizer.set_gradient_accumulation_boundary(self._is_reduced, only=only)

    def after(self, micro_batch: int, chunk: Chunk, *, is_whole: bool) -> None:
        if self._is_reduced:
            self._optimizer.reduce_gradients()
        else:
            self._optimizer.backward_epilogue()
        self._done[chunk] += is_whole
        if self._done[chunk] == self._num_micro_batches and is_whole:
            self._finished += (chunk,)
        if len(self._finished) == self._num_chunks:
            self._done.clear()
            self._finished = ()

    def _reached_by(self, chunk: Chunk) -> list[Any]:
        """The buckets that a backward through the chunk brings gradients for."""
        if (chunk,) not in self._buckets:
            self._buckets[(chunk,)] = self._optimizer.buckets_of(chunk.parameters())
        return self._buckets[(chunk,)]

    def _completed_by(self, chunks: tuple[Chunk, ...]) -> list[Any]:
        """The buckets that are complete after the last of the chunks and were not before; after all, what is left."""
        key = (*chunks, chunks[-1])  # no other key repeats a chunk
        if key not in self._buckets:
            before = self._complete_after(chunks[:-1])
            shared = self._optimizer.buckets_of(p for chunk in chunks[:-1] for p in chunk.parameters())
            new = [bucket for bucket in self._complete_after(chunks) if bucket not in before]
            self._buckets[key] = sorted(new, key=lambda bucket: bucket in shared)  # stable: else in launch order
        return self._buckets[key]

    def _complete_after(self, chunks: tuple[Chunk, ...]) -> list[Any]:
        parameters = list(self._engine.module.parameters())
        present = {parameter for chunk in chunks for parameter in chunk.parameters()}
        missing = [p for p in parameters if p not in present] if len(chunks) < self._num_chunks else []
        open_buckets = self._optimizer.buckets_of(missing)
        return [bucket for bucket in self._optimizer.buckets_of(parameters) if bucket not in open_buckets]


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
        set_micro_batches(self.engine, len(batches))
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
