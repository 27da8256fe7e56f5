"""What token dispatchers declare to send."""

from __future__ import annotations

import random

import pytest

from megatron.optimus.config.choices import TokenDispatcherType
from megatron.optimus.config.load import load
from megatron.optimus.config.rank_plan import RankPlan, rank_plans
from megatron.optimus.moe.traffic import DISPATCHERS, DispatcherTraffic, dispatcher_traffic, rows_needed


def planned(words: str, ranks: int = 4) -> RankPlan:
    return rank_plans(load(f"--preset mula-20b-a2b --global-batch-size 8 {words}".split()).config, ranks)[0]


def test_every_dispatcher_is_declared() -> None:
    assert set(DISPATCHERS) == set(TokenDispatcherType)


def test_a_dispatcher_without_a_declaration_is_planned_as_all_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = planned("--expert-model-parallel-size 4 --moe-token-dispatcher-type symmetric")
    monkeypatch.delitem(DISPATCHERS, TokenDispatcherType.SYMMETRIC)
    assert dispatcher_traffic(rank) is DISPATCHERS[TokenDispatcherType.ALLGATHER]
    # No declaration gives experts more rows.
    assert all(traffic.rows(rank) <= dispatcher_traffic(rank).rows(rank) for traffic in DISPATCHERS.values())


def test_where_a_rank_has_all_experts_nothing_is_sent() -> None:
    for kind in TokenDispatcherType:
        rank = planned(f"--expert-model-parallel-size 1 --moe-token-dispatcher-type {kind.value}")
        assert dispatcher_traffic(rank) is DispatcherTraffic
        assert DispatcherTraffic.rows(rank) == rank.tokens
        assert not list(DispatcherTraffic.collectives(rank, 1, overlaps=True))


def test_rows_needed_are_those_of_tokens_that_choose_their_experts_evenly() -> None:
    rank = planned("--expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall")
    draw, experts, topk = random.Random(3), rank.model.num_experts, rank.model.moe_router_topk
    tokens = 20_000
    hits = sum(min(draw.sample(range(experts), topk)) < experts // 4 for _ in range(tokens))
    assert rows_needed(rank) / (4 * rank.tokens) == pytest.approx(hits / tokens, abs=0.01)


def test_chunks_send_the_same_bytes() -> None:
    words = "--expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall --moe-dispatch-chunks"
    sent = []
    for chunks in (1, 3):
        rank = planned(f"{words} {chunks}")
        sent.append(sum(one.sent for one in dispatcher_traffic(rank).collectives(rank, 5, overlaps=False)))
    assert sent[0] == pytest.approx(sent[1])
