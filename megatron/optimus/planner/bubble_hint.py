"""What a pipeline with too few micro-batches a step would need."""

from __future__ import annotations

from dataclasses import replace

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.planner.plan import Plan, plan

MOST, GOAL = 0.20, 0.10  # shares of a step: above the one there is a hint, which leads to the other or less
MOST_ROUNDS = 256  # micro-batches for each stage that are tried


def enough_micro_batches(made: Plan) -> Plan | None:
    """The same run with the smallest global batch whose bubble is planned at GOAL of the step or less. It gives each
    rank a multiple of the stages in micro-batches, which every schedule takes. None if no batch tried does."""
    layout, training = made.shares[0].layout, made.config.training
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
        if larger.time.bubble_share <= GOAL:
            return larger
    return None


def bubble_hint(made: Plan) -> str:
    """One line with the bubble, its cause and the remedy; empty where the bubble is at most MOST of the step."""
    if made.time.bubble_share <= MOST:
        return ""
    count, batch = made.shares[0].micro_batches, made.config.training.global_batch_size
    cause = (
        f"bubble {made.time.bubble_share:.0%} of the step: {count} micro-batch{'es' * (count > 1)} a step "
        f"(global batch {batch}) over {made.shares[0].layout.pp} pipeline stages"
    )
    larger = enough_micro_batches(made)
    if larger is None:
        return f"{cause}; no batch with a multiple of these that the run allows makes it {GOAL:.0%}; use fewer stages"
    needs = f", but needs {larger.worst.peak / 2**30:.2f} of {larger.usable / 2**30:.2f} usable GiB"
    return (
        f"{cause}; --global-batch-size {larger.config.training.global_batch_size}, {larger.shares[0].micro_batches} "
        f"micro-batches, would make it {larger.time.bubble_share:.0%}{'' if larger.fits else needs}"
    )
