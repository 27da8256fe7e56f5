"""Choice of the token dispatcher, and the measurement behind ``moe_token_dispatcher_type=auto``.

Which dispatcher is fastest depends on message size, links and collective library, so ``auto`` times every one that the
ranks support at the run's own message sizes: some tens of milliseconds each. The router's choices are drawn uniformly,
which balancing works towards; nothing is computed between dispatch and combine.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.optimus.config.schema import ConfigError, ParallelConfig, RunConfig, TokenDispatcherType
from megatron.optimus.context import RunContext
from megatron.optimus.moe import dispatch
from megatron.optimus.moe.dispatch.base import REGISTRY, MessageShape, TokenDispatcher
from megatron.optimus.moe.dispatch.local import LocalDispatcher
from megatron.optimus.moe.dispatch.ownership import Ownership
from megatron.optimus.ops import Routing
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.platform.ranks import Ranks, attempt

logger = logging.getLogger("optimus")

WARM_UP, REPETITIONS = 2, 5
# What auto takes without a measurement: its traffic does not depend on the router's choices.
WITHOUT_MEASUREMENT = TokenDispatcherType.ALLGATHER


def dispatcher_classes() -> dict[TokenDispatcherType, type[TokenDispatcher]]:
    """The class of each value of ``moe_token_dispatcher_type`` but auto, in the order of the enum."""
    for module in pkgutil.iter_modules(dispatch.__path__):
        importlib.import_module(f"{dispatch.__name__}.{module.name}")  # its classes register themselves
    return {kind: REGISTRY[kind] for kind in TokenDispatcherType if kind in REGISTRY}


def build_dispatcher(config: ParallelConfig, mesh: Mesh, ownership: Ownership) -> TokenDispatcher:
    """The dispatcher of one layer over this rank's expert group. Collective over it.

    Args:
        config: its ``moe_token_dispatcher_type`` names one, as ``select_dispatcher`` leaves it.
        mesh: axis "experts" has the ranks that together hold every expert once.
        ownership: which of them has which expert.

    Raises:
        ValueError: for "auto".
    """
    if mesh.group("experts") is None:
        return LocalDispatcher()
    kind = config.moe_token_dispatcher_type
    if kind is TokenDispatcherType.AUTO:
        raise ValueError("moe_token_dispatcher_type=auto names no dispatcher; call select_dispatcher first")
    return dispatcher_classes()[kind].build(config, mesh, ownership)


def select_dispatcher(run: RunContext) -> ParallelConfig:
    """Replaces "auto" by the fastest dispatcher, and refuses one that these ranks do not support. Collective.

    Without an expert group no token travels, and "allgather" is returned whatever was asked for. With
    ``deterministic=True``, "auto" becomes "allgather" without a measurement.

    Args:
        run: its configuration, ranks and device.

    Returns:
        ``config.parallel`` with a ``moe_token_dispatcher_type`` that names a dispatcher, the same on all ranks.

    Raises:
        ConfigError: on every rank, where the dispatcher asked for does not fit the nodes or devices.
    """
    config, mesh, device = run.config, run.mesh, run.device
    parallel = config.parallel
    kind = parallel.moe_token_dispatcher_type
    if mesh.group("experts") is None:
        return replace(parallel, moe_token_dispatcher_type=WITHOUT_MEASUREMENT)  # no token travels
    if kind is not TokenDispatcherType.AUTO:
        _require_support(kind, run)
        return parallel
    if config.training.deterministic:
        logger.info(
            "token dispatcher: %s, without a measurement because of deterministic=True", WITHOUT_MEASUREMENT.value
        )
        return replace(parallel, moe_token_dispatcher_type=WITHOUT_MEASUREMENT)
    shape = message_shape(config, run.dtype)
    candidates, reasons = _candidates(run, shape)
    times = measure(candidates, shape, mesh, device)
    fastest = min(times, key=lambda kind: times[kind])
    _log(times, fastest, shape, mesh, reasons)
    return replace(parallel, moe_token_dispatcher_type=fastest)


def message_shape(config: RunConfig, dtype: torch.dtype) -> MessageShape:
    """The messages of one micro-batch: a rank's tokens are a part of it under context and sequence parallelism."""
    model, parallel, training = config.model, config.parallel, config.training
    shards = parallel.context_parallel_size
    if parallel.sequence_parallel:
        shards *= parallel.tensor_model_parallel_size
    num_tokens = training.micro_batch_size * training.seq_length // shards
    return MessageShape(num_tokens, model.hidden_size, model.num_experts, model.moe_router_topk, dtype)


def measure(
    dispatchers: Mapping[TokenDispatcherType, TokenDispatcher], shape: MessageShape, mesh: Mesh, device: torch.device
) -> dict[TokenDispatcherType, float]:
    """Times dispatch and combine, forward and backward, of each dispatcher. Collective over all ranks.

    Returns:
        Milliseconds, the median of some repetitions on the slowest rank: the same numbers on every rank.
    """
    group = mesh.group("experts")
    inputs = _inputs(shape, mesh.rank, device)
    token = torch.zeros(1, device=device)
    seconds: dict[TokenDispatcherType, list[float]] = {kind: [] for kind in dispatchers}
    for repetition in range(WARM_UP + REPETITIONS):
        for kind, dispatcher in dispatchers.items():
            dist.all_reduce(token, group=group)  # all begin together
            devices.synchronize(device)
            started = time.perf_counter()
            _dispatch_and_combine(dispatcher, *inputs)
            devices.synchronize(device)
            if repetition >= WARM_UP:
                seconds[kind].append(time.perf_counter() - started)
    medians = torch.tensor([statistics.median(own) for own in seconds.values()], dtype=torch.float32, device=device)
    dist.all_reduce(medians, op=dist.ReduceOp.MAX, group=mesh.group("world"))
    return dict(zip(dispatchers, (1e3 * medians).tolist(), strict=True))


def _inputs(shape: MessageShape, rank: int, device: torch.device) -> tuple[Tensor, Routing, Tensor]:
    # A generator of its own: the run's random numbers are those of a run without a measurement.
    generator = torch.Generator().manual_seed(rank)
    scores_TE = torch.rand(shape.num_tokens, shape.num_experts, generator=generator)
    weights_TK, indices_TK = (part.to(device) for part in scores_TE.topk(shape.topk))
    x_TD = torch.ones(shape.num_tokens, shape.width, dtype=shape.dtype, device=device)
    return x_TD.requires_grad_(), Routing(weights_TK.requires_grad_(), indices_TK, scores_TE), torch.ones_like(x_TD)


def _dispatch_and_combine(dispatcher: TokenDispatcher, x_TD: Tensor, routing: Routing, dy_TD: Tensor) -> None:
    x_TD.grad = routing.weights_TK.grad = None
    rows = dispatcher.dispatch(x_TD, routing, dispatcher.start(x_TD))
    y_RD = rows.x_RD * rows.weights_RK.sum(dim=1, keepdim=True).to(x_TD.dtype)
    dispatcher.combine(y_RD, rows.handle).backward(dy_TD)


def _require_support(kind: TokenDispatcherType, run: RunContext) -> None:
    dispatcher = dispatcher_classes()[kind]
    if dispatcher.runs_everywhere:
        return
    reason = dispatcher.unsupported_reason(run.mesh, run.device)

    def check() -> None:
        if reason is not None:
            raise ConfigError(reason)

    run.ranks.run_on_all_ranks(check, f"moe_token_dispatcher_type={kind.value}", ConfigError)


def _candidates(
    run: RunContext, shape: MessageShape
) -> tuple[dict[TokenDispatcherType, TokenDispatcher], dict[TokenDispatcherType, str]]:
    """Dispatchers that every rank supports, ready for messages of this shape; why each other one is left out."""
    config, mesh, device = run.config, run.mesh, run.device
    parallel = config.parallel
    ownership = Ownership.from_placement(
        config.model.num_experts, mesh.size("ep"), parallel.moe_expert_placement, parallel.expert_tensor_parallel_size
    )
    candidates: dict[TokenDispatcherType, TokenDispatcher] = {}
    reasons: dict[TokenDispatcherType, str] = {}
    for kind, cls in dispatcher_classes().items():
        reason = _on_all_ranks(cls.unsupported_reason(mesh, device), run.ranks)
        if reason is None:
            dispatcher = cls.build(parallel, mesh, ownership)
            # The ranks of this rank's group may have the memory where those of another group have not.
            reason = _on_all_ranks(_preparation_error(dispatcher, shape, device), run.ranks)
        if reason is None:
            candidates[kind] = dispatcher
        else:
            reasons[kind] = reason
    return candidates, reasons


def _preparation_error(dispatcher: TokenDispatcher, shape: MessageShape, device: torch.device) -> str | None:
    _, error = attempt(lambda: dispatcher.prepare(shape, device))
    return None if error is None else str(error)


def _on_all_ranks(reason: str | None, ranks: Ranks) -> str | None:
    """This rank's reason, or that of another one; None on every rank where no rank has a reason. Collective."""
    failure = ranks.first_failure(None if reason is None else ConfigError(reason))
    return reason if failure is None or reason is not None else f"rank {failure[0]} cannot"


def _log(
    times: Mapping[TokenDispatcherType, float],
    fastest: TokenDispatcherType,
    shape: MessageShape,
    mesh: Mesh,
    reasons: Mapping[TokenDispatcherType, str],
) -> None:
    logger.info(
        "token dispatchers, %d tokens x %d (%s) a rank over %d ranks, dispatch and combine, forward and backward:",
        shape.num_tokens,
        shape.width,
        str(shape.dtype).removeprefix("torch."),
        mesh.size("experts"),
    )
    for kind, milliseconds in times.items():
        logger.info("  %-12s %9.3f ms%s", kind.value, milliseconds, "  <- used" if kind is fastest else "")
    for kind, reason in reasons.items():
        logger.info("  %-12s not measured: %s", kind.value, reason.split(": ", 1)[-1])
