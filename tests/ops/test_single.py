"""The single operations on every backend: values and all gradients against the specification in fp64."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.optimus import ops
from megatron.optimus.ops import reference, routing
from tests.ops import targets
from tests.ops.cases import (
    CASES,
    MUTATIONS,
    NAMES,
    TOLERANCE,
    Case,
    case_with_answer,
    expected,
    make_inputs,
    mismatches,
    mutated,
    values_and_gradients,
)
from tests.ops.sycl_device import needs_sycl
from tests.ops.targets import ON_GPU, SINGLE_TARGETS

each_target = pytest.mark.parametrize(("backend", "device"), SINGLE_TARGETS)
each_target_and_dtype = targets.each_target_and_dtype(SINGLE_TARGETS, TOLERANCE)
each_case = pytest.mark.parametrize("name", CASES)


def rows_of(values_N: Tensor, order: ops.RowOrder) -> Tensor:
    """A buffer of rows as the order wants it, from one value per slot; zeros where no local slot is."""
    rows = values_N.new_zeros(order.slots_P.numel(), *values_N.shape[1:])
    local = order.rows_N >= 0
    rows[order.rows_N[local].long()] = values_N[local]
    return rows


def by_slot(rows: Tensor, order: ops.RowOrder) -> Tensor:
    """The other way round; zeros for foreign slots."""
    values = rows.new_zeros(order.rows_N.numel(), *rows.shape[1:])
    local = order.rows_N >= 0
    values[local] = rows[order.rows_N[local].long()]
    return values


@functools.cache
def random_by_slot(case: Case, width: int, seed: int) -> Tensor:
    return torch.randn(case.tokens * case.topk, width, generator=torch.Generator().manual_seed(seed))


# name: arguments by slot or whole, then the operation on them; "rows" arguments are laid out by the order of each side
def _gather(module, order, x):
    return module.gather_rows(x, order)


def _combine(module, order, rows, weights):
    return module.combine(rows, order, weights)


def _swiglu(module, order, hidden):
    return reference.swiglu(hidden) if module is reference else module.swiglu(hidden, order)


def _linear(module, order, rows, weight):
    return module.grouped_linear(rows, weight, order)


def _linear_swiglu(module, order, rows, weight):
    return module.grouped_linear_swiglu(rows, weight, order)


OPERATIONS: dict[str, tuple[Callable[..., Tensor], Callable[[Case, list[Tensor]], list[tuple[str, Tensor]]]]] = {
    "gather_rows": (_gather, lambda c, i: [("whole", i[0])]),
    "combine": (_combine, lambda c, i: [("rows", random_by_slot(c, c.width, 1)), ("fp32", i[3])]),
    "swiglu": (_swiglu, lambda c, i: [("rows", 2 * random_by_slot(c, 2 * c.inner, 2))]),
    "grouped_linear": (_linear, lambda c, i: [("rows", random_by_slot(c, c.inner, 3)), ("whole", i[2])]),
    "grouped_linear_swiglu": (_linear_swiglu, lambda c, i: [("rows", random_by_slot(c, c.width, 4)), ("whole", i[1])]),
}


def run(
    operation: str, module, order: ops.RowOrder, arguments: list[tuple[str, Tensor]], device: str, wide: bool
) -> list[Tensor]:
    """Value and gradients, each by slot where it has rows, on the cpu."""
    leaves = []
    for kind, value in arguments:
        laid_out = rows_of(value.to(device), order) if kind == "rows" else value.to(device)
        leaves.append((laid_out.double() if wide else laid_out).requires_grad_())
    out = OPERATIONS[operation][0](module, order, *leaves)
    g = torch.Generator().manual_seed(7)
    in_rows = operation != "combine"
    count = order.rows_N.numel() if in_rows else out.shape[0]
    grad = torch.randn(count, out.shape[1], generator=g).to(arguments[0][1].dtype).to(device, out.dtype)
    grads = torch.autograd.grad(out, leaves, rows_of(grad, order) if in_rows else grad)
    results = [by_slot(out.detach(), order) if in_rows else out.detach()]
    for (kind, _), gradient in zip(arguments, grads, strict=True):
        results.append(by_slot(gradient, order) if kind == "rows" else gradient)
    return [t.cpu() for t in results]


def differences(got: list[Tensor], want: list[Tensor], tolerance: float) -> list[str]:
    names = [str(i) for i in range(len(want))]
    return mismatches(dict(zip(names, got, strict=True)), dict(zip(names, want, strict=True)), tolerance)


def arguments_of(operation: str, case: Case, dtype: torch.dtype) -> tuple[list[tuple[str, Tensor]], list[Tensor]]:
    inputs = make_inputs(case, dtype)
    made = OPERATIONS[operation][1](case, inputs)
    return [(kind, value if kind == "fp32" else value.to(dtype)) for kind, value in made], inputs


@each_case
@each_target_and_dtype
@pytest.mark.parametrize("operation", OPERATIONS)
def test_values_and_gradients(operation: str, backend: str, device: str, dtype: torch.dtype, name: str) -> None:
    arguments, inputs = arguments_of(operation, CASES[name], dtype)
    experts = CASES[name].experts
    want = run(operation, reference, reference.sort_slots(inputs[4], experts), arguments, "cpu", wide=True)
    ops.set_backend(backend)
    order = ops.sort_slots(inputs[4].to(device), experts, dtype)
    got = run(operation, ops, order, arguments, device, wide=False)
    kinds = ["rows", *(kind for kind, _ in arguments)]
    assert all(t.dtype == (torch.float32 if kind == "fp32" else dtype) for t, kind in zip(got, kinds, strict=True))
    assert not differences(got, want, TOLERANCE[dtype])
    again = run(operation, ops, order, arguments, device, wide=False)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


def composed(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """A layer as a foreign model would write it."""
    order = ops.sort_slots(indices, down.shape[0], x.dtype)
    activation = ops.grouped_linear_swiglu(ops.gather_rows(x, order), gate_up, order)
    return ops.combine(ops.grouped_linear(activation, down, order), order, weights)


@each_case
@each_target_and_dtype
def test_a_layer_composed_of_them_is_moe_mlp(backend: str, device: str, dtype: torch.dtype, name: str) -> None:
    inputs, want = case_with_answer(name, dtype)
    ops.set_backend(backend)
    got = values_and_gradients(composed, [t.to(device) for t in inputs])
    assert not mismatches(got, want, 1.5 * TOLERANCE[dtype])  # expert outputs are rounded once more


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
@each_case
@each_target
def test_order_and_counts(backend: str, device: str, name: str, index_dtype: torch.dtype) -> None:
    case = CASES[name]
    indices = make_inputs(case, torch.float32)[4].to(index_dtype)
    ops.set_backend(backend)
    order = ops.sort_slots(indices.to(device), case.experts, torch.bfloat16)
    order = ops.RowOrder(order.slots_P.cpu(), order.rows_TK.cpu(), order.counts_E.cpu(), order.plan)
    flat = indices.reshape(-1)
    counts = torch.tensor([(flat == e).sum() for e in range(case.experts)])
    assert torch.equal(order.counts_E.long(), counts)
    assert torch.equal(ops.expert_counts(indices.to(device), case.experts).cpu(), counts)
    assert torch.equal(order.rows_N < 0, flat < 0)
    rows = order.rows_N[order.rows_N >= 0].long()
    local = torch.arange(flat.numel())[flat >= 0]
    assert torch.equal(order.slots_P[rows].long(), local)  # rows and slots are each other's inverse
    stable = local[torch.argsort(flat[flat >= 0], stable=True)]
    assert torch.equal(order.slots_P[rows.sort().values].long(), stable)
    for e in range(case.experts):  # the rows of an expert lie together
        mine = order.rows_N[flat == e]
        assert mine.numel() == 0 or int(mine.max() - mine.min()) == mine.numel() - 1


@each_target_and_dtype
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", ["odd_widths", "some_foreign", "empty_experts"])
def test_weight_gradients_add_to_a_main_gradient(
    name: str, wide: bool, backend: str, device: str, dtype: torch.dtype
) -> None:
    """Two micro-batches into one buffer, of the wide sum: rounding each contribution to 16 bits first would show."""
    case = CASES[name]
    _, gate_up, *_, indices, _ = make_inputs(case, dtype)
    ops.set_backend(backend)
    order = ops.sort_slots(indices.to(device), case.experts, dtype)
    compact = reference.sort_slots(indices, case.experts)
    start = torch.randn(gate_up.shape, generator=torch.Generator().manual_seed(3))
    main_grad = start.to(device, torch.float32 if wide else dtype)
    raw = main_grad.clone()
    want = main_grad.double().cpu()
    weight = gate_up.to(device).requires_grad_()
    for seed in (11, 12):
        x = random_by_slot(case, case.width, seed).to(dtype)
        grad = random_by_slot(case, 2 * case.inner, seed + 10).to(dtype)
        out = ops.grouped_linear(rows_of(x.to(device), order), weight, order, main_grad)
        out.backward(rows_of(grad.to(device), order))
        assert weight.grad is None
        rows = [rows_of(t.to(device), order) for t in (grad, x)]
        assert ops.grouped_weight_gradient(*rows, order, raw) is raw
        written = torch.full_like(raw, torch.nan)
        assert ops.grouped_weight_gradient(*rows, order, written, accumulate=False) is written
        one = reference.grouped_weight_gradient(rows_of(grad.double(), compact), rows_of(x.double(), compact), compact)
        assert not differences([written], [one], TOLERANCE[torch.float32 if wide else dtype])
        want += one
    tolerance = TOLERANCE[torch.float32 if wide else dtype]
    assert not differences([main_grad, raw], [want, want], tolerance)


@each_target_and_dtype
def test_gradients_by_name(backend: str, device: str, dtype: torch.dtype) -> None:
    case = CASES["some_foreign"]
    _, gate_up, *_, indices, _ = make_inputs(case, dtype)
    ops.set_backend(backend)
    order = ops.sort_slots(indices.to(device), case.experts, dtype)
    x, grad = random_by_slot(case, case.width, 1).to(dtype), random_by_slot(case, 2 * case.inner, 2).to(dtype)
    compact = reference.sort_slots(indices, case.experts)
    x_rows, rows = rows_of(x.double(), compact), rows_of(grad.double(), compact)
    want = [
        by_slot(reference.grouped_input_gradient(rows, gate_up.double(), compact), compact),
        reference.grouped_weight_gradient(rows, x_rows, compact),
    ]
    x_rows, rows = rows_of(x.to(device), order), rows_of(grad.to(device), order)
    got = [
        by_slot(ops.grouped_input_gradient(rows, gate_up.to(device), order), order),
        ops.grouped_weight_gradient(rows, x_rows, order),
    ]
    assert not differences(got, want, TOLERANCE[dtype])


@pytest.mark.parametrize("mutation", MUTATIONS)
@each_target
def test_the_comparison_sees_a_single_wrong_slot(backend: str, device: str, mutation: str) -> None:
    ops.set_backend(backend)
    inputs = make_inputs(CASES["odd_tokens"], torch.bfloat16 if backend not in ON_GPU else torch.float16)
    want = expected(inputs)
    changed = [t.to(device) for t in mutated(inputs, mutation)]
    bad = mismatches(values_and_gradients(composed, changed), want, 1.5 * TOLERANCE[torch.bfloat16])
    assert any(line.startswith("y:") for line in bad) and any(line.startswith("dx:") for line in bad)


def test_the_reference_by_finite_differences() -> None:
    case = Case(5, 4, 3, 3, 2, "some_foreign")
    inputs = make_inputs(case, torch.float64, seed=3)
    order = reference.sort_slots(inputs[4], case.experts)
    for operation, (fn, make) in OPERATIONS.items():
        arguments = [
            (rows_of(v.double(), order) if kind == "rows" else v.double()).requires_grad_()
            for kind, v in make(case, inputs)
        ]
        assert torch.autograd.gradcheck(functools.partial(fn, reference, order), arguments), operation


def test_the_reference_alone_composes_a_layer() -> None:
    """What the other tests compare with is itself held against the token-by-token computation, in fp64."""
    for name, case in CASES.items():
        inputs = [t.double() if t.is_floating_point() else t for t in make_inputs(case, torch.float32)]
        got = values_and_gradients(reference.moe_mlp, inputs)
        assert not mismatches(got, expected(inputs), 1e-12), name


@each_target
def test_strided_arguments_give_the_same(backend: str, device: str) -> None:
    dtype = torch.float16 if backend in ON_GPU else torch.float32
    ops.set_backend(backend)
    inputs = [t.to(device) for t in make_inputs(CASES["some_foreign"], dtype)]
    strided = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in inputs]
    assert not strided[0].is_contiguous() and not strided[4].is_contiguous()
    first, second = (values_and_gradients(composed, given) for given in (inputs, strided))
    assert all(torch.equal(first[n], second[n]) for n in NAMES)


@pytest.mark.parametrize("index", [6, -2])
@pytest.mark.parametrize("backend", ["reference", "cpu", pytest.param("sycl", marks=needs_sycl)])
def test_an_index_out_of_range_raises(backend: str, index: int) -> None:
    ops.set_backend(backend)
    indices = torch.zeros(5, 2, dtype=torch.int64)
    indices[3, 1] = index
    for call in (lambda: ops.sort_slots(indices, 6, torch.float32), lambda: ops.expert_counts(indices, 6)):
        with pytest.raises(ValueError, match=rf"indices hold {index}; expected values in \[-1, 6\)"):
            call()


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
        routing.check_values("unread", row_K.unsqueeze(0), 6)
        return row_K

    assert torch.equal(torch.vmap(unread)(indices), indices)
