"""Selects the tile sizes of Triton's expert kernels before the first step, the same on every rank.

Rank 0 reads the tuned tiles from disk; with ``tune_kernels`` it first times the candidates for shapes that have none.
Nothing is timed after the first step has begun. With ``deterministic`` only tiles are used whose results equal the
default tiles' bit for bit.
"""

from __future__ import annotations

import json
import logging
import time

import torch

from megatron.optimus.config.schema import RunConfig
from megatron.optimus.context import RunContext
from megatron.optimus.moe.dispatch.select import message_shape
from megatron.optimus.moe.traffic import traffic_of
from megatron.optimus.ops.backend import resolves_to_triton
from megatron.optimus.ops.triton import tile_cache, tiles
from megatron.optimus.ops.triton.candidates import Table
from megatron.optimus.ops.triton.tiles import Problem
from megatron.optimus.training.health import TrainingError

logger = logging.getLogger("optimus")


def select_tiles(run: RunContext) -> None:
    """Makes every rank use rank 0's tiles; does nothing for a model without experts or on the meta device. Collective.

    Raises TrainingError on every rank where rank 0 fails.
    """
    ranks = run.ranks
    if not run.config.model.is_moe or run.device.type == "meta":
        return

    def choose() -> dict[str, Table]:
        return _chosen(run.config, run.device, run.dtype) if ranks.rank == 0 else {}

    own = ranks.run_on_all_ranks(choose, "choosing the tiles of expert kernels", TrainingError)
    sent = ranks.broadcast_bytes(json.dumps(tile_cache.records(own)).encode())
    tiles.set_tables(tile_cache.parse(json.loads(sent))[0])


def _chosen(config: RunConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Table]:
    training = config.training
    if not resolves_to_triton(device, dtype):
        if training.tune_kernels:
            logger.info("tune_kernels: nothing to tune, as expert layers do not run on Triton's kernels here")
        return {}
    tiles.set_tables(None)
    entries = {k: e for k, e in tiles.table(device).items() if e.matches_default_bits or not training.deterministic}
    if training.tune_kernels:
        from megatron.optimus.ops.triton.autotune import line, tune_missing

        started = time.monotonic()
        problems, share = problems_of(config, dtype)
        seconds = 30 * config.parallel.distributed_timeout_minutes  # half of what the other ranks wait
        entries, outcomes = tune_missing(
            problems, device, entries, local_share=share, exact_only=training.deterministic, seconds=seconds
        )
        if outcomes:
            logger.info("tuned %d shapes of expert kernels in %.0f s:", len(outcomes), time.monotonic() - started)
        for outcome in outcomes:
            logger.info("  %s", line(outcome))
    return {tiles.hardware(device).key: entries}


def problems_of(config: RunConfig, dtype: torch.dtype, num_tokens: int | None = None) -> tuple[list[Problem], float]:
    """The matrix products of an expert layer on one rank, and the share of the slots whose expert is on that rank.

    ``num_tokens``: of a rank, before dispatch; default: those of a micro-batch. All-to-all sends a token once to each
    rank that has one of its experts; how many rows that gives is estimated for experts that are chosen evenly.
    """
    model, parallel, optimizer = config.model, config.parallel, config.optimizer
    ep, etp, topk = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size, model.moe_router_topk
    tokens = (message_shape(config, dtype).num_tokens if num_tokens is None else num_tokens) * ep * etp
    share = 1 / ep
    if ep * etp > 1 and not traffic_of(parallel.moe_token_dispatcher_type).sends_every_row:
        reached = 1 - (1 - share) ** topk
        tokens, share = round(tokens * reached / parallel.moe_dispatch_chunks), share / reached
    add_to = None
    if optimizer.zero_stage == 1:
        add_to = torch.float32 if optimizer.accumulate_allreduce_grads_in_fp32 else dtype
    experts, inner = model.num_experts // ep, model.moe_ffn_hidden_size // etp
    return tiles.layer_problems(experts, model.hidden_size, inner, topk, max(1, tokens), dtype, add_to), share
