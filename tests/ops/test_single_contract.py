"""What the single operations promise beside values: schemas, shapes on fake tensors, refusals, nothing of the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.optimus import ops
from tests.ops.cases import Case, make_inputs, values_and_gradients
from tests.ops.sycl_device import needs_sycl
from tests.ops.targets import HAS_CUDA, ON_GPU, SINGLE_TARGETS, needs_hopper
from tests.ops.test_single import composed

each_target = pytest.mark.parametrize(("backend", "device"), SINGLE_TARGETS)
fast_targets = pytest.mark.parametrize(("backend", "device"), [p for p in SINGLE_TARGETS if p.id != "reference"])
CASE = Case(12, 16, 8, 3, 2)
# All of opcheck but its comparison of compiled with eager results, which rows that hold nothing would fail.
# The layer's own have their opcheck in test_moe_mlp.py, "cpu_..." and the like are what the operations here call.
ELSEWHERE = ("moe_mlp", "cpu_", "cuda_", "sycl_")
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@needs_hopper
@pytest.mark.gpu
def test_all_but_the_layer_of_the_cuda_backend_is_tritons() -> None:
    """So these operations are tested once on a GPU, as Triton's (SINGLE_TARGETS)."""
    from megatron.optimus.ops import cuda
    from megatron.optimus.ops.triton import single

    halves = {"moe_mlp_backward_inputs", "moe_mlp_backward_up_weights"}
    own = {"moe_mlp", "moe_mlp_forward", "moe_mlp_backward"} | halves
    assert own < set(cuda.__all__)
    for name in set(cuda.__all__) - own:
        assert getattr(cuda, name) is getattr(single, name), name


def typed_inputs(backend: str, device: str) -> list[Tensor]:
    dtype = torch.float16 if backend in ON_GPU else torch.float32
    return [t.to(device) for t in make_inputs(CASE, dtype)]


def tensors(order: ops.RowOrder) -> list[Tensor]:
    return order.tensors()


@fast_targets
def test_opcheck(backend: str, device: str) -> None:
    ops.set_backend(backend)
    x, gate_up, down, weights, indices, _ = typed_inputs(backend, device)
    order = ops.sort_slots(indices, CASE.experts, x.dtype)
    parts, rows = tensors(order), ops.gather_rows(x, order)
    hidden = ops.grouped_linear(rows, gate_up, order)
    narrow = ops.swiglu(hidden, order)
    main_grad = torch.zeros(gate_up.shape, device=device)
    logits = torch.randn(CASE.tokens, CASE.experts, device=device)
    router = torch.randn(CASE.experts, CASE.width, device=device).to(x.dtype)
    routing = ops.router_topk(logits, 2)
    calls = {
        "route": (x, router, 2, True, True, torch.zeros(CASE.experts, device=device)),
        "route_backward": (x, router, x, routing.scores_TE, routing.indices_TK, weights, logits, logits, True, True),
        "sort_slots": (indices, CASE.experts, x.dtype),
        "expert_counts": (indices, CASE.experts),
        "router_topk": (logits, 2, False, True, torch.zeros(CASE.experts, device=device)),
        "router_topk_backward": (routing.scores_TE, routing.indices_TK, weights, logits, True, True),
        "gather_rows": (x, parts),
        "combine": (rows, weights, parts, CASE.tokens),
        "combine_backward": (x, rows, weights, parts),
        "swiglu": (hidden, parts),
        "swiglu_backward": (narrow, hidden, parts),
        "grouped_linear": (narrow, down, None, parts),
        "grouped_linear_swiglu": (rows, gate_up, None, parts),
        "grouped_input_gradient": (hidden, gate_up, parts),
        "grouped_weight_gradient": (hidden, rows, parts),
        "put_grouped_weight_gradient_": (main_grad, hidden, rows, parts, True),
    }
    registered = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    assert {name for kind, _, name in registered if kind == "optimus" and not name.startswith(ELSEWHERE)} == set(calls)
    without_gradient = ("sort_slots", "expert_counts", "route")  # or an autograd.Function around it
    for name, arguments in calls.items():
        wants_gradient = not name.endswith(("_backward", "gradient", "gradient_")) and name not in without_gradient
        ready = [
            a.detach().requires_grad_(wants_gradient) if isinstance(a, Tensor) and a.is_floating_point() else a
            for a in arguments
        ]
        torch.library.opcheck(getattr(torch.ops.optimus, name).default, tuple(ready), test_utils=CHECKS)


def test_everything_runs_on_meta_tensors() -> None:
    inputs = [t.to("meta") for t in make_inputs(CASE, torch.bfloat16)]
    got = values_and_gradients(composed, inputs)
    assert [got[n].shape for n in ("y", "dx", "dgate_up", "ddown", "dweights")] == [
        inputs[i].shape for i in (0, 0, 1, 2, 3)
    ]
    routing = ops.router_topk(torch.empty(5, 4, device="meta"), 2)
    assert routing.indices_TK.shape == (5, 2) and ops.expert_counts(routing.indices_TK, 4).shape == (4,)


@each_target
def test_what_does_not_fit_is_refused_before_anything_runs(backend: str, device: str) -> None:
    ops.set_backend(backend)
    x, gate_up, down, weights, indices, _ = typed_inputs(backend, device)
    order = ops.sort_slots(indices, CASE.experts, x.dtype)
    rows = ops.gather_rows(x, order)
    main_grad = torch.zeros(gate_up.shape, device=device)
    refused = [
        (r"x \(11, 16\); expected \[12, D\]", lambda: ops.gather_rows(x[1:], order)),
        (r"x \(8, 16\); expected \[12, D\]", lambda: ops.gather_rows(x[:8], order)),  # 24 slots, but of 12 tokens
        ("rows are torch.int32; expected a floating dtype", lambda: ops.gather_rows(x.int(), order)),
        ("rows are torch.float8.*16 bits or more", lambda: ops.gather_rows(x.to(torch.float8_e5m2), order)),
        (r"weights \(11, 2\); expected \[T, K\] = \(12, 2\)", lambda: ops.combine(rows, order, weights[1:])),
        (r"weights \(8, 3\); expected \[T, K\] = \(12, 2\)", lambda: ops.combine(rows, order, weights.view(8, 3))),
        ("weights torch.float16; expected float32", lambda: ops.combine(rows, order, weights.half())),
        ("rows .*; expected .* as the order's", lambda: ops.combine(rows[1:], order, weights)),
        (r"hidden \(.*, 15\); expected \[P, 2F\]", lambda: ops.swiglu(rows[:, 1:], order)),
        ("of 3 experts do not fit", lambda: ops.grouped_linear(rows, gate_up[1:], order)),
        ("do not fit: expected one dtype", lambda: ops.grouped_linear(rows, gate_up.double(), order)),
        ("do not fit: expected one dtype and a common", lambda: ops.grouped_linear(rows, down, order)),
        (r"gate_up .*; expected \[E, 2F, D\]", lambda: ops.grouped_linear_swiglu(rows, gate_up[:, 1:], order)),
        ("do not fit", lambda: ops.grouped_input_gradient(rows, gate_up.transpose(1, 2)[:, 1:], order)),
        ("of one dtype", lambda: ops.grouped_weight_gradient(rows.double(), rows, order)),
        (r"x \(.*\) on .* beside", lambda: ops.grouped_weight_gradient(rows, rows[1:], order)),
        ("main_grad .* expected contiguous", lambda: ops.grouped_linear(rows, gate_up, order, main_grad[1:])),
        (
            "main_grad .* with strides .* expected contiguous",
            lambda: ops.grouped_linear(rows, gate_up, order, main_grad.transpose(1, 2).contiguous().transpose(1, 2)),
        ),
        (
            "main_grad torch.float64 .* expected contiguous",
            lambda: ops.grouped_linear_swiglu(rows, gate_up, order, main_grad.double()),
        ),
        (
            "main_grad requires a gradient itself",
            lambda: ops.grouped_linear(rows, gate_up, order, main_grad.requires_grad_()),
        ),
        ("an order's tensors are int32", lambda: ops.gather_rows(x, order._replace(slots_P=order.slots_P.long()))),
        ("made for another backend", lambda: ops.gather_rows(x, order._replace(plan=[*order.plan, order.counts_E]))),
        ("made for another backend", lambda: ops.gather_rows(x, order._replace(counts_E=order.counts_E[1:]))),
        (r"rows \(.*, 0\); expected a width", lambda: ops.gather_rows(x[:, :0], order)),
        ("none of them 0", lambda: ops.grouped_input_gradient(rows[:, :0], gate_up[:, :0], order)),
        ("none of them 0", lambda: ops.grouped_linear(rows, gate_up[:, :0], order)),
        ("indices torch.float32", lambda: ops.sort_slots(weights, 3, x.dtype)),
        (r"indices torch.int64 \(24,\)", lambda: ops.expert_counts(indices.reshape(-1), 3)),
        ("num_experts=0", lambda: ops.expert_counts(indices, 0)),
    ]
    for message, call in refused:
        with pytest.raises(ValueError, match=message):
            call()
    if device != "cpu":
        with pytest.raises(ValueError, match="other arguments are on"):
            ops.gather_rows(x.cpu(), order)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("sycl", marks=needs_sycl)])
def test_an_order_that_points_outside_is_refused_on_the_cpu(backend: str) -> None:
    ops.set_backend(backend)
    x, _, _, weights, indices, _ = typed_inputs(backend, "cpu")
    order = ops.sort_slots(indices, CASE.experts, x.dtype)
    rows = ops.gather_rows(x, order)
    falling = order.plan[0].clone()
    falling[1] = 24
    broken = [
        ("slots hold 25; expected", lambda: ops.gather_rows(x, order._replace(slots_P=order.slots_P * 0 + 25))),
        ("rows hold 24; expected", lambda: ops.combine(rows, order._replace(rows_TK=order.rows_TK * 0 + 24), weights)),
        ("offsets fall from 24", lambda: ops.swiglu(rows, order._replace(plan=[falling]))),
        ("offsets run from", lambda: ops.gather_rows(x, order._replace(plan=[order.plan[0] + 1]))),
    ]
    for message, call in broken:
        with pytest.raises(ValueError, match=message):
            call()


@each_target
def test_a_dropped_row_or_a_zeroed_weight_changes_the_result(backend: str, device: str) -> None:
    """Of the order itself, so that each operation is seen to use it."""
    ops.set_backend(backend)
    x, _, _, weights, indices, _ = typed_inputs(backend, device)
    order = ops.sort_slots(indices, CASE.experts, x.dtype)
    rows = ops.gather_rows(x, order)
    right = ops.combine(rows, order, weights)
    dropped = order._replace(rows_TK=order.rows_TK.clone())
    dropped.rows_N[5] = -1
    zeroed = weights.clone()
    zeroed[2, 1] = 0.0
    for wrong in (ops.combine(rows, dropped, weights), ops.combine(rows, order, zeroed)):
        assert (wrong != right).any(-1).nonzero().flatten().tolist() == [2]
        assert (wrong - right).norm() / right.norm() > 1e-2
    want = x.float() * weights.sum(1, keepdim=True)  # every row of a token is the token itself
    assert torch.allclose(right.float(), want, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
def test_the_host_is_not_needed_on_a_gpu() -> None:
    """A layer composed of single operations, forward and backward, is captured in a CUDA graph and replayed."""
    case = Case(257, 64, 48, 8, 2)
    inputs = [t.cuda() for t in make_inputs(case, torch.bfloat16)]
    values_and_gradients(composed, inputs)
    leaves = [t.requires_grad_() for t in inputs[:4]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = composed(*leaves, inputs[4])
        grads = torch.autograd.grad(y, leaves, inputs[5])
    fresh = [t.cuda() for t in make_inputs(case, torch.bfloat16, seed=9)]
    for old, new in zip(inputs, fresh, strict=True):
        old.data.copy_(new)
    graph.replay()
    want = values_and_gradients(composed, fresh)
    assert all(torch.equal(got, right) for got, right in zip((y, *grads), want.values(), strict=True))


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_layer_compiles_as_one_graph(backend: str) -> None:
    torch.compiler.reset()  # a compiled function keeps its backend
    ops.set_backend(backend)
    inputs = make_inputs(CASE, torch.float32)
    for layer in (composed, ops.moe_mlp):
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        got, want = values_and_gradients(compiled, inputs), values_and_gradients(layer, inputs)
        assert all(torch.equal(got[name], want[name]) for name in want)
    leaves = [inputs[0].requires_grad_(), inputs[2][:, :, 0].clone().requires_grad_()]

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
