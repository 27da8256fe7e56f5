"""Which implementation (backend) runs an operation: one choice for each device and dtype, logged once.

``auto`` takes the fastest backend present. One that is missing (no compiler at installation, no triton) is named in a
warning with its remedy; asking for it explicitly raises. Nothing slower runs silently.

A new backend is a member of ``Backend``, a module of kernels in ``_KERNELS`` (the comment there says what it provides),
a place in ``_NATIVE``, and a case in ``obstacle_of`` that tells why it cannot run.
"""

from __future__ import annotations

import enum
import functools
import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

logger = logging.getLogger("optimus")

_Function = TypeVar("_Function", bound=Callable[..., Any])
_HALF = (torch.bfloat16, torch.float16)
_NEWEST_COMPILED = "cpu_sum_copies"  # the operation added to csrc/bindings.cpp last


class Backend(str, enum.Enum):
    """Implementations of the expert operations."""

    AUTO = "auto"
    REFERENCE = "reference"  # plain PyTorch: every device and dtype, the specification
    CPU = "cpu"  # C++ (csrc/cpu): float32, bfloat16, float16
    TRITON = "triton"  # NVIDIA GPUs; AMD's, and Intel's with triton-xpu (not run on either): bfloat16, float16
    CUDA = "cuda"  # Hopper GPUs (csrc/cuda): the expert layer in bfloat16 and float16; the rest is Triton's
    SYCL = "sycl"  # Intel GPUs (csrc/sycl): float32, bfloat16, float16; cpu tensors too, for tests


# What ``auto`` tries, in this order, by type of device; elsewhere as on cuda.
_NATIVE = {
    "cpu": (Backend.CPU,),
    "meta": (Backend.CPU,),
    "cuda": (Backend.CUDA, Backend.TRITON),
    "xpu": (Backend.SYCL, Backend.TRITON),
}

# The module of each backend's kernels, called below autograd: fused_moe.MoeKernels and, but for cuda, router_topk,
# router_topk_backward, expert_counts and, if it has them, copy_rows and sum_copies, on contiguous arguments.
_KERNELS = {
    Backend.CPU: "megatron.optimus.ops.cpu",
    Backend.TRITON: "megatron.optimus.ops.triton.backend",
    Backend.CUDA: "megatron.optimus.ops.cuda",
    Backend.SYCL: "megatron.optimus.ops.sycl",
}


class BackendUnavailableError(ValueError):
    """The backend asked for cannot run here; the message says what is missing and how to get it."""


_selected = Backend.AUTO
_loaded: dict[Backend, ModuleType] = {}


def set_backend(backend: Backend | str) -> None:
    """Sets the backend of every later call.

    Args:
        backend: a ``Backend`` or its name; ``auto`` (the initial state) takes the fastest one present.

    Raises:
        ValueError: the name is unknown. Whether the backend can run is checked when an operation is called: that then
            raises BackendUnavailableError rather than run something else.
    """
    global _selected  # noqa: PLW0603  one process-wide choice is the point
    try:
        _selected = Backend(backend)
    except ValueError:
        names = ", ".join(b.value for b in Backend)
        raise ValueError(f"unknown backend {backend!r}; use one of {names}") from None


def get_backend() -> Backend:
    """Returns the backend last set (``auto`` at start)."""
    return _selected


def _constant_in_graphs(function: _Function) -> _Function:
    """torch.compiler.assume_constant_result, without importing the compiler, which every start would wait for.

    A compiled function keeps the backend of its first call. What is returned must be compared by ``==``: while torch
    2.13 traces, ``is`` is false of a member of an enum from here.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant_in_graphs
def resolve(device: torch.device, dtype: torch.dtype) -> Backend:
    """The backend that runs operations on rows of this device and dtype. Raises BackendUnavailableError."""
    return _resolve(_selected, device.type, dtype)


@_constant_in_graphs
def resolve_routing(device: torch.device) -> Backend:
    """The backend of the operations that do not depend on the experts' dtype: router (fp32) and counts.

    Chosen as for 16-bit rows, which every backend supports. Raises BackendUnavailableError.
    """
    return _resolve_routing(_selected, device.type)


def resolves_to_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``resolve`` would return Triton, without logging and without an error."""
    return _choose(_selected, device.type, dtype)[0] is Backend.TRITON


def kernels(backend: Backend) -> ModuleType:
    """The module that holds the kernels of a backend other than the reference, once a call resolved to it."""
    return _loaded[backend]


@functools.cache
def _resolve(selected: Backend, device_type: str, dtype: torch.dtype) -> Backend:
    where = f"{device_type} {str(dtype).removeprefix('torch.')}"
    backend, obstacle = _choose(selected, device_type, dtype)
    routing = _router(_choose(selected, device_type, torch.bfloat16)[0]).value
    if obstacle is not None and selected is not Backend.AUTO:
        raise BackendUnavailableError(f"backend {selected.value!r} cannot run on {where}: {obstacle}")
    if obstacle is None:
        how = "" if selected is Backend.AUTO else " (as set)"
        if selected is Backend.AUTO and backend is Backend.TRITON:
            first = native(device_type)[0]
            how = "" if first is backend else f" (not {first.value}: {obstacle_of(first, device_type, dtype)})"
        if backend is Backend.TRITON:
            from megatron.optimus.ops.triton import tiles

            how = f" with {tiles.summary(torch.device(device_type))}{how}"
        if backend is Backend.CPU:
            how = f" on {_loaded[backend].instruction_sets()[0]}{how}"
        logger.info("expert kernels on %s: %s%s; router: %s", where, backend.value, how, routing)
    else:
        is_first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        message = "expert kernels on %s: reference, which is slower, because %s; router: %s"
        logger.log(logging.WARNING if is_first else logging.INFO, message, where, obstacle, routing)  # not once a rank
    return backend


@functools.cache
def _resolve_routing(selected: Backend, device_type: str) -> Backend:
    backend, obstacle = _choose(selected, device_type, torch.bfloat16)
    if obstacle is not None and selected is not Backend.AUTO:
        raise BackendUnavailableError(f"backend {selected.value!r} cannot route on {device_type}: {obstacle}")
    if _router(backend) is not backend:
        backend = _choose(_router(backend), device_type, torch.bfloat16)[0]
    return backend


def _router(backend: Backend) -> Backend:
    """The backend whose router another uses."""
    return Backend.TRITON if backend is Backend.CUDA else backend


def _choose(selected: Backend, device_type: str, dtype: torch.dtype) -> tuple[Backend, str | None]:
    """Returns the backend, and why it is not the one that was set or that is the device's first."""
    obstacles = {}
    for backend in native(device_type) if selected is Backend.AUTO else (selected,):
        why = obstacle_of(backend, device_type, dtype)
        if why is None:
            if backend in _KERNELS:
                _loaded[backend] = _module_of(backend)
            return backend, None
        obstacles[backend] = why
    if Backend.SYCL in obstacles and Backend.TRITON in obstacles:  # two ways out; CUDA has Triton as its own condition
        return Backend.REFERENCE, "; ".join(f"{backend.value}: {why}" for backend, why in obstacles.items())
    return Backend.REFERENCE, why


def _module_of(backend: Backend) -> ModuleType:
    """Imports a backend's kernels, by name: they import this file and what autograd needs."""
    return importlib.import_module(_KERNELS[backend])


def native(device_type: str) -> tuple[Backend, ...]:
    """Returns what ``auto`` tries for a type of device, in this order."""
    if device_type == "cuda" and torch.version.hip is not None:  # AMD GPUs
        return (Backend.TRITON,)
    return _NATIVE.get(device_type, _NATIVE["cuda"])


def obstacle_of(backend: Backend, device_type: str, dtype: torch.dtype) -> str | None:
    """Returns why a backend cannot run, with the remedy; None if it can."""
    if backend in (Backend.AUTO, Backend.REFERENCE):
        return None
    if device_type == "mps":
        return "there are none for Apple GPUs; --device cpu has the CPU's"
    if backend in (Backend.TRITON, Backend.CUDA):
        if dtype not in _HALF:
            return "it has bfloat16 and float16 only; the reference runs the rest"
        return _triton_error(device_type) if backend is Backend.TRITON else _cuda_error(device_type)
    if dtype not in (torch.float32, *_HALF):
        return "it has float32, bfloat16 and float16 only; the reference runs the rest"
    return _cpu_error(device_type) if backend is Backend.CPU else _sycl_error(device_type)


def _cpu_error(device_type: str) -> str | None:
    return compiled_library_error() if device_type in ("cpu", "meta") else f"it runs on cpu tensors, not {device_type}"


@functools.cache
def compiled_library_error() -> str | None:
    """Loads the compiled operations (csrc/); returns why they cannot be loaded, or None."""
    try:
        importlib.import_module("megatron.optimus.ops._C")
    except ImportError as error:
        return (
            f"the compiled operations are missing or do not fit this torch ({error}); with a C++ compiler present run "
            "'python setup.py build_ext --inplace' in the source tree, or 'pip install --no-build-isolation .'"
        )
    if not hasattr(torch.ops.optimus, _NEWEST_COMPILED):
        return "the compiled operations are older than the source tree; run 'python setup.py build_ext --inplace' again"
    return None


@functools.cache
def _triton_error(device_type: str) -> str | None:
    try:
        triton = importlib.import_module("triton")
    except ImportError:
        return "triton is not installed; 'pip install triton' (it comes with torch's CUDA builds)"
    if torch.version.hip is not None and "amd" not in triton.backends.backends:
        return (
            f"this triton ({triton.__version__}) has no backend for AMD GPUs; install that of this torch's ROCm build"
        )
    if device_type == "xpu":
        return _triton_for_intel_error(triton)
    if device_type != "cuda" and not triton.knobs.runtime.interpret:
        return f"it runs on cuda and xpu tensors, not {device_type}"
    return None


def _triton_for_intel_error(triton: ModuleType) -> str | None:
    """Triton for NVIDIA GPUs has the same module name as Triton for Intel's, and other hardware is called xpu too."""
    remedy = "install triton-xpu in its place, in the version that this torch's XPU build asks for"
    if "intel" not in triton.backends.backends:
        return f"this triton ({triton.__version__}) has no backend for Intel GPUs; {remedy}"
    try:
        target = triton.runtime.driver.active.get_current_target().backend
    except Exception as error:  # whatever a driver raises that finds no device, or no compiler for its own helpers
        why = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        return f"triton's backend for Intel GPUs does not start ({why}); see that it has a C++ compiler and the driver"
    return None if target == "xpu" else f"triton compiles for {target} here, not for Intel GPUs; {remedy}"


@functools.cache
def _cuda_error(device_type: str) -> str | None:
    if device_type != "cuda":
        return f"it runs on cuda tensors, not {device_type}"
    if torch.version.hip is not None:
        return "it is for NVIDIA's Hopper GPUs, and this torch is built for ROCm; use triton"
    capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    if capabilities != {(9, 0)}:
        found = ", ".join(f"{major}.{minor}" for major, minor in sorted(capabilities))
        return f"it needs Hopper GPUs, compute capability 9.0, and those here have {found}; use triton"
    if error := compiled_library_error() or _triton_error(device_type):
        return error
    if not _module_of(Backend.CUDA).is_built():
        return (
            "the compiled operations were built without csrc/cuda; with nvcc and a CUDA build of torch run "
            "'python setup.py build_ext --inplace' in the source tree, or 'pip install --no-build-isolation .'"
        )
    return None


def _sycl_error(device_type: str) -> str | None:
    if device_type not in ("xpu", "cpu"):
        return f"it runs on xpu and cpu tensors, not {device_type}"
    sycl = _module_of(Backend.SYCL)
    return sycl.xpu_error() if device_type == "xpu" else sycl.cpu_device_error()
