"""Which implementation runs an operation: one choice per device and dtype, said once, never made silently worse.

``auto`` takes the fastest implementation present. A part that is missing (no compiler at installation, no triton) is
named in a warning together with its remedy; asking for it explicitly raises.
"""

from __future__ import annotations

import enum
import functools
import importlib
import logging

import torch

logger = logging.getLogger("optimus")

_HALF = (torch.bfloat16, torch.float16)


class Backend(str, enum.Enum):
    """Implementations of the expert operations."""

    AUTO = "auto"
    REFERENCE = "reference"  # plain PyTorch: every device and dtype, the specification
    CPU = "cpu"  # C++ (csrc/cpu): float32, bfloat16, float16
    TRITON = "triton"  # NVIDIA GPUs: bfloat16, float16
    SYCL = "sycl"  # Intel GPUs (csrc/sycl): float32, bfloat16, float16; cpu tensors too, for tests


class BackendUnavailableError(ValueError):
    """The backend asked for cannot run here; the message says what is missing and how to get it."""


_selected = Backend.AUTO


def set_backend(backend: Backend | str) -> None:
    """Fixes the backend of every later call; ``auto`` gives the choice back.

    Raises ValueError for an unknown name. Whether the backend can run is checked when an operation meets a device and
    dtype: it then raises BackendUnavailableError rather than run something else.
    """
    global _selected  # noqa: PLW0603  one process-wide choice is the point
    try:
        _selected = Backend(backend)
    except ValueError:
        names = ", ".join(b.value for b in Backend)
        raise ValueError(f"unknown backend {backend!r}; use one of {names}") from None


def get_backend() -> Backend:
    """The backend last set (``auto`` at start)."""
    return _selected


def resolve(device: torch.device, dtype: torch.dtype) -> Backend:
    """The backend that runs an operation on these tensors. Raises BackendUnavailableError."""
    return _resolve(_selected, device.type, dtype)


def runs_triton(device: torch.device) -> bool:
    """Whether the small fp32 operations around the experts (the router) run in Triton on this device.

    They follow the experts' backend: Triton wherever that runs for bfloat16, else the reference.
    """
    return _selected in (Backend.AUTO, Backend.TRITON) and _triton_error(device.type) is None


@functools.cache
def _resolve(selected: Backend, device_type: str, dtype: torch.dtype) -> Backend:
    where = f"{device_type} {str(dtype).removeprefix('torch.')}"
    if selected is not Backend.AUTO:
        obstacle = _obstacle(selected, device_type, dtype)
        if obstacle:
            raise BackendUnavailableError(f"backend {selected.value!r} cannot run on {where}: {obstacle}")
        logger.info("expert kernels on %s: %s (as set)", where, selected.value)
        return selected
    native = {"cpu": Backend.CPU, "meta": Backend.CPU, "xpu": Backend.SYCL}.get(device_type, Backend.TRITON)
    obstacle = _obstacle(native, device_type, dtype)
    if obstacle is None:
        logger.info("expert kernels on %s: %s", where, native.value)
        return native
    logger.warning("expert kernels on %s: reference, which is slower, because %s", where, obstacle)
    return Backend.REFERENCE


def _obstacle(backend: Backend, device_type: str, dtype: torch.dtype) -> str | None:
    """Why a backend cannot run, with the remedy; None if it can."""
    if backend is Backend.CPU:
        if device_type not in ("cpu", "meta"):
            return f"it runs on cpu tensors, not {device_type}"
        if dtype not in (torch.float32, *_HALF):
            return "it has float32, bfloat16 and float16 only; the reference runs the rest"
        return compiled_library_error()
    if backend is Backend.TRITON:
        if dtype not in _HALF:
            return "it has bfloat16 and float16 only; the reference runs the rest"
        return _triton_error(device_type)
    return _sycl_error(device_type, dtype) if backend is Backend.SYCL else None


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
    return None


@functools.cache
def _triton_error(device_type: str) -> str | None:
    try:
        triton = importlib.import_module("triton")
    except ImportError:
        return "triton is not installed; 'pip install triton' (it comes with torch's CUDA builds)"
    if device_type != "cuda" and not triton.knobs.runtime.interpret:
        return f"it runs on cuda tensors, not {device_type}"
    return None


def _sycl_error(device_type: str, dtype: torch.dtype) -> str | None:
    from megatron.optimus.ops import sycl

    if dtype not in (torch.float32, *_HALF):
        return "it has float32, bfloat16 and float16 only; the reference runs the rest"
    if device_type not in ("xpu", "cpu"):
        return f"it runs on xpu and cpu tensors, not {device_type}"
    return sycl.xpu_error() if device_type == "xpu" else sycl.cpu_device_error()
