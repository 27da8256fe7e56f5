"""Replays forward and backward of a micro-batch as a CUDA graph, so that small models do not wait for the host.

The first micro-batch of a step overwrites main gradients and the later ones add to them: each kind has a graph of its
own, recorded in the third step of its kind and replayed from then on with other tokens in the same memory. The kernels
are those that the engine launches, so losses and weights have the same bits. No hook runs in a replay:
``EPZeroOptimizer.replay_backward`` counts the gradients, and recorded metrics are recorded again. Gradients are
reduced in hooks, so with several data-parallel ranks the last micro-batch of a step goes through the engine. The
optimizer's step is not part of a graph. The graph of a step's first micro-batch quantizes the weights of float8
products, the others read what it wrote.

A replay waits for all of the last update; the engine's forward waits layer by layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.context import RunContext
from megatron.optimus.data.loader import Batch
from megatron.optimus.ops import fp8
from megatron.optimus.platform import device as devices
from megatron.optimus.platform import metrics
from megatron.optimus.platform.ranks import Ranks
from megatron.optimus.training.engine import Engine
from megatron.optimus.training.health import TrainingError

logger = logging.getLogger("optimus")

WARM_UP = 2  # steps through the engine: kernels are compiled and tuned, and the optimizer learns who writes main_grad

RunMicroBatch = Callable[[Batch, "float | Tensor"], Tensor]


class _RecordedMicroBatch(NamedTuple):
    """A graph and what it leaves in its memory."""

    graph: devices.DeviceGraph
    loss_sum: Tensor  # fp32 scalar in nats
    metrics: list[tuple[str, Tensor, metrics.Reduce, float]]  # of ``Recorder.recorded``
    gradients: Any  # of ``EPZeroOptimizer.held_gradients``
    quantized: Any  # of ``fp8.kept_so_far``


def graphs_of(run: RunContext, engine: Engine) -> MicroBatchGraphs | None:
    """The graphs of a run with ``cuda_graphs``. Raises ConfigError where its device has none."""
    if not run.config.training.cuda_graphs:
        return None
    if run.device.type != "cuda":
        raise ConfigError(f"cuda_graphs=True needs device=cuda, this run has device={run.device.type}; leave it out")
    return MicroBatchGraphs(engine, run.ranks)


class MicroBatchGraphs:
    """Runs the micro-batches of training steps, through the engine or as a graph.

    Args:
        engine: of ZeRO stage 1.
        ranks: all ranks.
        graph_type: what records and replays.
    """

    def __init__(self, engine: Engine, ranks: Ranks, graph_type: type[devices.DeviceGraph] | None = None) -> None:
        self._engine, self._ranks, self._graph_type = engine, ranks, graph_type or devices.DeviceGraph
        self._setting: Any = None  # what recorded kernels have as constants
        self._steps = 0  # that have begun with this setting
        self._recordings: dict[bool, _RecordedMicroBatch] = {}  # True: of a step's first micro-batch
        self._num_hooks = self._count_hooks()  # of the model itself
        self._inputs: list[Any] = []  # tokens, labels, positions, mean labels: the memory from which graphs read

    def run(self, through_engine: RunMicroBatch, batch: Batch, mean_labels: float | Tensor) -> Tensor:
        """Forward and backward of the engine's next micro-batch.

        Args:
            through_engine: does it without a graph; it returns the sum of losses.
            batch: on the device.
            mean_labels: labels in a micro-batch, on average; a tensor is a scalar on the device.

        Returns:
            The sum of losses over the micro-batch's labels, fp32 scalar in nats.

        Raises:
            TrainingError: the device refuses to record the kernels.
        """
        is_first = not self._engine.optimizer.has_begun
        shapes = [None if part is None else part.shape for part in (batch.tokens_BS, batch.positions_BS)]
        constant = None if isinstance(mean_labels, Tensor) else mean_labels
        setting = (self._engine.gradient_accumulation_steps(), constant, shapes)
        if setting != self._setting:
            self._setting, self._steps, self._recordings, self._inputs = setting, 0, {}, []
        self._steps += is_first
        if self._steps <= WARM_UP or self._must_not_replay(batch):
            return through_engine(batch, mean_labels)
        self._copy_inputs(batch, mean_labels)
        if (recording := self._recordings.get(is_first)) is None:
            recording = self._recordings[is_first] = self._record(through_engine, is_first)
            recording.graph.replay()
        else:
            self._engine.optimizer.replay_backward(recording.graph.replay, recording.gradients)
            fp8.keep(recording.quantized)  # for a last micro-batch that goes through the engine
        for name, value, reduce, weight in recording.metrics:
            metrics.record(name, value, reduce=reduce, weight=weight)
        return recording.loss_sum.clone()

    def _must_not_replay(self, batch: Batch) -> bool:
        reduces = self._engine.dp_world_size > 1 and self._engine.is_gradient_accumulation_boundary()
        # Hooks come after a step that was not finite, and in a profile; a replay would run none of them. Of the rest
        # only the last micro-batch of a step differs, so the first one's float8 weights are always there.
        return reduces or batch.documents is not None or self._count_hooks() != self._num_hooks

    def _count_hooks(self) -> int:
        return sum(len(module._forward_hooks) for module in self._engine.module.modules())

    def _copy_inputs(self, batch: Batch, mean_labels: float | Tensor) -> None:
        """Copies the inputs to the memory from which graphs read."""
        given = (batch.tokens_BS, batch.labels_BS, batch.positions_BS, mean_labels)
        if not self._inputs:
            self._inputs = [part.clone() if isinstance(part, Tensor) else part for part in given]
        for own, part in zip(self._inputs, given, strict=True):
            if isinstance(own, Tensor) and isinstance(part, Tensor):
                own.copy_(part)

    def _record(self, through_engine: RunMicroBatch, is_first: bool) -> _RecordedMicroBatch:
        """Records a micro-batch; afterwards the engine has counted it, and the device has not computed it."""
        tokens_BS, labels_BS, positions_BS, mean_labels = self._inputs
        batch = Batch(tokens_BS, labels_BS, positions_BS=positions_BS)
        graph = self._graph_type(next((other.graph for other in self._recordings.values()), None))
        recorder, optimizer = metrics.Recorder(self._ranks), self._engine.optimizer

        def work() -> tuple[Tensor, list[tuple[str, Tensor, metrics.Reduce, float]]]:
            with recorder.recording(), self._engine.no_sync():
                loss_sum = through_engine(batch, mean_labels)
            return loss_sum, recorder.recorded()

        optimizer.wait_for_params()  # recorded kernels cannot wait for an update that was queued before
        try:
            loss_sum, recorded = graph.record(work)
        except RuntimeError as error:
            cause = error.__context__ or error  # ending the recording fails too
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            line = str(cause).strip().partition("\n")[0]
            raise TrainingError(f"cuda_graphs=True: a micro-batch cannot be recorded ({line}); leave it out") from error
        kind = "first micro-batch" if is_first else "later micro-batches"
        logger.info("cuda_graphs: the %s of a step from now on as one graph", kind)
        return _RecordedMicroBatch(graph, loss_sum, recorded, optimizer.held_gradients(), fp8.kept_so_far())
