"""Searches the layouts of a run that fit a machine, and the batch that a pipeline with a long bubble would need."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from megatron.optimus.config.rank_plan import first_of_each_kind
from megatron.optimus.config.schema import (
    ConfigError,
    ContextCommunication,
    PipelineSchedule,
    Recompute,
    RunConfig,
    divisors,
)
from megatron.optimus.planner.hardware import Machine
from megatron.optimus.planner.optimizer_state import total_state_bytes
from megatron.optimus.planner.plan import Plan, plan

_ALL = [Recompute.MOE, Recompute.ATTENTION, Recompute.NORM]
RECOMPUTATION: list[list[Recompute]] = [[], _ALL[:1], _ALL[:2], _ALL]
MICRO_BATCHES = [1, 2, 4, 8]
LONG_SEQUENCE = 16384  # from here on context parallelism is tried
CONTEXT = [1, 2, 4, 8, 16, 32]
_MISSES = 40  # layouts just too large that are looked at
MAX_EXPERT_NODES = 2  # an expert-parallel group is not spread further
# Of a pipeline's bubble, as shares of a step: above the one there is a hint, which leads to the other or less.
LONG_BUBBLE, SHORT_BUBBLE = 0.20, 0.10
MOST_ROUNDS = 256  # micro-batches for each stage that are tried


@dataclass
class SearchResult:
    """What a search found."""

    best: list[Plan] = field(default_factory=list)  # fit, most tokens per second first
    tried: int = 0
    refused: dict[str, int] = field(default_factory=dict)  # reason -> how many
    examples: dict[str, str] = field(default_factory=dict)  # reason -> one message
    too_large: list[Plan] = field(default_factory=list)  # faster than the best, if any, but do not fit; least first

    def refuse(self, reason: str, example: str) -> None:
        """Counts a layout that was refused, and keeps the first example of each reason."""
        self.refused[reason] = self.refused.get(reason, 0) + 1
        self.examples.setdefault(reason, example)


def search(
    config: RunConfig, world_size: int, machine: Machine, *, fixed_options: Set[str], keep: int = 10
) -> SearchResult:
    """Searches the fastest layouts that fit, and why others do not.

    Varies the sizes of the axes, micro-batch and recomputation of a run, except for the options ``fixed_options``.
    """
    found = SearchResult()
    layouts = _layouts(config, world_size, machine, fixed_options)
    plans = [made for layout in layouts for made in _plans(config, layout, world_size, machine, fixed_options, found)]
    fitting = sorted(
        (made for made in plans if made.fits), key=lambda made: (-made.time.tokens_per_second, made.worst.peak)
    )
    found.best = fitting[:keep]
    limit = fitting[0].time.tokens_per_second if fitting else 0.0
    nearest = sorted((made for made in plans if not made.fits), key=lambda made: made.worst.peak)[:_MISSES]
    found.too_large = [made for made in nearest if made.time.tokens_per_second > limit][:3]
    return found


def _plans(
    config: RunConfig,
    layout: dict[str, Any],
    world_size: int,
    machine: Machine,
    fixed_options: Set[str],
    found: SearchResult,
) -> Iterator[Plan]:
    """Tries one layout: for each micro-batch the least recomputation that fits, since more of it is only slower.

    A larger micro-batch needs more memory, so the first that fits with no recomputation at all ends the search. Counts
    in ``found``.
    """
    sizes = [config.training.micro_batch_size] if "micro_batch_size" in fixed_options else MICRO_BATCHES
    modules = [config.parallel.recompute_modules] if "recompute_modules" in fixed_options else RECOMPUTATION
    for size in sizes:
        for recompute in modules:
            found.tried += 1
            try:
                parallel = replace(config.parallel, **layout, recompute_modules=list(recompute))
                training = replace(config.training, micro_batch_size=size)
                made = plan(replace(config, parallel=parallel, training=training), world_size, machine)
            except ConfigError as error:
                found.refuse("the trainer's checks", str(error))
                break  # whatever is recomputed; a larger micro-batch may give each rank of a region a token
            states = max(total_state_bytes(rank).total for rank in first_of_each_kind(made.ranks))
            if states > made.usable:
                found.refuse("memory", f"weights, gradients and states alone take {states / 2**30:.1f} GiB")
                return
            yield made
            if made.fits:
                break
            found.refuse("memory", f"{made.worst.peak / 2**30:.1f} GiB of {made.usable / 2**30:.1f} usable")
        else:
            return


def _layouts(config: RunConfig, world_size: int, machine: Machine, fixed_options: Set[str]) -> Iterator[dict[str, Any]]:
    """Sizes of the axes, as changes to the parallel section; those that cannot divide are left out at once."""
    model, parallel, node = config.model, config.parallel, machine.devices_per_node
    experts = [size for size in divisors(max(1, model.num_experts)) if size <= MAX_EXPERT_NODES * node]
    options: dict[str, list[Any]] = {
        "tensor_model_parallel_size": [size for size in divisors(node) if model.num_attention_heads % size == 0],
        "pipeline_model_parallel_size": [size for size in divisors(world_size) if size <= model.num_layers],
        "virtual_pipeline_model_parallel_size": [1, 2],
        "context_parallel_size": CONTEXT if config.training.seq_length >= LONG_SEQUENCE else [1],
        "cp_comm_type": list(ContextCommunication),
        "expert_model_parallel_size": experts if model.is_moe else [1],
    }
    for name in options:
        if name in fixed_options:
            options[name] = [getattr(parallel, name)]
    for values in product(*options.values()):
        tp, pp, chunks, cp, around, ep = values
        stage = world_size // pp
        if world_size % (tp * pp * cp) or stage % (ep * parallel.expert_tensor_parallel_size):
            continue
        if chunks > 1 and (pp == 1 or model.num_layers < pp * chunks):
            continue
        if cp == 1 and around is not options["cp_comm_type"][0]:  # nothing to choose
            continue
        changes = dict(zip(options, values, strict=True))
        schedule = parallel.pipeline_schedule
        if "pipeline_schedule" not in fixed_options:
            changes["pipeline_schedule"] = (
                PipelineSchedule.INTERLEAVED_1F1B if chunks > 1 else PipelineSchedule.ONE_F_ONE_B
            )
        elif pp > 1 and (schedule is PipelineSchedule.ONE_F_ONE_B) != (chunks == 1):
            continue
        yield changes


def enough_micro_batches(made: Plan) -> Plan | None:
    """Plans the same run with the smallest global batch whose bubble is SHORT_BUBBLE of the step or less.

    It gives each rank a multiple of the stages in micro-batches, which every schedule takes. None if no batch tried
    has so short a bubble.
    """
    layout, training = made.ranks[0].layout, made.config.training
    for rounds in range(1, MOST_ROUNDS + 1):
        batch = rounds * layout.pp * training.micro_batch_size * layout.dp
        if batch <= training.global_batch_size:
            continue
        try:
            larger = plan(
                replace(made.config, training=replace(training, global_batch_size=batch)), made.world_size, made.machine
            )
        except ConfigError:  # a ramp of batch sizes that does not end there, fewer samples than that in the run
            continue
        if larger.time.bubble_share <= SHORT_BUBBLE:
            return larger
    return None


def bubble_hint(made: Plan) -> str:
    """Says in one line how long the bubble is, why, and the remedy; empty if it is at most LONG_BUBBLE of the step."""
    if made.time.bubble_share <= LONG_BUBBLE:
        return ""
    count, batch = made.ranks[0].micro_batches, made.config.training.global_batch_size
    cause = (
        f"bubble {made.time.bubble_share:.0%} of the step: {count} micro-batch{'es' * (count > 1)} a step "
        f"(global batch {batch}) over {made.ranks[0].layout.pp} pipeline stages"
    )
    larger = enough_micro_batches(made)
    if larger is None:
        none = f"no batch with a multiple of these that the run allows makes it {SHORT_BUBBLE:.0%}"
        return f"{cause}; {none}; use fewer stages"
    needs = f", but needs {larger.worst.peak / 2**30:.2f} of {larger.usable / 2**30:.2f} usable GiB"
    return (
        f"{cause}; --global-batch-size {larger.config.training.global_batch_size}, {larger.ranks[0].micro_batches} "
        f"micro-batches, would make it {larger.time.bubble_share:.0%}{'' if larger.fits else needs}"
    )
