"""One optimizer step and one validation, without any input or output.

Gradients are those of the mean over all labels of the global batch: each micro-batch's sum is divided by the labels a
micro-batch has on average over all ranks, the engine divides by the number of micro-batches, the optimizer averages
over data-parallel ranks. Only where labels are masked does that average need a collective: else all have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.data.loader import Batch
from megatron.optimus.models.decoder import Decoder, DecoderOutput
from megatron.optimus.parallel.mesh import Mesh
from megatron.optimus.trainer.engine import Engine


@dataclass(frozen=True)
class StepReport:
    """What happened in one step, over the global batch."""

    loss: float  # cross-entropy per label, nats
    aux_loss: float  # load-balancing loss, unweighted, mean over layers
    z_loss: float
    grad_norm: float  # before clipping
    skipped: bool  # gradients were not finite, nothing was updated
    router_entropy: float | None  # nats, mean over layers and tokens; None for a dense model
    expert_load_LE: list[list[int]]  # slots per layer and expert
    dropped_tokens: int  # slots routed but processed by no expert; dropless routing means 0

    @property
    def expert_load_max_over_mean(self) -> float | None:
        """Slots of the busiest expert over the mean, in the layer where that is worst; None for a dense model."""
        return max((max(load) * len(load) / sum(load) for load in self.expert_load_LE), default=None)


class _Totals:
    """Sums over the micro-batches of this rank, on the device, until one reduction at the end of the step.

    The reduction is over all ranks of a stage. Tensor-parallel ranks have different tokens where routers are, and the
    same loss_sum and num_tokens, so both of these count as often.
    """

    def __init__(self) -> None:
        self.scalars: Tensor | None = None
        self.counts_LE: Tensor | None = None

    @torch.no_grad()
    def add(self, output: DecoderOutput, batch: Batch) -> None:
        stats, num_tokens = output.router_stats, batch.tokens_BS.numel()
        assert output.loss_sum is not None
        # float64: sums of token counts must stay exact, and one dtype makes one collective. Filled on the device: a
        # number copied there would make the host wait.
        zero = torch.zeros_like(output.loss_sum, dtype=torch.float64)
        scalars = torch.stack(
            [
                output.loss_sum.double(),
                torch.full_like(zero, num_tokens if batch.num_labels is None else batch.num_labels),
                torch.full_like(zero, num_tokens),
                output.aux_loss.double() * num_tokens,
                output.z_loss.double() * num_tokens,
                sum((s.entropy.double() for s in stats), start=zero) * num_tokens,
                sum((s.processed.double() for s in stats), start=zero),
            ]
        )
        self.scalars = scalars if self.scalars is None else self.scalars + scalars
        if stats:
            counts_LE = torch.stack([s.counts_E for s in stats])
            self.counts_LE = counts_LE if self.counts_LE is None else self.counts_LE + counts_LE

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        if group is None:
            return
        assert self.scalars is not None
        dist.all_reduce(self.scalars, group=group)
        if self.counts_LE is not None:
            dist.all_reduce(self.counts_LE, group=group)


def train_step(
    engine: Engine,
    batches: Sequence[Batch],
    config: ModelConfig,
    mesh: Mesh,
    before_update: Callable[[], None] = lambda: None,
) -> StepReport:
    """Forward and backward over this rank's micro-batches, then the sharded optimizer step. Collective.

    ``before_update``: called before anything changes that a checkpoint holds.
    """
    model: Decoder = engine.module
    layers = model.moe_layers()
    totals = _Totals()
    labels_each = _labels_each(batches, mesh)
    for index, batch in enumerate(batches):
        output = engine(batch.tokens_BS, batch.labels_BS, batch.documents, batch.positions_BS)
        loss = output.loss_sum / labels_each
        loss = loss + config.moe_aux_loss_coeff * output.aux_loss + config.moe_z_loss_coeff * output.z_loss
        engine.backward(loss)
        if index == len(batches) - 1:
            before_update()
        engine.step()  # updates the weights after the last micro-batch only
        totals.add(output, batch)
        for layer, stats in zip(layers, output.router_stats, strict=True):
            layer.router.record_micro_batch(stats.counts_E)
    totals.reduce(mesh.group("stage"))
    report = _report(totals, engine)
    rate = 0.0 if report.skipped else config.moe_router_bias_update_rate
    if totals.counts_LE is not None:
        for layer, counts_E in zip(layers, totals.counts_LE, strict=True):
            layer.router.finish_step(counts_E, rate)
    return report


def _labels_each(batches: Sequence[Batch], mesh: Mesh) -> int | Tensor:
    """Labels that count in a micro-batch, averaged over those of all ranks. Collective if labels are masked."""
    if batches[0].num_labels is None:
        return batches[0].labels_BS.numel()
    own = sum(batch.num_labels or 0 for batch in batches)
    mean = torch.full((), own / len(batches), dtype=torch.float64, device=batches[0].labels_BS.device)
    group = mesh.group("dense")
    if group is not None:
        dist.all_reduce(mean, group=group)
        mean /= dist.get_world_size(group)
    return mean.clamp(min=1 / len(batches)).float()  # a batch without any label has the loss 0, not 0 / 0


def _report(totals: _Totals, engine: Engine) -> StepReport:
    assert totals.scalars is not None
    loss_sum, num_labels, num_tokens, aux, z, entropy, processed = totals.scalars.tolist()
    load = [] if totals.counts_LE is None else totals.counts_LE.tolist()
    return StepReport(
        loss=loss_sum / max(num_labels, 1),
        aux_loss=aux / num_tokens,
        z_loss=z / num_tokens,
        grad_norm=float(engine.get_global_grad_norm()),
        skipped=bool(engine.optimizer.overflow),
        router_entropy=entropy / num_tokens / len(load) if load else None,
        expert_load_LE=load,
        dropped_tokens=sum(map(sum, load)) - round(processed),
    )


@torch.no_grad()
def validation_loss(model: Decoder, batches: Iterable[Sequence[Batch]], mesh: Mesh) -> float:
    """Mean cross-entropy per token over the given global batches, in nats. Collective."""
    model.eval()
    totals = _Totals()
    for global_batch in batches:
        for batch in global_batch:
            totals.add(model(batch.tokens_BS, batch.labels_BS, batch.documents, batch.positions_BS), batch)
    totals.reduce(mesh.group("stage"))
    model.train()
    assert totals.scalars is not None
    return (totals.scalars[0] / totals.scalars[1].clamp(min=1)).item()
