"""Microseconds of RMSNorm, alone, with a sum before it and with the rotary embedding, by our operations and torch's.

    python benchmarks/norms.py                   one GPU
    python benchmarks/norms.py --device cpu      tiny: that it runs; both are torch's there

Medians of 20 calls, forward and backward, after a write of 256 MiB that empties the caches. ``memory`` is what moving
the bytes once takes at 4.2 TB/s: rows read and written forward; rows and gradient read, gradient written backward; with
the sum two of each are read and written forward, and one more gradient is read backward.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from device_check import require_device

from megatron.optimus import ops

REPEATS, EPS, BYTES_A_MICROSECOND = 20, 1e-5, 4.2e6
ROWS = [(65536, 1024), (8192, 2048), (32768, 2048), (8192, 4096)]  # rows, width
HEADS = [(64, 1024, 16, 64, True), (2, 4096, 16, 128, False), (8, 4096, 32, 128, True)]  # B, S, H, d, over each head


def microseconds(call: Callable[[], Any], device: torch.device) -> float:
    """The median time of a call."""
    cold, found = torch.empty(2**26, device=device), []
    for _ in range(REPEATS + 3):
        cold.zero_()
        if device.type == "cpu":
            began = time.perf_counter()
            call()
            found.append((time.perf_counter() - began) * 1e6)
            continue
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        torch.cuda.synchronize()
        found.append(first.elapsed_time(last) * 1e3)
    return statistics.median(found[3:])


def both_ways(name: str, operation: Callable[..., Any], leaves: list[Tensor], *grads: Tensor) -> str:
    """Forward and backward of an operation on some leaves."""
    out = operation(*leaves)
    forward = microseconds(lambda: operation(*leaves), grads[0].device)
    backward = microseconds(lambda: torch.autograd.grad(out, leaves, grads, retain_graph=True), grads[0].device)
    return f"  {name:<8} {forward:7.0f} / {backward:7.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args()
    require_device(parser, args.device)
    device, divisor = torch.device(args.device), 64 if args.device == "cpu" else 1
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    for rows, width in ROWS:
        x, grad = (torch.randn(rows // divisor, width, **options) for _ in range(2))
        leaves = [x.requires_grad_(), torch.ones(width, **options).requires_grad_()]
        print(f"norm of {len(x)} rows of {width}; memory {x.numel() * 4 / BYTES_A_MICROSECOND:.0f} / "
              f"{x.numel() * 6 / BYTES_A_MICROSECOND:.0f}")  # fmt: skip
        print(both_ways("ours", lambda x, w: ops.rms_norm(x, w, EPS), leaves, grad))
        print(both_ways("torch", lambda x, w: F.rms_norm(x, w.shape, w, EPS), leaves, grad))
        both = [x, torch.randn_like(x).requires_grad_(), leaves[1]]
        print(f"sum and norm of them; memory {x.numel() * 8 / BYTES_A_MICROSECOND:.0f} / "
              f"{x.numel() * 8 / BYTES_A_MICROSECOND:.0f}")  # fmt: skip
        print(both_ways("ours", lambda x, y, w: ops.add_rms_norm(x, y, w, EPS), both, grad, grad))
        print(both_ways("apart", lambda x, y, w: (t := x + y, ops.rms_norm(t, w, EPS)), both, grad, grad))
    for batch, whole_length, heads, width, per_head in HEADS:
        length = whole_length // divisor
        x, grad = (torch.randn(batch, length, heads, width, **options) for _ in range(2))
        weight = torch.ones(width if per_head else heads * width, **options)
        leaves, tables = [x.requires_grad_(), weight.requires_grad_()], torch.randn(2, length, width, device=device)

        def separate(x: Tensor, w: Tensor, tables: Tensor = tables) -> Tensor:
            normed = F.rms_norm(x if len(w) == x.shape[-1] else x.flatten(-2), w.shape, w, EPS).view(x.shape)
            return ops.rotate(normed.transpose(1, 2), *tables)

        print(f"norm over {'each head' if per_head else 'all heads'} and rotation of {batch * length} tokens, {heads} "
              f"heads of {width}; memory {x.numel() * 4 / BYTES_A_MICROSECOND:.0f} / "
              f"{x.numel() * 6 / BYTES_A_MICROSECOND:.0f}")  # fmt: skip
        print(both_ways("ours", lambda x, w, t=tables: ops.norm_rotate(x, w, EPS, *t), leaves, grad.transpose(1, 2)))
        print(both_ways("torch", separate, leaves, grad.transpose(1, 2)))


if __name__ == "__main__":
    main()
