"""The project's own training steps and attention, as layout_speed.py times them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from weights_on_device import draw_on_device

from megatron.optimus.config.checks import check, gradient_accumulation_steps
from megatron.optimus.config.load import load
from megatron.optimus.context import RunContext
from megatron.optimus.moe.dispatch.base import ExpertRows, TokenDispatcher, no_work
from megatron.optimus.platform import device as devices

LR = 1e-4


HOST: list[dist.ProcessGroup] = []  # a gloo group of all ranks, for what has nothing to do with the device


def slowest(value: float) -> float:
    """The largest of the ranks' values."""
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=HOST[0])
    return float(found)


@dataclass
class Program:
    """One way to train. ``step`` does a whole optimizer step and returns the loss; all of it is collective."""

    step: Callable[[], float]
    tokens: int  # of the global batch
    close: Callable[[], None] = lambda: None
    queue: Callable[[], Callable[[], float]] | None = None  # a step without waiting; what it returns reads the loss
    forward_backward: Callable[[], None] | None = None  # followed by ``update``; together they are a step
    update: Callable[[], None] | None = None
    about: dict[str, Any] = field(default_factory=dict)  # goes into the result

    @classmethod
    def queued(cls, queue: Callable[[], Callable[[], float]], tokens: int, **others: Any) -> Program:
        """One whose step is what ``queue`` queues, and a wait for its loss."""

        def step() -> float:
            return queue()()

        return cls(step, tokens, queue=queue, **others)


def run_config(words: Sequence[str], device: torch.device) -> Any:
    """The configuration of a command line; what it leaves open is one rank along every axis and no validation."""
    defaults = {
        "--expert-model-parallel-size": "1",
        "--pipeline-model-parallel-size": "1",
        "--train-iters": "1000",
        "--lr-warmup-iters": "0",
        "--eval-interval": "0",
        "--device": device.type,
        "--data-path": "RANDOM_TOKENS",
    }
    given = list(words)
    for flag, value in defaults.items():
        if flag not in given:
            given += [flag, value]
    return load(given).config


def random_tokens(config: Any, rows: int, seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and their followers, int64 [rows, S], drawn uniformly from the vocabulary."""
    generator = torch.Generator(device=device).manual_seed(seed)
    shape = (rows, config.training.seq_length + 1)
    tokens = torch.randint(0, config.model.vocab_size, shape, device=device, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def ours(words: Sequence[str], device: torch.device, change: Callable[[Any], None] = lambda model: None) -> Program:
    """The training program's model, after ``change``, its engine, schedule and step."""
    from megatron.optimus.data.loader import Batch
    from megatron.optimus.parallel.context import own_positions
    from megatron.optimus.platform.mesh import Mesh
    from megatron.optimus.platform.metrics import Recorder
    from megatron.optimus.training import engine as engines
    from megatron.optimus.training.data import context_parallel_slice
    from megatron.optimus.training.engine import build_engine
    from megatron.optimus.training.pipeline_schedule import build_schedule
    from megatron.optimus.training.trainer import train_step

    engines.initialize_weights = draw_on_device
    config = run_config(words, device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    check(config, ranks)
    mesh = Mesh(config.parallel, rank=rank, world_size=ranks)
    run = RunContext.of(config, mesh, device)
    model = engines.build_model(run)
    change(model)
    micro_batches = gradient_accumulation_steps(config, ranks)
    engine = build_engine(run, model)
    for group in engine.optimizer.param_groups:
        group["lr"] = LR
    schedule = build_schedule(run, engine)
    size, positions = config.training.micro_batch_size, own_positions(config.training.seq_length, config.parallel, mesh)
    tokens_BS, labels_BS = random_tokens(config, size * micro_batches, mesh.index("dp"), device)
    whole = [Batch(*parts) for parts in zip(tokens_BS.split(size), labels_BS.split(size), strict=True)]
    batches = [context_parallel_slice(batch, None if positions is None else positions.to(device)) for batch in whole]

    recorder = Recorder(run.ranks)

    def queue() -> Callable[[], float]:
        pending = train_step(run, engine, schedule, recorder, batches)
        return lambda: pending.read().metrics["loss"]

    return Program.queued(
        queue,
        config.training.global_batch_size * config.training.seq_length,
        close=engine.destroy,
        forward_backward=lambda: schedule.forward_backward(batches, batches[0].labels_BS.numel()),
        update=engine.step,
        about={"layout": mesh.describe(), "micro_batches": micro_batches, "num_layers": config.model.num_layers},
    )


class NoAttention(torch.autograd.Function):
    """In place of attention: q as it is, and a gradient for all three, without work."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.groups = k.shape[1]
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        part = grads[0][:, : ctx.groups]
        return grads[0], part, part


def without_attention(model: Any) -> None:
    for block in model.layers:
        block.attention.core_attention = lambda q, k, v, documents: NoAttention.apply(q, k, v)


class KeepHere(TokenDispatcher):
    """In place of a dispatcher that communicates: every token's experts are among this rank's, as many as it has."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def dispatch(self, x_TD: torch.Tensor, routing: Any, in_flight: None, overlapped: Any = no_work) -> ExpertRows:
        overlapped()
        return ExpertRows(x_TD, routing.weights_TK, routing.indices_TK % self.num_experts, None)

    def combine(self, y_RD: torch.Tensor, handle: Any) -> torch.Tensor:
        return y_RD


def without_exchange(model: Any) -> None:
    for layer in model.moe_layers():
        layer.dispatcher = KeepHere(len(layer.experts.gate_up_weight))


def combine_grads_last(model: Any) -> None:
    """Gradients leave the experts when all of their backward is queued, and tokens when the router has chosen."""
    for layer in model.moe_layers():
        layer.experts.forward = _without_callback(layer.experts.forward)
        layer.router.register_forward_pre_hook(_finish_started(layer.dispatcher))


def _without_callback(forward: Any) -> Any:
    return lambda x, weights, indices, on_input_gradients=None: forward(x, weights, indices)


def _finish_started(dispatcher: Any) -> Any:
    """Waits before the router for what ``dispatcher.start`` has sent."""
    start, started = dispatcher.start, []
    dispatcher.start = lambda x: started.append(start(x)) or started[-1]

    def wait(module: Any, arguments: Any) -> None:
        under_way = started.pop()
        if hasattr(under_way, "x"):
            under_way.x.wait()

    return wait


def attention_alone(words: Sequence[str], device: torch.device, ranks: int, repeats: int, by_ring: bool) -> float:
    """Seconds of one layer's attention, forward and backward, over whole sequences of a rank's share of the heads.

    ``by_ring``: with the kernels that ring attention uses for a part of the keys, without exchange and merging.
    """
    from megatron.optimus.context import DTYPES
    from megatron.optimus.layers.attention import causal_attention
    from megatron.optimus.layers.partial_attention import attend_part, attend_part_backward

    config = run_config(words, device)
    model, training = config.model, config.training
    heads, groups = model.num_attention_heads // ranks, max(1, model.num_kv_heads // ranks)
    shapes = [(training.micro_batch_size, n, training.seq_length, model.head_dim) for n in (heads, groups, groups)]
    q, k, v = (
        torch.randn(shape, device=device, dtype=DTYPES[training.params_dtype], requires_grad=True) for shape in shapes
    )
    grad = torch.randn_like(q)

    @torch.no_grad()
    def parts() -> None:
        each = [x.repeat_interleave(heads // groups, dim=1) for x in (k, v)]
        attend_part_backward(grad, q, *each, *attend_part(q, *each, True), True)

    def whole() -> None:
        causal_attention(q, k, v, None).backward(grad)

    times = []
    for _ in range(repeats + 1):
        devices.synchronize(device)
        began = time.perf_counter()
        parts() if by_ring else whole()
        devices.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def forward_backward_time(program: Program, device: torch.device, repeats: int) -> float:
    """Median seconds of a step's forward and backward on this rank."""
    assert program.forward_backward is not None and program.update is not None
    times = []
    for _ in range(repeats + 1):
        devices.synchronize(device)
        dist.barrier()
        began = time.perf_counter()
        program.forward_backward()
        devices.synchronize(device)
        times.append(time.perf_counter() - began)
        program.update()
    return statistics.median(times[1:])
