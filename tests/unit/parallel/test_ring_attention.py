"""Ring attention's arithmetic and its work, with threads for ranks: equal to one process, balanced, nothing in vain."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.optimus.config.schema import ContextCommunication, ParallelConfig
from megatron.optimus.layers import partial_attention
from megatron.optimus.layers.attention import causal_attention
from megatron.optimus.layers.documents import Documents
from megatron.optimus.layers.partial_attention import Kernel
from megatron.optimus.parallel import ring_attention as ring
from megatron.optimus.parallel.context import own_positions
from megatron.optimus.platform.mesh import Mesh

BATCH, HEADS, GROUPS, WIDTH, PIECE = 3, 4, 2, 8, 4
# Documents that end beside and at the borders of pieces, ones that reach over several of them, and none.
STARTS = [[PIECE - 1, PIECE, PIECE + 1, 3 * PIECE], [2 * PIECE], []]
# None that reaches over two pieces: most steps have nothing to do.
SHORT = [list(range(0, 16 * PIECE, PIECE))] * BATCH


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
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, list[int]]]:
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

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, varying: bool) -> tuple[Tensor, Tensor]:
        count(q, k, causal)
        return attend(q, k, v, causal, varying)

    def backward(grad: Tensor, q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        count(q, k, rest[-2])
        return attend_backward(grad, q, k, *rest)

    ranks = SimpleNamespace(get_rank=lambda place: place.rank, get_world_size=lambda place: place.size)
    monkeypatch.setattr(ring, "dist", ranks)
    monkeypatch.setattr(ring, "start_ring_shift", lambda x, out, step, place: place.exchange(x, out, step))
    monkeypatch.setattr(ring, "spans", begin_step)
    monkeypatch.setattr(ring, "attend_part", forward)
    monkeypatch.setattr(ring, "attend_part_backward", backward)
    torch.use_deterministic_algorithms(True)  # what is not computed is NaN
    yield pairs
    torch.use_deterministic_algorithms(False)


def together(size: int, qkvg: list[Tensor], documents: Documents | None) -> list[Tensor]:
    """Output and gradients of q, k and v, each position's from the rank that has it."""
    config = ParallelConfig(context_parallel_size=size, cp_comm_type=ContextCommunication.P2P)
    wires, length = Wires(), qkvg[0].shape[2]
    found = [torch.full_like(x, torch.nan) for x in (qkvg[3], *qkvg[:3])]

    def one(rank: int) -> None:
        positions = own_positions(length, config, Mesh(config, rank=rank, world_size=size))
        assert positions is not None
        q, k, v, grad = (x[:, :, positions].contiguous() for x in qkvg)
        group: Any = Place(rank, size, wires)
        lse, cu_seqlens_host = q.new_empty(q.shape[:3], dtype=torch.float32), documents and documents.cu_seqlens_host
        kv = torch.stack((k, v))
        # Not through autograd: on a GPU one thread runs all backward passes, and ranks would wait for each other.
        out = ring._forward(q, kv, lse, group, cu_seqlens_host)
        dq, dkv = ring._backward(grad, q, kv, out, lse, group, cu_seqlens_host)
        for whole, part in zip(found, (out, dq, *dkv), strict=True):
            whole[:, :, positions] = part

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(one, range(size)))
    return found


@pytest.mark.parametrize(("size", "starts"), [(2, None), (4, None), (8, None), (2, STARTS), (8, STARTS), (4, SHORT)])
def test_equals_one_process_with_no_pair_in_vain(
    size: int, starts: list[list[int]] | None, work: dict[int, list[int]]
) -> None:
    length = 2 * size * PIECE
    documents = None
    if starts is not None:
        documents = Documents.from_starts([[start for start in row if start < length] for row in starts], length)
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("kernel", [Kernel.CUDNN, Kernel.FLASH])
def test_kernels_of_a_device(
    kernel: Kernel, with_documents: bool, work: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks on one GPU in bf16 against one process in fp32."""
    size, times = 4, 16
    length = 2 * size * PIECE * times
    starts = [[times * start for start in row] for row in STARTS]
    documents = Documents.from_starts(starts, length) if with_documents else None
    generator = torch.Generator().manual_seed(size)
    heads = (HEADS, GROUPS, GROUPS, HEADS)
    given = [torch.randn(BATCH, n, length, 64, generator=generator).bfloat16().cuda() for n in heads]
    monkeypatch.setattr(partial_attention, "choose_kernel", lambda *args: kernel)
    found = together(size, given, documents)
    leaves = [x.float().cpu().requires_grad_() for x in given[:3]]
    out = causal_attention(*leaves, documents)
    out.backward(given[3].float().cpu())
    for got, expected in zip(found, (out.detach(), *(x.grad for x in leaves)), strict=True):
        assert float((got.float().cpu() - expected).abs().max() / expected.abs().max()) < 1e-2


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_rank_has_the_same_work_in_every_step(size: int, work: dict[int, list[int]]) -> None:
    length = 2 * size * PIECE
    together(size, [torch.randn(BATCH, 1, length, WIDTH) for _ in range(4)], None)
    own, others = BATCH * PIECE * (2 * PIECE + 1), BATCH * 2 * PIECE * PIECE
    each = [own] + [others] * (size - 1)
    assert dict(work) == {rank: each + each for rank in range(size)}
