"""Losses of many steps of the training program's own step, at any layout, on one stream of tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

LENGTH, SEQUENCES, VOCABULARY = 128, 16, 512
MODEL = (
    f"--preset mula-tiny --num-layers 8 --hidden-size 256 --num-attention-heads 8 --vocab-size {VOCABULARY} "
    f"--seq-length {LENGTH} --max-position-embeddings {LENGTH} --global-batch-size {SEQUENCES} --eval-interval 0 "
    "--moe-router-load-balancing-type none --data-path RANDOM_TOKENS "  # balancing would depend on the micro-batch
)
LR, WARM_UP = 1e-3, 20


@functools.cache
def corpus(steps: int) -> Tensor:
    """[steps, SEQUENCES, LENGTH + 1] of a language in which each token has eight followers, not equally likely: the
    loss falls for hundreds of steps and ends well above 0."""
    generator = torch.Generator().manual_seed(11)
    followers = torch.randint(0, VOCABULARY, (VOCABULARY, 8), generator=generator)
    odds = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0, 0.5, 0.5, 0.5])
    rows = steps * SEQUENCES
    choices = torch.multinomial(odds, rows * LENGTH, replacement=True, generator=generator).view(rows, LENGTH)
    tokens = [torch.randint(0, VOCABULARY, (rows,), generator=generator)]
    for place in range(LENGTH):
        tokens.append(followers[tokens[-1], choices[:, place]])
    return torch.stack(tokens, dim=1).view(steps, SEQUENCES, LENGTH + 1)


def curve(rank: int, world: int, words: str, steps: int, order: int = 0) -> list[float]:
    """The loss of every step, the same on all ranks: whatever the layout, a step sees the same sequences.

    ``order``: in which order, by the number of a permutation; 0 leaves them as they are.
    """
    from megatron.optimus.config.checks import check
    from megatron.optimus.config.load import load
    from megatron.optimus.context import RunContext
    from megatron.optimus.data.loader import Batch
    from megatron.optimus.parallel.context import own_positions
    from megatron.optimus.platform.mesh import Mesh
    from megatron.optimus.platform.metrics import Recorder
    from megatron.optimus.training.data import context_parallel_slice
    from megatron.optimus.training.engine import build_engine, build_model, init_engine
    from megatron.optimus.training.pipeline_schedule import build_schedule
    from megatron.optimus.training.trainer import train_step

    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    config = load((MODEL + f"--device {device.type} " + words).split()).config
    check(config, world)
    init_engine(timedelta(seconds=60))
    mesh = Mesh(config.parallel, rank=rank, world_size=world)
    run = RunContext.of(config, mesh, device)
    model = build_model(run)
    size, replicas = config.training.micro_batch_size, mesh.size("dp")
    accumulation = SEQUENCES // size // replicas
    engine = build_engine(run, model)
    schedule = build_schedule(run, engine)
    positions = own_positions(LENGTH, config.parallel, mesh)
    positions = None if positions is None else positions.to(device)

    generator = torch.Generator().manual_seed(order)
    places = torch.randperm(SEQUENCES, generator=generator) if order else torch.arange(SEQUENCES)

    def batches(tokens: Tensor) -> list[Batch]:
        each = tokens[places].to(device).split(size)
        own = [each[number * replicas + mesh.index("dp")] for number in range(accumulation)]
        return [context_parallel_slice(Batch(t[:, :-1].contiguous(), t[:, 1:].contiguous()), positions) for t in own]

    recorder = Recorder(run.ranks)
    losses: list[float] = []
    before = None  # read when the next step has been queued, else the device would wait for the host
    for step, tokens in enumerate(corpus(steps)):
        for group in engine.optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARM_UP)
        report = train_step(run, engine, schedule, recorder, batches(tokens))
        if before is not None:
            losses.append(before.read().metrics["loss"])
        before = report
    assert before is not None
    losses.append(before.read().metrics["loss"])
    engine.destroy()
    return losses


def curves(rank: int, world: int, runs: Sequence[tuple[str, int]]) -> list[list[float]]:
    """``curve`` of each (options, steps), one after the other."""
    return [curve(rank, world, words, steps) for words, steps in runs]


def alone(rank: int, world: int, runs: Sequence[tuple[str, int, int]]) -> list[float]:
    """``curve`` of this rank's own run (options, steps, order), as a process alone."""
    import os

    from megatron.optimus.training.engine import shutdown_engine

    backend = dist.get_backend()
    shutdown_engine()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    if backend == "nccl":  # several ranks may share a GPU
        os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return curve(0, 1, *runs[rank])
