"""moe_mlp of every backend against a token-by-token fp64 computation: values and all gradients, awkward shapes."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.optimus import ops
from megatron.optimus.ops import backend as backend_module
from megatron.optimus.ops import reference
from tests.ops.cases import (
    CASES,
    MUTATIONS,
    NAMES,
    TOLERANCE,
    Case,
    case_with_answer,
    make_inputs,
    mismatches,
    mutated,
    values_and_gradients,
)
from tests.ops.sycl_device import needs_sycl
from tests.ops.targets import HAS_CUDA, INTERPRETED, ON_GPU, each_target_and_dtype, needs_hopper
from tests.ops.targets import TARGETS as ALL_TARGETS

# test_sycl.py runs the same cases at several work-group sizes
TARGETS = [target for target in ALL_TARGETS if target.id != "sycl"]
_GPU_BACKENDS = ["triton", pytest.param("cuda", marks=needs_hopper)]


@pytest.mark.parametrize("name", CASES)
@each_target_and_dtype(TARGETS, TOLERANCE)
def test_values_and_gradients(backend: str, device: str, dtype: torch.dtype, name: str) -> None:
    inputs, want = case_with_answer(name, dtype)
    ops.set_backend(backend)
    got = values_and_gradients(ops.moe_mlp, [t.to(device) for t in inputs])
    assert all(got[n].dtype == (torch.float32 if n == "dweights" else dtype) for n in NAMES)
    assert not mismatches(got, want, TOLERANCE[dtype])


@pytest.mark.parametrize(("backend", "device"), TARGETS)
def test_foreign_slots_and_empty_experts_get_exact_zeros(backend: str, device: str) -> None:
    ops.set_backend(backend)
    inputs = [t.to(device) for t in make_inputs(CASES["none_local"], torch.bfloat16)]
    assert all(not value.any() for value in values_and_gradients(ops.moe_mlp, inputs).values())
    inputs = [t.to(device) for t in make_inputs(CASES["empty_experts"], torch.bfloat16)]
    got = values_and_gradients(ops.moe_mlp, inputs)
    assert not got["dgate_up"][1::2].any() and not got["ddown"][1::2].any()
    assert got["dgate_up"][0].any()


@pytest.mark.parametrize(("backend", "device"), TARGETS)
def test_tokens_without_an_expert_here_may_hold_anything(backend: str, device: str) -> None:
    """A transport need not write the rows that nobody here is chosen for, nor their gradients, nor their weights."""
    ops.set_backend(backend)
    inputs = [t.to(device) for t in make_inputs(Case(90, 32, 16, 2, 2, "some_foreign"), torch.float16)]
    inputs[4][::2] = -1
    clean = values_and_gradients(ops.moe_mlp, inputs)
    is_local = inputs[4] >= 0
    needed = is_local.any(1)
    for rows in (inputs[0], inputs[5]):
        rows[~needed] = torch.nan
    inputs[3][~is_local] = torch.nan
    got = values_and_gradients(ops.moe_mlp, inputs)
    for name, value in got.items():
        rows = {"y": needed, "dx": needed, "dweights": is_local}.get(name, slice(None))
        assert torch.equal(value[rows], clean[name][rows]) and value[rows].any(), name


@pytest.mark.parametrize(("backend", "device"), TARGETS)
def test_runs_are_bitwise_equal(backend: str, device: str) -> None:
    ops.set_backend(backend)
    inputs = [t.to(device) for t in make_inputs(Case(517, 96, 64, 8, 4, "some_foreign"), torch.bfloat16)]
    first = values_and_gradients(ops.moe_mlp, inputs)
    for _ in range(3):
        again = values_and_gradients(ops.moe_mlp, inputs)
        assert all(torch.equal(first[n], again[n]) for n in NAMES)


SAVING = [target for target in ALL_TARGETS if target.id != "reference"]  # which keeps what autograd keeps


@pytest.mark.parametrize(("backend", "device"), SAVING)
@pytest.mark.parametrize("name", ["wide", "some_foreign", "empty_experts"])
def test_what_is_kept_for_the_backward(backend: str, device: str, name: str) -> None:
    """2TD + 4TKF bytes in 16 bits beside weights, router weights and indices; and the order, integers."""
    case = CASES[name]
    ops.set_backend(backend)
    inputs = [t.to(device) for t in make_inputs(case, torch.float16)]
    leaves = [t.requires_grad_() for t in inputs[:4]]
    given = {t.untyped_storage().data_ptr() for t in inputs[1:5]}
    kept: dict[bool, dict[int, int]] = {True: {}, False: {}}

    def pack(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in given:
            kept[saved.is_floating_point()][storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        ops.moe_mlp(*leaves, inputs[4])
    slots, padded = case.tokens * case.topk, case.tokens * case.topk + 128 * (case.experts + 1)
    assert sum(kept[True].values()) == 2 * case.tokens * case.width + 4 * slots * case.inner, kept
    assert sum(kept[False].values()) <= 16 * padded + 4096, kept


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_sees_a_single_wrong_slot(mutation: str) -> None:
    inputs, want = case_with_answer("odd_tokens", torch.bfloat16)
    got = values_and_gradients(reference.moe_mlp, mutated(inputs, mutation))
    bad = mismatches(got, want, TOLERANCE[torch.bfloat16])
    assert any(line.startswith("y:") for line in bad) and any(line.startswith("dx:") for line in bad)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_the_layer_compiles_as_one_graph(backend: str) -> None:
    if backend == "reference" and torch.__version__.startswith("2.8."):
        pytest.skip("torch 2.8 cannot compile the sizes of its groups of rows, which depend on data")
    torch.compiler.reset()  # a compiled function keeps its backend
    ops.set_backend(backend)
    inputs = make_inputs(Case(12, 16, 8, 3, 2), torch.float32)
    compiled = torch.compile(ops.moe_mlp, backend="aot_eager", fullgraph=True)
    got, want = values_and_gradients(compiled, inputs), values_and_gradients(ops.moe_mlp, inputs)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(("backend", "device"), TARGETS)
def test_non_contiguous_arguments(backend: str, device: str) -> None:
    dtype = torch.float16 if backend in ON_GPU else torch.float32
    inputs, want = case_with_answer("odd_widths", dtype)
    ops.set_backend(backend)
    strided = [t.to(device).transpose(-1, -2).contiguous().transpose(-1, -2) for t in inputs]
    assert not any(t.is_contiguous() for t in strided)
    assert not mismatches(values_and_gradients(ops.moe_mlp, strided), want, TOLERANCE[dtype])


@pytest.mark.parametrize("index", [4, -2, 2**32])
@pytest.mark.parametrize("backend", ["reference", "cpu", pytest.param("sycl", marks=needs_sycl)])
def test_an_index_out_of_range_raises(backend: str, index: int) -> None:
    ops.set_backend(backend)
    inputs, _ = case_with_answer("odd_tokens", torch.float32)
    indices = inputs[4].clone()
    indices[3, 0] = index
    with pytest.raises(ValueError, match=rf"indices hold {index}; expected values in \[-1, 4\)"):
        ops.moe_mlp(*inputs[:4], indices)


@pytest.mark.skipif(not INTERPRETED, reason="not Triton's interpreter")
@pytest.mark.parametrize("index", [4, -2, 2**32])
def test_triton_looks_at_an_index_before_narrowing_it(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter
    from triton.runtime.errors import InterpreterError

    from megatron.optimus.ops.triton.row_order import order_rows

    indices = torch.tensor([[0, 1], [index, 2]])
    order = order_rows(indices, 4)  # assertions are off
    assert order.row_N[2] == -1 and order.count_E.tolist() == [1, 1, 1, 0]
    options = dataclasses.replace(interpreter.interpreter_builder.options, debug=True)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    with pytest.raises(InterpreterError, match="an expert index is outside"):
        order_rows(indices, 4)


def test_wrong_arguments_raise_before_anything_runs() -> None:
    x, gate_up, down, weights, indices, _ = make_inputs(CASES["odd_tokens"], torch.float32)
    with pytest.raises(ValueError, match=r"float8_e5m2.* 16 bits or more"):
        ops.moe_mlp(*(t.to(torch.float8_e5m2) for t in (x, gate_up, down)), weights, indices)
    many = [torch.empty(2**30, size, dtype=dtype, device="meta") for size, dtype in ((32, x.dtype), (2, torch.float32))]
    with pytest.raises(ValueError, match="1073741824 tokens of 2 experts each"):
        ops.moe_mlp(many[0], gate_up.to("meta"), down.to("meta"), many[1], many[1].long())
    with pytest.raises(ValueError, match="must share a floating dtype"):
        ops.moe_mlp(x.bfloat16(), gate_up, down, weights, indices)
    with pytest.raises(ValueError, match="must be float32"):
        ops.moe_mlp(x, gate_up, down, weights.bfloat16(), indices)
    with pytest.raises(ValueError, match="do not fit"):
        ops.moe_mlp(x[:, 1:], gate_up, down, weights, indices)
    with pytest.raises(ValueError, match="must both be"):
        ops.moe_mlp(x, gate_up, down, weights[1:], indices)
    with pytest.raises(ValueError, match="is on cpu but"):
        ops.moe_mlp(x, gate_up.to("meta"), down, weights, indices)
    for nothing in (
        (x, gate_up[:, :0], down[:, :, :0], weights, indices),
        (x[:, :0], gate_up[:, :, :0], down[:, :0], weights, indices),
        (x, gate_up[:0], down[:0], weights, indices),
        (x, gate_up, down, weights[:, :0], indices[:, :0]),
    ):
        with pytest.raises(ValueError, match="only T may be 0"):
            ops.moe_mlp(*nothing)


def test_compiled_operations_pass_opcheck() -> None:
    ops.set_backend("cpu")
    x, gate_up, down, weights, indices, dy = make_inputs(CASES["some_foreign"], torch.float32)
    ops.moe_mlp(x, gate_up, down, weights, indices)  # loads the library and registers autograd
    leaves = [t.requires_grad_() for t in (x, gate_up, down, weights)]
    # dhidden is filled for local slots only, so the other rows would be compared as they happen to be
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.optimus.moe_mlp.default, (*leaves, indices), test_utils=checks)
    hidden = torch.ops.optimus.moe_mlp(*leaves, indices)[1]
    plain = [t.detach() for t in (dy, *leaves)]
    saved = (*plain, indices, hidden)
    torch.library.opcheck(torch.ops.optimus.moe_mlp_backward.default, saved, test_utils=checks)
    places = [torch.zeros_like(t) for t in plain[2:4]]
    for add in (True, False):
        into = (*saved, *places, add, add)
        torch.library.opcheck(torch.ops.optimus.moe_mlp_backward_into.default, into, test_utils=checks)
    positions = torch.arange(2 * len(x), dtype=torch.int32).view(-1, 2)
    copies = torch.cat((x, x)).detach()
    torch.library.opcheck(torch.ops.optimus.cpu_sum_copies.default, (copies, positions), test_utils=checks)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
@pytest.mark.parametrize("backend", _GPU_BACKENDS)
def test_counts_stay_on_the_device(backend: str) -> None:
    """Forward and backward are captured in a CUDA graph, which a host synchronisation would break, and replayed."""
    ops.set_backend(backend)
    inputs = [t.cuda() for t in make_inputs(Case(257, 64, 48, 8, 2), torch.bfloat16)]
    values_and_gradients(ops.moe_mlp, inputs)
    graph = torch.cuda.CUDAGraph()
    leaves = [t.requires_grad_() for t in inputs[:4]]
    with torch.cuda.graph(graph):
        y = ops.moe_mlp(*leaves, inputs[4])
        grads = torch.autograd.grad(y, leaves, inputs[5])
    fresh = [t.cuda() for t in make_inputs(Case(257, 64, 48, 8, 2, "some_foreign"), torch.bfloat16, seed=9)]
    for old, new in zip(inputs, fresh, strict=True):
        old.data.copy_(new)
    graph.replay()
    want = values_and_gradients(ops.moe_mlp, fresh)
    assert all(torch.equal(got, want[n]) for n, got in zip(NAMES, (y, *grads), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
@pytest.mark.parametrize("backend", _GPU_BACKENDS)
@pytest.mark.parametrize("experts", [8, 136], ids=["one_kernel", "two_kernels"])  # for logits and choice
def test_router_and_layer_are_captured_together(backend: str, experts: int) -> None:
    ops.set_backend(backend)

    def run(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (x, router, gate_up, down)]
        routing, _, tokens = ops.route(*leaves[:2], 2, normalize=True)
        y = ops.moe_mlp(tokens, *leaves[2:], routing.weights_TK, routing.indices_TK)
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    def make(seed: int) -> list[Tensor]:
        x, gate_up, down, _, _, dy = (
            t.cuda() for t in make_inputs(Case(257, 64, 48, experts, 2), torch.bfloat16, "cpu", seed)
        )
        return [x, torch.randn(experts, 64, device="cuda").bfloat16(), gate_up, down, dy]

    inputs, fresh = make(0), make(9)
    run(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*inputs)
    for old, new in zip(inputs, fresh, strict=True):
        old.copy_(new)
    graph.replay()
    assert all(torch.equal(got, want) for got, want in zip(captured, run(*fresh), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
@pytest.mark.parametrize("backend", _GPU_BACKENDS)
@pytest.mark.parametrize("index", [4, 2**32])
def test_an_index_out_of_range_stops_the_device(backend: str, index: int) -> None:
    """In a process of its own: a failed assertion on the device ends every later use of it."""
    program = (
        "import torch; from megatron.optimus import ops; from tests.ops.cases import CASES, make_inputs\n"
        f"ops.set_backend({backend!r})\n"
        "inputs = [t.cuda() for t in make_inputs(CASES['odd_tokens'], torch.bfloat16)]\n"
        f"inputs[4][3, 0] = {index}\n"
        "ops.moe_mlp(*inputs[:5]); torch.cuda.synchronize()"
    )
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode != 0 and "an expert index is outside [-1, E)" in run.stdout + run.stderr


@pytest.mark.parametrize(("backend", "device"), [t for t in ALL_TARGETS if t.id in ("triton", "sycl")])
def test_layers_written_in_python_pass_opcheck(backend: str, device: str) -> None:
    ops.set_backend(backend)
    inputs = make_inputs(CASES["one_expert_exists"], torch.float16, device)
    values_and_gradients(ops.moe_mlp, inputs)
    leaves = [t.requires_grad_() for t in inputs[:4]]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    operations = getattr(torch.ops, f"optimus_{backend}")
    torch.library.opcheck(operations.moe_mlp.default, (*leaves, inputs[4]), test_utils=checks)
    plain = [t.detach() for t in leaves]
    _, hidden, *row_order = operations.moe_mlp(*plain, inputs[4])
    kept = (inputs[5], *plain, *((hidden, *row_order) if row_order else (inputs[4], hidden)))
    torch.library.opcheck(operations.moe_mlp_backward.default, kept, test_utils=checks)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
@pytest.mark.parametrize("backend", _GPU_BACKENDS)
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_bits_are_the_same_beside_a_kernel_that_holds_multiprocessors(
    backend: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NCCL's kernels do in training: some blocks start when others have ended, and nothing waits for them."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    held = importlib.import_module("held").Held
    ops.set_backend(backend)
    inputs = make_inputs(Case(3000, 320, 640, 5, 2, "some_foreign"), torch.bfloat16, "cuda")
    want = values_and_gradients(ops.moe_mlp, inputs)
    others = held(max(1, int(share * torch.cuda.get_device_properties(0).multi_processor_count)))
    for _ in range(3):
        others.start()
        try:
            while int(others.holding) < others.count:
                pass
            got = values_and_gradients(ops.moe_mlp, inputs)
            still_held = others.released.clone()
        finally:  # else the process could not end
            others.release()
        assert not still_held and all(torch.equal(got[name], want[name]) for name in NAMES)


def test_runs_on_meta_tensors() -> None:
    inputs = [t.to("meta") for t in make_inputs(CASES["odd_tokens"], torch.bfloat16)]
    assert ops.moe_mlp(*inputs[:5]).shape == inputs[0].shape


def test_an_explicit_backend_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(CASES["one_token"], torch.float32)
    ops.set_backend("triton")
    with pytest.raises(ops.BackendUnavailableError, match="backend 'triton' cannot run on cpu float32"):
        ops.moe_mlp(*inputs[:5])
    with pytest.raises(ValueError, match="unknown backend 'fast'; use one of auto, reference"):
        ops.set_backend("fast")


def test_auto_says_what_is_missing_and_runs_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inputs, want = case_with_answer("odd_tokens", torch.float32)
    monkeypatch.setattr(backend_module, "compiled_library_error", lambda: "no compiler; install one")
    backend_module._resolve.cache_clear()
    with caplog.at_level("INFO", logger="optimus"):
        for _ in range(2):
            got = values_and_gradients(ops.moe_mlp, inputs)
    backend_module._resolve.cache_clear()
    assert not mismatches(got, want, TOLERANCE[torch.float32])
    assert [r.getMessage() for r in caplog.records] == [
        "expert kernels on cpu float32: reference, which is slower, because no compiler; install one; router: reference"
    ]
