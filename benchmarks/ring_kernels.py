"""Ring attention's kernels on one GPU, at the shapes of a long sequence, without the wire.

    python benchmarks/ring_kernels.py --out ring_kernels_h200               131,072 tokens, 16 heads of width 128, bf16
    python benchmarks/ring_kernels.py --device cpu --tokens 256             that it runs

In order: the ideal, which is causal attention over the whole sequence with half of the heads (a rank's work on two
ranks, whatever the kind of context parallelism); each kernel that the ring can call, on the three kinds of parts; the
merging of two results; and what a rank of the ring does in a forward and in a backward (ring_attention.py), where
a copy on the same GPU stands for what other ranks send. Then what sizes cost that come for the first time, which
matters where documents cut a sequence. Medians of three, after one that is not counted. One JSON object a line, and all
of them in OUT.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installation

from device_check import require_device
from provenance import commit

from megatron.optimus.layers import partial_attention as parts
from megatron.optimus.parallel import ring_attention as ring
from megatron.optimus.platform import device as devices

HEADS, WIDTH = 16, 128
RANKS = ((2, 0), (2, 1), (8, 0), (8, 5))  # (ranks, rank): one that mostly cuts queries and one that mostly cuts keys
NEW_SIZES = (1000, 1003, 1111, 2049, 2222, 3001)


class Bench:
    def __init__(self, device: torch.device, tokens: int) -> None:
        self.device, self.tokens = device, tokens
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.kernels = [parts.Kernel.CPU] if device.type == "cpu" else [parts.Kernel.CUDNN, parts.Kernel.FLASH]
        self.results: list[dict[str, Any]] = []

    def note(self, what: str, **figures: Any) -> None:
        self.results.append({"what": what, **figures})
        print(json.dumps(self.results[-1]), flush=True)

    def random(self, heads: int, length: int) -> Tensor:
        return torch.randn(1, heads, length, WIDTH, device=self.device, dtype=self.dtype)

    def once(self, run: Callable[[], Any]) -> float:
        devices.synchronize(self.device)
        began = time.perf_counter()
        run()
        devices.synchronize(self.device)
        return (time.perf_counter() - began) * 1e3

    def ms(self, run: Callable[[], Any]) -> float:
        run()
        return round(statistics.median(self.once(run) for _ in range(3)), 3)

    def ideal(self) -> float:
        """Forward and backward of the whole sequence with half of the heads."""
        q, k, v = (self.random(HEADS // 2, self.tokens).requires_grad_() for _ in range(3))
        grad = self.random(HEADS // 2, self.tokens)

        def whole() -> None:
            q.grad = k.grad = v.grad = None
            F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(grad)

        best = self.ms(whole)
        choice = torch._fused_sdp_choice(q, k, v, None, 0.0, True)
        self.note("ideal: whole, heads/2, torch's choice", ms=best, choice=choice)
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            if self.device.type != "cpu":
                with sdpa_kernel(backend):
                    self.note(f"ideal with {backend.name}", ms=self.ms(whole))
        return best

    def each_part(self) -> None:
        length = self.tokens // 2
        q, k, v, grad = (self.random(HEADS, length) for _ in range(4))

        def half(x: Tensor) -> Tensor:
            return x[:, :, : length // 2]

        cases = (
            ("causal", (q, k, v), True),
            ("all queries, half the keys", (q, half(k), half(v)), False),
            ("half the queries, all keys", (half(q), k, v), False),
        )
        choices = {
            name: parts.choose_kernel(*(x.contiguous() for x in args), causal, False).name
            for name, args, causal in cases
        }
        self.note("torch's choice for a part", **choices)
        for kernel, (name, args, causal) in ((kernel, case) for kernel in self.kernels for case in cases):
            with chosen(kernel):
                self._part(f"{kernel.name} {name}", args, causal, grad)
        lse, more = torch.zeros(1, HEADS, length, device=self.device), self.random(HEADS, length)
        out = torch.zeros(more.shape, device=self.device)
        self.note("merge of all queries", ms=self.ms(lambda: parts.merge(out, lse, more, lse + 1)))

    def _part(self, name: str, args: tuple[Tensor, Tensor, Tensor], causal: bool, grad: Tensor) -> None:
        out, lse = parts.attend_part(*args, causal)
        forward = self.ms(lambda: parts.attend_part(*args, causal))
        rows = grad[:, :, : out.shape[2]]
        backward = self.ms(lambda: parts.attend_part_backward(rows, *args, out, lse, causal))
        flops = (
            (self.tokens // 2) ** 2 / 2 * HEADS * WIDTH * 4
        )  # of a forward; the backward has five products to its two
        rates = {"forward_tflops": flops / forward / 1e9, "backward_tflops": 2.5 * flops / backward / 1e9}
        self.note(
            name, forward_ms=forward, backward_ms=backward, **{key: round(rate, 1) for key, rate in rates.items()}
        )

    def one_rank(self, size: int, rank: int, kernel: parts.Kernel, ideal: float) -> None:
        q, grad = (self.random(HEADS, self.tokens // size) for _ in range(2))
        kv = torch.stack([self.random(HEADS, self.tokens // size) for _ in range(2)])
        lse = torch.empty(q.shape[:3], device=self.device)
        group: Any = None
        with chosen(kernel), without_wire(size, rank):
            out = ring._forward(q, kv, lse, group, None)
            forward = self.ms(lambda: ring._forward(q, kv, lse, group, None))
            devices.reset_peak_memory(self.device)
            before = devices.memory_allocated(self.device)
            backward = self.ms(lambda: ring._backward(grad, q, kv, out, lse, group, None))
            peak = devices.peak_memory(self.device) - before
        both = forward + backward
        self.note(
            f"ring of {size}, rank {rank}, {kernel.name}",
            forward_ms=forward,
            backward_ms=backward,
            together_ms=round(both, 2),
            over_ideal=round(both / (ideal * 2 / size), 4),
            backward_peak_gib=round(peak / 2**30, 3),
        )

    def new_sizes(self, kernel: parts.Kernel) -> None:
        firsts, again = [], []
        for length in NEW_SIZES:
            q, k, v, grad = (self.random(HEADS, length) for _ in range(4))

            def both(args: tuple[Tensor, ...] = (q, k, v), grad: Tensor = grad) -> None:
                parts.attend_part_backward(grad, *args, *parts.attend_part(*args, True), True)

            with chosen(kernel):
                firsts.append(round(self.once(both), 2))
                again.append(round(self.once(both), 2))
        self.note(f"new sizes, {kernel.name}", first_ms=firsts, again_ms=again)


@contextmanager
def chosen(kernel: parts.Kernel) -> Iterator[None]:
    """Every part is computed by this kernel."""
    with mock.patch.object(parts, "choose_kernel", lambda *args: kernel), torch.no_grad():
        yield


@contextmanager
def without_wire(size: int, rank: int) -> Iterator[None]:
    """One process is this rank of the ring; a copy of what it sends comes in."""

    def exchange(x: Tensor, out: Tensor, step: int, group: Any) -> SimpleNamespace:
        out.copy_(x)
        return SimpleNamespace(wait=lambda: out)

    world = SimpleNamespace(get_rank=lambda _: rank, get_world_size=lambda _: size)
    with mock.patch.object(ring, "dist", world), mock.patch.object(ring, "start_ring_shift", exchange):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tokens", type=int, default=131072, help="of the whole sequence, a multiple of 16")
    parser.add_argument("--out", help="OUT.json")
    args = parser.parse_args()
    require_device(parser, args.device)
    device = torch.device(args.device)
    bench = Bench(device, args.tokens)
    about = {"device": devices.device_name(device), "torch": torch.__version__, "tokens": args.tokens}
    about |= {"cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None, "commit": commit()}
    print(json.dumps(about), flush=True)
    ideal = bench.ideal()
    bench.each_part()
    for size, rank in RANKS:
        for kernel in bench.kernels:
            bench.one_rank(size, rank, kernel, ideal)
    for kernel in bench.kernels:
        bench.new_sizes(kernel)
    if args.out:
        Path(f"{args.out}.json").write_text(json.dumps(about | {"results": bench.results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
