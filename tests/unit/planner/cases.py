"""Small runs for the planner's tests, and what the real program does with them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.optimus.config.load import load
from megatron.optimus.config.schema import RunConfig
from megatron.optimus.context import RunContext

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96 --vocab-size 512 --seq-length 32 "
    "--max-position-embeddings 64 --params-dtype fp32 --device cpu --micro-batch-size 2 --global-batch-size 16 "
    "--lr-warmup-iters 0 --train-iters 10 --eval-interval 0 "
)
MOE = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 48 "
MIXED = MOE + "--moe-layer-freq [0]*2+[1]*2 "  # with two stages, the first one has no experts
SHARED = MOE + "--moe-shared-expert-intermediate-size 80 --moe-shared-expert-gate --add-qkv-bias "


HAS_PIPELINES = TorchVersion(torch.__version__) >= "2.10"


def run(words: str) -> RunConfig:
    return load((BASE + words).split()).config


def runnable(words: str) -> bool:
    """Whether this version of torch runs it (parallel/pipeline.py, check_torch_version)."""
    config = load(words.split()).config if words.startswith("--preset") else run(words)
    return HAS_PIPELINES or config.parallel.pipeline_model_parallel_size == 1


class Watch(TorchDispatchMode):
    """Storages that operations make, and collectives of more than a few numbers: (kind, bytes of the whole)."""

    def __init__(self, *, is_alone: bool = False) -> None:
        """``is_alone``: the ranks are those of ``world_of_one_thread``."""
        super().__init__()
        self.is_alone = is_alone
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.collectives: list[tuple[str, int]] = []
        self.groups: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.namespace == "c10d":
            self._note(function.name(), args)
            if self.is_alone:
                mirror(function.name(), args)
        for x in result if isinstance(result, (tuple, list)) else [result]:
            for tensor in x if isinstance(x, (tuple, list)) else [x]:
                if isinstance(tensor, Tensor):
                    storage = tensor.untyped_storage()
                    self.storages[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return result

    def _note(self, name: str, args: Any) -> None:
        objects = [x for x in args if isinstance(x, torch.ScriptObject)]
        [group] = [dist.ProcessGroup.unbox(x) for x in objects if x._type().name() == "ProcessGroup"]
        if group.size() > 1:
            self.groups.add(group.group_name)
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


def mirror(name: str, args: Any) -> None:
    """The result of a collective whose other ranks hold what this one holds."""
    match name.partition("::")[2].partition(".")[0]:
        case "_allgather_base_":
            out, source = args[:2]
            out.view(-1, source.numel()).copy_(source.view(1, -1))
        case "_reduce_scatter_base_":
            out, source = args[:2]
            out.copy_(source.view(-1, *out.shape)[0])
        case "alltoall_base_":
            out, source = args[:2]
            out.view(-1).copy_(source.reshape(-1))  # here as much comes as goes
        case "recv_":
            for out in args[0]:
                out.zero_()
        case "allreduce_" | "send":
            pass
        case other:
            raise NotImplementedError(other)


def batch_of(config: RunConfig, mesh: Any) -> Any:
    """This rank's part of a micro-batch of random tokens."""
    from megatron.optimus.data.loader import Batch
    from megatron.optimus.parallel.context import own_positions
    from megatron.optimus.training.data import context_parallel_slice

    training = config.training
    tokens = torch.randint(0, config.model.vocab_size, (training.micro_batch_size, training.seq_length + 1))
    return context_parallel_slice(
        Batch(tokens[:, :-1], tokens[:, 1:]), own_positions(training.seq_length, config.parallel, mesh)
    )


@contextmanager
def world_of_one_thread(rank: int, world: int) -> Iterator[None]:
    """This process alone as one rank of many, without their threads.

    gloo's threads let go of what they have sent a moment after the wait for it has ended, so that what a rank holds
    would depend on when they run. In torch's fake process group nothing communicates, and nobody but the program holds
    a tensor; ``Watch`` fills in results. Python's collector, too, would free tensors at times of its own.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alone_in_worlds(
    rank: int, world: int, measure: Callable[[str, int, int], Any], whose: list[int], size: int, cases: list[str]
) -> list[list[Any]]:
    """``measure(words, rank, size)`` for each case and each rank of ``whose``, one by one in this process."""
    found: list[list[Any]] = []
    for words in cases:
        found.append([])
        for one in whose:
            with world_of_one_thread(one, size):
                found[-1].append(measure(words, one, size))
    return found


def bytes_kept(words: str, rank: int, world: int) -> int:
    """What one forward leaves alive for its backward."""
    from megatron.optimus.platform.mesh import Mesh
    from megatron.optimus.training.engine import build_model

    config = run(words)
    mesh = Mesh(config.parallel, rank=rank, world_size=world)
    model = build_model(RunContext.of(config, mesh, torch.device("cpu")))
    batch = batch_of(config, mesh)
    watch = Watch(is_alone=True)
    with watch:
        output = model(batch.tokens_BS, batch.labels_BS, None, batch.positions_BS)
        loss = output.loss_sum + output.aux_loss + output.z_loss
    weights = {weight.untyped_storage().data_ptr() for weight in (*model.parameters(), *model.buffers())}
    assert loss.requires_grad
    return watch.alive(weights)


def collectives_of_a_step(rank: int, world: int, cases: list[str]) -> list[tuple[dict[str, int], int]]:
    """For each case the bytes of one step's collectives on this rank by kind, single numbers left out, and the number
    of groups that the start of the schedule and the step use."""
    return [_collectives_of_a_step(rank, world, words) for words in cases]


def _collectives_of_a_step(rank: int, world: int, words: str) -> tuple[dict[str, int], int]:
    from megatron.optimus.platform.mesh import Mesh
    from megatron.optimus.training.engine import build_engine, build_model
    from megatron.optimus.training.pipeline_schedule import build_schedule

    config = run(words)
    mesh = Mesh(config.parallel, rank=rank, world_size=world)
    steps = config.training.global_batch_size // config.training.micro_batch_size // mesh.size("dp")
    context = RunContext.of(config, mesh, torch.device("cpu"))
    engine = build_engine(context, build_model(context))
    starting, watch = Watch(), Watch()
    with starting:
        schedule = build_schedule(context, engine)
    batches = [batch_of(config, mesh) for _ in range(steps)]
    with watch:
        schedule.forward_backward(batches, 1)
        engine.step()
        engine.optimizer.wait_for_params()
    dist.barrier()
    totals: dict[str, int] = {}
    for kind, size in watch.collectives:
        if size > 8:  # the norm is one number
            totals[kind] = totals.get(kind, 0) + size
    return totals, len(starting.groups | watch.groups | {dist.group.WORLD.group_name})


def states_in_fake_worlds(rank: int, world: int, cases: list[tuple[str, int, int]]) -> list[tuple[int, dict[str, int]]]:
    """(parameters, optimizer's bytes) of each rank of each world, built for real without their peers."""
    from megatron.optimus.planner.fake_world import build
    from megatron.optimus.training.engine import shutdown_engine

    dist.destroy_process_group()
    found = []
    for words, one, size in cases:
        built = build(run(words) if not words.startswith("--preset") else load(words.split()).config, one, size)
        found.append((built.parameters, built.optimizer_bytes))
        shutdown_engine()
    return found


class _End(torch.autograd.Function):
    """What follows a part: it does not keep the part's output, and its gradient waits, as for the residual."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.like = x.shape, x.dtype
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        ctx.waiting = torch.ones(ctx.like[0], dtype=ctx.like[1])
        return ctx.waiting


class PeakWatch(Watch):
    """The most bytes of such storages that were alive at one time."""

    def __init__(self, besides: set[int]) -> None:
        super().__init__(is_alone=True)
        self.besides, self.peak = besides, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.storages = {at: kept for at, kept in self.storages.items() if not kept[0].expired()}
        self.peak = max(self.peak, self.alive(self.besides))
        return result


def peaks_of_parts(words: str, rank: int, world: int) -> dict[str, tuple[int, int]]:
    """Of attention and mlp of a layer: most bytes alive in the forward, and in the backward."""
    from megatron.optimus.config.rank_plan import rank_plans
    from megatron.optimus.layers.rope import rope_at, rope_table
    from megatron.optimus.platform.mesh import Mesh
    from megatron.optimus.training.engine import build_model

    config = run(words)
    mesh = Mesh(config.parallel, rank=rank, world_size=world)
    model = build_model(RunContext.of(config, mesh, torch.device("cpu")))
    positions_BS = batch_of(config, mesh).positions_BS
    rope = rope_table(config.training.seq_length, config.model, torch.device("cpu"))
    rope = rope if positions_BS is None else rope_at(rope, positions_BS)
    share = rank_plans(config, world)[0]
    rows = (
        (1, share.sequence_parallel_tokens)
        if mesh.size("tp") > 1
        else (share.sequences, share.tokens // share.sequences)
    )
    found, dtype = {}, next(model.parameters()).dtype
    for name, part in (("attention", lambda x: model.layers[0].attention(x, rope)), ("mlp", model.layers[0].mlp)):
        x = torch.randn(*rows, config.model.hidden_size, dtype=dtype, requires_grad=True)
        model.zero_grad()
        fixed = {one.untyped_storage().data_ptr() for one in (x, *rope, *model.parameters(), *model.buffers())}
        watch = PeakWatch(fixed)
        with watch:
            end = _End.apply(part(x))
            forward, watch.peak = watch.peak, 0
            end.backward()
        found[name] = forward, watch.peak
    return found
