"""All-to-all dispatchers move bits and add in fp32: bf16 outputs and gradients are those expected, bit by bit."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.optimus.config.schema import ExpertPlacement
from megatron.optimus.moe.dispatch import all_to_all
from megatron.optimus.moe.dispatch.all_to_all import AllToAllDispatcher, HierarchicalDispatcher
from megatron.optimus.moe.dispatch.base import TokenDispatcher, no_work
from megatron.optimus.moe.dispatch.ownership import Ownership
from megatron.optimus.ops import InputGradients, Routing
from megatron.optimus.platform import collectives
from tests.helpers import run_distributed

WORLD, NODE, WIDTH, EXPERTS, TOPK = 4, 2, 40, 12, 3
DISPATCHERS = ("all-to-all", "in 3 chunks", "hierarchical")
PER_EXPERT = torch.arange(1.0, EXPERTS + 1)  # gradient of the weight of a choice, small integers: exact in fp32


class Case(NamedTuple):
    dispatcher: str
    shards: int
    counts: tuple[int, ...]
    on_one_rank: bool = False


CASES = [
    Case(dispatcher, shards, counts, on_one_rank)
    for dispatcher in DISPATCHERS
    for shards in (1, 2)
    for counts, on_one_rank in [
        ((8, 8, 8, 8), False),
        ((1, 1, 1, 1), False),
        ((5, 0, 9, 1), False),
        ((6, 2, 0, 4), True),
    ]
]


def inputs(case: Case, rank: int) -> tuple[Tensor, Tensor, Routing]:
    """Own tokens, the gradients of their outputs, and choices: of any experts, or of the first, which one rank has."""
    generator = torch.Generator().manual_seed(10 + rank)
    num_tokens = case.counts[rank]
    x, dy = (torch.randn(num_tokens, WIDTH, generator=generator).bfloat16() for _ in range(2))
    scores = torch.rand(num_tokens, EXPERTS, generator=generator)
    if case.on_one_rank:
        scores[:, :TOPK] += 1
    weights, indices = scores.topk(TOPK)
    return x.requires_grad_(), dy, Routing(weights.requires_grad_(), indices, scores)


def answer(x: Tensor, rank: int) -> Tensor:
    """What a rank makes of a row: another value, rounded to bf16, on every one."""
    return x * (1 + (rank + 1) / 64)


def build(case: Case, rank: int, nodes: list[Any]) -> tuple[TokenDispatcher, Ownership]:
    ownership = Ownership.from_placement(EXPERTS, WORLD // case.shards, ExpertPlacement.CONTIGUOUS, case.shards)
    if case.dispatcher == "hierarchical":
        return HierarchicalDispatcher(nodes[rank // NODE], nodes[2 + rank % NODE], ownership), ownership
    num_chunks = 3 if case.dispatcher == "in 3 chunks" else 1
    return AllToAllDispatcher(dist.group.WORLD, ownership, num_chunks), ownership


def one_rank(rank: int, world: int) -> list[dict[str, Any]]:
    nodes = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    exchanges, waits = (
        count_calls(collectives.dist, "all_to_all_single"),
        count_calls(all_to_all.devices.AsyncHostCopy, "read"),
    )
    return [run_case(rank, case, nodes, exchanges, waits) for case in CASES]


def count_calls(owner: Any, name: str) -> list[None]:
    calls: list[None] = []
    original = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return original(*args, **kwargs)

    setattr(owner, name, counted)
    return calls


def run_case(rank: int, case: Case, nodes: list[Any], exchanges: list[None], waits: list[None]) -> dict[str, Any]:
    dispatcher, ownership = build(case, rank, nodes)
    per_expert = PER_EXPERT[list(ownership.expert_ids(rank // case.shards))]
    x, dy, routing = inputs(case, rank)
    results: list[tuple[Tensor, ...]] = []
    for _ in range(2):
        exchanges.clear(), waits.clear()
        x.grad = routing.weights_TK.grad = None
        arrived, terms = [], []

        def experts(x_RD: Tensor, weights_RK: Tensor, indices_RK: Tensor, on_input_gradients: InputGradients) -> Tensor:
            is_here = indices_RK >= 0
            assert is_here.any(dim=1).all(), "a row that no expert here was chosen for"
            arrived.append(x_RD.shape[0])  # noqa: B023
            terms.append((weights_RK * torch.where(is_here, per_expert[indices_RK], 0.0)).sum())  # noqa: B023
            return answer(x_RD, rank)

        y, processed = dispatcher.run_experts(experts, x, routing, dispatcher.start(x), no_work)  # type: ignore[arg-type]
        forward = len(exchanges), len(waits)
        torch.autograd.backward([y, *terms], [dy, *(torch.ones(()) for _ in terms)])
        results.append((y.detach(), x.grad, routing.weights_TK.grad))
    same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return dict(
        values=results[0], same=same, arrived=sum(arrived), processed=int(processed), forward=forward,
        backward=len(exchanges) - forward[0], waits=len(waits),
    )  # fmt: skip


def summed(parts: list[Tensor]) -> Tensor:
    """In fp32, one after the other, rounded once."""
    total = torch.zeros(WIDTH)
    for part in parts:
        total += part.float()
    return total.bfloat16()


def expected(case: Case, rows: Tensor, indices_TK: Tensor) -> Tensor:
    """Of tokens, or of the gradients of their outputs: what comes back."""
    size = EXPERTS * case.shards // WORLD
    out = []
    for row, choices in zip(rows, indices_TK, strict=True):
        ranks = [rank for rank in range(WORLD) if rank // case.shards in (choices // size).tolist()]
        parts = [answer(row, rank) for rank in ranks]
        if case.dispatcher == "hierarchical":
            of_nodes = [[part for part, r in zip(parts, ranks, strict=True) if r // NODE == node] for node in (0, 1)]
            parts = [summed(of_node) for of_node in of_nodes if of_node]
        out.append(summed(parts))
    return torch.stack(out) if out else rows


def test_bits_sums_messages_and_waits() -> None:
    results = run_distributed(one_rank, WORLD)
    for number, case in enumerate(CASES):
        copies = 0
        for rank in range(WORLD):
            found = results[rank][number]
            x, dy, routing = inputs(case, rank)
            y, dx, dweights = found["values"]
            assert torch.equal(y, expected(case, x.detach(), routing.indices_TK)), case
            assert torch.equal(dx, expected(case, dy, routing.indices_TK)), case
            assert torch.equal(dweights, PER_EXPERT[routing.indices_TK] * case.shards), case
            assert found["same"], case
            size = EXPERTS * case.shards // WORLD
            copies += case.shards * sum(len(set(own)) for own in (routing.indices_TK // size).tolist())
            hops, chunks = (2, 1) if case.dispatcher == "hierarchical" else (1, 3 if "chunks" in case.dispatcher else 1)
            # Counts once a hop; tokens, their choices and the outputs once a chunk and hop, and their gradients.
            assert found["forward"] == (hops * (1 + 3 * chunks), hops), case
            assert (found["backward"], found["waits"]) == (3 * chunks * hops, hops), case
        assert sum(of_rank[number]["arrived"] for of_rank in results) == copies, case
        assert sum(of_rank[number]["processed"] for of_rank in results) == case.shards * TOPK * sum(case.counts), case
