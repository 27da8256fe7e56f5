"""router_topk on every backend: the choice and every gradient against the specification in fp64."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.optimus import ops
from megatron.optimus.ops import reference
from tests.ops.sycl_device import WORK_SIZES, needs_sycl
from tests.ops.targets import HAS_CUDA, SINGLE_TARGETS

SHAPES = [(0, 4, 2), (1, 4, 1), (37, 64, 8), (130, 72, 3), (5, 1, 1), (9, 6, 6), (300, 384, 8)]
OPTIONS = list(itertools.product([False, True], repeat=3))
each_target = pytest.mark.parametrize(("backend", "device"), SINGLE_TARGETS)


def routed(fn, leaf: torch.Tensor, topk: int, options: tuple[bool, bool, bool], device: str) -> list[torch.Tensor]:
    """Weights, indices, scores and the logits' gradient, on the cpu."""
    sigmoid, normalize, biased = options
    generator = torch.Generator().manual_seed(1)
    tokens, experts = leaf.shape
    bias = torch.randn(experts, generator=generator).to(device) if biased else None
    dweights = torch.randn(tokens, topk, generator=generator).to(device, leaf.dtype)
    dscores = torch.randn(tokens, experts, generator=generator).to(device, leaf.dtype)
    out = fn(leaf.requires_grad_(), topk, sigmoid=sigmoid, normalize=normalize, selection_bias_E=bias)
    (grad,) = torch.autograd.grad((out.weights_TK, out.scores_TE), leaf, (dweights, dscores))
    return [t.detach().cpu() for t in (*out, grad)]


def check_router(device: str, shape: tuple[int, int, int], options: tuple[bool, bool, bool]) -> None:
    tokens, experts, topk = shape
    logits = 3 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(2))
    got = routed(ops.router_topk, logits.to(device), topk, options, device)
    want = routed(reference.router_topk, logits.double(), topk, options, "cpu")
    assert [t.dtype for t in got] == [torch.float32, torch.int64, torch.float32, torch.float32]
    for value, right in zip(got, want, strict=True):
        torch.testing.assert_close(value, right.to(value.dtype), rtol=2e-5, atol=2e-6)
    again = routed(ops.router_topk, logits.to(device), topk, options, device)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@each_target
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(
    backend: str, device: str, shape: tuple[int, int, int], options: tuple[bool, bool, bool]
) -> None:
    ops.set_backend(backend)
    check_router(device, shape, options)


@each_target
@pytest.mark.parametrize("used", ["weights_TK", "scores_TE"])
def test_gradient_of_one_output_alone(backend: str, device: str, used: str) -> None:
    """The other's gradient, which nobody formed, counts as zero."""
    ops.set_backend(backend)
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(9, 6, generator=generator)
    dout = torch.randn(9, 2 if used == "weights_TK" else 6, generator=generator)

    def grad(fn, leaf: torch.Tensor) -> torch.Tensor:
        out = getattr(fn(leaf.requires_grad_(), 2, normalize=True), used)
        return torch.autograd.grad(out, leaf, dout.to(leaf.device, leaf.dtype))[0].cpu()

    got, want = grad(ops.router_topk, logits.to(device)), grad(reference.router_topk, logits.double())
    torch.testing.assert_close(got, want.float(), rtol=2e-5, atol=2e-6)


@needs_sycl
@pytest.mark.usefixtures("default_work_sizes")
@pytest.mark.parametrize("sizes", WORK_SIZES, ids=str)
def test_every_work_group_size_gives_the_same_choice(sizes: tuple[int, int, int]) -> None:
    from megatron.optimus.ops import sycl

    ops.set_backend("sycl")
    sycl.set_work_sizes(*sizes)
    for options in OPTIONS:
        check_router("cpu", (37, 64, 8), options)


@pytest.mark.parametrize(("backend", "device"), [target for target in SINGLE_TARGETS if target.id != "reference"])
def test_equal_and_missing_numbers_still_choose_different_experts(backend: str, device: str) -> None:
    """Of equal scores the lower expert; rows of NaN stay NaN and their indices stay in range."""
    ops.set_backend(backend)
    logits = torch.zeros(3, 6)
    logits[1, 2] = float("nan")
    logits[2] = torch.tensor([1.0, 2.0, 2.0, 1.0, 2.0, 0.0])
    routing = ops.router_topk(logits.to(device), 4)
    assert routing.indices_TK.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 4, 0]]
    assert routing.weights_TK[1].isnan().all() and not routing.weights_TK[[0, 2]].isnan().any()


LOGIT_DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="no GPU")]),
]


@pytest.mark.parametrize("device", LOGIT_DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [(0, 16, 4), (1, 8, 1), (130, 72, 20), (300, 200, 64), (90, 264, 36), (70, 136, 130)], ids=str
)
def test_logits_and_one_gradient_of_both_uses_of_x(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    """Logits and the weight's gradient as in fp32, whatever the inputs; x's gradient is a sum rounded once."""
    tokens, width, experts = shape
    generator = torch.Generator().manual_seed(3)
    x, weight, dx = (
        torch.randn(size, generator=generator).to(dtype)
        for size in ((tokens, width), (experts, width), (tokens, width))
    )
    dlogits = torch.randn(tokens, experts, generator=generator)
    leaves = [t.to(device).requires_grad_() for t in (x, weight)]
    logits, x_too = ops.router_logits(*leaves)
    got_dx, got_dweight = torch.autograd.grad((logits, x_too), leaves, (dlogits.to(device), dx.to(device)))
    assert logits.dtype == torch.float32 and torch.equal(x_too, leaves[0])
    assert got_dx.dtype == got_dweight.dtype == dtype

    def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> bool:
        return bool((got.detach().double().cpu() - want).norm() <= tolerance * want.norm())

    assert close(logits, x.double() @ weight.double().T, 1e-5)
    want_dx = dx.double() + dlogits.double() @ weight.double()
    want_dweight = dlogits.double().T @ x.double()
    if dtype == torch.float32:
        assert close(got_dx, want_dx, 1e-5) and close(got_dweight, want_dweight, 1e-5)
        return
    for got, want in ((got_dx, want_dx), (got_dweight, want_dweight)):  # all but ties of the last rounding
        assert (got.cpu() != want.to(dtype)).sum() <= want.numel() / 200
    (alone,) = torch.autograd.grad(ops.router_logits(*leaves)[0], leaves[0], dlogits.to(device))
    assert (alone.cpu() != (dlogits.double() @ weight.double()).to(dtype)).sum() <= alone.numel() / 200
    (through,) = torch.autograd.grad(ops.router_logits(*leaves)[1], leaves[0], dx.to(device))
    assert torch.equal(through.cpu(), dx)


def test_logits_of_wrong_shapes_raise() -> None:
    with pytest.raises(ValueError, match=r"router_logits: x torch.float32 \(3, 4\) and weight torch.float32 \(2, 5\)"):
        ops.router_logits(torch.zeros(3, 4), torch.zeros(2, 5))
    with pytest.raises(ValueError, match="x is on cpu but weight on meta"):
        ops.router_logits(torch.zeros(3, 4), torch.zeros(2, 4, device="meta"))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_reference_by_finite_differences(options: tuple[bool, bool, bool]) -> None:
    sigmoid, normalize, biased = options
    generator = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(size, generator=generator, dtype=torch.float64) for size in ((3, 4), (5, 4)))
    bias = torch.randn(5, generator=generator, dtype=torch.float64) if biased else None

    def outputs(*leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.nn.functional.linear(*leaves)  # router_logits would round to fp32
        routing = reference.router_topk(logits, 2, sigmoid=sigmoid, normalize=normalize, selection_bias_E=bias)
        return routing.weights_TK, routing.scores_TE

    assert torch.autograd.gradcheck(outputs, (x.requires_grad_(), weight.requires_grad_()))


def test_wrong_arguments_raise() -> None:
    logits = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"topk=5 of torch.float32 logits \(3, 4\)"):
        ops.router_topk(logits, 5)
    with pytest.raises(ValueError, match=r"topk=1 of torch\.int64 logits"):
        ops.router_topk(logits.long(), 1)
    with pytest.raises(ValueError, match=r"selection bias \(3,\) on cpu; expected \[4\]"):
        ops.router_topk(logits, 2, selection_bias_E=torch.zeros(3))


def test_a_router_set_to_a_backend_that_is_not_here_raises() -> None:
    ops.set_backend("triton")
    if torch.cuda.is_available():
        pytest.skip("triton is here")
    with pytest.raises(ops.BackendUnavailableError, match="backend 'triton' cannot route on cpu"):
        ops.router_topk(torch.zeros(3, 4), 2)
