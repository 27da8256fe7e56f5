"""Small runs for the planner's tests, and what the real program does with them."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.optimus.config.load import load
from megatron.optimus.config.schema import RunConfig

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96 --vocab-size 512 --seq-length 32 "
    "--max-position-embeddings 64 --params-dtype fp32 --device cpu --micro-batch-size 2 --global-batch-size 16 "
    "--lr-warmup-iters 0 --train-iters 10 --eval-interval 0 "
)
MOE = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 48 "


def run(words: str) -> RunConfig:
    return load((BASE + words).split()).config


class Watch(TorchDispatchMode):
    """Storages that operations make, and collectives of more than a few numbers: (kind, bytes of the whole)."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.collectives: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.namespace == "c10d":
            self._note(function.name(), args)
        for x in result if isinstance(result, (tuple, list)) else [result]:
            for tensor in x if isinstance(x, (tuple, list)) else [x]:
                if isinstance(tensor, Tensor):
                    storage = tensor.untyped_storage()
                    self.storages[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return result

    def _note(self, name: str, args: Any) -> None:
        kinds = {
            "_allgather_base_": ("all-gather", 0),
            "_reduce_scatter_base_": ("reduce-scatter", 1),
            "allreduce_": ("all-reduce", 0),
            "alltoall_base_": ("all-to-all", 1),
            "send": ("send", 0),
        }
        kind = kinds.get(name.partition("::")[2].partition(".")[0])
        if kind is not None:
            whole = args[kind[1]]
            self.collectives.append((kind[0], sum(t.nbytes for t in (whole if isinstance(whole, list) else [whole]))))

    def alive(self, besides: set[int]) -> int:
        """Bytes of the storages that still exist and do not lie at the addresses ``besides``."""
        kept = [
            size for at, (reference, size) in self.storages.items() if at not in besides and not reference.expired()
        ]
        return sum(kept)


def batch_of(config: RunConfig, mesh: Any) -> Any:
    """This rank's part of a micro-batch of random tokens."""
    from megatron.optimus.data.loader import Batch
    from megatron.optimus.parallel.context import own_positions
    from megatron.optimus.trainer.step import own_part

    training = config.training
    tokens = torch.randint(0, config.model.vocab_size, (training.micro_batch_size, training.seq_length + 1))
    return own_part(Batch(tokens[:, :-1], tokens[:, 1:]), own_positions(training.seq_length, config.parallel, mesh))


def bytes_kept(rank: int, world: int, cases: list[str]) -> list[int]:
    """For each case what one forward leaves alive for its backward on this rank."""
    return [_bytes_kept(rank, world, words) for words in cases]


def _bytes_kept(rank: int, world: int, words: str) -> int:
    from megatron.optimus.parallel.mesh import Mesh
    from megatron.optimus.trainer.build import build_model

    config = run(words)
    mesh = Mesh(config.parallel, rank=rank, world_size=world)
    model = build_model(config, mesh, torch.device("cpu"))
    batch = batch_of(config, mesh)
    watch = Watch()
    with watch:
        output = model(batch.tokens_BS, batch.labels_BS, None, batch.positions_BS)
        loss = output.loss_sum + output.aux_loss + output.z_loss
    weights = {weight.untyped_storage().data_ptr() for weight in (*model.parameters(), *model.buffers())}
    kept = watch.alive(weights)
    for _ in range(10):  # gloo's threads let go of what they sent a moment after the wait for it has ended
        time.sleep(0.01)
        kept = min(kept, watch.alive(weights))
    assert loss.requires_grad
    return kept


def collectives_of_a_step(rank: int, world: int, cases: list[str]) -> list[dict[str, int]]:
    """For each case the bytes of one step's collectives on this rank by kind; single numbers are left out."""
    return [_collectives_of_a_step(rank, world, words) for words in cases]


def _collectives_of_a_step(rank: int, world: int, words: str) -> dict[str, int]:
    from megatron.optimus.parallel.mesh import Mesh
    from megatron.optimus.trainer.build import build_model
    from megatron.optimus.trainer.engine import build_engine
    from megatron.optimus.trainer.schedule import build_schedule

    config = run(words)
    mesh = Mesh(config.parallel, rank=rank, world_size=world)
    steps = config.training.global_batch_size // config.training.micro_batch_size // mesh.size("dp")
    engine = build_engine(build_model(config, mesh, torch.device("cpu")), config, mesh, steps)
    schedule = build_schedule(config, engine, mesh, torch.device("cpu"))
    batches = [batch_of(config, mesh) for _ in range(steps)]
    watch = Watch()
    with watch:
        schedule.forward_backward(batches, 1)
        engine.step()
        engine.optimizer.wait_for_params()
    dist.barrier()
    totals: dict[str, int] = {}
    for kind, size in watch.collectives:
        if size > 8:  # the norm is one number
            totals[kind] = totals.get(kind, 0) + size
    return totals


def states_in_fake_worlds(rank: int, world: int, cases: list[tuple[str, int, int]]) -> list[tuple[int, dict[str, int]]]:
    """(parameters, optimizer's bytes) of each rank of each world, built for real without their peers."""
    from megatron.optimus.planner.fake_world import build
    from megatron.optimus.trainer.engine import shutdown_engine

    dist.destroy_process_group()
    found = []
    for words, one, size in cases:
        built = build(run(words) if not words.startswith("--preset") else load(words.split()).config, one, size)
        found.append((built.parameters, built.optimizer_bytes))
        shutdown_engine()
    return found
