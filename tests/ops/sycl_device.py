"""What the tests of the SYCL kernels share. The kernels run on Intel's CPU device: it shows that they are right.

python -m tests.ops.sycl_device    compiles them; `make test` does it beside the type checks
"""

from __future__ import annotations

import pytest
import torch

from megatron.optimus import ops
from megatron.optimus.ops import sycl
from tests.ops.cases import CASES, make_inputs, values_and_gradients

# group_items, block_slots, tile: the defaults, one work-item and one slot, and sizes that divide nothing
WORK_SIZES = [(256, 512, 64), (1, 1, 16), (24, 33, 16), (1024, 1000, 64)]


# Skipped only where neither package is installed: an installation that is broken or half there fails the tests.
needs_sycl = pytest.mark.skipif(
    not any(sycl._is_installed(package) for package in sycl._PACKAGES),
    reason="no SYCL runtime: pip install intel-sycl-rt==2026.2.0 intel-opencl-rt==2026.2.0",
)


def compile_all() -> None:
    """Compiles every kernel file into build/sycl, where later processes find them."""
    if sycl.cpu_device_error() is not None:
        return  # tests skip or fail, and say why
    ops.set_backend("sycl")
    x, gate_up, down, weights, indices, dy = make_inputs(CASES["one_token"], torch.float32)
    values_and_gradients(ops.moe_mlp, [x, gate_up, down, weights, indices, dy])
    routing, logits, _ = ops.route(x.requires_grad_(), down[:, :, 0].contiguous(), 2)
    (routing.weights_TK.sum() + logits.sum()).backward()


if __name__ == "__main__":
    compile_all()
