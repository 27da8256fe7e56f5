"""The loss on data that no step has seen: of a checkpoint at any layout, of a run between its steps and at its end."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.config.checks import gradient_accumulation_steps
from megatron.optimus.config.schema import RunConfig
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.loader import Batch, BatchLoader
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.platform.ranks import Ranks
from megatron.optimus.training.build import build_evaluation_data, build_model
from megatron.optimus.training.checkpointing import Checkpoints
from megatron.optimus.training.engine import build_engine
from megatron.optimus.training.health import TrainingError
from megatron.optimus.training.pipeline_schedule import Schedule, build_schedule
from megatron.optimus.training.step import validation_loss

FILE_NAME = "evaluation.json"

logger = logging.getLogger("optimus")


def loss_over(
    loader: BatchLoader, schedule: Schedule, config: RunConfig, mesh: Mesh, device: torch.device, ranks: Ranks
) -> float:
    """Mean cross-entropy in nats per label over all batches of ``loader``. Collective."""
    assert loader.num_batches is not None
    size = config.training.global_batch_size  # while the batch size is ramped up too: every validation is the same

    def read(number: int) -> list[Batch]:
        batches = ranks.run_on_all_ranks(partial(loader.batch, number * size), "reading validation data", DataError)
        return [batch.to(device) for batch in batches]

    return validation_loss(schedule, map(read, range(loader.num_batches)), config.model, mesh)


def evaluate(config: RunConfig, mesh: Mesh, device: torch.device) -> None:
    """What ``skip_train`` asks for: writes ``<run_dir>/evaluation.json``. Collective.

    The checkpoint is the one a training run would take up; nothing is trained and no checkpoint written. Raises
    CheckpointError where there is none, DataError without data, on every rank.
    """
    ranks = Ranks(None, device)
    loaders = build_evaluation_data(config, mesh, device)
    model = build_model(config, mesh, device)
    engine = build_engine(model, config, mesh, gradient_accumulation_steps(config, mesh.layout.world_size))
    schedule = build_schedule(config, engine, mesh, device)
    checkpoints = Checkpoints(config, mesh, device, model, engine)
    step, _ = checkpoints.resume()
    if checkpoints.found_none:
        raise CheckpointError("skip_train=True, but there is no checkpoint to evaluate; name one in load, or a run_dir")
    evaluate_sets(loaders, step, schedule, config, mesh, device, ranks)
    for loader in loaders.values():
        loader.close()
    checkpoints.close()


def evaluate_sets(
    loaders: Mapping[str, BatchLoader],
    step: int,
    schedule: Schedule,
    config: RunConfig,
    mesh: Mesh,
    device: torch.device,
    ranks: Ranks,
) -> None:
    """Writes the loss over every set, by its name, and the ``step`` into ``<run_dir>/evaluation.json``. Collective.

    Raises DataError or TrainingError on every rank where one cannot read or write.
    """
    found: dict[str, Any] = {"step": step}
    tokens = config.training.global_batch_size * config.training.seq_length
    for name, loader in loaders.items():
        loss = loss_over(loader, schedule, config, mesh, device, ranks)
        perplexity = math.exp(min(loss, 700.0))  # beyond that no float holds it
        found[name] = {"loss": loss, "perplexity": perplexity, "tokens": (loader.num_batches or 0) * tokens}
        logger.info("%s: loss %.4f nats, perplexity %.2f, %d tokens", name, loss, perplexity, found[name]["tokens"])

    def write() -> None:
        if mesh.rank == 0:
            folder = Path(config.logging.run_dir)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / FILE_NAME).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    ranks.run_on_all_ranks(write, f"writing {FILE_NAME}", TrainingError)
