"""Declares what a MoE layer sends: the router's collectives, and each token dispatcher's rows, memory and collectives.

Written without torch, so that the planner can read it on any machine. A dispatcher that DISPATCHERS does not name is
planned as all-gather, whose rows are the most there can be; one that sends less declares it here, in a subclass of
``DispatcherTraffic`` that DISPATCHERS names. Tests count the collectives of real steps against the declarations.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.optimus.config.costs import FP32, INT32, INT64, Collective, CollectiveKind, OverlapsWith
from megatron.optimus.config.rank_plan import RankPlan
from megatron.optimus.config.schema import LoadBalancing, TokenDispatcherType


def router_traffic(rank: RankPlan, layers: int) -> Iterator[Collective]:
    """The collectives of the load-balancing loss in ``layers`` passes through a router."""
    kind, layout = rank.model.moe_router_load_balancing_type, rank.layout
    if kind is LoadBalancing.NONE:
        return
    is_global = kind is LoadBalancing.GLOBAL_AUX_LOSS
    size = layout.dp * layout.cp * layout.tp if is_global else layout.cp * layout.tp
    axis = "stage" if is_global else "sequence"
    yield Collective(axis, CollectiveKind.ALL_REDUCE, "counts of experts", size, rank.model.num_experts * INT64, layers)


class DispatcherTraffic:
    """What a token dispatcher sends and holds; the base is that of a dispatcher whose ranks hold all experts."""

    sends_before_router = False  # tokens leave before the router has chosen
    sends_every_row = True  # experts are given every token of the group, whether they are needed for it or not

    @staticmethod
    def rows(rank: RankPlan) -> int:
        """Rows that the experts of a rank are given."""
        return rank.sequence_parallel_tokens * rank.expert_ranks

    @staticmethod
    def saved_bytes(rank: RankPlan, *, recomputes: bool) -> int:
        """Bytes that a layer keeps for its backward besides the rows. ``recomputes``: its experts are recomputed."""
        return 0

    @staticmethod
    def shared_bytes(rank: RankPlan) -> int:
        """Bytes of memory that a rank shares with its peers, for all layers."""
        return 0

    @staticmethod
    def collectives(rank: RankPlan, layers: int, *, overlaps: bool) -> Iterator[Collective]:
        """The collectives of ``layers`` passes, forward and backward. ``overlaps``: the device computes beside them."""
        yield from ()


class AllGatherTraffic(DispatcherTraffic):
    """Every rank gets all tokens of the group."""

    sends_before_router = True

    @staticmethod
    def collectives(rank: RankPlan, layers: int, *, overlaps: bool) -> Iterator[Collective]:
        size, rows = rank.expert_ranks, rank.sequence_parallel_tokens * rank.expert_ranks
        router, last = (OverlapsWith.ROUTER, OverlapsWith.LAST_PRODUCT) if overlaps else (OverlapsWith.NOTHING,) * 2
        wide, weights = rows * rank.model.hidden_size * rank.element_bytes, rows * rank.model.moe_router_topk * FP32
        yield Collective("experts", CollectiveKind.ALL_GATHER, "tokens to experts", size, wide, layers, router)
        yield Collective(
            "experts", CollectiveKind.ALL_GATHER, "router weights, expert numbers", size, 2 * weights, layers
        )
        yield Collective("experts", CollectiveKind.REDUCE_SCATTER, "sums from experts", size, wide, layers)
        yield Collective("experts", CollectiveKind.ALL_GATHER, "gradients to experts", size, wide, layers)
        yield Collective("experts", CollectiveKind.REDUCE_SCATTER, "gradients from experts", size, wide, layers, last)
        yield Collective(
            "experts", CollectiveKind.REDUCE_SCATTER, "gradients of router weights", size, weights, layers, last
        )


class AllToAllTraffic(DispatcherTraffic):
    """A rank gets the tokens that need one of its experts, each once."""

    sends_every_row = False

    @staticmethod
    def rows(rank: RankPlan) -> int:
        return rows_needed(rank)

    @staticmethod
    def saved_bytes(rank: RankPlan, *, recomputes: bool) -> int:
        return (
            rank.sequence_parallel_tokens * rank.expert_ranks * INT32
        )  # where each token's copies are among the rows sent

    @staticmethod
    def collectives(rank: RankPlan, layers: int, *, overlaps: bool) -> Iterator[Collective]:
        size, rows = rank.expert_ranks, rows_needed(rank)
        there, last = (OverlapsWith.SHARED, OverlapsWith.LAST_PRODUCT) if overlaps else (OverlapsWith.NOTHING,) * 2
        wide, weights = rows * rank.model.hidden_size * rank.element_bytes, rows * rank.model.moe_router_topk * FP32
        yield Collective("experts", CollectiveKind.ALL_TO_ALL, "numbers of rows", size, size * INT64, layers)
        for purpose, count, hiding in (
            ("tokens", layers, there),
            ("results, their gradients", 2 * layers, OverlapsWith.NOTHING),
            ("gradients from experts", layers, last),
        ):
            yield from _in_chunks(rank, purpose, wide, count, hiding, overlaps=overlaps)
        yield Collective(
            "experts", CollectiveKind.ALL_TO_ALL, "router weights, expert numbers", size, 2 * weights, layers
        )
        yield Collective(
            "experts", CollectiveKind.ALL_TO_ALL, "gradients of router weights", size, weights, layers, last
        )


class HierarchicalTraffic(AllToAllTraffic):
    """Counted as all-to-all over the whole group: what travels between nodes once is not told apart."""

    @staticmethod
    def saved_bytes(rank: RankPlan, *, recomputes: bool) -> int:
        return 0


class SymmetricTraffic(DispatcherTraffic):
    """Ranks read each other's memory: what all-to-all moves, in rows as all-gather has them."""

    @staticmethod
    def saved_bytes(rank: RankPlan, *, recomputes: bool) -> int:
        """Bytes of each row's flag (needed here or not), and of its expert numbers unless experts are recomputed."""
        indices = 0 if recomputes else rank.model.moe_router_topk * INT32
        return SymmetricTraffic.rows(rank) * (1 + indices)

    @staticmethod
    def shared_bytes(rank: RankPlan) -> int:
        """Bytes of own tokens, of the other ranks' outputs, and of choices with their gradients."""
        choices = rank.sequence_parallel_tokens * rank.model.moe_router_topk
        rows = SymmetricTraffic.rows(rank)
        return rows * rank.model.hidden_size * rank.element_bytes + choices * (INT32 + 2 * FP32)

    @staticmethod
    def collectives(rank: RankPlan, layers: int, *, overlaps: bool) -> Iterator[Collective]:
        size, rows, row = rank.expert_ranks, SymmetricTraffic.rows(rank), rank.model.hidden_size * rank.element_bytes
        choices = rows * rank.model.moe_router_topk
        needed, copies = rows_needed(rank) * row, OverlapsWith.LAST_PRODUCT  # whole blocks, by the copy engines
        yield Collective(
            "experts", CollectiveKind.ALL_TO_ALL, "tokens, results, their gradients", size, needed, 3 * layers
        )
        yield Collective(
            "experts", CollectiveKind.ALL_TO_ALL, "gradients from experts", size, rows * row, layers, copies
        )
        yield Collective("experts", CollectiveKind.ALL_GATHER, "router weights", size, choices * FP32, layers)
        yield Collective("experts", CollectiveKind.ALL_GATHER, "expert numbers", size, choices * INT32, layers)
        gradients = choices // size * FP32  # each choice is served by one rank
        yield Collective("experts", CollectiveKind.ALL_TO_ALL, "gradients of router weights", size, gradients, layers)


DISPATCHERS: dict[TokenDispatcherType, type[DispatcherTraffic]] = {
    TokenDispatcherType.ALLGATHER: AllGatherTraffic,
    TokenDispatcherType.ALLTOALL: AllToAllTraffic,
    TokenDispatcherType.HIERARCHICAL: HierarchicalTraffic,
    TokenDispatcherType.SYMMETRIC: SymmetricTraffic,
    TokenDispatcherType.AUTO: HierarchicalTraffic,  # which one is taken, only a probe knows
}


def traffic_of(kind: TokenDispatcherType) -> type[DispatcherTraffic]:
    """Returns the declaration of a dispatcher, AllGatherTraffic for one without a declaration of its own."""
    return DISPATCHERS.get(kind, AllGatherTraffic)


def dispatcher_traffic(rank: RankPlan) -> type[DispatcherTraffic]:
    """The declaration of the dispatcher that a run uses."""
    return traffic_of(rank.config.parallel.moe_token_dispatcher_type) if rank.expert_ranks > 1 else DispatcherTraffic


def rows_needed(rank: RankPlan) -> int:
    """Tokens of the group that need an expert of one rank, each counted once, when all experts are equally likely."""
    experts, here = rank.model.num_experts, rank.model.num_experts // rank.layout.ep
    absent = 1.0  # probability that none of a token's K experts, drawn evenly without repetition, is here
    for draw in range(rank.model.moe_router_topk):
        absent *= max(0, experts - here - draw) / (experts - draw)
    return round(rank.sequence_parallel_tokens * rank.expert_ranks * (1.0 - absent))


def _in_chunks(
    rank: RankPlan, purpose: str, payload: int, count: int, hiding: OverlapsWith, *, overlaps: bool
) -> Iterator[Collective]:
    """All-to-alls that travel in chunks, each beside another's products: one of them is always alone.

    ``hiding``: what they hide behind in one chunk. Where collectives take multiprocessors from products, chunks gained
    nothing.
    """
    chunks, size = rank.config.parallel.moe_dispatch_chunks, rank.expert_ranks
    if chunks > 1:
        beside = OverlapsWith.PRODUCTS if overlaps else OverlapsWith.NOTHING
        yield Collective(
            "experts", CollectiveKind.ALL_TO_ALL, purpose, size, payload // chunks, count * (chunks - 1), beside
        )
        payload, hiding = payload - payload // chunks * (chunks - 1), OverlapsWith.NOTHING
    yield Collective("experts", CollectiveKind.ALL_TO_ALL, purpose, size, payload, count, hiding)
