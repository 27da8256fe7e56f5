"""The expert layer and dense projections in float8 beside bf16, forward and backward, on one GPU.

    python benchmarks/fp8_layer.py

Expert weights' gradients are added to fp32 buffers, as in training. Weights are quantized in every call, as with one
micro-batch a step, and in the last columns once in eight calls, as with eight. A time is the mean over --seconds of
calls without a pause, the precisions one after the other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installation

from device_check import require_device
from provenance import commit

from megatron.optimus import ops
from megatron.optimus.ops import fp8, fp8_experts

# Tokens, width, inner width, experts on this rank, experts per token.
LAYERS = {
    "mula-7b, T 16,384": (16384, 2048, 1024, 64, 8),
    "mula-7b, T 32,768": (32768, 2048, 1024, 64, 8),
    "mula-100b, 36 of 144 experts, T 32,768, 4 slots a token here": (32768, 3072, 1536, 36, 4),
}
MICRO_BATCHES = 8
PROJECTIONS = {"query, key, value": (2048, 3), "gate, up": (8192, 2)}  # width of one, how many; of 2,048 inputs


def seconds_of(call: Callable[[], object], seconds: float) -> float:
    """The mean time of a call, over about ``seconds``."""
    for _ in range(3):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    repeats = max(5, int(seconds * 1e3 / start.elapsed_time(end)))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats / 1e3


def in_a_step(call: Callable[[], object]) -> Callable[[], object]:
    """Several calls between which weights are constant."""

    def calls() -> None:
        with fp8.constant_weights():
            for _ in range(MICRO_BATCHES):
                call()

    return calls


def expert_layer(tokens: int, width: int, inner: int, experts: int, topk: int, seconds: float) -> tuple[float, ...]:
    """Seconds in bf16, in float8 and in float8 with constant weights, and the FLOPs of the products."""

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.5

    x, dy = made(tokens, width).requires_grad_(), made(tokens, width)
    weights = [made(experts, 2 * inner, width).requires_grad_(), made(experts, width, inner).requires_grad_()]
    buffers = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    main_grads = tuple(ops.MainGrad(buffer, lambda: None) for buffer in buffers)
    router_weights = torch.rand(tokens, topk, device="cuda").requires_grad_()
    indices = torch.rand(tokens, experts, device="cuda").topk(topk).indices.int()

    def call(layer: Callable[..., torch.Tensor]) -> Callable[[], object]:
        def both() -> None:
            y = layer(x, *weights, router_weights, indices, main_grads)
            torch.autograd.backward(y, dy)
            x.grad = router_weights.grad = None

        return both

    times = [seconds_of(call(layer), seconds) for layer in (ops.moe_mlp, fp8_experts.moe_mlp)]
    times.append(seconds_of(in_a_step(call(fp8_experts.moe_mlp)), seconds) / MICRO_BATCHES)
    return *times, 3 * 2 * tokens * topk * 3 * width * inner


def projections(tokens: int, inner: int, count: int, seconds: float) -> tuple[float, ...]:
    """As ``expert_layer``, of several projections of one input."""
    x = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weights = [
        (torch.randn(inner, 2048, device="cuda", dtype=torch.bfloat16) / 45).requires_grad_() for _ in range(count)
    ]
    grads = [torch.randn(tokens, inner, device="cuda", dtype=torch.bfloat16) for _ in range(count)]

    def in_bf16() -> object:
        return torch.autograd.grad([F.linear(x, weight) for weight in weights], [x, *weights], grads)

    def in_float8() -> object:
        return torch.autograd.grad(fp8.linear(x, weights), [x, *weights], grads)

    times = [seconds_of(call, seconds) for call in (in_bf16, in_float8)]
    times.append(seconds_of(in_a_step(in_float8), seconds) / MICRO_BATCHES)
    return *times, 3 * 2 * tokens * 2048 * inner * count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.5, help="of one measurement")
    args = parser.parse_args()
    require_device(parser, "cuda")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, commit {commit()}, {' '.join(sys.argv)}")
    print("| | bf16 | float8 | ratio | weights quantized once in eight | ratio |\n|---|---|---|---|---|---|")
    rows = {name: expert_layer(*sizes, args.seconds) for name, sizes in LAYERS.items()}
    rows |= {f"{name}, T 32,768": projections(32768, *sizes, args.seconds) for name, sizes in PROJECTIONS.items()}
    for name, (bf16, float8, constant, flops) in rows.items():
        cells = [f"{1e3 * t:.2f} ms, {flops / t / 1e12:.0f} TFLOP/s" for t in (bf16, float8, constant)]
        ratios = [f"{bf16 / t:.3f}" for t in (float8, constant)]
        print(f"| {name} | {cells[0]} | {cells[1]} | {ratios[0]} | {cells[2]} | {ratios[1]} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
