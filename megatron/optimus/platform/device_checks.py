"""Checks of one device before a run: products with known results, a memory pattern, and how fast memory is.

Each check raises ``BadDevice`` with what it found, its limit and the remedy, or returns figures by name. The numbers
are small integers, which bf16 and fp32 hold exactly in any order of summation: a result is right or wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from megatron.optimus.platform import device as devices

_SECONDS = 1.0  # of products of each dtype: a fault that comes with heat or load shows rarely in the first
_BLOCK_BYTES = 1 << 30  # of the memory pattern
_SHARE = 0.9  # of the free memory that is tested; the rest is for the comparison
_HOST_BYTES = 64 << 20  # tested on a CPU, whose memory the machine's own ECC watches
_COPIES = 5


class BadDevice(Exception):
    """A device computed or kept something wrong."""


def check_products(device: torch.device) -> dict[str, float]:
    """Multiplies integer matrices in bf16 and fp32 for a second each; returns TFLOP/s.

    A's and B's entries are -1, 0 and 1, so that entries of C = A B are below 256, up to where bf16 holds every integer
    (11 standard deviations at the size used). The product is right if C v = A (B v) for a random v of such entries,
    computed without matrix products (Freivalds 1977: a wrong entry is missed by half of all v at most), and if all
    later products are equal to the first.
    """
    size = 2048 if device.type != "cpu" else 256
    generator = torch.Generator().manual_seed(1234)
    entries = [torch.randint(-1, 2, (size, size), generator=generator).to(device) for _ in range(2)]
    vectors = torch.randint(-1, 2, (8, size), generator=generator).to(device, torch.float32)
    figures = {}
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (entry.to(dtype) for entry in entries)
        first, wrong, count, began = torch.mm(a, b), torch.zeros((), dtype=torch.int64, device=device), 0, 0.0
        for v in vectors:
            expected = _times(a, _times(b, v))
            wrong += (_times(first, v) != expected).sum()
        devices.synchronize(device)
        began = time.perf_counter()
        while (spent := time.perf_counter() - began) < _SECONDS:
            for _ in range(8):
                wrong += (torch.mm(a, b) != first).sum()
            devices.synchronize(device)
            count += 8
        if found := int(wrong):
            raise BadDevice(
                f"products of {dtype} matrices of {size} x {size}: {found} wrong numbers in {count + 1} products, "
                "limit 0; take this device out of use"
            )
        figures[f"{str(dtype).removeprefix('torch.')}_tflops"] = 2 * size**3 * count / spent / 1e12
    return figures


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix.float() * vector).sum(1)


def check_memory(device: torch.device) -> dict[str, float]:
    """Fills most of the free memory with a pattern and then its complement, and reads both back; returns GiB tested."""
    free = devices.memory_info(device)[0] if device.type != "cpu" else _HOST_BYTES * 4
    size = min(_BLOCK_BYTES, max(1 << 20, free // 16)) // 4
    numbers = torch.arange(size, dtype=torch.int32, device=device)
    count = max(1, int(_SHARE * free / (4 * size)) - 3)  # the numbers themselves and two comparisons
    blocks = [numbers ^ (0x5A5A5A5A + block) for block in range(count)]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for is_complement in (False, True):
        for block, held in enumerate(blocks):
            key = 0x5A5A5A5A + block
            wrong += (held.bitwise_xor_(~key if is_complement else key) != numbers).sum()
            held.copy_(numbers).bitwise_xor_(~key)  # for the second round
    if found := int(wrong):
        tested = count * size * 4 / 2**30
        raise BadDevice(
            f"memory pattern: {found} of {2 * count * size:,} words wrong in {tested:.1f} GiB, limit 0; take this "
            "device out of use"
        )
    return {"tested_gib": count * size * 4 / 2**30}


def check_bandwidth(device: torch.device) -> dict[str, float]:
    """Times copies inside the device, and on an accelerator from and to pinned host memory; returns GB/s."""
    size = _BLOCK_BYTES if device.type != "cpu" else _HOST_BYTES
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    figures = {"memory_gb_s": 2 * size / _best_seconds(lambda: target.copy_(source), device) / 1e9}
    if device.type != "cpu":
        host = torch.empty(size // 4, dtype=torch.uint8, pin_memory=devices.pins_memory(device))
        part = target[: size // 4]
        figures["to_device_gb_s"] = size / 4 / _best_seconds(lambda: part.copy_(host), device) / 1e9
        figures["to_host_gb_s"] = size / 4 / _best_seconds(lambda: host.copy_(part), device) / 1e9
    return figures


def _best_seconds(action: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(1 + _COPIES):  # the first one allocates
        devices.synchronize(device)
        began = time.perf_counter()
        action()
        devices.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best
