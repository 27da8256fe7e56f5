"""Forward and backward of a step's micro-batches, one after the other or over the stages of a pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from megatron.optimus.config.checks import micro_batches
from megatron.optimus.config.schema import ModelConfig, RunConfig
from megatron.optimus.context import RunContext
from megatron.optimus.data.loader import Batch
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.moe.router import Router
from megatron.optimus.parallel.pipeline_stages import make_p2p_groups, stage_plan
from megatron.optimus.training.cuda_graphs import MicroBatchGraphs, graphs_of
from megatron.optimus.training.engine import Engine, set_micro_batches

if TYPE_CHECKING:
    from megatron.optimus.parallel.pipeline import ModelChunk, Pipeline


class Schedule(Protocol):
    """Both methods are collective over the ranks of a pipeline. They return each micro-batch's sum of losses (fp32
    scalars in nats, without gradients), or nothing where another pipeline stage has the loss."""

    engine: Engine
    routers: dict[int, Router]  # of this rank's MoE layers, by their number in the model

    def forward_backward(
        self,
        batches: Sequence[Batch],
        mean_labels_per_micro_batch: float | Tensor,
        *,
        with_router_losses: bool = True,
    ) -> list[Tensor]:
        """Accumulates the gradients of the mean over micro-batches; ``engine.step()`` comes next.

        Steps may differ in their number of micro-batches, on every rank alike.
        ``mean_labels_per_micro_batch``: labels that count in a micro-batch, on average over those of all ranks.
        ``with_router_losses``: whether the routers' balancing and z-loss are part of the loss.
        """

    def evaluate(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Forward only, in evaluation mode."""


def build_schedule(run: RunContext, engine: Engine) -> Schedule:
    """Builds the schedule of a run. Collective."""
    config, mesh, device = run.config, run.mesh, run.device
    group = mesh.group("pp")
    if group is None:
        return WholeModel(engine, config.model, graphs_of(run, engine))
    # Here, because importing torch's pipelining takes as long as importing torch, at every start.
    from megatron.optimus.parallel.pipeline import Pipeline

    training, parallel = config.training, config.parallel
    length = training.seq_length // mesh.size("cp")
    hidden_shape = (training.micro_batch_size, length, config.model.hidden_size)
    if mesh.size("tp") > 1 and parallel.sequence_parallel:
        hidden_shape = (1, training.micro_batch_size * length // mesh.size("tp"), config.model.hidden_size)
    tied = _tied_weight(engine.module)
    if tied is not None:  # both stages add their gradients up; the sum over the two makes them one
        ends = mesh.first_and_last_group("pp")
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
        backward_hooks=GradientReduction(engine, config),
        p2p_groups=make_p2p_groups(mesh, parallel, device),
    )
    return Stages(engine, pipeline)


class GradientReduction:
    """Has the optimizer sum a pipeline's gradients over data-parallel ranks while backwards run.

    ZeRO stage 1 adds up the gradients of all micro-batches and reduces them in the last backward of each chunk. Stage 2
    keeps no whole gradients and reduces them in every backward. A bucket may lie in several chunks: stage 1 reduces it
    in the last backward of the chunk that finishes last, after the buckets that lie in that chunk alone and are
    complete earlier. Which buckets a backward reduces, and in which order, follows from the schedule and the layers of
    the rank, which are the same on all ranks of a data-parallel group.
    """

    def __init__(self, engine: Engine, config: RunConfig) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        self._num_micro_batches = 0  # of the present step
        self._num_chunks = config.parallel.virtual_pipeline_model_parallel_size
        self._buckets: dict[tuple[ModelChunk, ...], list[Any]] = {}
        self._done: Counter[ModelChunk] = Counter()  # backwards of this step, those of inputs alone not counted
        self._finished: tuple[ModelChunk, ...] = ()  # that have no further backward in this step, in their order
        self._is_reduced = False  # by the present backward
        self._in_each_backward = config.optimizer.zero_stage == 2
        engine.optimizer.measure_ranks_only()

    def begin(self, num_micro_batches: int) -> None:
        """Takes the number of micro-batches of the step."""
        self._num_micro_batches = num_micro_batches

    def before(self, micro_batch: int, chunk: ModelChunk, *, is_whole: bool) -> None:
        """Tells the optimizer whether this backward is reduced, and which buckets."""
        is_last = is_whole and self._done[chunk] + 1 == self._num_micro_batches
        self._is_reduced = is_last or (is_whole and self._in_each_backward)
        only = None
        if self._num_chunks > 1:
            completes = is_last and not self._in_each_backward
            only = self._completed_by((*self._finished, chunk)) if completes else self._reached_by(chunk)
        self._optimizer.set_gradient_accumulation_boundary(self._is_reduced, only=only)

    def after(self, micro_batch: int, chunk: ModelChunk, *, is_whole: bool) -> None:
        """Reduces the gradients, or ends the backward without, and counts it for its chunk."""
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

    def _reached_by(self, chunk: ModelChunk) -> list[Any]:
        """The buckets that hold gradients of the chunk."""
        if (chunk,) not in self._buckets:
            self._buckets[(chunk,)] = self._optimizer.buckets_of(chunk.parameters())
        return self._buckets[(chunk,)]

    def _completed_by(self, chunks: tuple[ModelChunk, ...]) -> list[Any]:
        """The buckets that are complete once the last of the chunks is done, and were not before."""
        key = (*chunks, chunks[-1])  # no other key repeats a chunk
        if key not in self._buckets:
            before = self._complete_after(chunks[:-1])
            shared = self._optimizer.buckets_of(p for chunk in chunks[:-1] for p in chunk.parameters())
            new = [bucket for bucket in self._complete_after(chunks) if bucket not in before]
            self._buckets[key] = sorted(new, key=lambda bucket: bucket in shared)  # stable: else in launch order
        return self._buckets[key]

    def _complete_after(self, chunks: tuple[ModelChunk, ...]) -> list[Any]:
        parameters = list(self._engine.module.parameters())
        present = {parameter for chunk in chunks for parameter in chunk.parameters()}
        missing = [p for p in parameters if p not in present] if len(chunks) < self._num_chunks else []
        open_buckets = self._optimizer.buckets_of(missing)
        return [bucket for bucket in self._optimizer.buckets_of(parameters) if bucket not in open_buckets]


def _tied_weight(model: Decoder) -> nn.Parameter | None:
    """The embedding weight, where another pipeline stage has a copy of it; else None."""
    return next((parameter for parameter in model.parameters() if getattr(parameter, "pipe_tied", False)), None)


def routers_of(model: Decoder) -> dict[int, Router]:
    """The routers of this rank's layers, by the layer's number in the model."""
    blocks = ((int(number), block) for number, block in model.layers.named_children())
    return {number: block.moe.router for number, block in blocks if block.is_moe}  # type: ignore[union-attr,misc]


class WholeModel(Schedule):
    """The schedule without pipeline parallelism: one micro-batch after the other goes through the engine, or through
    ``graphs``, which replay it."""

    def __init__(self, engine: Engine, config: ModelConfig, graphs: MicroBatchGraphs | None = None) -> None:
        self.engine, self.config, self.graphs = engine, config, graphs
        self.routers = routers_of(engine.module)

    def forward_backward(
        self,
        batches: Sequence[Batch],
        mean_labels_per_micro_batch: float | Tensor,
        *,
        with_router_losses: bool = True,
    ) -> list[Tensor]:
        loss_sums, config = [], self.config

        def run(batch: Batch, mean_labels: float | Tensor) -> Tensor:
            output = self.engine(batch.tokens_BS, batch.labels_BS, batch.documents, batch.positions_BS)
            loss = output.loss_sum / mean_labels
            if with_router_losses:
                loss = loss + config.moe_aux_loss_coeff * output.aux_loss + config.moe_z_loss_coeff * output.z_loss
            self.engine.backward(loss)
            return output.loss_sum.detach()

        # Without the routers' losses it is no training step, but a check or an estimate that no other step repeats.
        run_micro_batch = partial(self.graphs.run, run) if self.graphs is not None and with_router_losses else run
        set_micro_batches(self.engine, len(batches))
        for index, batch in enumerate(batches):
            if index > 0:
                self.engine.step()  # between micro-batches it only counts them
            loss_sums.append(run_micro_batch(batch, mean_labels_per_micro_batch))
        return loss_sums

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> list[Tensor]:
        model: Decoder = self.engine.module
        model.eval()
        outputs = [model(b.tokens_BS, b.labels_BS, b.documents, b.positions_BS) for b in batches]
        model.train()
        return [output.loss_sum for output in outputs if output.loss_sum is not None]


class Stages(Schedule):
    """The schedule of a pipeline. The engine sees all micro-batches of a step as one."""

    def __init__(self, engine: Engine, pipeline: Pipeline) -> None:
        self.engine, self.pipeline = engine, pipeline
        self.routers = routers_of(engine.module)

    def forward_backward(
        self,
        batches: Sequence[Batch],
        mean_labels_per_micro_batch: float | Tensor,
        *,
        with_router_losses: bool = True,
    ) -> list[Tensor]:
        return self.pipeline.forward_backward(
            batches, mean_labels_per_micro_batch, with_router_losses=with_router_losses
        )

    def evaluate(self, batches: Sequence[Batch]) -> list[Tensor]:
        model: Decoder = self.engine.module
        model.eval()
        loss_sums = self.pipeline.evaluate(batches)
        model.train()
        return loss_sums
