"""Assigns the layers of the model to pipeline stages: pure arithmetic.

With ``chunks`` model chunks per rank (virtual pipeline) there are pp * chunks stages. Stage s lies on rank s mod pp in
a loop; in V shape (two chunks) the second half runs back, so that the last stage is on the rank of the first.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.optimus.config.costs import head_cost, layer_cost
from megatron.optimus.config.schema import (
    ConfigError,
    ModelConfig,
    ParallelConfig,
    PipelineSchedule,
    divisors,
    one_of,
)
from megatron.optimus.config.stage_balance import balance_layers


def layers_of_stages(
    costs: Sequence[int],
    pp: int,
    *,
    chunks: int = 1,
    v_shape: bool = False,
    first: int | None = None,
    last: int | None = None,
    head_cost: int = 0,
) -> list[range]:
    """Splits the layers over the pp * chunks stages, in order.

    Args:
        costs: cost of each layer, in any unit.
        pp: pipeline ranks.
        chunks: model chunks per rank; 2 in V shape.
        v_shape: whether stages lie on ranks in V shape.
        first: layers of the first stage, where the user fixes them.
        last: layers of the last stage, likewise; the layers left must divide by the stages left.
        head_cost: cost of the output projection on the last stage, in the unit of ``costs``.

    Returns:
        The layers of every stage: the split whose slowest rank is fastest, the equal split among equals.

    Raises:
        ConfigError: for fewer layers than stages, and for layers left that do not divide.
    """
    num_layers, num_stages = len(costs), pp * chunks
    if first is None and last is None:
        if num_layers < num_stages:
            raise ConfigError(
                f"num_layers={num_layers} is less than the {num_stages} pipeline stages; use fewer stages"
            )
    else:
        fixed = [size for size in (first, last) if size is not None]
        middle, rest = num_stages - len(fixed), num_layers - sum(fixed)
        if min(fixed) < 1 or middle < 0 or rest < middle or (middle == 0 and rest) or (middle and rest % middle):
            raise ConfigError(
                f"num_layers={num_layers} over {num_stages} pipeline stages with {first or 'any'} in the first and "
                f"{last or 'any'} in the last leaves {rest} layers for {middle} stages; they must divide equally"
            )
    ranks = tuple(tuple(stages_of_rank(rank, pp, chunks, v_shape=v_shape)) for rank in range(pp))
    return _ranges(balance_layers(tuple(costs), ranks, head_cost, (first, last)))


def stage_layers(model: ModelConfig, parallel: ParallelConfig, seq_length: int) -> list[range]:
    """Splits the layers as a configuration asks, by what they cost in a sequence of that length.

    Attention counts with its length: the longer the sequences, the fewer layers the head is worth. Raises ConfigError
    for layers that do not fit.
    """
    dense, moe = (layer_cost(model, seq_length, is_moe=is_moe).total for is_moe in (False, True))
    costs = [dense] * model.num_layers
    for layer in model.moe_layers:
        costs[layer] = moe
    return layers_of_stages(
        costs,
        parallel.pipeline_model_parallel_size,
        chunks=parallel.virtual_pipeline_model_parallel_size,
        v_shape=parallel.pipeline_model_parallel_size > 1 and parallel.pipeline_schedule is PipelineSchedule.ZBV,
        first=parallel.decoder_first_pipeline_num_layers,
        last=parallel.decoder_last_pipeline_num_layers,
        head_cost=head_cost(model),
    )


def _ranges(sizes: Sequence[int]) -> list[range]:
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def stages_of_rank(rank: int, pp: int, chunks: int, *, v_shape: bool) -> list[int]:
    """Lists the stages of a pipeline rank, in the order of its chunks."""
    if v_shape:
        return [rank, 2 * pp - 1 - rank]
    return [rank + pp * chunk for chunk in range(chunks)]


def check_micro_batches(num_micro_batches: int, pp: int) -> None:
    """Raises ConfigError for a number that interleaved schedules cannot cut into rounds of equal length."""
    rounds = max(1, num_micro_batches // pp)
    if num_micro_batches % rounds:
        good = [n for n in (*divisors(pp), pp * (num_micro_batches // pp), pp * (num_micro_batches // pp + 1)) if n]
        raise ConfigError(
            f"{num_micro_batches} micro-batches per step do not fit an interleaved schedule over {pp} stages: use "
            f"fewer than {2 * pp} or a multiple of {pp}, such as {one_of(sorted(set(good)))}"
        )


def num_p2p_groups(pp: int, *, v_shape: bool) -> int:
    """Counts the communicators for each direction between stages with several chunks (parallel/pipeline_stages.py)."""
    return 4 if v_shape else 2 + pp % 2
