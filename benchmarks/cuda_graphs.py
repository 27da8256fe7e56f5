"""Step time of small models with and without CUDA graphs (--cuda-graphs), by turns in one process on one GPU.

    python benchmarks/cuda_graphs.py --out cuda_graphs_h100.json

Each case is the training program's model, engine and step (training_step.py), in bf16, on random tokens. A time is that
between two marks on the device's stream. ``graphs`` is the memory that recording took beyond the engine's steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
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
    "MoE 720M": [(8, 1024, 1, MOE), (8, 1024, 4, MOE), (1, 1024, 4, MOE)],
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--out", help="file for the raw result")
    args = parser.parse_args()
    os.environ.update(environment.for_local_rank(0, 1, environment.free_port()))
    device = torch.device("cuda", 0)
    devices.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    from megatron.optimus.training.engine import init_engine, shutdown_engine

    init_engine(dist.default_pg_timeout)
    report = {"command": " ".join(sys.argv), "commit": commit(), "torch": torch.__version__, "rows": []}
    report["device"] = devices.device_name(device)
    print(
        "| model | micro-batch | engine, ms | graphs, ms | ratio | host, ms: engine, graphs | reserved, GiB: engine, graphs |"
    )
    print("|---|---|---|---|---|---|---|")
    for model in args.models:
        for size, length, count, words in CASES[model]:
            given = f"{words} --seq-length {length} --micro-batch-size {size} --global-batch-size {size * count}"
            row = {"model": model, "micro_batch": f"{count} x {size} x {length}", "words": given}
            try:
                row |= measure(given.split(), device)
                engine, graphs = (statistics.median(row[kind]["ms"]) for kind in ("engine", "graphs"))
                hosts = ", ".join(f"{statistics.median(row[kind]['host_ms']):.1f}" for kind in ("engine", "graphs"))
                held = ", ".join(f"{row[name] / 2**30:.2f}" for name in ("reserved_engine", "reserved_graphs"))
                print(
                    f"| {model} | {row['micro_batch']} | {engine:.2f} | {graphs:.2f} | {engine / graphs:.2f} | {hosts} | {held} |"
                )
            except Exception:
                row["error"] = traceback.format_exc()[-2000:]
                print(f"| {model} | {row['micro_batch']} | failed: {row['error'].strip().splitlines()[-1][:300]} |")
            sys.stdout.flush()
            report["rows"].append(row)
            torch.cuda.empty_cache()
            if args.out:
                Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    shutdown_engine()
    return 0


if __name__ == "__main__":
    sys.exit(main())
