"""Ring attention's arithmetic and its work, with threads for ranks: equal to one process, balanced, nothing in vain."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.optimus.config.schema import ContextCommunication, ParallelConfig
from megatron.optimus.layers.attention import causal_attention
from megatron.optimus.layers.documents import Documents
from megatron.optimus.parallel import ring
from megatron.optimus.parallel.context import own_positions
from megatron.optimus.parallel.mesh import Mesh

BATCH, HEADS, GROUPS, WIDTH, PIECE = 3, 4, 2, 8, 4
# Documents that end beside and at the borders of pieces, ones that reach over several of them, and none.
STARTS = [[PIECE - 1, PIECE, PIECE + 1, 3 * PIECE], [2 * PIECE], []]


class Wires:
    """Messages between threads, matched in the order in which both ends ask for them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.boxes: defaultdict[tuple[int, int], queue.Queue[Tensor]] = defaultdict(queue.Queue)

    def box(self, rank: int, number: int) -> queue.Queue[Tensor]:
        with self.lock:
            return self.boxes[rank, number]


class Place:
    """A rank's view of the group."""

    def __init__(self, rank: int, size: int, wires: Wires) -> None:
        self.rank, self.size, self.wires, self.asked = rank, size, wires, 0

    def exchange(self, x: Tensor, out: Tensor, step: int) -> SimpleNamespace:
        number, self.asked = self.asked, self.asked + 1
        self.wires.box((self.rank + step) % self.size, number).put(x.clone())
        return SimpleNamespace(wait=lambda: out.copy_(self.wires.box(self.rank, number).get(timeout=20)))


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """Pairs of query and key computed by each rank: an entry for each step, forward and backward. Puts threads in."""
    pairs: dict[int, list[int]] = defaultdict(list)
    here = threading.local()
    spans, attend, attend_backward = ring.spans, ring.attend_part, ring.attend_part_backward

    def begin_step(rank: int, *args: Any) -> list[ring.Span]:
        here.steps = pairs[rank]
        here.steps.append(0)
        return spans(rank, *args)

    def count(q: Tensor, k: Tensor, causal: bool) -> None:
        num_queries, num_keys = q.shape[2], k.shape[2]
        assert not causal or num_queries == num_keys
        each = num_queries * (num_queries + 1) // 2 if causal else num_queries * num_keys
        here.steps[-1] += q.shape[0] * each

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        count(q, k, causal)
        return attend(q, k, v, causal)

    def backward(grad: Tensor, q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        count(q, k, rest[-1])
        return attend_backward(grad, q, k, *rest)

    ranks = SimpleNamespace(get_rank=lambda place: place.rank, get_world_size=lambda place: place.size)
    monkeypatch.setattr(ring, "dist", ranks)
    monkeypatch.setattr(ring, "start_exchange", lambda x, out, step, place: place.exchange(x, out, step))
    monkeypatch.setattr(ring, "spans", begin_step)
    monkeypatch.setattr(ring, "attend_part", forward)
    monkeypatch.setattr(ring, "attend_part_backward", backward)
    return pairs


def together(size: int, qkvg: list[Tensor], documents: Documents | None) -> list[Tensor]:
    """Output and gradients of q, k and v, each position's from the rank that has it."""
    config = ParallelConfig(context_parallel_size=size, cp_comm_type=ContextCommunication.P2P)
    wires, length = Wires(), qkvg[0].shape[2]
    found = [torch.full_like(x, torch.nan) for x in (qkvg[3], *qkvg[:3])]

    def one(rank: int) -> None:
        positions = own_positions(length, config, Mesh(config, rank=rank, world_size=size))
        assert positions is not None
        q, k, v, grad = (x[:, :, positions] for x in qkvg)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        group: Any = Place(rank, size, wires)
        out = ring.RingAttention(group)(*leaves, documents)
        out.backward(grad)
        for whole, part in zip(found, (out.detach(), *(x.grad for x in leaves)), strict=True):
            whole[:, :, positions] = part

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(one, range(size)))
    return found


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_equals_one_process_with_no_pair_in_vain(size: int, with_documents: bool, work: dict[int, list[int]]) -> None:
    length = 2 * size * PIECE
    documents = Documents.from_starts(STARTS, length) if with_documents else None
    generator = torch.Generator().manual_seed(size)
    heads = (HEADS, GROUPS, GROUPS, HEADS)
    q, k, v, grad = (torch.randn(BATCH, n, length, WIDTH, generator=generator) for n in heads)
    found = together(size, [q, k, v, grad], documents)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = causal_attention(*leaves, documents)
    out.backward(grad)
    for got, expected in zip(found, (out.detach(), *(x.grad for x in leaves)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)
    lengths = [length] * BATCH if documents is None else documents.lengths
    wanted = sum(n * (n + 1) // 2 for n in lengths)
    forward = sum(sum(steps[:size]) for steps in work.values())
    backward = sum(sum(steps[size:]) for steps in work.values())
    assert (forward, backward) == (wanted, wanted)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_rank_has_the_same_work_in_every_step(size: int, work: dict[int, list[int]]) -> None:
    length = 2 * size * PIECE
    together(size, [torch.randn(BATCH, 1, length, WIDTH) for _ in range(4)], None)
    own, others = BATCH * PIECE * (2 * PIECE + 1), BATCH * 2 * PIECE * PIECE
    each = [own] + [others] * (size - 1)
    assert dict(work) == {rank: each + each for rank in range(size)}
