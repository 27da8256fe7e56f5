"""moe_mlp composed of the SYCL kernels, on Intel's CPU device: values, gradients, determinism, refusals.

Needs two packages from PyPI (15 s, 1 GB); without them: pip install intel-sycl-rt==2026.2.0 intel-opencl-rt==2026.2.0
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.optimus import ops
from megatron.optimus.ops import backend as backend_module
from megatron.optimus.ops import sycl
from tests.ops import test_main_grads as main_grads
from tests.ops.cases import (
    CASES,
    MUTATIONS,
    NAMES,
    TOLERANCE,
    Case,
    expected,
    make_inputs,
    mismatches,
    mutated,
    values_and_gradients,
)
from tests.ops.sycl_device import WORK_SIZES, needs_sycl

on_device = [needs_sycl, pytest.mark.usefixtures("default_work_sizes")]
SOURCES = Path(__file__).resolve().parents[2] / "csrc" / "sycl"


def marked(test):
    for mark in on_device:
        test = mark(test)
    return test


@marked
@pytest.mark.parametrize("sizes", WORK_SIZES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    inputs = make_inputs(CASES[name], dtype)
    sycl.set_work_sizes(*sizes)
    ops.set_backend("sycl")
    got = values_and_gradients(ops.moe_mlp, inputs)
    assert all(got[n].dtype == (torch.float32 if n == "dweights" else dtype) for n in NAMES)
    assert not mismatches(got, expected(inputs), TOLERANCE[dtype])


@marked
def test_no_tokens_give_empty_values_and_zero_weight_gradients() -> None:
    ops.set_backend("sycl")
    got = values_and_gradients(ops.moe_mlp, make_inputs(Case(0, 16, 8, 4, 2), torch.bfloat16))
    assert got["y"].shape == got["dx"].shape == (0, 16) and got["dweights"].shape == (0, 2)
    assert not got["dgate_up"].any() and not got["ddown"].any()


@marked
@pytest.mark.parametrize("wide", [True, False], ids=["fp32_buffer", "own_dtype"])
@pytest.mark.parametrize("name", ["odd_tokens", "empty_experts", "some_foreign", "no_token"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_main_gradients(dtype: torch.dtype, name: str, wide: bool) -> None:
    main_grads.test_two_backwards_add_twice("sycl", "cpu", dtype, name, wide)
    main_grads.test_a_first_gradient_is_written_over_whatever_was_there("sycl", "cpu", dtype, name, wide)


@marked
def test_main_gradients_are_added_where_autograd_would(monkeypatch: pytest.MonkeyPatch) -> None:
    main_grads.test_it_is_asked_once_a_gradient_and_in_the_backward("sycl", "cpu")
    main_grads.test_sums_in_fp32_are_not_rounded_to_the_weights_dtype("sycl", "cpu")
    main_grads.test_a_gradient_asked_for_is_returned_and_not_added("sycl", "cpu")
    main_grads.test_recomputation_adds_once("sycl", "cpu", False)
    main_grads.test_a_frozen_weight_gets_nothing("sycl", "cpu")
    main_grads.test_input_gradients_are_told_once_and_before_the_last_product("sycl", "cpu", monkeypatch)


@marked
def test_int32_indices_and_strided_arguments_give_the_same() -> None:
    ops.set_backend("sycl")
    inputs = make_inputs(CASES["some_foreign"], torch.float32)
    first = values_and_gradients(ops.moe_mlp, inputs)
    strided = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in inputs]
    narrow = [*inputs[:4], inputs[4].int(), inputs[5]]
    for other in (strided, narrow):
        got = values_and_gradients(ops.moe_mlp, other)
        assert all(torch.equal(first[n], got[n]) for n in NAMES)


@marked
def test_runs_are_bitwise_equal_and_do_not_depend_on_work_sizes() -> None:
    ops.set_backend("sycl")
    inputs = make_inputs(Case(517, 96, 64, 8, 4, "some_foreign"), torch.bfloat16)
    first = values_and_gradients(ops.moe_mlp, inputs)
    for _ in range(3):
        again = values_and_gradients(ops.moe_mlp, inputs)
        assert all(torch.equal(first[n], again[n]) for n in NAMES)
    for sizes in WORK_SIZES:
        sycl.set_work_sizes(*sizes)
        again = values_and_gradients(ops.moe_mlp, inputs)
        # the work-items of a group share the sum of a router-weight gradient, so their number is its order
        assert all(torch.equal(first[n], again[n]) for n in NAMES if n != "dweights")


@marked
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_sees_a_single_wrong_slot(mutation: str) -> None:
    ops.set_backend("sycl")
    inputs = make_inputs(CASES["odd_tokens"], torch.bfloat16)
    want = expected(inputs)
    bad = mismatches(values_and_gradients(ops.moe_mlp, mutated(inputs, mutation)), want, 1.5e-2)
    assert any(line.startswith("y:") for line in bad) and any(line.startswith("dx:") for line in bad)


@marked
def test_a_kernel_that_drops_one_slot_or_one_weight_is_seen(tmp_path: Path) -> None:
    """The kernels themselves are changed and compiled again: what runs is the text of these files."""
    for path in SOURCES.iterdir():
        shutil.copy(path, tmp_path)
    for file, right, wrong in (
        ("row_order.sycl", "bin < num_experts ? row : -1", "bin < num_experts && first + i != 17 ? row : -1"),
        ("permute.sycl", "weights ? weights[slot] : 1.0f", "weights && slot != 17 ? weights[slot] : 0.0f"),
    ):
        text = (tmp_path / file).read_text()
        assert text.count(right) == 1
        (tmp_path / file).write_text(text.replace(right, wrong))
    case = CASES["odd_tokens"]
    *_, weights, indices, _dy = make_inputs(case, torch.float32)
    rows = torch.randn(weights.numel(), 8)
    order = sycl.sort_slots(indices, case.experts)
    y = sycl.combine(rows, order, weights, case.tokens)

    wrong_runtime = sycl._Runtime(tmp_path)
    wrong_order = [torch.empty_like(t) for t in order]
    wrong_runtime.run("sort_slots", [indices, *wrong_order])
    assert (wrong_order[1] != order.rows_N).nonzero().tolist() == [[17]] and wrong_order[1][17] == -1
    wrong_y = torch.empty_like(y)
    wrong_runtime.run("combine", [rows, order.rows_N, order.offsets, weights, wrong_y])
    assert (wrong_y != y).any(-1).nonzero().tolist() == [[17 // case.topk]]
    assert mismatches({"y": wrong_y}, {"y": y.double()}, TOLERANCE[torch.float32])


@marked
def test_addresses_that_allow_no_sixteen_bytes_give_the_same() -> None:
    ops.set_backend("sycl")
    inputs = make_inputs(Case(33, 64, 32, 4, 2, "some_foreign"), torch.bfloat16)
    shifted = [torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape) for t in inputs]
    assert all(t.is_contiguous() and t.data_ptr() % 16 for t in shifted[:3])
    first, again = ops.moe_mlp(*inputs[:5]), ops.moe_mlp(*shifted[:5])
    assert torch.equal(first, again)


@marked
def test_a_broken_runtime_is_an_error_that_names_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "types.hpp").write_text((SOURCES / "types.hpp").read_text())
    (tmp_path / "permute.sycl").write_text("this is no C++")
    case = CASES["one_token"]
    x, *_, indices, _dy = make_inputs(case, torch.float32)
    order = sycl.sort_slots(indices, case.experts)
    runtime = sycl._Runtime(tmp_path)
    arguments = [x.new_empty(case.topk, case.width), order.rows_N, order.offsets, x.new_empty(0), x]
    with pytest.raises(RuntimeError, match=r"permute\.sycl does not compile"):
        runtime.run("combine", arguments)
    (tmp_path / "permute.sycl").unlink()
    with pytest.raises(RuntimeError, match=r"cannot read .*permute\.sycl"):
        runtime.run("combine", arguments)
    monkeypatch.setattr(importlib.metadata, "files", lambda package: [])
    with pytest.raises(RuntimeError, match=r"package intel-sycl-rt holds no libsycl\.so; reinstall it"):
        sycl._Runtime()


@marked
@pytest.mark.parametrize("index", [4, -2, 2**40])
def test_an_index_out_of_range_raises_where_it_can_be_read_and_shows_as_nan_on_a_device(index: int) -> None:
    ops.set_backend("sycl")
    inputs = make_inputs(CASES["odd_tokens"], torch.float32)
    inputs[4][3, 0] = index
    with pytest.raises(ValueError, match=rf"indices hold {index}; expected values in \[-1, 4\)"):
        ops.moe_mlp(*inputs[:5])
    sycl.set_work_sizes(check_contents=False)
    got = values_and_gradients(ops.moe_mlp, inputs)
    assert got["y"].isnan().all() and got["dx"].isnan().all() and got["dweights"].isnan().any()


@marked
def test_wrong_arguments_raise_and_nothing_runs() -> None:
    case = CASES["odd_tokens"]
    dy, _gate_up, down, weights, indices, _ = make_inputs(case, torch.float32)
    slots, rows, offsets, counts = sycl.sort_slots(indices, case.experts)
    N, D = indices.numel(), case.width
    da, rows_out = torch.full((N, case.inner), 7.0), torch.full((N, D), 7.0)
    y, ddown = torch.full((case.tokens, D), 7.0), torch.full(down.shape, 7.0)
    swapped = offsets[[0, 2, 1, 3, 4, 5, 6]]
    product, gradient, sums = "gemm_input_gradient", "gemm_weight_gradient_left", "combine"
    wrong: list[tuple[str, str, list[Tensor | None]]] = [
        ("dout has dtype unsupported; expected f32, bf16 or f16", product, [dy.double(), down, slots, offsets, da]),
        ("weight has dtype f32; expected bf16", product, [dy.bfloat16(), down, slots, offsets, da]),
        ("slots has dtype i64; expected i32", product, [dy, down, slots.long(), offsets, da]),
        (r"slots has shape \[261\]; expected \[262\]", product, [dy, down, slots[:-1], offsets, da]),
        (r"dout is not contiguous \(strides \[1, 131\]\)", product, [dy.T.contiguous().T, down, slots, offsets, da]),
        ("slots are not a multiple of T = 130", product, [dy[:-1], down, slots, offsets, da]),
        (r"weight has shape \[3, 32, 24\]", product, [dy, down[1:], slots, offsets, da]),
        ("offsets run from 0 to 262; expected 0 to N = 131", product, [dy, down, slots[:131], offsets, da[:131]]),
        ("offsets fall from", product, [dy, down, slots, swapped, da]),
        ("slots hold 262; expected", product, [dy, down, slots + 1, offsets, da]),
        ("rows hold -2; expected", sums, [rows_out, rows * 0 - 2, offsets, None, y]),
        ("weights has dtype bf16; expected f32", sums, [rows_out, rows, offsets, weights.bfloat16(), y]),
        ("out has dtype bf16; expected f32", gradient, [dy, da, slots, offsets, ddown.bfloat16()]),
        ("hidden has shape", "swiglu_backward", [da, da, slots, offsets, weights, da, da, weights]),
        ("combine takes 5 arguments, not 2", sums, [rows_out, rows]),
        ("no SYCL operation combined", "combined", [rows_out]),
        ("but others are on", product, [dy, down, slots.to("meta"), offsets, da]),
        ("SYCL kernels run on xpu and cpu tensors, not meta", sums, [rows_out.to("meta")]),
        ("indices must be i32 or i64", "sort_slots", [indices.short(), slots, rows, offsets, counts]),
        ("counts has dtype i64; expected i32", "sort_slots", [indices, slots, rows, offsets, counts.long()]),
    ]
    slots_before = slots.clone()
    for message, name, arguments in wrong:
        with pytest.raises(ValueError, match=message):
            sycl._run(name, *arguments)
    assert all((t == 7).all() for t in (da, rows_out, y, ddown)) and torch.equal(slots, slots_before)
    for sizes in ((0, 512, 64), (1025, 512, 64), (256, 2000, 64), (256, 512, 32)):
        with pytest.raises(ValueError, match="expected"):
            sycl.set_work_sizes(*sizes)


@marked
def test_runs_on_the_device_it_says(caplog: pytest.LogCaptureFixture) -> None:
    assert ", driver 20" in sycl.device_name()
    ops.set_backend("sycl")
    backend_module._resolve.cache_clear()
    with caplog.at_level("INFO", logger="optimus"):
        ops.moe_mlp(*make_inputs(CASES["one_token"], torch.float32)[:5])
    assert [r.getMessage() for r in caplog.records] == ["expert kernels on cpu float32: sycl (as set); router: sycl"]


def test_what_is_missing_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    backend_module._resolve.cache_clear()
    monkeypatch.setattr(sycl, "_is_installed", lambda package: package != "intel-opencl-rt")
    ops.set_backend("sycl")
    inputs = make_inputs(CASES["one_token"], torch.float32)
    with pytest.raises(
        ops.BackendUnavailableError, match="intel-opencl-rt not installed; 'pip install intel-sycl-rt=="
    ):
        ops.moe_mlp(*inputs[:5])
    with pytest.raises(ops.BackendUnavailableError, match="float32, bfloat16 and float16 only"):
        ops.moe_mlp(*(t.double() for t in inputs[:3]), *inputs[3:5])
    assert "built without SYCL; with icpx on the PATH" in (sycl.xpu_error() or "")
    with pytest.raises(ops.BackendUnavailableError, match="cannot run on cuda bfloat16: it runs on xpu and cpu"):
        backend_module._resolve(ops.Backend.SYCL, "cuda", torch.bfloat16)


@needs_sycl
def test_the_translation_unit_for_gpus_passes_the_host_compiler(tmp_path: Path) -> None:
    """What icpx hands to g++, but for the header it generates: that one tells which functions are kernels."""
    headers = tmp_path / "c10" / "xpu" / "impl"
    headers.mkdir(parents=True)
    (headers / "xpu_cmake_macros.h").write_text("#define C10_XPU_BUILD_SHARED_LIBS\n")
    generated = tmp_path / "generated.hpp"
    generated.write_text(
        "#define __SYCL_DEVICE_ONLY__ 1\n"  # in this mode every function counts as a kernel
        "#include <sycl/ext/oneapi/experimental/free_function_traits.hpp>\n"
        "#undef __SYCL_DEVICE_ONLY__\n"
    )
    (sycl_header,) = (f for f in importlib.metadata.files("intel-sycl-rt") or () if f.match("include/sycl/sycl.hpp"))
    torch_include = Path(torch.__file__).parent / "include"
    folders = [tmp_path, Path(str(sycl_header.locate())).resolve().parents[1], torch_include]
    folders.append(torch_include / "torch" / "csrc" / "api" / "include")
    command = ["g++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wno-unknown-pragmas", "-Werror", "-x", "c++"]
    command += ["-include", str(generated), str(SOURCES / "xpu.sycl"), *(f"-isystem{folder}" for folder in folders)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
