"""Which layers of the model a pipeline stage holds: pure arithmetic.

With ``chunks`` model chunks per rank (virtual pipeline) there are pp * chunks stages. Stage s lies on rank s mod pp in
a loop; in V shape (two chunks) the second half runs back, so that the last stage is on the rank of the first.
"""

from __future__ import annotations

from megatron.optimus.config.schema import ConfigError, ModelConfig, ParallelConfig, divisors, one_of


def layers_of_stages(
    num_layers: int, num_stages: int, *, first: int | None = None, last: int | None = None, head_cost: float = 0.0
) -> list[range]:
    """The layers of every stage, in order.

    ``first``, ``last``: layers of the first and the last stage, where the user fixes them; the others share the rest
    equally. Without them an equal split where there is one; otherwise the split whose slowest stage is fastest, when
    the head weighs ``head_cost`` layers. Raises ConfigError when some stage would be empty or the rest does not divide.
    """
    if first is None and last is None:
        if num_layers < num_stages:
            raise ConfigError(
                f"num_layers={num_layers} is less than the {num_stages} pipeline stages; use fewer stages"
            )
        return _ranges(_even_or_balanced(num_layers, num_stages, head_cost))
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
    inner = model.moe_router_topk * (model.moe_ffn_hidden_size or 0) if model.is_moe else model.ffn_hidden_size
    layer = model.hidden_size * (4 * model.hidden_size + 3 * inner)  # multiply-adds of a token, as of the head below
    return layers_of_stages(
        model.num_layers,
        parallel.pipeline_model_parallel_size * parallel.virtual_pipeline_model_parallel_size,
        first=parallel.decoder_first_pipeline_num_layers,
        last=parallel.decoder_last_pipeline_num_layers,
        head_cost=model.hidden_size * model.vocab_size / layer,
    )


def _even_or_balanced(num_layers: int, num_stages: int, head_cost: float) -> list[int]:
    if num_layers % num_stages == 0:
        return [num_layers // num_stages] * num_stages
    sizes = [1] * num_stages
    for _ in range(num_layers - num_stages):
        # The next layer goes where it hurts least; among equals to the earliest stage, which idles least at the end.
        costs = [size + (head_cost if stage == num_stages - 1 else 0.0) for stage, size in enumerate(sizes)]
        sizes[costs.index(min(costs))] += 1
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
