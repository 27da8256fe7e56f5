"""Every backend and the device its tests run on. Triton runs on a GPU, or on cpu tensors under its interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from tests.ops.sycl_device import needs_sycl

HAS_CUDA = torch.cuda.is_available()
ON_GPU = ("triton", "cuda")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_needs_triton = pytest.mark.skipif(not HAS_CUDA and not INTERPRETED, reason="neither CUDA nor Triton's interpreter")

needs_hopper = pytest.mark.skipif(not HAS_CUDA or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU")

TARGETS = [
    pytest.param("reference", "cpu", id="reference"),
    pytest.param("cpu", "cpu", id="cpu"),
    pytest.param("sycl", "cpu", id="sycl", marks=[needs_sycl]),
    pytest.param(
        "triton",
        "cpu" if INTERPRETED else "cuda",
        id="triton",
        marks=[_needs_triton, *([] if INTERPRETED else [pytest.mark.gpu])],
    ),
    pytest.param("cuda", "cuda", id="cuda", marks=[needs_hopper, pytest.mark.gpu]),
]


def skip_what_cannot_run(backend: str, dtype: torch.dtype) -> None:
    """The one dtype that a backend refuses on purpose; that it refuses is a test of its own."""
    if backend in ON_GPU and dtype == torch.float32:
        pytest.skip("16-bit only")
    if backend == "triton" and INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter has no bf16 product")
