"""What the tests of the SYCL kernels share. The kernels run on Intel's CPU device: it shows that they are right."""

from __future__ import annotations

import pytest

from megatron.optimus.ops import sycl

# group_items, block_slots, tile: the defaults, one work-item and one slot, and sizes that divide nothing
WORK_SIZES = [(256, 512, 64), (1, 1, 16), (24, 33, 16), (1024, 1000, 64)]


# Skipped only where neither package is installed: an installation that is broken or half there fails the tests.
needs_sycl = pytest.mark.skipif(
    not any(sycl._is_installed(package) for package in sycl._PACKAGES),
    reason="no SYCL runtime: pip install intel-sycl-rt==2026.2.0 intel-opencl-rt==2026.2.0",
)
