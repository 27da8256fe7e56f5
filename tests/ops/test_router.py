"""route and expert_counts on every backend: the choice and every gradient against the specification in fp64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.optimus import ops
from megatron.optimus.ops import reference
from megatron.optimus.ops import router as router_module
from megatron.optimus.ops.backend import kernels, resolve_routing
from tests.ops.cases import CASES, make_inputs
from tests.ops.sycl_device import WORK_SIZES, needs_sycl
from tests.ops.targets import ROUTER_TARGETS

# Programs of the GPU kernel have 512 scores: of (22, 72, 3) five have four tokens, the last one two, and all 56 lanes
# too many.
SHAPES = [(0, 4, 2), (1, 4, 1), (37, 64, 8), (22, 72, 3), (5, 1, 1), (9, 6, 6), (300, 384, 8)]
OPTIONS = list(itertools.product([False, True], repeat=3))
each_target = pytest.mark.parametrize(("backend", "device"), ROUTER_TARGETS)


def choose(logits_TE: torch.Tensor, topk: int, **options) -> ops.Routing:
    """Routes tokens that are the logits, with the identity as the router's weight: exact, and so is the gradient."""
    routing, logits, _ = ops.route(logits_TE, torch.eye(logits_TE.shape[1]).to(logits_TE), topk, **options)
    assert torch.equal(logits, logits_TE)
    return routing


def choose_of_any(logits_TE: torch.Tensor, topk: int, **options) -> ops.Routing:
    """The same by the backend's kernel, for logits that are not finite: zero times such a number is NaN."""
    backend = resolve_routing(logits_TE.device)
    if backend == ops.Backend.REFERENCE:
        return reference.router_topk(logits_TE, topk, **options)
    bias = options.pop("selection_bias_E", None)
    options = {"sigmoid": False, "normalize": False, **options}
    return ops.Routing(*kernels(backend).router_topk(logits_TE, topk, *options.values(), bias))


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
    got = routed(choose, logits.to(device), topk, options, device)
    want = routed(reference.router_topk, logits.double(), topk, options, "cpu")
    assert [t.dtype for t in got] == [torch.float32, torch.int64, torch.float32, torch.float32]
    for value, right in zip(got, want, strict=True):
        torch.testing.assert_close(value, right.to(value.dtype), rtol=2e-5, atol=2e-6)
    again = routed(choose, logits.to(device), topk, options, device)
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

    got, want = grad(choose, logits.to(device)), grad(reference.router_topk, logits.double())
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


@each_target
def test_equal_and_missing_numbers_still_choose_different_experts(backend: str, device: str) -> None:
    """Of equal scores the lower expert; rows of NaN stay NaN and their indices stay in range."""
    ops.set_backend(backend)
    logits = torch.zeros(3, 6)
    logits[1, 2] = float("nan")
    logits[2] = torch.tensor([1.0, 2.0, 2.0, 1.0, 2.0, 0.0])
    routing = choose_of_any(logits.to(device), 4)
    assert routing.indices_TK.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 4, 0]]
    assert routing.weights_TK[1].isnan().all() and not routing.weights_TK[[0, 2]].isnan().any()
    assert choose_of_any(torch.zeros(1, 64, device=device), 8).indices_TK.tolist() == [list(range(8))]


@each_target
@pytest.mark.parametrize("normalize", [False, True])
def test_nan_is_chosen_first_and_reaches_the_weights(backend: str, device: str, normalize: bool) -> None:
    """With any sign; of several the lower expert. NaN in the bias is chosen likewise, the weight is its score."""
    ops.set_backend(backend)
    nan = torch.tensor([0x7FC00000, -0x400000], dtype=torch.int32).view(torch.float32)
    assert nan.isnan().all() and nan.signbit().tolist() == [False, True]
    rows = [
        [9.0, 8.0, nan[0], 7.0, nan[1], 100.0],
        [1.0, nan[1], 2.0, 0.0, 2.0, 0.0],
        [1.0, 2.0, 3.0, nan[0], 0.0, 0.0],
    ]
    logits, options = torch.tensor(rows, device=device), {"sigmoid": True, "normalize": normalize}
    routing = choose_of_any(logits, 3, **options)
    assert routing.indices_TK.tolist() == [[2, 4, 5], [1, 2, 4], [3, 2, 1]]
    is_nan = [[True, True, normalize], [True, normalize, normalize], [True, normalize, normalize]]
    assert routing.weights_TK.isnan().tolist() == is_nan
    for sign in nan:
        bias = torch.tensor([float("inf"), 0.0, 0.0, sign, 0.0, sign], device=device)
        routing = choose_of_any(torch.zeros(1, 6, device=device), 3, selection_bias_E=bias, **options)
        assert routing.indices_TK.tolist() == [[3, 5, 0]]
        torch.testing.assert_close(routing.weights_TK.cpu(), torch.full((1, 3), 1 / 3 if normalize else 0.5))


UNDERFLOWN = torch.tensor([6 * [-200.0], [-200.0, -50.0, -200.0, -45.0, -200.0, -200.0], 3 * [-50.0, -200.0]])


@each_target
@pytest.mark.parametrize("biased", [False, True])
def test_scores_that_underflow_give_small_weights_and_finite_gradients(backend: str, device: str, biased: bool) -> None:
    """Where the sum of a token's scores is below the floor, the floor is what they are divided by, a constant."""
    ops.set_backend(backend)
    options = (True, True, biased)
    got = routed(choose, UNDERFLOWN.to(device), 3, options, device)
    want = routed(reference.router_topk, UNDERFLOWN.double(), 3, options, "cpu")
    for value, right in zip(got, want, strict=True):
        torch.testing.assert_close(value, right.to(value.dtype), rtol=2e-5, atol=2e-6)
    assert got[0][0].max() < 1e-15 and got[3][0].abs().max() < 1e-15


LINEAR_SHAPES = [(0, 16, 4, 2), (1, 8, 1, 1), (130, 72, 20, 3), (300, 200, 64, 8), (90, 264, 36, 8), (150, 136, 96, 5)]


def linear_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Tokens, weight, and gradients of the weights, the scores, the logits and the tokens handed on."""
    tokens, width, experts, topk = shape
    generator = torch.Generator().manual_seed(3)
    both = [torch.randn(n, width, generator=generator).to(dtype) for n in (tokens, experts)]
    grads = [torch.randn(tokens, n, generator=generator) for n in (topk, experts, experts)]
    return [*both, *grads, torch.randn(tokens, width, generator=generator).to(dtype)]


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> bool:
    return bool((got.detach().double().cpu() - want).norm() <= tolerance * want.norm())


@each_target
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [*LINEAR_SHAPES, (70, 136, 130, 4)], ids=str)
@pytest.mark.parametrize("options", [(False, True, False), (True, False, True)], ids=["softmax", "sigmoid"])
def test_a_linear_router(
    backend: str, device: str, options: tuple[bool, bool, bool], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Choice, scores and logits as in fp64, whatever the inputs; gradients of all that came of x, each rounded once."""
    ops.set_backend(backend)
    x, weight, *grads = linear_inputs(shape, dtype)
    sigmoid, normalize, biased = options
    bias = torch.linspace(-1, 1, shape[2]) if biased else None

    def routed(fn, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.to(device, dtype).requires_grad_() for t in (x, weight)]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        shift = None if bias is None else bias.to(device, wide)
        routing, logits, x_out = fn(*leaves, shape[3], sigmoid=sigmoid, normalize=normalize, selection_bias_E=shift)
        douts = [g.to(device, wide) for g in grads[:3]] + [grads[3].to(device, dtype)]
        found = torch.autograd.grad((routing.weights_TK, routing.scores_TE, logits, x_out), leaves, douts)
        assert torch.equal(x_out, leaves[0])
        return [t.detach().cpu() for t in (*routing, logits, *found)]

    got, want = routed(ops.route, device, dtype), routed(reference.route, "cpu", torch.float64)
    assert [t.dtype for t in got] == [torch.float32, torch.int64, torch.float32, torch.float32, dtype, dtype]
    assert torch.equal(got[1], want[1])
    assert all(close(got[i], want[i], 1e-5) for i in (0, 2, 3))
    for value, right in zip(got[4:], want[4:], strict=True):
        if dtype == torch.float32:
            assert close(value, right, 1e-5)
        else:  # all but ties of the last rounding
            assert (value != right.to(dtype)).sum() <= right.numel() / 200
    again = routed(ops.route, device, dtype)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@each_target
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_some_of_a_linear_routers_results(backend: str, device: str, dtype: torch.dtype) -> None:
    """What no loss used counts as zero, and costs nothing where it is everything."""
    ops.set_backend(backend)
    x, weight, dweights, _, dlogits, dx = (t.to(device) for t in linear_inputs(LINEAR_SHAPES[2], dtype))
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    routing, logits, x_out = ops.route(*leaves, 3)
    (through,) = torch.autograd.grad(x_out, leaves[:1], dx, retain_graph=True)
    assert torch.equal(through, dx)
    (of_logits,) = torch.autograd.grad(logits, leaves[:1], dlogits, retain_graph=True)
    want = dlogits.double() @ weight.detach().double()
    assert close(of_logits, want.cpu(), 1e-5 if dtype == torch.float32 else 3e-3)
    alone = torch.autograd.grad(routing.weights_TK, leaves, dweights, retain_graph=True)
    nothing = [torch.zeros_like(t) for t in (logits, x_out)]
    whole = torch.autograd.grad((routing.weights_TK, logits, x_out), leaves, (dweights, *nothing))
    assert all(torch.equal(a, b) for a, b in zip(alone, whole, strict=True))


@each_target
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_no_bit_of_a_linear_router(backend: str, device: str, dtype: torch.dtype) -> None:
    """Neither forward nor backward, which runs under autocast here, too."""
    ops.set_backend(backend)
    x, weight, *grads = (t.to(device) for t in linear_inputs(LINEAR_SHAPES[2], dtype))
    leaves = [x.requires_grad_(), weight.requires_grad_()]

    def routed(is_on: bool) -> list[torch.Tensor]:
        with torch.autocast(device, torch.bfloat16, enabled=is_on):
            routing, logits, x_out = ops.route(*leaves, 3, sigmoid=True, normalize=True)
            found = torch.autograd.grad((routing.weights_TK, routing.scores_TE, logits, x_out), leaves, grads)
        assert routing.weights_TK.dtype == routing.scores_TE.dtype == logits.dtype == torch.float32
        return [*routing, logits, *found]

    assert all(torch.equal(a, b) for a, b in zip(routed(False), routed(True), strict=True))


def test_a_linear_router_of_wrong_arguments_raises() -> None:
    with pytest.raises(ValueError, match=r"route: x torch.float32 \(3, 4\) and weight torch.float32 \(2, 5\)"):
        ops.route(torch.zeros(3, 4), torch.zeros(2, 5), 1)
    with pytest.raises(ValueError, match="x is on cpu but weight on meta"):
        ops.route(torch.zeros(3, 4), torch.zeros(2, 4, device="meta"), 1)
    with pytest.raises(ValueError, match="route: topk=3 of 2 experts; expected 1 <= K <= E"):
        ops.route(torch.zeros(3, 4), torch.zeros(2, 4), 3)
    with pytest.raises(ValueError, match=r"route: selection bias \(3,\) on cpu; expected \[2\] on cpu"):
        ops.route(torch.zeros(3, 4), torch.zeros(2, 4), 1, selection_bias_E=torch.zeros(3))


def test_a_router_set_to_a_backend_that_is_not_here_raises() -> None:
    ops.set_backend("triton")
    if torch.cuda.is_available():
        pytest.skip("triton is here")
    with pytest.raises(ops.BackendUnavailableError, match="backend 'triton' cannot route on cpu"):
        choose(torch.zeros(3, 4), 2)


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("name", CASES)
@each_target
def test_expert_counts(backend: str, device: str, name: str, index_dtype: torch.dtype) -> None:
    indices = make_inputs(CASES[name], torch.float32)[4].to(index_dtype)
    ops.set_backend(backend)
    counts = ops.expert_counts(indices.to(device), CASES[name].experts)
    assert counts.dtype == torch.int64 and counts.device.type == device
    assert counts.tolist() == [int((indices == e).sum()) for e in range(CASES[name].experts)]


@each_target
def test_counts_of_what_are_no_indices_are_refused(backend: str, device: str) -> None:
    ops.set_backend(backend)
    indices = torch.zeros(12, 2, dtype=torch.int64, device=device)
    for message, call in (
        ("indices torch.float32", lambda: ops.expert_counts(indices.float(), 3)),
        (r"indices torch.int64 \(24,\)", lambda: ops.expert_counts(indices.reshape(-1), 3)),
        (r"indices \(12, 0\); expected K >= 1", lambda: ops.expert_counts(indices[:, :0], 3)),
        ("num_experts=0", lambda: ops.expert_counts(indices, 0)),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("index", [6, -2])
@pytest.mark.parametrize("backend", ["reference", "cpu", pytest.param("sycl", marks=needs_sycl)])
def test_counts_of_an_index_out_of_range_raise(backend: str, index: int) -> None:
    ops.set_backend(backend)
    indices = torch.zeros(5, 2, dtype=torch.int64)
    indices[3, 1] = index
    with pytest.raises(ValueError, match=rf"indices hold {index}; expected values in \[-1, 6\)"):
        ops.expert_counts(indices, 6)


class _Marked(Tensor):
    """A subclass that holds its numbers itself."""


def test_values_of_subclasses_are_checked_where_there_are_any() -> None:
    indices = torch.tensor([[0, 6]])
    ops.set_backend("reference")
    for real in (torch.nn.Parameter(indices, requires_grad=False), indices.as_subclass(_Marked)):
        with pytest.raises(ValueError, match=r"expert_counts: indices hold 6; expected values in \[-1, 6\)"):
            ops.expert_counts(real, 6)
    with FakeTensorMode() as mode:
        assert ops.expert_counts(mode.from_tensor(indices), 6).shape == (6,)

    def unread(row_K: Tensor) -> Tensor:
        router_module.check_values("unread", row_K.unsqueeze(0), 6)
        return row_K

    assert torch.equal(torch.vmap(unread)(indices), indices)


@pytest.mark.parametrize(("backend", "device"), [t for t in ROUTER_TARGETS if t.id != "reference"])
def test_opcheck(backend: str, device: str) -> None:
    """Schemas and shapes of the router's operations; their gradients are an autograd.Function around them."""
    ops.set_backend(backend)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    x, weight, *_ = (t.to(device) for t in linear_inputs(LINEAR_SHAPES[2], torch.float32))
    _, _, experts, topk = LINEAR_SHAPES[2]
    bias = torch.zeros(experts, device=device)
    routing, logits, _ = ops.route(x, weight, topk, sigmoid=True, normalize=True)
    options = (routing.scores_TE, routing.indices_TK, routing.weights_TK, routing.scores_TE, logits, True, True)
    calls = {
        "route": (x, weight, topk, True, True, bias),
        "route_backward": (x, weight, torch.ones_like(x), *options),
        "expert_counts": (routing.indices_TK, experts),
    }
    registered = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    elsewhere = ("moe_mlp", "cpu_", "cuda_", "sycl_")  # the layer's own, and what these call
    assert {name for kind, _, name in registered if kind == "optimus" and not name.startswith(elsewhere)} == set(calls)
    for name, arguments in calls.items():
        torch.library.opcheck(getattr(torch.ops.optimus, name).default, arguments, test_utils=checks)


def test_the_router_runs_on_meta_tensors() -> None:
    routing, *_ = ops.route(torch.empty(5, 8, device="meta"), torch.empty(4, 8, device="meta"), 2)
    assert routing.indices_TK.shape == (5, 2) and ops.expert_counts(routing.indices_TK, 4).shape == (4,)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_router_compiles_as_one_graph(backend: str) -> None:
    torch.compiler.reset()  # a compiled function keeps its backend
    ops.set_backend(backend)
    leaves = [t.requires_grad_() for t in linear_inputs((12, 16, 3, 2), torch.float32)[:2]]

    def routed(x: Tensor, router: Tensor) -> Tensor:
        routing, logits, x = ops.route(x, router, 2, normalize=True)
        return routing.weights_TK.square().sum() + logits.square().sum() + x.square().sum()

    for is_on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            grads = [
                torch.autograd.grad(run(*leaves), leaves)
                for run in (torch.compile(routed, backend="aot_eager", fullgraph=True), routed)
            ]
        assert all(torch.equal(got, want) for got, want in zip(*grads, strict=True))
