"""What a layout costs: real training steps of one layout against those of another on the same GPUs, in the same run.

    python benchmarks/layout_speed.py --out layout_speed_h200x2                        all sections on all GPUs here
    python benchmarks/layout_speed.py --sections tp cp --ranks 2 --seconds 120         some, on two, with a time limit
    python benchmarks/layout_speed.py --sections moe moe-autoep --moe-preset mula-20b-a2b
    CUDA_DEVICE_MAX_CONNECTIONS=1 python benchmarks/layout_speed.py --sections tp      kernels start in queued order
    TORCH_NCCL_HIGH_PRIORITY=1 python benchmarks/layout_speed.py --sections tp         communication before products
    python benchmarks/layout_speed.py --sections pp pp-deepspeed --micro-batches 16    smaller bubbles
    python benchmarks/layout_speed.py --device cpu --ranks 2 --out layout_speed_smoke  gloo, tiny: that it runs
    python benchmarks/layout_speed.py --table layout_speed_h200x2.json                 the table of an earlier run

Every step is a whole one: forward, backward, gradient reduction, clipping, sharded AdamW, of the project's own model,
engine and schedule (peers: DeepSpeed's), on random tokens. The variants of a section exist at the same time and take
turns: some consecutive steps each, a wait for the device, the next variant; the order turns round every time. A time is
the median of these turns, on the slowest rank. Sections:

tp             Mula-1B, tensor with sequence parallelism, with and without --tp-comm-overlap, against data parallelism:
               the same tokens a step, those of a tensor-parallel group in one micro-batch. Cost: time of a step over
               that of tp=1, minus 1.
pp             Mula-1B, schedules against their bubble-limited ideal: T + (p - 1) / (p v) t for p stages of v chunks
               (zero bubble: T). T is a step of the same micro-batches shared out over p data-parallel ranks: the same
               work a GPU, no bubble, reduction of gradients included. t is the forward and backward of one micro-batch
               through the whole model, timed with that program.
pp-deepspeed   the same model and micro-batches through DeepSpeed's PipelineModule (1F1B, ZeRO stage 1).
cp             Mula-1B, one sequence over all ranks, against the attention-bound ideal: layers x attention + rest.
               attention: forward and backward over the whole sequence of a rank's share of the heads, alone on the
               GPU (ring attention does as much, balanced; kernels_alone_ms_each_layer: that work with the ring's
               kernels, alone); rest: the same step with an attention that does nothing.
moe            experts over all ranks: how tokens travel. Exposed: what a step takes longer than one in which every
               token finds its experts on its own rank. --moe-variants: some of allgather, alltoall, "alltoall, 2
               chunks", symmetric; of those that hide something beside the router or the last product of the experts'
               backward (on CUDA symmetric alone, elsewhere all) also "..., home last", which does not.
moe-autoep     the same with DeepSpeed's AutoEP (layout_speed_peers.py).
moe-deepspeed  one sequence a GPU, with DeepSpeed's older MoE layer.

tp and pp have all 16 layers. cp and moe have 4 by default, to save time: layers are alike, but embedding and head weigh
more than in the whole model. The whole set is meant for GPUs of 141 GB; smaller ones need --micro-batch-size 2. A
section that fails or exceeds its limit ends alone: the others follow in new processes.
"""

from __future__ import annotations

import argparse
import json
import os
import queue as queues
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installation

from device_check import require_device
from layout_speed_programs import HOST, Program, slowest
from layout_speed_sections import SECTIONS, Section
from provenance import commit

from megatron.optimus.platform import device as devices
from megatron.optimus.platform import environment
from megatron.optimus.platform.process_exit import exit_process

VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_NCCL_HIGH_PRIORITY", "NCCL_NVLS_ENABLE")  # that matter for overlap
START_LIMIT = 120.0  # seconds for processes to start


# ---- measuring


def free(device: torch.device) -> None:
    import gc

    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def run_section(section: Section, device: torch.device) -> list[dict[str, Any]]:
    """Builds all variants, lets them take turns, and returns a result for each. Collective."""
    built: dict[str, Program] = {}
    results: dict[str, dict[str, Any]] = {}
    for name, build in section.variants.items():
        began, error = time.perf_counter(), ""
        try:
            program = build(device)
            losses = [program.step() for _ in range(section.warm_up)]
            devices.synchronize(device)
        except Exception:  # one that does not run must not take the others with it
            error = traceback.format_exc()[-2000:]
        failed = slowest(float(bool(error)))
        results[name] = {"variant": name, "error": error or "another rank failed"} if failed else {"variant": name}
        if failed:
            free(device)
            continue
        built[name] = program
        results[name] |= program.about | {"losses": losses, "build_and_warm_up_s": time.perf_counter() - began}
    times: dict[str, list[float]] = {name: [] for name in built}
    for turn in range(section.turns):
        for name in list(built)[:: 1 if turn % 2 == 0 else -1]:
            devices.synchronize(device)
            dist.barrier(group=HOST[0])
            began = time.perf_counter()
            for _ in range(section.steps):
                built[name].step()
            devices.synchronize(device)
            times[name].append(slowest(time.perf_counter() - began) / section.steps)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, median in medians.items():
        rate = built[name].tokens / median / dist.get_world_size()
        results[name] |= {
            "step_ms": median * 1e3,
            "step_ms_each_turn": [t * 1e3 for t in times[name]],
            "tokens_per_second_per_gpu": rate,
        }
    if len(built) == len(section.variants) or not section.needs_all:
        for name, figures in section.further(built, medians, device).items():
            results[name] |= figures
    for program in built.values():
        program.close()
    from deepspeed.utils import groups

    groups.mpu = None  # DeepSpeed's pipeline leaves its grid here, which no later engine could work with
    return list(results.values())


def worker(rank: int, ranks: int, names: list[str], args: argparse.Namespace, store: str, queue: Any) -> None:
    """One rank: the sections in order, its first words when it is ready, a result for each."""
    place = environment.for_local_rank(rank, ranks, environment.free_port())
    os.environ.update(place)
    if args.device == "cpu":
        torch.set_num_threads(1)
        os.environ["DS_ACCELERATOR"] = "cpu"
    device = torch.device(args.device, rank) if args.device != "cpu" else torch.device("cpu")
    devices.set_device(device)
    backend = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}[args.device]
    name = names[0]
    try:
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
        HOST.append(dist.new_group(backend="gloo"))
        from megatron.optimus.training.engine import init_engine, shutdown_engine

        init_engine(dist.default_pg_timeout)
        dist.barrier(group=HOST[0])
        for name in names:
            if rank == 0:
                queue.put(("start", name, devices.device_name(device)))
            found = run_section(SECTIONS[name](args, ranks), device)
            free(device)
            if rank == 0:
                queue.put(("end", name, found))
        shutdown_engine()
    except Exception:
        queue.put(("error", name, f"rank {rank}: {traceback.format_exc()[-2000:]}"))
    exit_process(0)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the sections in processes of their own, started again after a section that did not end well."""
    ranks = args.ranks or (torch.cuda.device_count() if args.device == "cuda" else 2)
    report: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "ranks": ranks,
        "torch": torch.__version__,
        "commit": commit(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "options": {name: value for name, value in vars(args).items() if name not in ("table", "out")},
        "sections": {},
    }
    context, left, ends = mp.get_context("spawn"), list(args.sections), time.monotonic() + args.seconds
    while left:
        with tempfile.TemporaryDirectory() as folder:
            queue = context.Queue()
            workers = [
                context.Process(target=worker, args=(rank, ranks, left, args, f"{folder}/store", queue))
                for rank in range(ranks)
            ]
            for process in workers:
                process.start()
            left = follow(queue, left, report, args, ends)
            for process in workers:
                process.join(timeout=15 if not left else 0)
                process.kill()
    return report


def follow(queue: Any, names: list[str], report: dict[str, Any], args: argparse.Namespace, ends: float) -> list[str]:
    """Notes what the ranks say until they are done or must be ended; the sections that then remain."""
    left, began, limit = list(names), time.monotonic(), START_LIMIT
    while left:
        until = min(began + limit, ends)
        try:
            kind, name, value = queue.get(timeout=max(0.05, until - time.monotonic()))
        except queues.Empty:
            kind, name = "error", left[0]
            value = f"not done after {time.monotonic() - began:.0f} s"
            if time.monotonic() >= ends:
                left = left[:1]
        if kind == "start":
            began, limit, report["device"] = time.monotonic(), args.limit, value
            continue
        entry = {"results": value} if kind == "end" else {"error": value}
        report["sections"][name] = entry | {"seconds": time.monotonic() - began}
        began = time.monotonic()
        left.remove(name)
        if args.out:
            Path(f"{args.out}.json").write_text(json.dumps(report, indent=1) + "\n")
        print("\n".join(table_of(name, report["sections"][name])), flush=True)
        if kind == "error":
            return left
    return left


# ---- telling


def table_of(name: str, section: dict[str, Any]) -> list[str]:
    lines = [
        f"\n**{name}** ({section['seconds']:.0f} s)\n",
        "| variant | step, ms | turns | tokens/s a GPU | | loss |",
        "|---|---|---|---|---|---|",
    ]
    if "error" in section:
        return [*lines[:1], section["error"]]
    for row in section["results"]:
        if "error" in row:
            lines.append(f"| {row['variant']} | failed: {row['error'].strip().splitlines()[-1][:120]} | | | | |")
            continue
        turns = row["step_ms_each_turn"]
        figure = ""
        if "what" in row:
            value = f"{row['percent']:+.1f}%" if "percent" in row else f"{row['ratio']:.3f}"
            figure = f"{value} {row['what']}"
        lines.append(
            f"| {row['variant']} | {row['step_ms']:.1f} | {min(turns):.1f} to {max(turns):.1f} "
            f"| {row['tokens_per_second_per_gpu']:,.0f} | {figure} | {row['losses'][-1]:.3f} |"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--device", default="cuda", choices=["cuda", "xpu", "cpu"])
    parser.add_argument("--ranks", type=int, help="default: all GPUs of this machine; cpu: 2")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for one section")
    parser.add_argument("--seconds", type=float, default=300.0, help="for all of them")
    parser.add_argument("--out", help="OUT.json, written after each section")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], help="default bf16, cpu: fp32")
    parser.add_argument("--preset", default="mula-1b")
    parser.add_argument("--layers", type=int, help="of tp and pp; default 16, all of Mula-1B (cpu: 2 a rank)")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--micro-batch-size", type=int, default=4, help="sequences of a GPU in tp and moe")
    parser.add_argument("--tp", type=int, help="default: all ranks")
    parser.add_argument("--pp-micro-batch-size", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, help="of a pipeline's step; default four for each rank")
    parser.add_argument("--cp-seq-length", type=int, default=131072)
    parser.add_argument("--cp-layers", type=int, default=4)
    parser.add_argument("--moe-preset", default="mula-7b-a1b")
    parser.add_argument("--moe-variants", nargs="+", help="of moe, instead of the four transports; see above")
    parser.add_argument("--moe-layers", type=int, default=4)
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of an earlier measurement")
    args = parser.parse_args()
    if args.table is not None:
        for name, section in json.loads(args.table.read_text())["sections"].items():
            print("\n".join(table_of(name, section)))
        return 0
    require_device(parser, args.device)
    if args.device == "cpu":
        args.seq_length, args.cp_seq_length, args.moe_layers = 64, 256, 2
    args.layers = args.layers or (16 if args.device != "cpu" else 2 * (args.ranks or 2))
    args.dtype = args.dtype or ("bf16" if args.device != "cpu" else "fp32")
    report = measure(args)
    return 0 if all("error" not in section for section in report["sections"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
