"""The CUDA expert layer with tokens in the memory of several GPUs: the bits of the layer with all tokens here.

The other GPUs' memory is this one's: addresses are all that the kernels know of it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.targets import needs_hopper

pytestmark = [needs_hopper, pytest.mark.gpu]

# ranks, tokens of each, width, inner width, experts here, experts of a token, choices that are served here
CASES = {
    "one token": (2, 1, 64, 32, 2, 1, 1.0),
    "odd sizes": (3, 37, 136, 72, 5, 3, 0.5),
    "chunks that ranks share": (2, 6, 64, 64, 3, 8, 0.3),
    "more choices than lanes": (2, 9, 64, 64, 40, 34, 0.5),
    "as in training": (4, 512, 2048, 1024, 24, 8, 0.25),
    "nobody comes": (3, 40, 64, 64, 4, 2, 0.0),
}


class Memory:
    """What ``RowsAtPeers`` asks of a transport, with every rank's memory at hand."""

    def __init__(self, rank: int, x: list[Tensor], answers: list[Tensor]) -> None:
        self.rank, self.staged, self.answers, self.told = rank, x, answers, []  # type: ignore[var-annotated]

    def source(self, rows: Tensor) -> Tensor:
        return _addresses(self.staged)

    def fetch(self, rows: Tensor) -> None:
        raise AssertionError("rows were not read where they are")

    def target(self) -> Tensor:
        return _addresses(self.answers)

    def sent(self, y: Tensor) -> None:
        self.told.append(y)


def _addresses(tensors: list[Tensor]) -> Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_tokens_at_peers_give_the_bits_of_tokens_here(name: str, dtype: torch.dtype) -> None:
    from megatron.optimus.ops import cuda

    ranks, tokens, width, inner, experts, topk, share = CASES[name]
    torch.manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device="cuda") * scale).to(dtype)

    def unwritten(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan, device="cuda", dtype=dtype)

    gate_up, down = random(experts, 2 * inner, width, scale=0.1), random(experts, width, inner, scale=0.1)
    weights = torch.rand(ranks * tokens, topk, device="cuda")
    indices = torch.rand(ranks * tokens, experts, device="cuda").topk(topk).indices if topk <= experts else None
    if indices is None:  # a token may name an expert twice, as far as the kernels are concerned
        indices = torch.randint(experts, (ranks * tokens, topk), device="cuda")
    indices = torch.where(torch.rand_like(weights) < share, indices, -1).int()
    needed = (indices >= 0).any(1)
    x, dy = random(ranks * tokens, width), random(ranks * tokens, width)
    plain: list[Any] = [x, gate_up, down, weights, indices]
    y, saved = cuda.moe_mlp_forward(*plain)
    dx, ddown, dweights, pending = cuda.moe_mlp_backward_inputs(dy, plain, saved, None)
    dgate_up = cuda.moe_mlp_backward_up_weights(plain, saved, pending, None)
    for rank in range(ranks):
        answers = [unwritten(tokens, width) for _ in range(ranks)]
        memory = Memory(rank, [part.clone() for part in x.chunk(ranks)], answers)
        arguments = [unwritten(ranks * tokens, width), *plain[1:]]
        own_y, own_saved = cuda.moe_mlp_among_peers(arguments, memory)
        assert memory.told[0] is own_y
        assert torch.equal(arguments[0][needed], x[needed]) and arguments[0][~needed].isnan().all()
        for peer, (answer, whole) in enumerate(zip(answers, y.chunk(ranks), strict=True)):
            served = needed.chunk(ranks)[peer]
            if peer == rank:
                assert answer.isnan().all() and torch.equal(own_y.chunk(ranks)[peer], whole)
            else:
                assert torch.equal(answer[served], whole[served]) and answer[~served].isnan().all()
        there = _addresses([part.clone() for part in dy.chunk(ranks)]), rank
        nothing = unwritten(ranks * tokens, width)
        own_dx, own_ddown, own_dweights, own_pending = cuda.moe_mlp_backward_inputs(
            nothing, arguments, own_saved, None, there
        )
        own_dgate_up = cuda.moe_mlp_backward_up_weights(arguments, own_saved, own_pending, None)
        assert own_ddown is not None and ddown is not None and own_dgate_up is not None and dgate_up is not None
        assert torch.equal(own_dx[needed], dx[needed]) and torch.equal(own_dweights, dweights)
        assert torch.equal(own_ddown, ddown) and torch.equal(own_dgate_up, dgate_up)


def test_addresses_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(6, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.zeros(2, 64, 64, device="cuda", dtype=torch.bfloat16)
    choices = torch.zeros(6, 1, device="cuda"), torch.zeros(6, 1, device="cuda", dtype=torch.int32)
    run = torch.ops.optimus.cuda_moe_mlp_among_peers
    for places in (4, 0):  # 6 tokens are not as many on each of four ranks
        at = torch.zeros(places, dtype=torch.int64, device="cuda")
        with pytest.raises(ValueError, match="as many tokens on each"):
            run(x, weight, weight[:, :, :32].contiguous(), *choices, at, at, 0)
