"""One optimizer step and one validation, without any input or output.

Gradients are those of the mean over all labels of the global batch: each micro-batch's sum is divided by the labels a
micro-batch has on average over all ranks, the engine divides by the number of micro-batches, the optimizer averages
over data-parallel ranks. Only where samples differ in their labels does that average need a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.context import RunContext
from megatron.optimus.data.loader import Batch
from megatron.optimus.layers.labels import NO_LABEL
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.training.engine import Engine, step_outcome
from megatron.optimus.training.pipeline_schedule import MicroBatchRecord, Schedule

# Phases of a step in profiles (profiling.py lists what begins with "part: ").
FORWARD_BACKWARD, OPTIMIZER_STEP = "part: forward and backward", "part: optimizer step"


@dataclass(frozen=True)
class StepReport:
    """What happened in one step, over the global batch."""

    loss: float  # cross-entropy per label, nats
    aux_loss: float  # load-balancing loss, unweighted, mean over layers with experts
    z_loss: float
    grad_norm: float  # before clipping
    skipped: bool  # gradients were not finite, nothing was updated
    router_entropy: float | None  # nats, mean over layers and tokens; None for a dense model
    expert_load_LE: list[list[int]]  # slots per layer and expert, of the layers that have experts
    dropped_tokens: int  # slots routed but processed by no expert; dropless routing means 0
    stop_requested: bool = False  # a rank was asked to end the run; the same answer on all

    @property
    def expert_load_max_over_mean(self) -> float | None:
        """Slots of the busiest expert over the mean, in the layer where that is worst; None for a dense model."""
        return max((max(load) * len(load) / sum(load) for load in self.expert_load_LE), default=None)


class PendingReport:
    """A step that has been queued. ``read`` waits until the device has taken it, not for what was queued later."""

    def __init__(self, totals: _Totals, outcome: Tensor) -> None:
        assert totals.scalars is not None
        loads = [] if totals.counts_LE is None else [totals.counts_LE]
        self._outcome = devices.HostCopy(outcome)
        self._totals = devices.HostCopy(totals.scalars, *loads)

    def read(self) -> StepReport:
        """What happened."""
        [outcome], [scalars, *loads] = self._outcome.read(), self._totals.read()
        grad_norm, skipped = outcome.tolist()
        loss_sum, num_labels, num_tokens, aux, z, entropy, processed, stop = scalars.tolist()
        load = loads[0].tolist() if loads else []
        return StepReport(
            loss=loss_sum / max(num_labels, 1),
            aux_loss=aux / num_tokens,
            z_loss=z / num_tokens,
            grad_norm=grad_norm,
            skipped=bool(skipped),
            router_entropy=entropy / num_tokens / len(load) if load else None,
            expert_load_LE=load,
            dropped_tokens=sum(map(sum, load)) - round(processed),
            stop_requested=stop > 0,
        )


class _Totals:
    """Sums over the micro-batches of this rank, on the device, until one reduction at the end of the step.

    The reduction is over all ranks. Tensor-parallel ranks have different tokens where routers are, and the same
    loss_sum and num_tokens, so both of these count as often. Of a pipeline's stages the last one counts them, and each
    counts its own layers.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.moe_layers = config.moe_layers
        self.num_experts = config.num_experts
        self.scalars: Tensor | None = None
        self.counts_LE: Tensor | None = None

    @torch.no_grad()
    def add(self, seen: MicroBatchRecord, batch: Batch) -> None:
        stats, num_tokens = seen.stats.values(), batch.tokens_BS.numel()
        # float64: sums of token counts must stay exact, and one dtype makes one collective. Filled on the device: a
        # number copied there would make the host wait.
        zero = torch.zeros((), dtype=torch.float64, device=batch.tokens_BS.device)
        num_labels = num_tokens if batch.num_labels is None else batch.num_labels
        num_layers = max(1, len(self.moe_layers))
        counted = 0 if seen.loss_sum is None else 1
        scalars = torch.stack(
            [
                zero if seen.loss_sum is None else seen.loss_sum.double(),
                torch.full_like(zero, num_labels * counted),
                torch.full_like(zero, num_tokens * counted),
                sum((s.aux_loss.double() for s in stats), start=zero) * (num_tokens / num_layers),
                sum((s.z_loss.double() for s in stats), start=zero) * (num_tokens / num_layers),
                sum((s.entropy.double() for s in stats), start=zero) * num_tokens,
                sum((s.processed.double() for s in stats), start=zero),
            ]
        )
        self.scalars = scalars if self.scalars is None else self.scalars + scalars
        if self.moe_layers:  # on a stage without any of them too: the sum over ranks is one of all
            # Row by row: a list of rows as the index would travel to the device, and the host would wait for it.
            none_E = zero.new_zeros(self.num_experts, dtype=torch.int64)
            counts_LE = torch.stack([seen.stats[n].counts_E if n in seen.stats else none_E for n in self.moe_layers])
            self.counts_LE = counts_LE if self.counts_LE is None else self.counts_LE + counts_LE

    def reduce(self, group: dist.ProcessGroup | None, *, stop_requested: bool = False) -> None:
        """Appends the number of ranks that were asked to stop, and sums."""
        assert self.scalars is not None
        self.scalars = torch.cat([self.scalars, self.scalars.new_full((1,), float(stop_requested))])
        if group is None:
            return
        dist.all_reduce(self.scalars, group=group)
        if self.counts_LE is not None:
            dist.all_reduce(self.counts_LE, group=group)


def own_part(batch: Batch, positions_S: Tensor | None) -> Batch:
    """The part of a micro-batch that a context-parallel rank works on; None: all of it. Documents stay whole."""
    if positions_S is None:
        return batch
    tokens_BS, labels_BS = batch.tokens_BS[:, positions_S], batch.labels_BS[:, positions_S]
    if batch.positions_BS is None:
        places_BS = positions_S.expand_as(tokens_BS).contiguous()
    else:
        places_BS = batch.positions_BS[:, positions_S]
    num_labels = batch.num_labels
    if batch.is_same and num_labels is not None:  # the parts' mean: over all of them the sum is that of the labels
        num_labels *= positions_S.numel() / batch.labels_BS.shape[1]
    elif num_labels is not None:
        num_labels = int((labels_BS != NO_LABEL).sum())
    return Batch(tokens_BS, labels_BS, batch.documents, places_BS, num_labels, batch.is_same)


def train_step(
    run: RunContext,
    engine: Engine,
    schedule: Schedule,
    batches: Sequence[Batch],
    before_update: Callable[[], None] = lambda: None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> PendingReport:
    """Forward and backward over this rank's micro-batches, then the sharded optimizer step. Collective.

    ``before_update``: called before anything changes that a checkpoint holds. ``stop_requested``: whether this rank was
    asked to end the run; the report says whether any was. Nothing here waits for the device.
    """
    config, mesh = run.config.model, run.mesh
    totals = _Totals(config)
    with record_function(FORWARD_BACKWARD):
        seen = schedule.forward_backward(batches, _labels_each(batches, mesh))
    before_update()
    with record_function(OPTIMIZER_STEP):
        engine.step()
    for record, batch in zip(seen, batches, strict=True):
        totals.add(record, batch)
    totals.reduce(mesh.group("world"), stop_requested=stop_requested())
    outcome = step_outcome(engine)
    if totals.counts_LE is not None:
        rate = torch.where(outcome[1] == 0, config.moe_router_bias_update_rate, 0.0).to(totals.counts_LE.device)
        for number, router in schedule.routers.items():
            router.finish_step(totals.counts_LE[totals.moe_layers.index(number)], rate)
    return PendingReport(totals, outcome)


def _labels_each(batches: Sequence[Batch], mesh: Mesh) -> float | Tensor:
    """Labels that count in a micro-batch, averaged over those of all ranks. Collective if these have to be asked."""
    if batches[0].num_labels is None:
        return batches[0].labels_BS.numel()
    if batches[0].is_same:
        return batches[0].num_labels
    own = sum(batch.num_labels or 0 for batch in batches)
    mean = torch.full((), own / len(batches), dtype=torch.float64, device=batches[0].labels_BS.device)
    group, ranks = mesh.group("dense"), mesh.size("dense")
    if group is not None:
        dist.all_reduce(mean, group=group)
        mean /= ranks
    return mean.clamp(min=1 / (len(batches) * ranks)).float()  # a batch without any label has the loss 0, not 0 / 0


@torch.no_grad()
def validation_loss(run: RunContext, schedule: Schedule, batches: Iterable[Sequence[Batch]]) -> float:
    """Mean cross-entropy per token over the given global batches, in nats. Collective."""
    totals = _Totals(run.config.model)
    for global_batch in batches:
        for record, batch in zip(schedule.evaluate(global_batch), global_batch, strict=True):
            totals.add(record, batch)
    totals.reduce(run.mesh.group("world"))
    assert totals.scalars is not None
    return (totals.scalars[0] / totals.scalars[1].clamp(min=1)).item()
