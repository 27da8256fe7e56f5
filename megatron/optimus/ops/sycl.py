"""The SYCL kernels (csrc/sycl) on an Intel GPU, or on any x86-64 CPU through Intel's SYCL runtime.

On ``xpu`` tensors the kernels were compiled ahead of time and are reached through torch.ops. On ``cpu`` tensors the
very same files are compiled at the first use by the SYCL runtime from PyPI and run on its CPU device: the way to test
them without a GPU, not a fast one. Everything behind the two entrances is one C++ table of operations, which checks
every argument before it launches; only ``_run`` here knows that there are two.

Shapes and orders as in reference.py. Row tensors have N rows in expert order; the rows from ``offsets[E]`` on belong to
no local expert and hold nothing.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.optimus.ops.forward_mode import reverse_mode_only
from megatron.optimus.ops.main_grads import keep_for_backward
from megatron.optimus.ops.reference import RowOrder
from megatron.optimus.ops.second_derivatives import refuse

_SOURCES = Path(__file__).resolve().parents[3] / "csrc" / "sycl"
_BUILD = Path(__file__).resolve().parents[3] / "build" / "sycl"
_PACKAGES = ("intel-sycl-rt", "intel-opencl-rt")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int32: 3, torch.int64: 4}
_MESSAGE_BYTES = 1 << 16


def cpu_device_error() -> str | None:
    """Why the kernels cannot run on cpu tensors here, with the remedy; None if nothing is missing."""
    if missing := [name for name in _PACKAGES if not _is_installed(name)]:
        return f"{' and '.join(missing)} not installed; 'pip install intel-sycl-rt==2026.2.0 intel-opencl-rt==2026.2.0'"
    if not _SOURCES.is_dir():
        return f"the kernels' sources are not at {_SOURCES}; run from the source tree"
    if shutil.which("g++") is None:
        return "no C++ compiler on the PATH; install g++"
    return None


def xpu_error() -> str | None:
    """Why the kernels cannot run on xpu tensors here, with the remedy; None if they were built."""
    from megatron.optimus.ops.backend import compiled_library_error

    if error := compiled_library_error():
        return error
    if not torch._C._dispatch_has_kernel_for_dispatch_key("optimus::sycl_run", "XPU"):
        return (
            "the compiled operations were built without SYCL; with icpx on the PATH (source oneAPI's setvars.sh) and "
            "torch for XPU, run 'pip install --no-build-isolation .'"
        )
    return None


def device_name() -> str:
    """Name and driver of the CPU device; compiles nothing but the host library."""
    return _runtime().device


def set_work_sizes(
    group_items: int = 256, block_slots: int = 512, tile: int = 64, *, check_contents: bool = True
) -> None:
    """Work-group sizes of later calls on cpu tensors; tests run every kernel at several. Raises ValueError.

    group_items: 1 to 1024, along the feature dimension and in scans. block_slots: 1 to 1024, slots counted by a
    work-group. tile: 64 or 16, rows and columns of a matrix product's tile (256 or 64 work-items).
    check_contents: whether what indices and orders hold is checked before a launch, which a GPU has no time for.
    """
    _runtime().configure(group_items, block_slots, tile, check_contents)


def order_sizes(num_slots: int, num_experts: int) -> list[int]:
    """Elements of an order's tensors: slots, rows, counts, offsets."""
    return [num_slots, num_slots, num_experts, num_experts + 3]


def sort_slots(indices_TK: Tensor, num_experts: int) -> RowOrder:
    """``reference.sort_slots`` and ``reference.expert_counts``. On xpu, an index outside [-1, E) is sorted to the end
    and makes the results of ``combine`` NaN; on cpu it raises ValueError."""
    num_slots = indices_TK.numel()
    slots, rows = (indices_TK.new_empty(num_slots, dtype=torch.int32) for _ in range(2))
    offsets = indices_TK.new_empty(num_experts + 3, dtype=torch.int32)
    counts = indices_TK.new_empty(num_experts, dtype=torch.int32)
    _run("sort_slots", indices_TK, slots, rows, offsets, counts)
    return RowOrder(slots, rows.view(indices_TK.shape), counts, [offsets])


def expert_counts(indices_TK: Tensor, num_experts: int) -> Tensor:
    """``reference.expert_counts``."""
    return sort_slots(indices_TK, num_experts).counts_E.long()


def gather_rows(x_TD: Tensor, order: RowOrder) -> Tensor:
    """Rows of tokens in expert order: [T, D] -> [N, D]. Its gradient is ``combine`` without weights."""
    out = x_TD.new_empty(order.slots_P.numel(), x_TD.shape[1])
    _run("gather_rows", x_TD, order.slots_P, order.plan[0], out)
    return out


def combine(rows_ND: Tensor, order: RowOrder, weights_TK: Tensor | None, num_tokens: int) -> Tensor:
    """Sum over each token's local slots, in slot order and fp32, of weight (or one) times row: [N, D] -> [T, D]."""
    y = rows_ND.new_empty(num_tokens, rows_ND.shape[1])
    _run("combine", rows_ND, order.rows_N, order.plan[0], weights_TK, y)
    return y


def combine_backward(dy_TD: Tensor, rows_ND: Tensor, order: RowOrder, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the weighted ``combine``: of its rows [N, D] and of its weights [T, K] (fp32)."""
    drows, dweights = torch.empty_like(rows_ND), torch.empty_like(weights_TK)
    _run("combine_backward", dy_TD, rows_ND, order.slots_P, order.plan[0], weights_TK, drows, dweights)
    return drows, dweights


def swiglu(hidden_N2F: Tensor, order: RowOrder) -> Tensor:
    """``reference.swiglu`` of the local rows: [N, 2F] -> [N, F]."""
    activation = hidden_N2F.new_empty(hidden_N2F.shape[0], hidden_N2F.shape[1] // 2)
    _run("swiglu", hidden_N2F, order.plan[0], activation)
    return activation


def swiglu_backward(
    hidden_N2F: Tensor, grad_NF: Tensor, order: RowOrder, weights_TK: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradient of w * swiglu(hidden), w the slot's router weight (None: one), where ``grad_NF`` is the gradient of the
    activation before the weight. Returns (dhidden [N, 2F], w * swiglu(hidden) [N, F], dw [T, K] fp32 or None)."""
    dhidden, weighted = torch.empty_like(hidden_N2F), torch.empty_like(grad_NF)
    dweights = None if weights_TK is None else torch.empty_like(weights_TK)
    arguments = (hidden_N2F, grad_NF, order.slots_P, order.plan[0], weights_TK, dhidden, weighted, dweights)
    _run("swiglu_backward", *arguments)
    return dhidden, weighted, dweights


def swiglu_gradient(hidden_N2F: Tensor, grad_NF: Tensor, order: RowOrder) -> Tensor:
    """Gradient of ``swiglu``: [N, F] -> [N, 2F]."""
    return swiglu_backward(hidden_N2F, grad_NF, order, None)[0]


def grouped_linear(x: Tensor, weight_EOI: Tensor, order: RowOrder, *, gathered: bool = False) -> Tensor:
    """Each row times its expert's weight transposed, fp32 sums: [N, I] -> [N, O]. With ``gathered``, x is [T, I] in
    token order and its rows are gathered as they are read."""
    out = x.new_empty(order.slots_P.numel(), weight_EOI.shape[1])
    _run("gemm_forward", x, weight_EOI, order.slots_P if gathered else None, order.plan[0], out)
    return out


def grouped_linear_swiglu(
    x: Tensor, gate_up_E2FI: Tensor, order: RowOrder, *, gathered: bool = False
) -> tuple[Tensor, Tensor]:
    """``swiglu`` in the epilogue of ``grouped_linear``: [N, I] -> activation [N, F] and hidden [N, 2F]."""
    hidden = x.new_empty(order.slots_P.numel(), gate_up_E2FI.shape[1])
    activation = x.new_empty(order.slots_P.numel(), gate_up_E2FI.shape[1] // 2)
    slots = order.slots_P if gathered else None
    _run("gemm_swiglu", x, gate_up_E2FI, slots, order.plan[0], hidden, activation)
    return activation, hidden


def grouped_input_gradient(dout: Tensor, weight_EOI: Tensor, order: RowOrder, *, gathered: bool = False) -> Tensor:
    """Gradient of ``grouped_linear`` with respect to x: [N, O] (or [T, O] with ``gathered``) -> [N, I]."""
    out = dout.new_empty(order.slots_P.numel(), weight_EOI.shape[2])
    _run("gemm_input_gradient", dout, weight_EOI, order.slots_P if gathered else None, order.plan[0], out)
    return out


def grouped_weight_gradient(
    dout: Tensor,
    x: Tensor,
    order: RowOrder,
    main_grad: Tensor | None = None,
    accumulate: bool = True,
    *,
    gathered: str | None = None,
) -> Tensor:
    """Gradient of ``grouped_linear`` with respect to its weight, [E, O, I] in x's dtype, or added to ``main_grad``, in
    x's dtype or fp32, or written there if not ``accumulate``. ``gathered``: the operand, "dout" or "x", that is in
    token order [T, ...]. Raises ValueError."""
    suffix = {None: "", "dout": "_left", "x": "_right"}.get(gathered)
    if suffix is None:
        raise ValueError(f"gathered={gathered!r}; use None, 'dout' or 'x'")
    result = x.new_empty(order.counts_E.numel(), dout.shape[1], x.shape[1]) if main_grad is None else main_grad
    name = f"gemm_weight_gradient{suffix}{'' if main_grad is None or not accumulate else '_add'}"
    _run(name, dout, x, order.slots_P, order.plan[0], result)
    return result


def router_topk(
    logits_TE: Tensor, topk: int, sigmoid: bool, normalize: bool, bias_E: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """``reference.router_topk`` of fp32 logits: weights, indices and scores."""
    weights, scores = logits_TE.new_empty(logits_TE.shape[0], topk), torch.empty_like(logits_TE)
    indices = torch.empty_like(weights, dtype=torch.int64)
    _run(_router_name("router_topk", sigmoid, normalize), logits_TE, bias_E, weights, indices, scores)
    return weights, indices, scores


def router_topk_backward(
    scores_TE: Tensor, indices_TK: Tensor, dweights_TK: Tensor, dscores: Tensor | None, sigmoid: bool, normalize: bool
) -> Tensor:
    """Gradient of ``router_topk`` with respect to its logits."""
    dscores_TE = torch.zeros_like(scores_TE) if dscores is None else dscores
    dlogits, name = torch.empty_like(scores_TE), _router_name("router_topk_backward", sigmoid, normalize)
    _run(name, scores_TE, indices_TK, dweights_TK, dscores_TE, dlogits)
    return dlogits


def _router_name(name: str, sigmoid: bool, normalize: bool) -> str:
    return f"{name}_{'sigmoid' if sigmoid else 'softmax'}{'_normalized' if normalize else ''}"


def moe_mlp(x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, weights_TK: Tensor, indices_TK: Tensor) -> Tensor:
    """``reference.moe_mlp`` in SYCL. Saves its arguments and the hidden rows [N, 2F] before SwiGLU."""
    arguments = (x_TD, gate_up_E2FD, down_EDF, weights_TK, indices_TK)
    if x_TD.device.type == "xpu":
        from megatron.optimus.ops import cpu  # registers autograd and shapes of torch.ops.optimus.moe_mlp

        return cpu.moe_mlp(*(t.contiguous() for t in arguments))
    return _moe_mlp(*arguments)[0]


def moe_mlp_forward(
    x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, weights_TK: Tensor, indices_TK: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """``moe_mlp`` and what its backward needs beside the arguments."""
    y, hidden = _moe_mlp(x_TD, gate_up_E2FD, down_EDF, weights_TK, indices_TK)
    return y, [hidden]


def moe_mlp_backward_inputs(
    dy_TD: Tensor, arguments: list[Tensor], saved: list[Tensor], down_buffer: Tensor | None, accumulate: bool
) -> tuple[Tensor, Tensor | None, Tensor, tuple[Tensor, RowOrder]]:
    """See ``main_grads.FusedMoE``; the kernels of csrc/sycl/moe_mlp.hpp, in the order that the halves ask for."""
    dy, gate_up, down, weights, indices = (t.contiguous() for t in (dy_TD, *arguments[1:]))
    order = sort_slots(indices, down.shape[0])
    dactivation = grouped_input_gradient(dy, down, order, gathered=True)  # before the router's weights
    dhidden, weighted, dweights = swiglu_backward(saved[0], dactivation, order, weights)
    assert dweights is not None
    dx = combine(grouped_input_gradient(dhidden, gate_up, order), order, None, dy.shape[0])
    ddown = grouped_weight_gradient(dy, weighted, order, down_buffer, accumulate, gathered="dout")
    return dx, ddown if down_buffer is None else None, dweights, (dhidden, order)


def moe_mlp_backward_up_weights(
    arguments: list[Tensor],
    saved: list[Tensor],
    pending: tuple[Tensor, RowOrder],
    gate_up_buffer: Tensor | None,
    accumulate: bool,
) -> Tensor | None:
    """See ``main_grads.FusedMoE``."""
    dhidden, order = pending
    x = arguments[0].contiguous()
    dgate_up = grouped_weight_gradient(dhidden, x, order, gate_up_buffer, accumulate, gathered="x")
    return dgate_up if gate_up_buffer is None else None


@torch.library.custom_op("optimus_sycl::moe_mlp", mutates_args=())
def _moe_mlp(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The composed operation on cpu tensors; the composition itself is csrc/sycl/moe_mlp.hpp on both devices."""
    x, gate_up, down, weights, indices = (t.contiguous() for t in (x, gate_up, down, weights, indices))
    y, hidden = torch.empty_like(x), x.new_empty(indices.numel(), gate_up.shape[1])
    _run("moe_mlp", x, gate_up, down, weights, indices, y, hidden)
    return y, hidden


@_moe_mlp.register_fake
def _(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(indices.numel(), gate_up.shape[1])


@torch.library.custom_op("optimus_sycl::moe_mlp_backward", mutates_args=())
def _moe_mlp_backward(
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, indices: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    saved = [t.contiguous() for t in (dy, x, gate_up, down, weights, indices, hidden)]
    dx, dgate_up, ddown, dweights = (torch.empty_like(t) for t in saved[1:5])
    _run("moe_mlp_backward", *saved, dx, dgate_up, ddown, dweights)
    return dx, dgate_up, ddown, dweights


@_moe_mlp_backward.register_fake
def _(
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, indices: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return tuple(t.new_empty(t.shape) for t in (x, gate_up, down, weights))  # type: ignore[return-value]


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    keep_for_backward(ctx, inputs, output[1:])


@reverse_mode_only("moe_mlp")
def _backward(ctx: Any, dy: Tensor | None, _dhidden: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None, None, None
    return (*_moe_mlp_backward(dy, *ctx.saved_tensors), None)


_moe_mlp.register_autograd(_backward, setup_context=_setup_context)
refuse("optimus_sycl::moe_mlp_backward")


def _run(name: str, *arguments: Tensor | None) -> None:
    """Runs one operation of csrc/sycl/table.hpp; None stands for an argument left out. Outputs are written in place."""
    first = arguments[0]
    assert first is not None
    tensors = [first.new_empty(0) if t is None else t.detach() for t in arguments]
    if others := {str(t.device) for t in tensors} - {str(first.device)}:
        raise ValueError(f"{name}: the first argument is on {first.device} but others are on {sorted(others)}")
    if first.device.type == "xpu":
        torch.ops.optimus.sycl_run(name, tensors)
    elif first.device.type == "cpu":
        _runtime().run(name, tensors)
    else:
        raise ValueError(f"{name}: SYCL kernels run on xpu and cpu tensors, not {first.device.type}")


class _Array(ctypes.Structure):
    """csrc/sycl/launcher.hpp: Array."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("dims", ctypes.c_int32),
        ("sizes", ctypes.c_int64 * 4),
        ("strides", ctypes.c_int64 * 4),
    )


def _array(tensor: Tensor) -> _Array:
    four = ctypes.c_int64 * 4
    if tensor.dim() > 4:
        raise ValueError(f"a tensor of {tensor.dim()} dimensions; SYCL kernels take at most 4")
    dtype = _DTYPES.get(tensor.dtype, -1)
    return _Array(tensor.data_ptr(), dtype, tensor.dim(), four(*tensor.shape), four(*tensor.stride()))


class _Runtime:
    """The host library, built on demand, and the SYCL queue behind it."""

    def __init__(self, kernels: Path = _SOURCES) -> None:
        if error := cpu_device_error():
            from megatron.optimus.ops.backend import BackendUnavailableError

            raise BackendUnavailableError(f"the SYCL kernels cannot run on cpu: {error}")
        self._library = ctypes.CDLL(str(_build_library()))
        self._handle = ctypes.c_void_p()
        opencl = _library_folder("intel-opencl-rt", "libintelocl.so") / "libintelocl.so"
        self.device = self._call("open", str(kernels).encode(), str(opencl).encode(), ctypes.byref(self._handle))

    def configure(self, group_items: int, block_slots: int, tile: int, check_contents: bool) -> None:
        numbers = (ctypes.c_int64(int(n)) for n in (group_items, block_slots, tile, check_contents))
        self._call("configure", self._handle, *numbers)

    def run(self, name: str, tensors: list[Tensor]) -> None:
        arrays = (_Array * len(tensors))(*(_array(t) for t in tensors))
        self._call("run", self._handle, name.encode(), arrays, ctypes.c_size_t(len(tensors)))

    def _call(self, function: str, *arguments: Any) -> str:
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        size = ctypes.c_size_t(_MESSAGE_BYTES)
        status = getattr(self._library, f"optimus_sycl_{function}")(*arguments, message, size)
        text = message.value.decode(errors="replace")
        if status:
            raise ValueError(text) if status == 1 else RuntimeError(f"SYCL: {text}")
        return text


@functools.cache
def _runtime() -> _Runtime:
    return _Runtime()


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _library_folder(package: str, library: str) -> Path:
    for file in importlib.metadata.files(package) or ():
        if file.name == library:
            return Path(str(file.locate())).resolve().parent
    raise RuntimeError(f"package {package} holds no {library}; reinstall it")


def _build_library() -> Path:
    """Compiles csrc/sycl/run_time_route.cpp into build/sycl, once per state of the sources and of the SYCL package."""
    lib = _library_folder("intel-sycl-rt", "libsycl.so")
    parts = [path.read_bytes() for path in sorted(_SOURCES.glob("*.[hc]pp"))]
    parts += [str(lib).encode(), importlib.metadata.version("intel-sycl-rt").encode()]
    target = _BUILD / f"run_time_route_{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"
    if target.exists():
        return target
    _BUILD.mkdir(parents=True, exist_ok=True)
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", str(_SOURCES / "run_time_route.cpp")]
    command += ["-I", str(lib.parent / "include"), "-L", str(lib), "-lsycl", f"-Wl,-rpath,{lib}"]
    with tempfile.TemporaryDirectory(dir=_BUILD) as folder:  # renamed when whole: several processes may build at once
        made = Path(folder) / target.name
        result = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"{_SOURCES / 'run_time_route.cpp'} does not compile:\n{result.stderr}")
        os.replace(made, target)
    return target
