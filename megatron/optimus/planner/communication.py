"""Lists what a rank sends in one optimizer step: every collective of the program by axis and kind, with its bytes.

Those of MoE layers are declared in moe/traffic.py, those of the other parallelisms in parallel/traffic.py. A test
counts the collectives of real steps against this list.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.optimus.config.costs import Collective, CollectiveKind, OverlapsWith
from megatron.optimus.config.rank_plan import RankPlan
from megatron.optimus.models.activations import Kernels
from megatron.optimus.moe.traffic import dispatcher_traffic, router_traffic
from megatron.optimus.parallel.traffic import (
    context_traffic,
    partial_gradient_traffic,
    pipeline_traffic,
    tensor_traffic,
)
from megatron.optimus.planner.optimizer_state import flat_buffers


def collectives(rank: RankPlan, kernels: Kernels) -> list[Collective]:
    """Lists all that moves activations, gradients or weights, largest groups last; scalars are left out."""
    layers = rank.num_moe_layers * rank.micro_batches
    dispatch = dispatcher_traffic(rank).collectives(rank, layers, overlaps=kernels.overlaps_collectives)
    moe = [*router_traffic(rank, layers), *dispatch]
    data = [*_optimizer_traffic(rank), *partial_gradient_traffic(rank)]
    found = [*tensor_traffic(rank), *context_traffic(rank), *moe, *pipeline_traffic(rank), *data]
    return [one for one in found if one.size > 1 and one.count > 0]


def sent_by_axis(found: list[Collective]) -> dict[str, float]:
    """Sums the bytes that a rank sends in a step along each axis."""
    totals: dict[str, float] = {}
    for one in found:
        totals[one.axis] = totals.get(one.axis, 0.0) + one.sent
    return totals


def _optimizer_traffic(rank: RankPlan) -> Iterator[Collective]:
    """What the sharded optimizer sends: gradients to their owners, weights from them."""
    options, layout = rank.config.optimizer, rank.layout
    repeats = rank.micro_batches if options.zero_stage == 2 else 1
    is_tied = layout.pp > 1 and not rank.model.untie_embeddings_and_output_weights
    reduces = options.overlap_grad_reduce and len(rank.stages) == 1
    into = OverlapsWith.BACKWARD if reduces else OverlapsWith.NOTHING
    out = OverlapsWith.FORWARD if options.overlap_param_gather else OverlapsWith.NOTHING
    for buffer in flat_buffers(rank):
        axis, what = ("edp", "expert") if buffer.is_expert else ("dense", "other")
        size, sent, weights = (
            buffer.group_size,
            buffer.numel * rank.sent_gradient_element_bytes,
            buffer.numel * rank.element_bytes,
        )
        yield Collective(axis, CollectiveKind.REDUCE_SCATTER, f"{what} gradients", size, sent, repeats, into)
        yield Collective(axis, CollectiveKind.ALL_GATHER, f"{what} weights", size, weights, 1, out)
    if is_tied and (rank.has_embedding or rank.has_head):
        table = rank.model.vocab_size // layout.tp * rank.model.hidden_size * rank.gradient_element_bytes
        table = -(-table // (layout.dp * layout.cp))  # of each rank's shard, after the reduction
        yield Collective("pp", CollectiveKind.ALL_REDUCE, "gradient of the tied embedding", 2, table, 1)
