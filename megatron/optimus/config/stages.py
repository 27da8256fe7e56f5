"""Which layers of the model a pipeline stage holds: pure arithmetic.

With ``chunks`` model chunks per rank (virtual pipeline) there are pp * chunks stages. Stage s lies on rank s mod pp in
a loop; in V shape (two chunks) the second half runs back, so that the last stage is on the rank of the first.
"""

from __future__ import annotations

from megatron.optimus.config.schema import (
    ConfigError,
    ModelConfig,
    ParallelConfig,
    PipelineSchedule,
    divisors,
    one_of,
)


def layers_of_stages(
    num_layers: int,
    pp: int,
    *,
    chunks: int = 1,
    v_shape: bool = False,
    first: int | None = None,
    last: int | None = None,
    head_cost: float = 0.0,
) -> list[range]:
    """The layers of every one of the pp * chunks stages, in order.

    ``first``, ``last``: layers of the first and the last stage, where the user fixes them; the others share the rest
    equally. Without them the split whose slowest rank is fastest, when the head on the last stage weighs ``head_cost``
    layers; the equal one if it is as fast. Raises ConfigError for a stage that would be empty and a rest that does not
    divide.
    """
    num_stages = pp * chunks
    if first is None and last is None:
        if num_layers < num_stages:
            raise ConfigError(
                f"num_layers={num_layers} is less than the {num_stages} pipeline stages; use fewer stages"
            )
        ranks = [stages_of_rank(rank, pp, chunks, v_shape=v_shape) for rank in range(pp)]
        return _ranges(_balanced(num_layers, ranks, head_cost))
    fixed = [size for size in (first, last) if size is not None]
    middle, rest = num_stages - len(fixed), num_layers - sum(fixed)
    if min(fixed) < 1 or middle < 0 or rest < middle or (middle == 0 and rest) or (middle and rest % middle):
        raise ConfigError(
            f"num_layers={num_layers} over {num_stages} pipeline stages with {first or 'any'} in the first and "
            f"{last or 'any'} in the last leaves {rest} layers for {middle} stages; they must divide equally"
        )
    inner = [rest // middle] * middle if middle else []
    return _ranges([*([first] if first else []), *inner, *([last] if last else [])])


def stage_layers(model: ModelConfig, parallel: ParallelConfig) -> list[range]:
    """The layers of every stage that a configuration asks for. Raises ConfigError for layers that do not fit."""
    active = model.moe_router_topk * model.moe_ffn_hidden_size + model.moe_shared_expert_intermediate_size
    share = len(model.moe_layers) / model.num_layers  # of layers with experts; stages are cut as if all cost the mean
    inner = share * active + (1 - share) * model.ffn_hidden_size
    layer = model.hidden_size * (4 * model.hidden_size + 3 * inner)  # multiply-adds of a token, as of the head below
    return layers_of_stages(
        model.num_layers,
        parallel.pipeline_model_parallel_size,
        chunks=parallel.virtual_pipeline_model_parallel_size,
        v_shape=parallel.pipeline_schedule is PipelineSchedule.ZBV,
        first=parallel.decoder_first_pipeline_num_layers,
        last=parallel.decoder_last_pipeline_num_layers,
        head_cost=model.hidden_size * model.vocab_size / layer,
    )


def _balanced(num_layers: int, ranks: list[list[int]], head_cost: float) -> list[int]:
    """Layers of every stage, for ``ranks``: the stages of each."""
    num_stages = sum(len(stages) for stages in ranks)
    heads = [0.0] * (num_stages - 1) + [head_cost]

    def costs(sizes: list[int]) -> list[float]:
        return [sum(sizes[stage] + heads[stage] for stage in stages) for stages in ranks]

    sizes = [1] * num_stages
    for _ in range(num_layers - num_stages):
        # The next layer goes to the rank with least to do and there to its least stage; among equals to the earliest,
        # which idles least at the end.
        loads = costs(sizes)
        stages = ranks[loads.index(min(loads))]
        sizes[min(stages, key=lambda stage: sizes[stage] + heads[stage])] += 1
    if num_layers % num_stages == 0:
        equal = [num_layers // num_stages] * num_stages
        return equal if max(costs(equal)) <= max(costs(sizes)) else sizes
    return sizes


def _ranges(sizes: list[int]) -> list[range]:
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def stages_of_rank(rank: int, pp: int, chunks: int, *, v_shape: bool) -> list[int]:
    """The stages of a pipeline rank, in the order of its chunks."""
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
    """Communicators for each direction between stages of a pipeline with several chunks (parallel/pipeline_p2p.py)."""
    return 4 if v_shape else 2 + pp % 2
