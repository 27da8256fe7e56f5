"""Kernels between GPUs, and the token dispatcher made of them, with all ranks in one process: memory is a tensor.

Under Triton's interpreter, or the kernels alone on one GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.optimus import ops
from megatron.optimus.config.schema import ExpertPlacement, LoadBalancing, ModelConfig
from megatron.optimus.moe.dispatch.ownership import Ownership
from megatron.optimus.moe.layer import MoE
from megatron.optimus.platform import device as devices
from tests.ops.targets import HAS_CUDA, INTERPRETED

pytestmark = [
    pytest.mark.skipif(not HAS_CUDA and not INTERPRETED, reason="neither CUDA nor Triton's interpreter"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
DEVICE = "cpu" if INTERPRETED else "cuda"
RANKS, EXPERTS, TOPK = 3, 6, 3


def addresses(tensors: Sequence[Tensor]) -> Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], device=DEVICE)


def choices(num_tokens: int, how: str, seed: int) -> Tensor:
    """[T, K] experts of one rank's tokens; rank r of 3 owns experts 2r and 2r + 1."""
    scores = torch.rand(num_tokens, EXPERTS, generator=torch.Generator().manual_seed(seed))
    if how == "all on rank 1":
        return torch.tensor([2, 3])[torch.arange(2)].expand(num_tokens, 2).contiguous().to(DEVICE)
    if how == "every rank":
        return torch.tensor([0, 2, 4]).expand(num_tokens, TOPK).contiguous().to(DEVICE)
    return scores.topk(TOPK).indices.to(DEVICE)


def filled_with_nan(compute: Callable[[], Any]) -> Any:
    """``compute`` where memory that nothing is written to holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        return compute()
    finally:
        torch.use_deterministic_algorithms(False)


CASES = {  # tokens of a rank, width, choices
    "one token": (1, 16, "random"),
    "odd sizes": (7, 24, "random"),
    "several tiles": (150, 130, "random"),
    "everybody needs all": (5, 16, "every rank"),
    "two ranks need nothing": (6, 16, "all on rank 1"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_rows_go_out_and_their_sums_come_back(name: str, dtype: torch.dtype) -> None:
    from megatron.optimus.ops.triton import symmetric_memory

    num_tokens, width, how = CASES[name]
    owner_E, local_E = Ownership.from_placement(EXPERTS, RANKS, ExpertPlacement.CONTIGUOUS).owner_and_local_id(
        torch.device(DEVICE)
    )
    torch.manual_seed(0)
    x = [torch.randn(num_tokens, width, device=DEVICE, dtype=dtype) for _ in range(RANKS)]
    indices = [choices(num_tokens, how, rank) for rank in range(RANKS)]
    weights = [torch.rand(index.shape, device=DEVICE) for index in indices]
    numbers = [index.int() for index in indices]
    outputs = [torch.full((RANKS - 1, num_tokens, width), torch.nan, device=DEVICE, dtype=dtype) for _ in x]
    dweights = [torch.full_like(weight, torch.nan) for weight in weights]
    own_outputs, products = [], torch.zeros((), dtype=torch.float64, device=DEVICE)
    owners = owner_E[torch.cat(indices)]
    for rank in range(RANKS):
        all_indices, all_weights, needed = symmetric_memory.read_choices(
            addresses(numbers), addresses(weights), owner_E, local_E, rank, *indices[0].shape
        )
        assert torch.equal(all_weights, torch.cat(weights))
        assert torch.equal(all_indices, torch.where(owners == rank, local_E[torch.cat(indices)], -1).int())
        assert torch.equal(needed.bool(), (owners == rank).any(1))
        rows = filled_with_nan(lambda: symmetric_memory.pull_rows(addresses(x), needed, rank, width, dtype))  # noqa: B023
        assert rows.dtype == dtype and torch.equal(rows[needed.bool()], torch.cat(x)[needed.bool()])
        assert rows[~needed.bool()].isnan().all()  # nothing else travels
        y = torch.randn(RANKS * num_tokens, width, device=DEVICE, dtype=dtype)
        products += (rows * y)[needed.bool()].double().sum()
        y[~needed.bool()] = torch.nan  # never read
        symmetric_memory.push_rows(y.nan_to_num(7.0), needed, addresses(outputs), rank)  # 7 arrives nowhere
        gradient = torch.where(all_indices >= 0, all_weights * (rank + 1), torch.nan)
        symmetric_memory.push_weight_gradients(gradient, all_indices, addresses(dweights), rank)
        own_outputs.append(y)
    back = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for rank in range(RANKS):
        total = symmetric_memory.sum_outputs(own_outputs[rank], outputs[rank], indices[rank], owner_E, rank, RANKS)
        mine = slice(rank * num_tokens, (rank + 1) * num_tokens)
        others = torch.tensor([place for place in range(RANKS) if place != rank], device=DEVICE)
        came = (owner_E[indices[rank]][None] == others[:, None, None]).any(2)
        assert outputs[rank][~came].isnan().all() and not outputs[rank][came].isnan().any()
        expected = torch.zeros(num_tokens, width, device=DEVICE)
        for place in range(RANKS):
            is_needed = (owner_E[indices[rank]] == place).any(1, keepdim=True)
            expected += torch.where(is_needed, own_outputs[place][mine].float(), 0.0)
        assert torch.equal(total, expected.to(dtype))
        assert torch.equal(dweights[rank], weights[rank] * (owner_E[indices[rank]] + 1))
        back += (total.double() * x[rank].double()).sum()
    # Out and back are each other's transpose: <out(x), y> = <x, back(y)>.
    scale = sum(part.double().norm() ** 2 for part in x).sqrt() * width**0.5
    torch.testing.assert_close(back / scale, products / scale, rtol=0, atol=1e-6 if dtype is torch.float32 else 5e-3)


class Turns:
    """Ranks as threads that run one at a time, in rank order, each until its next barrier: the first is always a whole
    exchange ahead of the last, as far as barriers let it."""

    def __init__(self, num_ranks: int) -> None:
        self.failed = False
        self.may_run = [threading.Semaphore(int(rank == 0)) for rank in range(num_ranks)]

    def barrier(self, rank: int) -> None:
        self.may_run[(rank + 1) % len(self.may_run)].release()
        assert self.may_run[rank].acquire(timeout=60), "another rank did not come to its barrier"
        assert not self.failed, "another rank failed"

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * len(self.may_run)

        def one(rank: int) -> None:
            assert self.may_run[rank].acquire(timeout=60)
            try:
                results[rank] = work(rank)
            except Exception as error:
                results[rank], self.failed = error, True
            self.may_run[(rank + 1) % len(self.may_run)].release()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results


def stagings(turns: Turns, num_ranks: int, shape: Any) -> list[Any]:
    from megatron.optimus.moe.dispatch.symmetric import SymmetricBuffer, buffer_regions

    memories = [
        torch.full((buffer_regions(shape, num_ranks)[1],), 0xFF, dtype=torch.uint8) for _ in range(num_ranks)
    ]  # NaN
    places = [memory.data_ptr() for memory in memories]
    return [
        SymmetricBuffer(memory, places, rank, shape, lambda rank=rank: turns.barrier(rank), memories=memories)
        for rank, memory in enumerate(memories)
    ]


def serial_layer(seed: int) -> MoE:
    config = ModelConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        vocab_size=32,
        num_experts=EXPERTS,
        moe_ffn_hidden_size=10,
        moe_router_topk=2,
        moe_router_load_balancing_type=LoadBalancing.NONE,
    )
    torch.manual_seed(seed)
    layer = MoE(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return layer


def own_layer(seed: int, rank: int, ownership: Ownership, staging: Any) -> MoE:
    from megatron.optimus.moe.dispatch.symmetric import SymmetricDispatcher

    class InOneProcess(SymmetricDispatcher):
        def __init__(self) -> None:
            self.ownership = ownership

        def reserve(self, shape: Any, device: torch.device) -> Any:
            assert shape == staging.shape
            return staging

    layer = serial_layer(seed)
    for name, weight in list(layer.experts.named_parameters()):
        setattr(layer.experts, name, torch.nn.Parameter(weight.detach()[list(ownership.expert_ids(rank))].clone()))
    layer.dispatcher = InOneProcess()
    return layer


def assert_same(got: Tensor, want: Tensor) -> None:
    """Equal to 1e-5 of the largest element: smaller ones are what is left of sums of such, in another order."""
    torch.testing.assert_close(got, want, rtol=0.0, atol=1e-5 * float(want.detach().abs().max()))


@pytest.mark.skipif(not INTERPRETED, reason="one thread of autograd serves all ranks on a GPU")
def test_layers_over_ranks_equal_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers, three micro-batches in flight, one of them never finished, backwards in the order of the forwards.
    Gradients are being combined when the last product of the experts begins."""
    from megatron.optimus.moe.dispatch.symmetric import BufferShape

    monkeypatch.setattr(devices, "overlaps_collectives", lambda device: False)  # as on CUDA: it is no collective
    ops.set_backend("reference")  # whose backward has two halves
    last_product, under_way, here = ops.reference.moe_mlp_backward_up_weights, [], threading.local()

    def watched(*args: Any) -> Any:
        under_way.append(memory[here.rank].pending is not None)
        return last_product(*args)

    monkeypatch.setattr(ops.reference, "moe_mlp_backward_up_weights", watched)
    turns, num_tokens = Turns(RANKS), 5
    ownership = Ownership.from_placement(EXPERTS, RANKS, ExpertPlacement.INTERLEAVED)
    memory = stagings(turns, RANKS, BufferShape(num_tokens, 16, 2, torch.float32))

    def tokens_of(rank: int, batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * rank + batch)
        return torch.randn(1, num_tokens, 16, generator=generator).requires_grad_()

    def through(layers: list[MoE], x: Tensor) -> Tensor:
        for layer in layers:
            x = x + layer(x)[0]
        return x

    def loss(y: Tensor) -> Tensor:
        return (y * torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)).sum()

    def work(rank: int) -> dict[str, Any]:
        here.rank = rank
        layers = [own_layer(seed, rank, ownership, memory[rank]) for seed in (1, 2)]
        with torch.no_grad():
            through(layers, tokens_of(rank, 0))
        inputs = [tokens_of(rank, batch) for batch in range(3)]
        outputs = [through(layers, x) for x in inputs]
        for y in outputs[:2]:
            loss(y).backward()
        return dict(y=outputs, x=inputs, layers=layers)

    results = filled_with_nan(lambda: turns.run(work))
    assert under_way == [True] * (RANKS * 2 * 2)
    layers = [serial_layer(seed) for seed in (1, 2)]
    for rank, result in enumerate(results):
        for batch in range(3):
            x = tokens_of(rank, batch)
            y = through(layers, x)
            assert_same(result["y"][batch], y)
            if batch < 2:
                loss(y).backward()
                assert_same(result["x"][batch].grad, x.grad)
    for number, layer in enumerate(layers):
        routers = [result["layers"][number].router.weight.grad for result in results]
        assert_same(sum(routers), layer.router.weight.grad)
        for rank, result in enumerate(results):
            for name, weight in result["layers"][number].experts.named_parameters():
                whole = getattr(layer.experts, name).grad[list(ownership.expert_ids(rank))]
                assert_same(weight.grad, whole)


@pytest.mark.skipif(not INTERPRETED, reason="one stream serves all ranks on a GPU")
@pytest.mark.parametrize(
    "exchanges",
    [("dispatch",) * 3, ("combine",) * 3, ("dispatch", "combine", "combine", "dispatch", "dispatch", "combine")],
)
def test_no_rank_writes_what_another_has_yet_to_read(exchanges: tuple[str, ...]) -> None:
    """Whatever the order of exchanges, with the first rank ahead of the others as far as it can get."""
    from megatron.optimus.moe.dispatch.symmetric import BufferShape, _SymmetricExchange

    turns, num_tokens = Turns(RANKS), 4
    memory = stagings(turns, RANKS, BufferShape(num_tokens, 16, 1, torch.float32))
    owner_E = torch.arange(RANKS)

    def work(rank: int) -> list[Tensor]:
        # Every token goes to the next rank.
        there = torch.full((num_tokens, 1), (rank + 1) % RANKS)
        row_owner = (torch.arange(RANKS).repeat_interleave(num_tokens) + 1) % RANKS
        indices_RK = torch.where(row_owner == rank, 0, -1)[:, None].int()
        exchange = _SymmetricExchange(memory[rank], there, owner_E, indices_RK, (indices_RK >= 0).any(1).to(torch.int8))
        found = []
        for number, kind in enumerate(exchanges):
            value = 10.0 * number + rank
            if kind == "dispatch":
                rows = exchange.dispatch(torch.full((num_tokens, 16), value))
                found.append(rows[row_owner == rank])
            else:
                sent = torch.full((RANKS * num_tokens, 16), value)
                if number % 2 == 0:
                    found.append(exchange.combine(sent))
                    continue
                rows, dweights = exchange.start_combine(sent, sent[:, :1])()
                assert torch.equal(dweights, rows[:, :1])
                found.append(rows)
        return found

    for rank, found in enumerate(turns.run(work)):
        for number, (kind, rows) in enumerate(zip(exchanges, found, strict=True)):
            peer = (rank - 1) % RANKS if kind == "dispatch" else (rank + 1) % RANKS
            assert torch.equal(rows, torch.full((num_tokens, 16), 10.0 * number + peer)), (rank, number, kind)


def test_rows_that_do_not_fit_are_not_sent() -> None:
    """A peer would be written to beyond its memory."""
    from megatron.optimus.moe.dispatch.symmetric import BufferShape, _SymmetricExchange

    staging = stagings(Turns(2), 2, BufferShape(4, 16, 1, torch.float16))[0]
    exchange = _SymmetricExchange(
        staging, torch.zeros(4, 1), torch.arange(2), torch.zeros(8, 1).int(), torch.ones(8).to(torch.int8)
    )
    for rows in (torch.zeros(8, 16), torch.zeros(8, 12).half(), torch.zeros(9, 16).half()):
        with pytest.raises(ValueError, match=r"expected torch.float16 \(8, 16\)"):
            exchange.combine(rows)
