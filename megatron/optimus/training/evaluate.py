"""Evaluation on held-out data: between the steps of a run, at its end, or of a checkpoint at any layout."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.context import RunContext
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.loader import Batch, BatchLoader
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.files import write_atomically
from megatron.optimus.platform.memory import needs_memory
from megatron.optimus.training.checkpointing import Checkpoints
from megatron.optimus.training.data import build_evaluation_data, num_labels
from megatron.optimus.training.engine import build_engine, build_model, training_state
from megatron.optimus.training.health import TrainingError
from megatron.optimus.training.pipeline_schedule import Schedule, build_schedule

FILE_NAME = "evaluation.json"

logger = logging.getLogger("optimus")


def loss_over(run: RunContext, loader: BatchLoader, schedule: Schedule) -> float:
    """Mean cross-entropy in nats per label over all batches of ``loader``. Collective.

    Raises DataError on every rank where one cannot read its batches.
    """
    assert loader.num_batches is not None
    size = run.config.training.global_batch_size  # during a batch-size ramp too: every validation is the same

    def read(number: int) -> list[Batch]:
        batches = run.ranks.run_on_all_ranks(partial(loader.batch, number * size), "reading validation data", DataError)
        return [batch.to(run.device) for batch in batches]

    return validation_loss(run, schedule, map(read, range(loader.num_batches)))


@needs_memory("an evaluation")
def validation_loss(run: RunContext, schedule: Schedule, batches: Iterable[Sequence[Batch]]) -> float:
    """Mean cross-entropy in nats per label over global batches, each given as this rank's micro-batches. Collective.

    A schedule-free optimizer's model is evaluated at the average of its weights.
    """
    total = torch.zeros(2, dtype=devices.sum_dtype(run.device), device=run.device)  # sum of losses, labels
    with training_state(schedule.engine).averaged_parameters():
        for own in batches:
            # Empty where another pipeline stage has the loss.
            for loss_sum, batch in zip(schedule.evaluate(own), own, strict=False):
                total += torch.stack([loss_sum.to(total.dtype), torch.full_like(total[0], num_labels(batch))])
    if (world := run.mesh.group("world")) is not None:
        dist.all_reduce(total, group=world)
    return (total[0] / total[1].clamp(min=1)).item()


def evaluate(run: RunContext) -> None:
    """Evaluates the checkpoint that a training run would resume from, as ``skip_train`` asks for. Collective.

    Writes ``<run_dir>/evaluation.json``; nothing is trained and no checkpoint is written. Raises CheckpointError where
    there is no checkpoint, DataError without data, on every rank.
    """
    loaders = build_evaluation_data(run)
    model = build_model(run)
    engine = build_engine(run, model)
    schedule = build_schedule(run, engine)
    checkpoints = Checkpoints(run, model, engine)
    step, _ = checkpoints.resume()
    if checkpoints.found_none:
        raise CheckpointError("skip_train=True, but there is no checkpoint to evaluate; name one in load, or a run_dir")
    evaluate_sets(run, loaders, step, schedule)
    for loader in loaders.values():
        loader.close()
    checkpoints.close()


def evaluate_sets(run: RunContext, loaders: Mapping[str, BatchLoader], step: int, schedule: Schedule) -> None:
    """Writes the loss over every set and the number of the step to ``<run_dir>/evaluation.json``. Collective.

    Raises DataError or TrainingError on every rank where one cannot read or write.
    """
    found: dict[str, Any] = {"step": step}
    training = run.config.training
    tokens = training.global_batch_size * training.seq_length
    for name, loader in loaders.items():
        loss = loss_over(run, loader, schedule)
        perplexity = math.exp(min(loss, 700.0))  # beyond that no float holds it
        found[name] = {"loss": loss, "perplexity": perplexity, "tokens": (loader.num_batches or 0) * tokens}
        logger.info("%s: loss %.4f nats, perplexity %.2f, %d tokens", name, loss, perplexity, found[name]["tokens"])

    def write() -> None:
        if run.mesh.rank == 0:
            folder = Path(run.config.logging.run_dir)
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / FILE_NAME, json.dumps(found, indent=1) + "\n", sync=False)

    run.ranks.run_on_all_ranks(write, f"writing {FILE_NAME}", TrainingError)
