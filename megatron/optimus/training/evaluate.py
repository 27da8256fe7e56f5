"""Evaluation on held-out data: between the steps of a run, at its end, or of a checkpoint at any layout."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.config.choices import TokenizerType
from megatron.optimus.context import RunContext
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.loader import Batch, BatchLoader
from megatron.optimus.data.tokenize.identity import TokenizerIdentity
from megatron.optimus.data.tokenize.tokenizer import build_tokenizer, byte_lengths
from megatron.optimus.layers import NO_LABEL
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.files import write_atomically
from megatron.optimus.platform.memory import needs_memory
from megatron.optimus.training.checkpointing import Checkpoints, has_own_checkpoint
from megatron.optimus.training.data import build_evaluation_data, num_labels
from megatron.optimus.training.engine import build_engine, build_model, training_state
from megatron.optimus.training.health import TrainingError
from megatron.optimus.training.pipeline_schedule import Schedule, build_schedule

FILE_NAME = "evaluation.json"

logger = logging.getLogger("optimus")


class SetLoss(NamedTuple):
    """Cross-entropy over a set."""

    loss: float  # nats per label
    bits_per_byte: float | None  # of the text that the labels stand for; None where its bytes are not known


def bytes_of_tokens(run: RunContext) -> Tensor | None:
    """Bytes of text of each token, float64 [V]; None where no tokenizer says it. Collective.

    The tokenizer is the run's, else the one that the token files name, if it is still there.
    """

    def read() -> bytes:
        if run.ranks.rank > 0:
            return b""
        data, named = run.config.data, run.tokenizer or {}
        kind, path = data.tokenizer_type, data.tokenizer_model
        if path is None and kind is not TokenizerType.BYTE:
            kind, path = TokenizerType(named["type"]) if "type" in named else kind, named.get("model")
        try:
            tokenizer = build_tokenizer(kind, path)
            if path != data.tokenizer_model and TokenizerIdentity.of_tokenizer(
                kind or TokenizerType.HF, path, tokenizer
            ).fingerprint != named.get("fingerprint"):
                return b""
        except (DataError, OSError):
            return b""
        lengths = byte_lengths(tokenizer) or {}
        return np.array([lengths.get(i, 0) for i in range(run.config.model.vocab_size)] * bool(lengths)).tobytes()

    found = run.ranks.broadcast_bytes(read())
    return torch.from_numpy(np.frombuffer(found, np.int64).astype(np.float64)).to(run.device) if found else None


def loss_over(run: RunContext, loader: BatchLoader, schedule: Schedule, bytes_V: Tensor | None = None) -> SetLoss:
    """Mean cross-entropy over all batches of ``loader``; ``bytes_V`` as ``bytes_of_tokens`` gives them. Collective.

    Raises DataError on every rank where one cannot read its batches.
    """
    assert loader.num_batches is not None
    size = run.config.training.global_batch_size  # during a batch-size ramp too: every validation is the same

    def read(number: int) -> list[Batch]:
        batches = run.ranks.run_on_all_ranks(partial(loader.batch, number * size), "reading validation data", DataError)
        return [batch.to(run.device) for batch in batches]

    return set_loss(run, schedule, map(read, range(loader.num_batches)), bytes_V)


@needs_memory("an evaluation")
def set_loss(
    run: RunContext, schedule: Schedule, batches: Iterable[Sequence[Batch]], bytes_V: Tensor | None = None
) -> SetLoss:
    """Mean cross-entropy over global batches, each given as this rank's micro-batches. Collective.

    A schedule-free optimizer's model is evaluated at the average of its weights.
    """
    total = torch.zeros(3, dtype=devices.sum_dtype(run.device), device=run.device)  # losses, labels, bytes of these
    with training_state(schedule.engine).averaged_parameters():
        for own in batches:
            # Empty where another pipeline stage has the loss.
            for loss_sum, batch in zip(schedule.evaluate(own), own, strict=False):
                size = torch.zeros_like(total[0])
                if bytes_V is not None:
                    size = bytes_V[batch.labels_BS[batch.labels_BS != NO_LABEL]].sum().to(total.dtype)
                labels = torch.full_like(total[0], num_labels(batch))
                total += torch.stack([loss_sum.to(total.dtype), labels, size])
    if (world := run.mesh.group("world")) is not None:
        dist.all_reduce(total, group=world)
    loss_sum_all, labels, size = total.tolist()
    return SetLoss(loss_sum_all / max(labels, 1), loss_sum_all / math.log(2) / size if size else None)


def evaluate(run: RunContext) -> None:
    """Evaluates the checkpoint that a training run would resume from, as ``skip_train`` asks for. Collective.

    Writes ``<run_dir>/evaluation.json``; nothing is trained and no checkpoint is written. Raises CheckpointError where
    there is no checkpoint, DataError without data, on every rank.
    """
    loaders = build_evaluation_data(run)
    is_drawn = not has_own_checkpoint(run)
    model = build_model(run, draws=is_drawn)
    engine = build_engine(run, model)
    schedule = build_schedule(run, engine)
    checkpoints = Checkpoints(run, model, engine, is_drawn=is_drawn)
    step, _ = checkpoints.resume()
    if checkpoints.found_none:
        raise CheckpointError("skip_train=True, but there is no checkpoint to evaluate; name one in load, or a run_dir")
    if run.config.optimizer.evaluate_ema and not checkpoints.has_average:
        raise CheckpointError(
            "evaluate_ema=True, but the checkpoint holds no moving average of the weights; leave it out"
        )
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
    tokens, bytes_V = training.global_batch_size * training.seq_length, bytes_of_tokens(run)
    for name, loader in loaders.items():
        loss, bits = loss_over(run, loader, schedule, bytes_V)
        perplexity = math.exp(min(loss, 700.0))  # beyond that no float holds it
        found[name] = {"loss": loss, "perplexity": perplexity, "tokens": (loader.num_batches or 0) * tokens}
        in_bits = ""
        if bits is not None:
            found[name]["bits_per_byte"], in_bits = bits, f" ({bits:.4f} bits per byte)"
        tail = (perplexity, found[name]["tokens"])
        logger.info("%s: loss %.4f nats%s, perplexity %.2f, %d tokens", name, loss, in_bits, *tail)

    def write() -> None:
        if run.mesh.rank == 0:
            folder = Path(run.config.logging.run_dir)
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / FILE_NAME, json.dumps(found, indent=1) + "\n", sync=False)

    run.ranks.run_on_all_ranks(write, f"writing {FILE_NAME}", TrainingError)
