"""Speed of one optimizer step on one device, without communication: this package's optimizers against torch's.

On a GPU:  python benchmarks/optimizer_step.py --numel 6919161856 --out benchmarks/results/optimizer_step_h200.json
On a CPU:  python benchmarks/optimizer_step.py --device cpu --numel 33554432 --threads 1 --out ...

All in one process, medians of CUDA-event times (wall clock on a CPU). Every contender gets gradients and a clip factor
on the device, and leaves new fp32 masters, states and bf16 parameters. Bytes are those a contender has to move at
least, each input read and each output written once; the share is of the copy bandwidth, the better of two measurements
before and after. The floor of AdamW is 28 bytes a parameter: bf16 gradient, fp32 master and moments in and out, bf16
parameter.
Muon has no such floor: it is timed on the experts of one Mula-7B layer, in TFLOP/s of its matrix products.
The other optimizers of whole matrices are timed on the same experts, ours in one batch and the reference matrix by
matrix, as the mean of steps 2 to 21 (whole periods of what is done every tenth step), with the peak memory:
`--only-matrices --muon-experts 8 --repetitions 5`. The first step, which begins with an eigendecomposition, is apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installation

from device_check import require_device

from deepspeed_ext.optimizers import OWN_OPTIMIZERS, Lion, Muon, Shard, StepScalars, shard_optimizer_for
from deepspeed_ext.optimizers.base import LocalMatrices, MatrixOptimizer

BUCKET = 1 << 26  # elements, deepspeed_ext's default
EXPERTS, INNER, WIDTH = 64, 1024, 2048  # of one Mula-7B layer, three matrices each
STATE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 4 / 256}


class Clock:
    """Times in milliseconds; on a GPU between events, without the host in between."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type != "cpu"
        self.module = torch.cuda if device.type == "cuda" else torch.xpu

    def times(self, step: Callable[[], Any], repetitions: int) -> list[float]:
        for _ in range(2):
            step()
        if not self.on_gpu:
            times = []
            for _ in range(repetitions):
                started = time.perf_counter()
                step()
                times.append((time.perf_counter() - started) * 1e3)
            return times
        events = [self.module.Event(enable_timing=True) for _ in range(repetitions + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        self.module.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(events)]

    def once(self, step: Callable[[], Any]) -> float:
        """One step from a device at rest to a device at rest."""
        self.synchronize()
        started = time.perf_counter()
        step()
        self.synchronize()
        return (time.perf_counter() - started) * 1e3

    def synchronize(self) -> None:
        if self.on_gpu:
            self.module.synchronize()

    def reset_peak(self) -> None:
        if self.on_gpu:
            self.module.reset_peak_memory_stats()

    def peak(self) -> float:
        return self.module.max_memory_allocated() / 1e9 if self.on_gpu else 0.0

    def release(self) -> None:
        if self.on_gpu:
            self.module.empty_cache()


def copy_bandwidth(clock: Clock, device: torch.device, numel: int) -> float:
    """TB/s of a large copy, read and written bytes counted."""
    source = torch.randn(min(numel, 3 << 29), device=device)
    target = torch.empty_like(source)
    clock.times(lambda: target.copy_(source), 30)  # a device fresh from rest copies a few per cent slower
    median = statistics.median(clock.times(lambda: target.copy_(source), 30))
    return 2 * source.nbytes / median / 1e9


def random(numel: int, device: torch.device, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=device).normal_(0, scale)


def ours(
    optimizer: torch.optim.Optimizer, numel: int, device: torch.device, grad_dtype: torch.dtype
) -> Callable[[], None]:
    """A step of the optimizer on buckets of one flat buffer."""
    group = optimizer.param_groups[0]
    shard_optimizer = shard_optimizer_for(optimizer, group)
    master, grad = random(numel, device, torch.float32, 0.02), random(numel, device, grad_dtype)
    param = torch.empty(numel, dtype=torch.bfloat16, device=device)
    shards = [
        Shard(*parts) for parts in zip(master.split(BUCKET), grad.split(BUCKET), param.split(BUCKET), strict=True)
    ]
    for shard in shards:
        shard.state = shard_optimizer.new_state(shard, group)
    scalars = StepScalars.of(device, 10, scale=0.5)

    def step() -> None:
        for shard in shards:
            shard_optimizer.update_(shard, group, scalars)

    return step


def torch_adamw(numel: int, device: torch.device, grad_dtype: torch.dtype, *, clip: bool) -> Callable[[], None]:
    """torch's fused AdamW on fp32 masters, then the copy to bf16; bf16 gradients are first copied to fp32.

    ``clip``: with a factor on the device, which torch's kernel takes as grad_scale.
    """
    masters = [torch.nn.Parameter(part) for part in random(numel, device, torch.float32, 0.02).split(BUCKET)]
    params = torch.empty(numel, dtype=torch.bfloat16, device=device).split(BUCKET)
    grads = random(numel, device, grad_dtype).split(BUCKET)
    wide = grads if grad_dtype == torch.float32 else torch.empty(numel, device=device).split(BUCKET)
    for master, grad in zip(masters, wide, strict=True):
        master.grad = grad
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    if clip:
        optimizer.grad_scale = torch.ones((), device=device)  # type: ignore[attr-defined]  # as torch.amp sets them
        optimizer.found_inf = torch.zeros((), device=device)  # type: ignore[attr-defined]

    @torch.no_grad()
    def step() -> None:
        if wide is not grads:
            torch._foreach_copy_(wide, grads)
        optimizer.step()
        torch._foreach_copy_(params, masters)

    return step


def elementwise(clock: Clock, device: torch.device, numel: int, repetitions: int) -> list[dict[str, Any]]:
    """One row for each contender; the big tensors of one are freed before the next."""
    some, half, full = [torch.zeros(1)], torch.bfloat16, torch.float32

    def adamw(state: str) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": some, "state_dtype": state}], lr=1e-4, betas=(0.9, 0.95))

    contenders: list[tuple[str, float, Callable[[], Callable[[], None]]]] = []
    for state, size in STATE_BYTES.items():
        contenders.append(
            (f"AdamW, {state} states", 12 + 4 * size, lambda s=state: ours(adamw(s), numel, device, half))
        )
    contenders += [
        ("AdamW, fp32 states, fp32 gradients", 30, lambda: ours(adamw("fp32"), numel, device, full)),
        ("Lion, fp32 state", 20, lambda: ours(Lion(some, lr=1e-5), numel, device, half)),
        ("Lion, bf16 state", 16, lambda: ours(Lion(some, lr=1e-5, state_dtype="bf16"), numel, device, half)),
        ("SGD with momentum", 20, lambda: ours(torch.optim.SGD(some, lr=1e-4, momentum=0.9), numel, device, half)),
        ("torch AdamW + bf16 copy, fp32 gradients, no clip", 34, lambda: torch_adamw(numel, device, full, clip=False)),
        ("torch AdamW + bf16 copy, fp32 gradients", 38, lambda: torch_adamw(numel, device, full, clip=True)),
        ("torch AdamW + bf16 copy, bf16 gradients", 44, lambda: torch_adamw(numel, device, half, clip=True)),
    ]
    rows = []
    for name, size, make in contenders:
        step = make()
        times = clock.times(step, repetitions)
        del step
        clock.release()
        rows.append({"name": name, "bytes_per_parameter": size, "ms": times, "median_ms": statistics.median(times)})
        print(f"{name:50s} {rows[-1]['median_ms']:9.3f} ms", flush=True)
    return rows


def muon(clock: Clock, device: torch.device, repetitions: int, layers_experts: int) -> list[dict[str, Any]]:
    """The experts of one layer: ours in one batch, torch.optim.Muon matrix by matrix."""
    shape = (3 * layers_experts, INNER, WIDTH)
    numel = shape[0] * INNER * WIDTH
    # five iterations of X X^T (2 m m n), its square (2 m m m) and the product with X (2 m m n)
    flops = shape[0] * 5 * (4 * INNER * INNER * WIDTH + 2 * INNER**3)
    optimizer = Muon([torch.zeros(2, 2)], lr=1e-3, ns_dtype=torch.bfloat16)
    group = optimizer.param_groups[0]
    shard_optimizer = shard_optimizer_for(optimizer, group)
    assert isinstance(shard_optimizer, MatrixOptimizer)
    shard = Shard(
        random(numel, device, torch.float32),
        random(numel, device, torch.bfloat16),
        torch.empty(numel, dtype=torch.bfloat16, device=device),
    )
    shard.state = shard_optimizer.new_state(shard, group)
    scalars, whole = StepScalars.of(device, 10, scale=0.5), LocalMatrices(shape[0], (INNER, WIDTH))
    params = [torch.nn.Parameter(torch.randn(INNER, WIDTH, device=device)) for _ in range(shape[0])]
    for param in params:
        param.grad = torch.randn_like(param)
    oracle = torch.optim.Muon(params, lr=1e-3)
    steps: dict[str, Callable[[], Any]] = {
        "Muon, experts of one Mula-7B layer": lambda: shard_optimizer.update_matrices_([shard], whole, group, scalars),
        "torch.optim.Muon, the same, without bf16 copy": oracle.step,
    }
    rows = []
    for name, step in steps.items():
        times = clock.times(step, repetitions)
        median = statistics.median(times)
        rows.append({"name": name, "numel": numel, "ms": times, "median_ms": median, "tflops": flops / median / 1e9})
        print(f"{name:50s} {median:9.3f} ms {rows[-1]['tflops']:7.1f} TFLOP/s", flush=True)
    return rows


PERIOD = 10  # steps from one renewal to the next, of ours and of the references


def references() -> dict[str, tuple[dict[str, Any], Callable[[list[Any]], torch.optim.Optimizer] | None]]:
    """Of each optimizer its options and its reference; Dion has none that is installed."""
    import pytorch_optimizer as other

    try:
        import galore_torch
    except ImportError as error:  # it needs bitsandbytes
        print(f"GaLore has no reference here: {error}", flush=True)
        galore_torch = None
    galore = {"rank": 128, "update_proj_gap": PERIOD, "scale": 0.25}

    def shampoo(params: list[Any]) -> torch.optim.Optimizer:
        return other.ScalableShampoo(
            params, preconditioning_compute_steps=PERIOD, start_preconditioning_step=PERIOD, block_size=1024,
            shape_interpretation=False, graft_type=3, moving_average_for_momentum=True, nesterov=False,
        )  # fmt: skip

    return {
        "NorMuon": ({}, lambda params: other.NorMuon([{"params": params, "use_muon": True}])),
        "SOAP": ({"precondition_frequency": PERIOD}, lambda params: other.SOAP(params, precondition_frequency=PERIOD)),
        "Shampoo": ({"precondition_frequency": PERIOD}, shampoo),
        "GaLore": (
            galore,
            None
            if galore_torch is None
            else lambda params: galore_torch.GaLoreAdamW(
                [{"params": params, "proj_type": "std", **galore}], no_deprecation_warning=True
            ),
        ),
        "Dion": ({}, None),
    }


def whole_matrices(clock: Clock, device: torch.device, count: int) -> list[dict[str, Any]]:
    """Steps of each matrix optimizer and of its reference on ``count`` experts."""
    rows = []
    for name, (options, reference) in references().items():
        for who, build in (("ours", None), ("reference", reference)):
            if who == "reference" and build is None:
                continue
            clock.reset_peak()
            step = stepper(name, options, build, device, count)
            first, times = clock.once(step), [clock.once(step) for _ in range(2 * PERIOD)]
            peak, mean = clock.peak(), statistics.mean(times)
            rows.append({"name": name, "who": who, "first_ms": first, "ms": times, "mean_ms": mean, "peak_gb": peak})
            print(f"{name:10s} {who:10s} first {first:10.1f} ms, mean {mean:9.2f} ms, peak {peak:6.2f} GB", flush=True)
            del step
            clock.release()
    return rows


def stepper(
    name: str,
    options: dict[str, Any],
    reference: Callable[[list[Any]], torch.optim.Optimizer] | None,
    device: torch.device,
    count: int,
) -> Callable[[], Any]:
    """A step on the matrices of ``count`` experts, with the same gradients in every step but for a factor."""
    if reference is not None:
        params = [torch.nn.Parameter(torch.randn(INNER, WIDTH, device=device) * 0.02) for _ in range(3 * count)]
        for param in params:
            param.grad = torch.randn_like(param)
        return reference(params).step
    optimizer = OWN_OPTIMIZERS[name]([torch.zeros(INNER, WIDTH, requires_grad=True)], lr=1e-3, **options)
    group, numel = optimizer.param_groups[0], 3 * count * INNER * WIDTH
    rule = shard_optimizer_for(optimizer, group)
    assert isinstance(rule, MatrixOptimizer)
    shard = Shard(
        random(numel, device, torch.float32, 0.02),
        random(numel, device, torch.bfloat16),
        torch.empty(numel, dtype=torch.bfloat16, device=device),
    )
    shard.state = rule.new_state(shard, group)
    states = rule.new_matrix_states(3 * count, (INNER, WIDTH), group, device)
    whole, taken = LocalMatrices(3 * count, (INNER, WIDTH), states), [0]

    def step() -> None:
        taken[0] += 1
        rule.update_matrices_([shard], whole, group, StepScalars.of(device, taken[0]))

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--numel", type=int, default=6_919_161_856, help="parameters; the default is Mula-7B-A1B")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--muon-experts", type=int, default=EXPERTS, help="0 leaves Muon out")
    parser.add_argument("--only-matrices", action="store_true", help="time the optimizers of whole matrices only")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    require_device(parser, args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    clock = Clock(device)
    name = "cpu" if device.type == "cpu" else clock.module.get_device_name(device)
    if args.only_matrices:
        result = {
            "command": " ".join(sys.argv),
            "device": name,
            "torch": torch.__version__,
            "experts": args.muon_experts,
        }
        result["muon"] = muon(clock, device, args.repetitions, args.muon_experts)
        result["whole_matrices"] = whole_matrices(clock, device, args.muon_experts)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
        return
    before = copy_bandwidth(clock, device, args.numel)
    rows = elementwise(clock, device, args.numel, args.repetitions)
    bandwidth = max(before, copy_bandwidth(clock, device, args.numel))
    clock.release()
    matrices = muon(clock, device, args.repetitions, args.muon_experts) if args.muon_experts else []
    ours_ms = rows[0]["median_ms"]
    print(f"\n{name}, torch {torch.__version__}, {args.numel:,} parameters, copy {bandwidth:.3f} TB/s")
    print(
        f"{'':50s} {'ms':>9s} {'B/param':>8s} {'TB/s':>7s} {'of copy':>8s} {'of 28 B floor':>14s} {'time / ours':>12s}"
    )
    for row in rows:
        row["tb_per_s"] = row["bytes_per_parameter"] * args.numel / row["median_ms"] / 1e9
        row["share_of_copy"] = row["tb_per_s"] / bandwidth
        row["share_of_28_byte_floor"] = 28 * args.numel / bandwidth / 1e9 / row["median_ms"]
        print(
            f"{row['name']:50s} {row['median_ms']:9.3f} {row['bytes_per_parameter']:8.2f} {row['tb_per_s']:7.3f} "
            f"{row['share_of_copy']:8.1%} {row['share_of_28_byte_floor']:14.1%} {row['median_ms'] / ours_ms:12.2f}"
        )
    if args.out:
        result = {
            "command": " ".join(sys.argv),
            "device": name,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "numel": args.numel,
            "bucket": BUCKET,
            "copy_tb_per_s": bandwidth,
            "elementwise": rows,
            "muon": matrices,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
