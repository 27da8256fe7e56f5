"""Step time of small models with and without CUDA graphs (--cuda-graphs), by turns on one GPU.

    python benchmarks/cuda_graphs.py --out cuda_graphs_h100.json

Each case is the training program's model, engine and step (training_step.py), in bf16, on random tokens. A time is that
between two marks on the device's stream; host is what queuing a step takes. GiB is what the allocator holds after steps
through the engine, and after recording. Each case has a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installation

from layout_speed_programs import Program, ours
from provenance import commit
from training_step import between, mark

from megatron.optimus.platform import device as devices
from megatron.optimus.platform import environment
from megatron.optimus.training.cuda_graphs import WARM_UP, MicroBatchGraphs

SMALL = "--vocab-size 32000 --num-attention-heads 6 --hidden-size 384 --ffn-hidden-size 1024 --num-layers 8"
MIDDLE = "--vocab-size 32000 --num-attention-heads 12 --hidden-size 768 --ffn-hidden-size 2048 --num-layers 12"
MOE = (
    "--vocab-size 32000 --hidden-size 1024 --num-attention-heads 16 --qk-layernorm-scope head --num-layers 12 "
    "--num-experts 32 --moe-router-topk 4 --moe-ffn-hidden-size 512 --moe-aux-loss-coeff 0.01 --norm-epsilon 1e-5"
)
CASES = {  # sequences of a micro-batch, their length, micro-batches of a step, model
    "dense 27M": [(4, 512, 1, SMALL), (4, 512, 4, SMALL), (8, 1024, 1, SMALL)],
    "dense 134M": [(4, 1024, 1, MIDDLE), (4, 1024, 4, MIDDLE), (32, 1024, 1, MIDDLE)],
    "Mula-1B": [(1, 2048, 1, "--preset mula-1b"), (1, 2048, 4, "--preset mula-1b")],
    "MoE 720M": [(8, 1024, 1, MOE), (8, 1024, 4, MOE), (1, 1024, 4, MOE), (64, 1024, 2, MOE)],
    "MoE 720M, float8": [(8, 1024, 4, f"{MOE} --fp8 hybrid"), (64, 1024, 2, f"{MOE} --fp8 hybrid")],
}
TURNS, STEPS = 4, 5


def through_engine(self: MicroBatchGraphs, run: Any, batch: Any, mean_labels: Any) -> torch.Tensor:
    return run(batch, mean_labels)


def steps(program: Program, device: torch.device) -> tuple[list[float], float]:
    """Milliseconds of each of STEPS steps, and what queuing one takes the host."""
    assert program.queue is not None
    program.queue()()
    devices.synchronize(device)
    marks, began = [mark(device)], time.perf_counter()
    for _ in range(STEPS):
        program.queue()
        marks.append(mark(device))
    host = (time.perf_counter() - began) / STEPS * 1e3
    devices.synchronize(device)
    return [between(*pair) for pair in pairwise(marks)], host


def measure(words: list[str], device: torch.device) -> dict[str, Any]:
    program = ours([*words, "--params-dtype", "bf16", "--cuda-graphs"], device)
    assert program.queue is not None
    replay = MicroBatchGraphs.run
    kinds = {"engine": through_engine, "graphs": replay}
    found: dict[str, Any] = {"tokens": program.tokens} | {kind: {"ms": [], "host_ms": []} for kind in kinds}
    losses = [program.queue()() for _ in range(WARM_UP)]
    torch.cuda.empty_cache()
    MicroBatchGraphs.run = through_engine
    steps(program, device)
    before = torch.cuda.memory_reserved()
    MicroBatchGraphs.run = replay
    losses += [program.queue()() for _ in range(2)]
    found["reserved_engine"], found["reserved_graphs"] = before, torch.cuda.memory_reserved()
    for _ in range(TURNS):
        for kind, run in kinds.items():
            MicroBatchGraphs.run = run
            devices.reset_peak_memory(device)
            times, host = steps(program, device)
            found[kind]["ms"] += times
            found[kind]["host_ms"].append(host)
            found[kind]["peak_bytes"] = devices.peak_memory(device)
    MicroBatchGraphs.run = replay
    found["losses"] = [*losses, program.queue()()]
    return found


def row_of(model: str, case: tuple[int, int, int, str]) -> dict[str, Any]:
    """One case in this process: times and memory, or the error."""
    size, length, count, words = case
    given = f"{words} --seq-length {length} --micro-batch-size {size} --global-batch-size {size * count}"
    row: dict[str, Any] = {"model": model, "micro_batches": f"{count} x {size} x {length}", "words": given}
    os.environ.update(environment.for_local_rank(0, 1, environment.free_port()))
    device = torch.device("cuda", 0)
    devices.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    from megatron.optimus.training.engine import init_engine, shutdown_engine

    init_engine(dist.default_pg_timeout)
    try:
        row |= {"device": devices.device_name(device)} | measure(given.split(), device)
    except Exception:
        row["error"] = traceback.format_exc()[-2000:]
    shutdown_engine()
    return row


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    if "error" in row:
        return f"| {row['model']} | {row['micro_batches']} | failed: {row['error'].strip().splitlines()[-1][:200]} |"
    engine, graphs = (statistics.median(row[kind]["ms"]) for kind in ("engine", "graphs"))
    hosts = " | ".join(f"{statistics.median(row[kind]['host_ms']):.1f}" for kind in ("engine", "graphs"))
    held = " | ".join(f"{row[name] / 2**30:.2f}" for name in ("reserved_engine", "reserved_graphs"))
    times = f"{engine:.2f} | {graphs:.2f} | {engine / graphs:.2f}"
    return f"| {row['model']} | {row['micro_batches']} | {times} | {hosts} | {held} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--out", help="file for the raw result")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "NUMBER", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        model, number, result = args.one
        Path(result).write_text(json.dumps(row_of(model, CASES[model][int(number)])))
        return 0
    report: dict[str, Any] = {"command": " ".join(sys.argv), "commit": commit(), "torch": torch.__version__, "rows": []}
    print("| model | micro-batches | engine, ms | graphs, ms | ratio | host, ms | with graphs | GiB | with graphs |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model in args.models:
        for number in range(len(CASES[model])):
            with tempfile.TemporaryDirectory() as folder:
                result = Path(folder) / "row.json"
                command = [sys.executable, __file__, "--one", model, str(number), str(result)]
                with (Path(folder) / "log").open("wb") as log:
                    subprocess.run(command, stdout=log, stderr=log, check=False)
                text = (Path(folder) / "log").read_text(errors="replace")[-2000:]
                failed = {"model": model, "micro_batches": str(number), "error": text or "no output"}
                report["rows"].append(json.loads(result.read_text()) if result.exists() else failed)
            print(line(report["rows"][-1]), flush=True)
            if args.out:
                Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
