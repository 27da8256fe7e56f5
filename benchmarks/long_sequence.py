"""One long sequence over the ranks of a context-parallel group: seconds and memory of real steps, as it gets longer.

    python benchmarks/long_sequence.py --out benchmarks/results/long_sequence_gloo.json

A narrow MoE model of one layer on real gloo ranks of this machine takes one of the training program's own steps
(layers, loss, backward, exchange, optimizer) on one sequence. Its memory is how much the process was larger at its
largest, as the system counts it (VmHWM), than just before; attention is quadratic in time and must not be in memory.
Beside it what the planner has for the activations and working memory of a rank on the CPU. Each row has ranks of its
own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from provenance import commit  # noqa: E402

from megatron.optimus.config.load import load  # noqa: E402
from megatron.optimus.config.rank_plan import rank_plans  # noqa: E402
from megatron.optimus.models.activations import CPU  # noqa: E402
from megatron.optimus.planner.memory import memory_of  # noqa: E402
from tests.helpers import run_distributed  # noqa: E402

LENGTHS = [16384, 32768, 65536, 131072]
KINDS = {"Ulysses": "--cp-comm-type a2a", "ring": "--cp-comm-type p2p"}
MODEL = (
    "--preset mula-tiny --num-layers 1 --hidden-size 64 --num-attention-heads 4 --num-experts 4 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 64 --vocab-size 512 --params-dtype fp32 --device cpu --micro-batch-size 1 "
    "--global-batch-size 1 --data-path RANDOM_TOKENS --eval-interval 0 "
)


def words(ranks: int, length: int, kind: str) -> str:
    return f"{MODEL} --seq-length {length} --max-position-embeddings {length} --context-parallel-size {ranks} {kind}"


def memory_kib(field: str) -> int:
    """Of this process, from the kernel: VmHWM, VmRSS."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def steps(rank: int, world: int, options: str, length: int) -> dict[str, Any]:
    from datetime import timedelta

    from megatron.optimus.context import RunContext
    from megatron.optimus.data.loader import Batch
    from megatron.optimus.parallel.context import own_positions
    from megatron.optimus.platform.mesh import Mesh
    from megatron.optimus.platform.metrics import Recorder
    from megatron.optimus.training.data import context_parallel_slice
    from megatron.optimus.training.engine import build_engine, build_model, init_engine
    from megatron.optimus.training.pipeline_schedule import build_schedule
    from megatron.optimus.training.trainer import train_step

    config, device = load(options.split()).config, torch.device("cpu")
    init_engine(timedelta(seconds=300))
    mesh = Mesh(config.parallel, rank=rank, world_size=world)
    run = RunContext.of(config, mesh, device)
    engine = build_engine(run, build_model(run))
    schedule = build_schedule(run, engine)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 512, (1, length + 1), generator=generator)
    whole = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    batch = context_parallel_slice(whole, own_positions(length, config.parallel, mesh))
    before = memory_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the largest size so far is forgotten
    began = time.perf_counter()
    loss = train_step(run, engine, schedule, Recorder(run.ranks), [batch]).read().metrics["loss"]
    seconds = time.perf_counter() - began
    engine.destroy()
    return {"loss": loss, "seconds": seconds, "mib": (memory_kib("VmHWM") - before) / 1024}


def planned_mib(ranks: int, options: str) -> float:
    [share] = rank_plans(load(options.split()).config, ranks)
    return memory_of(share, CPU).worst.total / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for name, kind in KINDS.items():
        for length in args.lengths:
            options = words(args.ranks, length, kind)
            ranks = run_distributed(steps, args.ranks, options, length, timeout=590)
            row: dict[str, Any] = {"kind": name, "ranks": args.ranks, "length": length, "loss": ranks[0]["loss"]}
            row |= {key: max(one[key] for one in ranks) for key in ("seconds", "mib")}
            rows.append(row | {"planned_mib": planned_mib(args.ranks, options)})
            sys.stdout.write(json.dumps(rows[-1]) + "\n")
            sys.stdout.flush()
    about = {"command": "benchmarks/long_sequence.py", "torch": torch.__version__, "commit": commit()}
    args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
