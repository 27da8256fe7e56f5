"""``moe_token_dispatcher_type=auto``: every transport is timed at the run's own message sizes, the fastest is taken.

Which one wins hangs on the message size, the links and the collectives library, and changes with each of them; a probe
of some tens of milliseconds a transport knows. The router's choices are taken as uniform, which is what balancing
works towards; nothing is computed between dispatch and combine.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.optimus.config.schema import ConfigError, ParallelConfig, RunConfig, TokenDispatcher
from megatron.optimus.context import RunContext
from megatron.optimus.moe.dispatch.base import Dispatcher
from megatron.optimus.moe.dispatch.collective import build_dispatcher
from megatron.optimus.moe.dispatch.ownership import Ownership
from megatron.optimus.moe.dispatch.symmetric import Shape, SymmetricDispatcher, symmetric_problem
from megatron.optimus.ops import Routing
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.platform.ranks import RELAYED, Ranks, attempt

logger = logging.getLogger("optimus")

WARM_UP, REPETITIONS = 2, 5
WITHOUT_PROBE = TokenDispatcher.ALLGATHER  # its traffic does not hang on the router's choices


class Messages(NamedTuple):
    """What a MoE layer of a run sends from one rank."""

    num_tokens: int
    width: int
    num_experts: int
    topk: int
    dtype: torch.dtype


def messages_of(config: RunConfig, dtype: torch.dtype) -> Messages:
    """Those of one micro-batch. A rank's tokens are a part of it under context and sequence parallelism."""
    model, parallel, training = config.model, config.parallel, config.training
    shards = parallel.context_parallel_size
    if parallel.sequence_parallel:
        shards *= parallel.tensor_model_parallel_size
    num_tokens = training.micro_batch_size * training.seq_length // shards
    return Messages(num_tokens, model.hidden_size, model.num_experts, model.moe_router_topk, dtype)


def settle_transport(run: RunContext) -> ParallelConfig:
    """``config.parallel`` with a transport instead of "auto", the same on all ranks. Collective over all of them.

    Raises ConfigError on every rank where the transport that is asked for does not fit the nodes or devices.
    """
    config, mesh, device = run.config, run.mesh, run.device
    parallel = config.parallel
    transport = parallel.moe_token_dispatcher_type
    if mesh.group("experts") is None:
        return replace(parallel, moe_token_dispatcher_type=WITHOUT_PROBE)  # nothing travels
    if transport in (TokenDispatcher.ALLGATHER, TokenDispatcher.ALLTOALL):
        return parallel
    if transport is TokenDispatcher.SYMMETRIC:
        _demand_shared_memory(run)
        return parallel
    problem = _hierarchy_problem(mesh, device)
    if transport is TokenDispatcher.HIERARCHICAL:
        if problem is not None:
            error = ConfigError(problem)
            setattr(error, RELAYED, mesh.rank > 0)  # every rank raises it, one speaks
            raise error
        return parallel
    if config.training.deterministic:
        logger.info("token transport: %s, without a probe because of deterministic=True", WITHOUT_PROBE.value)
        return replace(parallel, moe_token_dispatcher_type=WITHOUT_PROBE)
    problems = {
        TokenDispatcher.HIERARCHICAL: problem,
        TokenDispatcher.SYMMETRIC: _on_all_ranks(_own_symmetric_problem(mesh, device), run.ranks),
    }
    ownership = Ownership.regular(
        config.model.num_experts, mesh.size("ep"), parallel.moe_expert_placement, parallel.expert_tensor_parallel_size
    )
    candidates = [TokenDispatcher.ALLGATHER, TokenDispatcher.ALLTOALL]
    candidates += [name for name, problem in problems.items() if problem is None]
    dispatchers = {name: build_dispatcher(name, mesh, ownership) for name in candidates}
    messages = messages_of(config, run.dtype)
    symmetric = dispatchers.get(TokenDispatcher.SYMMETRIC)
    if isinstance(symmetric, SymmetricDispatcher):
        problem = _on_all_ranks(_memory_problem(symmetric, messages, device), run.ranks)
        problems[TokenDispatcher.SYMMETRIC] = problem
        if problem is not None:
            del dispatchers[TokenDispatcher.SYMMETRIC]
    times = measure(dispatchers, messages, mesh, device)
    fastest = min(times, key=lambda name: times[name])
    _log(times, fastest, messages, mesh, problems)
    return replace(parallel, moe_token_dispatcher_type=fastest)


def measure(
    transports: Mapping[TokenDispatcher, Dispatcher], messages: Messages, mesh: Mesh, device: torch.device
) -> dict[TokenDispatcher, float]:
    """Milliseconds of dispatch and combine, forward and backward: the median of some repetitions on the slowest
    rank, so the same numbers on every rank. Collective over all ranks."""
    group = mesh.group("experts")
    inputs = _inputs(messages, mesh.rank, device)
    token = torch.zeros(1, device=device)
    seconds: dict[TokenDispatcher, list[float]] = {name: [] for name in transports}
    for repetition in range(WARM_UP + REPETITIONS):
        for name, dispatcher in transports.items():
            dist.all_reduce(token, group=group)  # all begin together
            devices.synchronize(device)
            started = time.perf_counter()
            _dispatch_and_combine(dispatcher, *inputs)
            devices.synchronize(device)
            if repetition >= WARM_UP:
                seconds[name].append(time.perf_counter() - started)
    medians = torch.tensor([statistics.median(own) for own in seconds.values()], dtype=torch.float32, device=device)
    dist.all_reduce(medians, op=dist.ReduceOp.MAX, group=mesh.group("world"))
    return dict(zip(transports, (1e3 * medians).tolist(), strict=True))


def _inputs(messages: Messages, rank: int, device: torch.device) -> tuple[Tensor, Routing, Tensor]:
    # A generator of its own: the run's random numbers are those of a run without a probe.
    generator = torch.Generator().manual_seed(rank)
    scores_TE = torch.rand(messages.num_tokens, messages.num_experts, generator=generator)
    weights_TK, indices_TK = (part.to(device) for part in scores_TE.topk(messages.topk))
    x_TD = torch.ones(messages.num_tokens, messages.width, dtype=messages.dtype, device=device)
    return x_TD.requires_grad_(), Routing(weights_TK.requires_grad_(), indices_TK, scores_TE), torch.ones_like(x_TD)


def _dispatch_and_combine(dispatcher: Dispatcher, x_TD: Tensor, routing: Routing, dy_TD: Tensor) -> None:
    x_TD.grad = routing.weights_TK.grad = None
    rows = dispatcher.dispatch(x_TD, routing, dispatcher.start(x_TD))
    y_RD = rows.x_RD * rows.weights_RK.sum(dim=1, keepdim=True).to(x_TD.dtype)
    dispatcher.combine(y_RD, rows.handle).backward(dy_TD)


def _hierarchy_problem(mesh: Mesh, device: torch.device) -> str | None:
    """The layout's, or that nodes differ in size, where ranks would not agree on who is whose neighbour."""
    sizes = torch.tensor([mesh.node_size, -mesh.node_size], device=device)
    dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=mesh.group("world"))
    largest, smallest = sizes[0].item(), -sizes[1].item()
    if largest == smallest:
        return mesh.layout.hierarchy_problem(mesh.node_size)
    return (
        f"moe_token_dispatcher_type=hierarchical: nodes have from {smallest} to {largest} ranks; start as many on "
        "each, set moe_hierarchical_node_size to a number that divides them, or use alltoall"
    )


def _demand_shared_memory(run: RunContext) -> None:
    problem = _own_symmetric_problem(run.mesh, run.device)

    def check() -> None:
        if problem is not None:
            raise ConfigError(problem)

    run.ranks.together(check, "moe_token_dispatcher_type=symmetric", ConfigError)


def _on_all_ranks(problem: str | None, ranks: Ranks) -> str | None:
    """What this rank or another one cannot; None on every rank where no rank has a problem. Collective over all."""
    failure = ranks.first_failure(None if problem is None else ConfigError(problem))
    return problem if failure is None or problem is not None else f"rank {failure[0]} cannot"


def _memory_problem(dispatcher: SymmetricDispatcher, messages: Messages, device: torch.device) -> str | None:
    """Why the ranks of this rank's group have not the memory; those of others may have it."""
    shape = Shape(messages.num_tokens, messages.width, messages.topk, messages.dtype)
    _, error = attempt(lambda: dispatcher.reserve(shape, device))
    return None if error is None else str(error)


def _own_symmetric_problem(mesh: Mesh, device: torch.device) -> str | None:
    group = mesh.group("experts")
    assert group is not None
    return symmetric_problem(group, mesh.size("etp"), device)


def _log(
    times: Mapping[TokenDispatcher, float],
    fastest: TokenDispatcher,
    messages: Messages,
    mesh: Mesh,
    problems: Mapping[TokenDispatcher, str | None],
) -> None:
    logger.info(
        "token transports, %d tokens x %d (%s) a rank over %d ranks, there and back, forward and backward:",
        messages.num_tokens,
        messages.width,
        str(messages.dtype).removeprefix("torch."),
        mesh.size("experts"),
    )
    for name, milliseconds in times.items():
        logger.info("  %-12s %9.3f ms%s", name.value, milliseconds, "  <- used" if name is fastest else "")
    for name, problem in problems.items():
        if problem is not None:
            logger.info("  %-12s not measured: %s", name.value, problem.split(": ", 1)[-1])
