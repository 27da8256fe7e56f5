"""Backend ``sycl``: the SYCL kernels (csrc/sycl) on an Intel GPU, or on any x86-64 CPU through Intel's SYCL runtime.

For ``xpu`` tensors the kernels were compiled ahead of time and are reached through torch.ops. For ``cpu`` tensors the
very same files are compiled at the first use (JIT) by the SYCL runtime from PyPI and run on its CPU device: the way to
test them without a GPU, not a fast one. On both, one C++ table of operations checks every argument before it launches;
only ``_run`` here knows that there are two ways.

Shapes as in reference.py. Row tensors have N rows in expert order; the rows from ``offsets[E]`` on belong to no local
expert and hold nothing.
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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.optimus.ops.backend import BackendUnavailableError, compiled_library_error
from megatron.optimus.ops.fused_moe import register_moe_mlp

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
    """Sets the work-group sizes of later calls on cpu tensors; tests run every kernel at several.

    Args:
        group_items: work-items along the feature dimension and in scans, 1 to 1024.
        block_slots: slots counted by a work-group, 1 to 1024.
        tile: rows and columns of a matrix product's tile, 64 or 16 (256 or 64 work-items).
        check_contents: whether the values of indices and orders are checked before a launch. On a GPU they are not.

    Raises:
        ValueError: a size is out of range.
    """
    _runtime().configure(group_items, block_slots, tile, check_contents)


class CompactRowOrder(NamedTuple):
    """Rows of slots in expert order, as csrc/sycl/row_order.sycl makes it; all int32."""

    slots_N: Tensor  # slot of each row, foreign slots last
    rows_N: Tensor  # row of each slot, -1 for a foreign slot
    offsets: Tensor  # [E+3] first row of each expert, then R, then N twice
    counts_E: Tensor  # rows of each expert


def sort_slots(indices_TK: Tensor, num_experts: int) -> CompactRowOrder:
    """``reference.sort_slots``. On xpu, an index outside [-1, E) is sorted to the end and makes the results of
    ``combine`` NaN; on cpu it raises ValueError."""
    num_slots = indices_TK.numel()
    sizes = (num_slots, num_slots, num_experts + 3, num_experts)
    order = CompactRowOrder(*(indices_TK.new_empty(size, dtype=torch.int32) for size in sizes))
    _run("sort_slots", indices_TK, *order)
    return order


def expert_counts(indices_TK: Tensor, num_experts: int) -> Tensor:
    """``reference.expert_counts``."""
    return sort_slots(indices_TK, num_experts).counts_E.long()


def combine(rows_ND: Tensor, order: CompactRowOrder, weights_TK: Tensor | None, num_tokens: int) -> Tensor:
    """Sum over each token's local slots, in slot order and fp32, of weight (None: one) times row: [N, D] -> [T, D]."""
    y = rows_ND.new_empty(num_tokens, rows_ND.shape[1])
    _run("combine", rows_ND, order.rows_N, order.offsets, weights_TK, y)
    return y


def swiglu_backward(
    hidden_N2F: Tensor, grad_NF: Tensor, order: CompactRowOrder, weights_TK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of w * swiglu(hidden), w the slot's router weight, from the gradient of the activation without w.

    Returns dhidden [N, 2F], w * swiglu(hidden) [N, F], and dw [T, K] in fp32.
    """
    dhidden, weighted = torch.empty_like(hidden_N2F), torch.empty_like(grad_NF)
    dweights = torch.empty_like(weights_TK)
    arguments = (hidden_N2F, grad_NF, order.slots_N, order.offsets, weights_TK, dhidden, weighted, dweights)
    _run("swiglu_backward", *arguments)
    return dhidden, weighted, dweights


def grouped_input_gradient(
    dout: Tensor, weight_EOI: Tensor, order: CompactRowOrder, *, gathered: bool = False
) -> Tensor:
    """Each row times its expert's weight, fp32 sums: [N, O] -> [N, I]; or [T, O], gathered while it is read."""
    out = dout.new_empty(order.slots_N.numel(), weight_EOI.shape[2])
    _run("gemm_input_gradient", dout, weight_EOI, order.slots_N if gathered else None, order.offsets, out)
    return out


def grouped_weight_gradient(
    dout: Tensor,
    x: Tensor,
    order: CompactRowOrder,
    buffer: Tensor | None = None,
    accumulate: bool = True,
    *,
    gathered: str,
) -> Tensor:
    """dout.T @ x over the rows of each expert, [E, O, I] in x's dtype, added to ``buffer`` or written over it.

    ``gathered``: the operand, "dout" or "x", that is in token order [T, ...]; the other is [N, ...].
    """
    side = {"dout": "left", "x": "right"}[gathered]
    result = x.new_empty(order.counts_E.numel(), dout.shape[1], x.shape[1]) if buffer is None else buffer
    name = f"gemm_weight_gradient_{side}{'' if buffer is None or not accumulate else '_add'}"
    _run(name, dout, x, order.slots_N, order.offsets, result)
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


def moe_mlp_forward(
    x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, weights_TK: Tensor, indices_TK: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """See ``fused_moe.MoeKernels``. Saves the hidden rows [N, 2F] before SwiGLU."""
    arguments = (x_TD, gate_up_E2FD, down_EDF, weights_TK, indices_TK)
    if x_TD.device.type == "xpu":
        from megatron.optimus.ops import cpu  # registers autograd and shapes of torch.ops.optimus.moe_mlp

        return cpu.moe_mlp_forward(*(t.contiguous() for t in arguments))
    y, hidden = _moe_mlp(*arguments)
    return y, [hidden]


def moe_mlp_backward_inputs(
    dy_TD: Tensor, arguments: list[Tensor], saved: list[Tensor], down_buffer: Tensor | None, accumulate: bool
) -> tuple[Tensor, Tensor | None, Tensor, tuple[Tensor, CompactRowOrder]]:
    """See ``fused_moe.MoeKernels``. The kernels of csrc/sycl/moe_mlp.hpp, in the order that the halves ask for."""
    dy, gate_up, down, weights, indices = (t.contiguous() for t in (dy_TD, *arguments[1:]))
    order = sort_slots(indices, down.shape[0])
    dactivation = grouped_input_gradient(dy, down, order, gathered=True)  # before the router's weights
    dhidden, weighted, dweights = swiglu_backward(saved[0], dactivation, order, weights)
    dx = combine(grouped_input_gradient(dhidden, gate_up, order), order, None, dy.shape[0])
    ddown = grouped_weight_gradient(dy, weighted, order, down_buffer, accumulate, gathered="dout")
    return dx, ddown if down_buffer is None else None, dweights, (dhidden, order)


def moe_mlp_backward_up_weights(
    arguments: list[Tensor],
    saved: list[Tensor],
    pending: tuple[Tensor, CompactRowOrder],
    gate_up_buffer: Tensor | None,
    accumulate: bool,
) -> Tensor | None:
    """See ``fused_moe.MoeKernels``."""
    dhidden, order = pending
    x = arguments[0].contiguous()
    dgate_up = grouped_weight_gradient(dhidden, x, order, gate_up_buffer, accumulate, gathered="x")
    return dgate_up if gate_up_buffer is None else None


@torch.library.custom_op("optimus_sycl::moe_mlp", mutates_args=())
def _moe_mlp(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The layer on cpu tensors; on both devices it is composed in csrc/sycl/moe_mlp.hpp."""
    x, gate_up, down, weights, indices = (t.contiguous() for t in (x, gate_up, down, weights, indices))
    y, hidden = torch.empty_like(x), x.new_empty(indices.numel(), gate_up.shape[1])
    _run("moe_mlp", x, gate_up, down, weights, indices, y, hidden)
    return y, hidden


@torch.library.custom_op("optimus_sycl::moe_mlp_backward", mutates_args=())
def _moe_mlp_backward(
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, indices: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    saved = [t.contiguous() for t in (dy, x, gate_up, down, weights, indices, hidden)]
    dx, dgate_up, ddown, dweights = (torch.empty_like(t) for t in saved[1:5])
    _run("moe_mlp_backward", *saved, dx, dgate_up, ddown, dweights)
    return dx, dgate_up, ddown, dweights


register_moe_mlp("optimus_sycl::moe_mlp", _moe_mlp_backward)


def _run(name: str, *arguments: Tensor | None) -> None:
    """Runs one operation of csrc/sycl/operations.hpp, which writes its outputs in place; None: an argument left out."""
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
    """csrc/sycl/launch.hpp: Array."""

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
    """The host library (csrc/sycl/jit.cpp), built on demand, with its SYCL queue."""

    def __init__(self, kernels: Path = _SOURCES) -> None:
        if error := cpu_device_error():
            raise BackendUnavailableError(f"the SYCL kernels cannot run on cpu: {error}")
        self._library = ctypes.CDLL(str(_build_library()))
        self._handle = ctypes.c_void_p()
        opencl = _library_folder("intel-opencl-rt", "libintelocl.so") / "libintelocl.so"
        paths = (str(path).encode() for path in (kernels, opencl, _BUILD / "cache"))
        self.device = self._call("open", *paths, ctypes.byref(self._handle))

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
    """Compiles csrc/sycl/jit.cpp into build/sycl, once per state of the sources and of the SYCL package."""
    lib = _library_folder("intel-sycl-rt", "libsycl.so")
    parts = [path.read_bytes() for path in sorted(_SOURCES.glob("*.[hc]pp"))]
    parts += [str(lib).encode(), importlib.metadata.version("intel-sycl-rt").encode()]
    target = _BUILD / f"jit_{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"
    if target.exists():
        return target
    _BUILD.mkdir(parents=True, exist_ok=True)
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", str(_SOURCES / "jit.cpp")]
    command += ["-I", str(lib.parent / "include"), "-L", str(lib), "-lsycl", f"-Wl,-rpath,{lib}"]
    with tempfile.TemporaryDirectory(dir=_BUILD) as folder:  # renamed when whole: several processes may build at once
        made = Path(folder) / target.name
        result = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"{_SOURCES / 'jit.cpp'} does not compile:\n{result.stderr}")
        os.replace(made, target)
    return target
