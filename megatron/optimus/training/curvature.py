"""Sophia's estimate of the Hessian: a backward of the loss against labels drawn from the model's own predictions.

It is a training step without an update (the Gauss-Newton-Bartlett estimate, arXiv 2305.14342, algorithm 2): the same
schedule, layouts and reduction, with the cross-entropy alone. Which label a position draws depends on the seed, the
step and the position in the global batch, not on the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.profiler import record_function

from megatron.optimus.config.schema import RunConfig
from megatron.optimus.context import RunContext
from megatron.optimus.data.loader import Batch
from megatron.optimus.layers import NO_LABEL
from megatron.optimus.layers.loss import DRAWS
from megatron.optimus.parallel.context import own_positions
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.training.data import labels_per_micro_batch
from megatron.optimus.training.engine import Engine, update_curvature
from megatron.optimus.training.pipeline_schedule import Schedule


def is_due(config: RunConfig, step: int) -> bool:
    """Whether an estimate comes before the update of a step, numbered from 0."""
    interval = config.optimizer.sophia_interval
    return interval is not None and step % interval == 0


def estimate_curvature(
    run: RunContext,
    engine: Engine,
    schedule: Schedule,
    batches: Sequence[Batch],
    step: int,
    before_update: Callable[[], None] = lambda: None,
) -> None:
    """Queues one estimate on the first micro-batches of a step. Collective; nothing here waits for the device.

    Args:
        run: configuration, mesh and device of the run.
        engine: the model and its optimizer.
        schedule: runs forward and backward.
        batches: this rank's micro-batches of the step, on the device.
        step: its number.
        before_update: called before anything changes that a checkpoint holds.
    """
    mesh = run.mesh
    count = num_micro_batches(run.config, mesh, len(batches))
    chosen = [_drawing(batch, number, step, run) for number, batch in enumerate(batches[:count])]
    labels = labels_per_micro_batch(chosen, mesh)
    with record_function("part: curvature"), _sampling(engine, schedule):
        schedule.forward_backward(chosen, labels, with_router_losses=False)
    before_update()
    update_curvature(engine, labels * count * mesh.size("dense"))


def num_micro_batches(config: RunConfig, mesh: Mesh, available: int) -> int:
    """Micro-batches of a rank that an estimate takes, of those ``available`` in a step."""
    wanted = config.optimizer.sophia_batch_size
    if wanted is None:
        return available if mesh.size("pp") > 1 else 1
    return min(available, wanted // (config.training.micro_batch_size * mesh.size("dp")))  # a ramp begins with fewer


@contextmanager
def _sampling(engine: Engine, schedule: Schedule) -> Iterator[None]:
    """Has the output projection draw its labels, without z-loss; the routers' counts of the step stay as they are."""
    head = engine.module.lm_head  # None on the other pipeline stages
    counts = {router: router.step_counts_E.clone() for router in schedule.routers.values()}
    z_loss = 0.0 if head is None else head.z_loss_coeff
    if head is not None:
        head.draws_labels, head.z_loss_coeff = True, 0.0
    try:
        yield
    finally:
        if head is not None:
            head.draws_labels, head.z_loss_coeff = False, z_loss
        for router, count in counts.items():
            router.step_counts_E.copy_(count)


def _drawing(batch: Batch, number: int, step: int, run: RunContext) -> Batch:
    """The micro-batch with a random number, 0 to DRAWS - 1, in the place of each label that counts."""
    mesh, training = run.mesh, run.config.training
    rows, device = batch.tokens_BS.shape[0], batch.tokens_BS.device
    positions = own_positions(training.seq_length, run.config.parallel, mesh)
    places_S = torch.arange(batch.tokens_BS.shape[1]) if positions is None else positions
    first = (number * mesh.size("dp") + mesh.index("dp")) * rows
    samples_B = torch.arange(first, first + rows)
    numbers_BS = _hash(samples_B[:, None] * training.seq_length + places_S, training.seed, step).to(device)
    return batch._replace(labels_BS=torch.where(batch.labels_BS != NO_LABEL, numbers_BS, NO_LABEL))


def _hash(index: Tensor, seed: int, step: int) -> Tensor:
    """Evenly distributed numbers from 0 to DRAWS - 1, int64, a function of the arguments alone."""
    mask = 0xFFFFFFFF
    x = (index * 0x9E3779B9 + step * 0x85EBCA6B + (seed & mask) * 0xC2B2AE35) & mask
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
        x = ((x ^ (x >> 15)) * 0x846CA68B) & mask
    return (x ^ (x >> 16)) % DRAWS
