"""Whole training steps of the project and of its peers on one device: the same dimensions, tokens and optimizer.

    python benchmarks/training_step.py --out training_step_h200 --profile           all systems, both models
    python benchmarks/training_step.py --models moe --systems ours torchtitan       some
    python benchmarks/training_step.py --device cpu --no-compile                    tiny: that it runs
    python benchmarks/training_step.py --table training_step_h200.json              the table of an earlier run

A step is forward, loss, backward, clipping of the gradients' norm at 1 and AdamW with fp32 weights and moments, in
bf16, of one micro-batch of random tokens, always the same one. Models: dense is Mula-1B; moe has the layers of
Mula-7B-A1B, as many as fit one GPU in every system; moe-720m is the model of time_to_loss.py, in sequences of 1,024.
The norm is each system's own: without parameters in our dense model, RMSNorm in all else; where ours normalises
queries and keys (moe), so do the others, torchtitan over each head.
FLOPs are counted by megatron/optimus/config/costs.py for all. Systems, each in a process of its own:

ours                 the training program's model, engine, schedule and step with its defaults: bf16 parameters, fp32
                     master weights, moments and gradients in DeepSpeed's engine with the project's optimizer.
ours-fp8             the same with --fp8 hybrid.
torchtitan, torchtitan-autocast, torchtitan-float8, olmo-core
                     see training_step_peers.py; they are compiled, ours is not.

A time is that between two marks on the device's stream; steps are queued without waiting, as a training program does.
``host_ms`` is what queuing a step takes: where it is as long as a step, the host is what is waited for. Peak memory is
that of live tensors during the timed steps. --profile: the kernels of one more step of each, in OUT_kernels.txt.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installation

from device_check import require_device
from layout_speed_programs import Program, ours, run_config
from provenance import commit
from time_to_loss import MODELS
from training_step_peers import PEERS, count

from megatron.optimus.config.costs import flops_per_token
from megatron.optimus.platform import device as devices
from megatron.optimus.platform import environment
from megatron.optimus.platform.process_exit import run_program

PRESETS = {"dense": "mula-1b", "moe": "mula-7b-a1b"}
SEQUENCES = {"dense": 8, "moe": 4, "moe-720m": 64}  # of a micro-batch
SYSTEMS = ("ours", "ours-fp8", *PEERS)
TINY = ["--hidden-size", "128", "--num-attention-heads", "2", "--vocab-size", "512", "--ffn-hidden-size", "256"]
TINY_MOE = ["--num-experts", "8", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "128"]
TOP = 25  # kernels in a profile
KINDS = {  # of kernels, by what their names contain; the first that fits
    "communication": ("nccl",),
    "copies": ("memcpy", "memset"),
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "compiled": ("triton_",),
    "optimizer": ("adam", "multi_tensor"),
    "experts": (
        "expert",
        "groupproblem",
        "grouped_gemm_kernel<",
        "_up_swiglu",
        "_rows_times_weight",
        "_weight_gradient",
    ),
    "products": ("nvjet", "gemm", "cutlass", "cublas", "splitk"),
}


# ---- one system, in its own process


def words(model: str, args: argparse.Namespace) -> list[str]:
    """The training program's command line for a model; the peers read dimensions from the configuration it makes."""
    tiny, size = args.device == "cpu", str(args.micro_batch_size or SEQUENCES[model])
    batch = ["--params-dtype", "bf16", "--micro-batch-size", size, "--global-batch-size", size]
    if model not in PRESETS:
        return [*MODELS["tiny" if tiny else model].split(), "--norm-epsilon", "1e-5", *batch]
    given = ["--preset", PRESETS[model], *batch, "--seq-length", str(args.seq_length or (64 if tiny else 4096))]
    layers = args.layers if model == "dense" else args.moe_layers
    given += ["--num-layers", str(2 if tiny else layers)]
    given += (TINY + (TINY_MOE if model == "moe" else [])) if tiny else []
    return [*given, "--moe-router-force-load-balancing"] if args.balanced and model == "moe" else given


def build(system: str, model: str, args: argparse.Namespace, device: torch.device) -> Program:
    if system in PEERS:
        return PEERS[system](run_config(words(model, args), device), device, args.compile)
    counted: dict[str, int] = {}
    more = ["--fp8", "hybrid"] if system == "ours-fp8" else []
    program = ours([*words(model, args), *more], device, change=lambda built: counted.update(count(built)))
    config = run_config(words(model, args), device)
    program.about |= counted | {
        "system_version": commit(),
        "precision": "bf16 parameters, fp32 master weights and gradients",
        "norm": config.model.normalization.value,
        "optimizer": "DeepSpeed's engine with the project's optimizer, AdamW",
    }
    return program


def measure(program: Program, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Losses of all steps, and times and memory of those after the warm-up."""
    assert program.queue is not None
    losses = [program.queue()() for _ in range(args.warm_up)]
    devices.synchronize(device)
    devices.reset_peak_memory(device)
    marks, reads, began = [mark(device)], [], time.perf_counter()
    for _ in range(args.steps):
        reads.append(program.queue())
        marks.append(mark(device))
    host = (time.perf_counter() - began) / args.steps
    devices.synchronize(device)
    times = [between(*pair) for pair in pairwise(marks)]
    return {
        "step_ms": statistics.median(times),
        "step_ms_each": times,
        "host_ms": host * 1e3,
        "peak_bytes": devices.peak_memory(device),
        "losses": losses + [read() for read in reads],
    }


def mark(device: torch.device) -> Any:
    """A point in time on the device's stream; on the CPU, now."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.get_device_module(device).Event(enable_timing=True)
    event.record()
    return event


def between(first: Any, second: Any) -> float:
    """Milliseconds from one mark to another, which have passed."""
    return (second - first) * 1e3 if isinstance(first, float) else first.elapsed_time(second)


def kernels(step: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Milliseconds of a step's kernels (CPU: of operations) by name, and of all of them together."""
    on_cpu = device.type == "cpu"
    activity = torch.profiler.ProfilerActivity.CPU if on_cpu else torch.profiler.ProfilerActivity.CUDA
    devices.synchronize(device)
    with torch.profiler.profile(activities=[activity]) as profiler:
        step()
        devices.synchronize(device)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        recorded = json.loads(Path(file.name).read_text())["traceEvents"]
    wanted = ("cpu_op",) if on_cpu else ("kernel", "gpu_memcpy", "gpu_memset")
    events = [e for e in recorded if e.get("cat") in wanted and "dur" in e]
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in events:
        by_name[event["name"]].append(event["dur"] / 1e3)
    busy, end = 0.0, 0.0  # intervals may lie side by side on several streams
    for event in sorted(events, key=lambda e: e["ts"]):
        start, stop = event["ts"], event["ts"] + event["dur"]
        busy, end = busy + max(0.0, stop - max(start, end)) / 1e3, max(end, stop)
    span = (end - min(e["ts"] for e in events)) / 1e3
    return {"by_name": dict(by_name), "busy_ms": busy, "span_ms": span}


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lower for part in parts)), "other")


def kernel_table(title: str, found: dict[str, Any]) -> str:
    """A profile in words: time by kind, and the kernels that take longest."""
    sums = {name: sum(times) for name, times in found["by_name"].items()}
    kinds: dict[str, float] = defaultdict(float)
    for name, total in sums.items():
        kinds[kind_of(name)] += total
    calls = sum(len(times) for times in found["by_name"].values())
    lines = [
        f"== {title}: {found['span_ms']:.2f} ms from first to last, {found['busy_ms']:.2f} ms busy, {calls} kernels",
        ", ".join(f"{kind} {total:.2f} ms" for kind, total in sorted(kinds.items(), key=lambda pair: -pair[1])),
        f"{'ms':>9} {'calls':>6} {'share':>6}  kernel",
    ]
    for name, total in sorted(sums.items(), key=lambda pair: -pair[1])[:TOP]:
        share = total / sum(sums.values())
        lines.append(f"{total:9.3f} {len(found['by_name'][name]):6d} {share:6.1%}  {name[:160]}")
    return "\n".join(lines) + "\n\n"


def run_one(model: str, system: str, args: argparse.Namespace) -> None:
    """Builds, times and, if asked, profiles one system; what was found goes to ``args.result``, piece by piece."""
    os.environ.update(environment.for_local_rank(0, 1, environment.free_port()))
    if args.device == "cpu":
        torch.set_num_threads(1)
        os.environ["DS_ACCELERATOR"] = "cpu"
    device = torch.device(args.device, 0) if args.device != "cpu" else torch.device("cpu")
    devices.set_device(device)
    dist.init_process_group({"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}[args.device])
    from megatron.optimus.training.engine import init_engine, shutdown_engine

    if system not in PEERS:
        init_engine(dist.default_pg_timeout)
    found: dict[str, Any] = {"device": devices.device_name(device)}
    began = time.perf_counter()
    try:
        program = build(system, model, args, device)
        found |= program.about | {"tokens": program.tokens, "build_s": time.perf_counter() - began}
        found |= measure(program, args, device)
        config = run_config(words(model, args), device)
        rate = program.tokens / found["step_ms"] * 1e3
        flops = flops_per_token(config.model, config.training.seq_length)
        found |= {"tokens_per_second": rate, "flops_per_token": flops, "tflops": rate * flops / 1e12}
        found |= {"vocab_size": config.model.vocab_size, "seconds": time.perf_counter() - began}
        Path(args.result).write_text(json.dumps(found))
        if args.profile:
            assert program.queue is not None
            found["kernels"] = kernels(program.queue, device)
    except Exception:
        found["error"] = traceback.format_exc()[-3000:]
    Path(args.result).write_text(json.dumps(found))
    if system not in PEERS:
        shutdown_engine()


# ---- all of them


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    """Every system on every model, one after the other; OUT.json and OUT_kernels.txt are written after each."""
    report: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "commit": commit(),
        "torch": torch.__version__,
        "options": {name: value for name, value in vars(args).items() if name not in ("table", "out", "result", "one")},
        "results": [],
    }
    profiles, ends = "", time.monotonic() + args.seconds
    for model in args.models:
        for system in args.systems:
            row = {"model": model, "system": system} | started(model, system, args, ends)
            if found := row.pop("kernels", None):
                profiles += kernel_table(f"{model}, {system}", found)
                row |= {"busy_ms": found["busy_ms"], "span_ms": found["span_ms"]}
            report["results"].append(row)
            if args.out:
                Path(f"{args.out}.json").write_text(json.dumps(report, indent=1) + "\n")
                if profiles:
                    Path(f"{args.out}_kernels.txt").write_text(profiles)
            print(table([row])[-1], flush=True)
    return report


def started(model: str, system: str, args: argparse.Namespace, ends: float) -> dict[str, Any]:
    """What one system's process has found before its limit."""
    left = min(args.limit, ends - time.monotonic())
    if left < 5:
        return {"error": f"not started: the {args.seconds:g} s of --seconds are used up"}
    env = dict(os.environ)
    if system in PEERS:
        env.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as the peers' launchers set it
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        command = [sys.executable, __file__, *sys.argv[1:], "--one", model, system, "--result", str(result)]
        began, problem = time.monotonic(), ""
        with log.open("wb") as output:
            try:
                subprocess.run(command, env=env, stdout=output, stderr=output, timeout=left, check=False)
            except subprocess.TimeoutExpired:
                problem = f"ended after {left:.0f} s"
        found = json.loads(result.read_text()) if result.exists() else {}
        if "step_ms" not in found and "error" not in found:
            found["error"] = f"{problem or 'no result'}: {log.read_bytes()[-2000:].decode(errors='replace')}"
        return found | {"process_s": time.monotonic() - began}


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| model | system | step, ms | tokens/s | TFLOP/s | peak, GiB | host, ms | loss, first and last |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = f"| {row['model']} | {row['system']} |"
        if "step_ms" not in row:
            lines.append(f"{name} failed: {row['error'].strip().splitlines()[-1][:200]} | | | | | |")
            continue
        first, last = row["losses"][0], row["losses"][-1]
        lines.append(
            f"{name} {row['step_ms']:.1f} | {row['tokens_per_second']:,.0f} | {row['tflops']:.1f} "
            f"| {row['peak_bytes'] / 2**30:.1f} | {row['host_ms']:.1f} | {first:.3f} {last:.3f} |"
        )
    return lines


def doubts(rows: list[dict[str, Any]]) -> list[str]:
    """What speaks against a comparison: another size, a first loss unlike a guess's, a loss that does not fall."""
    lines = []
    for row in (row for row in rows if "step_ms" in row):
        name, losses = f"{row['model']}, {row['system']}", row["losses"]
        first = next(r for r in rows if r["model"] == row["model"] and "step_ms" in r)
        own, theirs, guess = row["parameters"], first["parameters"], math.log(row["vocab_size"])
        if own != theirs:
            lines.append(f"{name}: {own} parameters outside norms, {first['system']} has {theirs}")
        if not abs(losses[0] - guess) < 0.8:  # logits of random weights spread by about 0.9: half its square more
            lines.append(f"{name}: first loss {losses[0]:.3f}, ln(vocabulary) {guess:.3f}")
        if not losses[-1] < losses[0]:
            lines.append(f"{name}: the loss does not fall, {losses[0]:.3f} to {losses[-1]:.3f}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SEQUENCES), default=list(PRESETS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["ours", "torchtitan", "olmo-core"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "xpu", "cpu"])
    parser.add_argument("--layers", type=int, default=16, help="of the dense model")
    parser.add_argument("--moe-layers", type=int, default=8)
    parser.add_argument("--seq-length", type=int, help="of dense and moe; default 4096, cpu: 64")
    parser.add_argument("--micro-batch-size", type=int, help="default: dense 8, moe 4, moe-720m 64")
    parser.add_argument("--balanced", action="store_true", help="moe: spread tokens evenly instead of by the router")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="the peers")
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--profile", action="store_true", help="kernels of one more step, to OUT_kernels.txt")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one system on one model")
    parser.add_argument("--seconds", type=float, default=400.0, help="for all of them")
    parser.add_argument("--out", help="OUT.json, written after each system")
    parser.add_argument("--table", help="print an earlier run's table and stop")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # a process of this program: model, system
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.table:
        if not Path(args.table).is_file():
            parser.error(f"--table {args.table}: no such file")
        rows = json.loads(Path(args.table).read_text())["results"]
    else:
        require_device(parser, args.device)
        if args.one:
            run_one(*args.one, args)
            return 0
        rows = run_all(args)["results"]
    print("\n".join(["", *table(rows), *(f"doubt: {line}" for line in doubts(rows))]))
    return 0 if any("step_ms" in row for row in rows) else 1


if __name__ == "__main__":
    run_program(main)
