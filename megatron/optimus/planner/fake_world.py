"""Builds one rank of the real program at any world size, in a process without its peers.

torch's "fake" process group answers every collective at once without communicating, and tensors on the meta device
have shapes and no memory. All that a start does with ranks and sizes runs for real: the checks, the grid of ranks and
its process groups, the cut model, DeepSpeed's engine, flat buffers, shards and buckets, the schedule. Left out is what
needs data: drawing weights, sending them to other replicas, reading token files and checkpoints.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from megatron.optimus.config.checks import check
from megatron.optimus.config.load import load
from megatron.optimus.config.schema import ConfigError, RunConfig
from megatron.optimus.models.huggingface.config import take_from_hf
from megatron.optimus.platform import environment

RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss


@dataclass(frozen=True)
class Built:
    """What building a rank took, and what was built."""

    rank: int
    world_size: int
    import_s: float  # torch, deepspeed and the program
    groups_s: float  # process groups
    model_s: float
    engine_s: float  # with buffers and buckets
    total_s: float
    peak_rss_bytes: int
    groups: dict[str, int]  # axis -> ranks
    layers: list[int]
    parameters: int
    buckets: int
    bucket_pieces: int  # pieces of parameters in this rank's shards
    optimizer_bytes: dict[str, int]  # as EPZeroOptimizer.memory_bytes


def build(config: RunConfig, rank: int, world_size: int) -> Built:
    """Builds the rank in this process, which must not have a process group yet; it has a fake one afterwards."""
    check(config, world_size)
    began = time.perf_counter()
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron.optimus.config.layout import AXES
    from megatron.optimus.context import RunContext
    from megatron.optimus.platform.mesh import Mesh
    from megatron.optimus.training.engine import Engine, build_engine, build_model, init_engine
    from megatron.optimus.training.pipeline_schedule import build_schedule

    imported = time.perf_counter()
    for name, value in environment.for_local_rank(rank, world_size, 29500).items():
        environment.set_default(name, value)
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    init_engine(dist.default_pg_timeout)
    mesh = Mesh(config.parallel, rank=rank, world_size=world_size)
    grouped = time.perf_counter()
    run = RunContext.of(config, mesh, torch.device("meta"))
    model = build_model(run)
    modelled = time.perf_counter()
    # Without data these mean nothing: moving weights to a device or to replicas, reading counters.
    model.to = lambda *args, **kwargs: model  # type: ignore[method-assign]
    Engine._broadcast_model = Engine._report_progress = lambda *args: None  # type: ignore[method-assign,assignment]
    engine = build_engine(run, model)
    build_schedule(run, engine)
    done = time.perf_counter()
    buffers = engine.optimizer.flat_buffers
    return Built(
        rank=rank,
        world_size=world_size,
        import_s=imported - began,
        groups_s=grouped - imported,
        model_s=modelled - grouped,
        engine_s=done - modelled,
        total_s=done - began,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT,
        groups={axis: mesh.size(axis) for axis in AXES},
        layers=[int(name) for name, _ in model.layers.named_children()],
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        buckets=sum(len(buffer.buckets) for buffer in buffers),
        bucket_pieces=sum(len(b.layout.shard_ranges(buffer.rank)) for buffer in buffers for b in buffer.buckets),
        optimizer_bytes=engine.optimizer.memory_bytes(),
    )


def build_in_a_process(words: Sequence[str], rank: int, world_size: int) -> Built:
    """``build`` in a process of its own, so that times and memory are those of a start.

    Raises ConfigError with the last line of what the process said, if it fails.
    """
    command = [sys.executable, "-m", __name__, str(rank), str(world_size), *words]
    variables = environment.current() | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["nothing"]
        raise ConfigError(f"rank {rank} of {world_size} could not be built: {lines[-1]}")
    return Built(**json.loads(done.stdout.splitlines()[-1]))


def built_text(built: Built) -> str:
    """Describes one rank in a few lines."""
    groups = ", ".join(f"{axis} {size}" for axis, size in built.groups.items() if size > 1)
    sizes = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in built.optimizer_bytes.items())
    return (
        f"rank {built.rank} of {built.world_size:,}: built in {built.total_s:.1f} s (imports {built.import_s:.1f}, "
        f"groups {built.groups_s:.3f}, model {built.model_s:.1f}, engine {built.engine_s:.1f}), peak "
        f"{built.peak_rss_bytes / 2**30:.2f} GiB of host memory\n"
        f"  groups of more than one rank: {groups}\n"
        f"  layers {built.layers[0]} to {built.layers[-1]}, {built.parameters:,} parameters, {built.buckets} buckets; "
        f"this rank's shards hold {built.bucket_pieces} pieces of parameters\n"
        f"  optimizer, GiB: {sizes}"
    )


if __name__ == "__main__":
    try:
        built = build(load(sys.argv[3:], take_from_hf=take_from_hf).config, int(sys.argv[1]), int(sys.argv[2]))
    except ConfigError as error:
        sys.exit(str(error))  # alone in the last line, as ``build_in_a_process`` reads it
    sys.stdout.write(json.dumps(asdict(built)) + "\n")
