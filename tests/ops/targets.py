"""Every backend and the device its tests run on. Triton runs on a GPU, or on cpu tensors under its interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

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


# Router, counts and copies of the backend "cuda" are Triton's (ops/backend.py): a second run would show nothing more.
ROUTER_TARGETS = [target for target in TARGETS if target.id != "cuda"]


def each_target_and_dtype(targets: Sequence[Any], dtypes: Iterable[torch.dtype]) -> pytest.MarkDecorator:
    """Values for backend, device and dtype, without the one that a backend refuses on purpose (that it refuses is a
    test of its own) and without bf16 under Triton's interpreter, which has no product in it."""
    found = []
    for target in targets:
        backend, device = target.values
        for dtype in dtypes:
            is_refused = backend in ON_GPU and dtype == torch.float32
            if not is_refused and not (backend == "triton" and INTERPRETED and dtype == torch.bfloat16):
                found.append(pytest.param(backend, device, dtype, id=f"{target.id}-{dtype}", marks=target.marks))
    return pytest.mark.parametrize(("backend", "device", "dtype"), found)
