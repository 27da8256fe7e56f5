"""The planner's peak memory and step time against the real program's, configuration by configuration.

    python benchmarks/planner_memory.py --out benchmarks/results/planner_memory_h200       on one or two GPUs
    python benchmarks/planner_memory.py --compare benchmarks/results/planner_memory_h200.json       anywhere: the table

Every case is the training program's own Trainer and loop for a few steps on random tokens. Two things differ: weights
are drawn on the device (on the host it takes minutes), and nothing is saved. ``peak`` is the device allocator's largest
count of live bytes from before the model is built to the end of the last step. Cases of one rank share the machine: one
runs on each GPU. Those named host have so few tokens that a step takes as long as its host.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installation

from device_check import require_device
from provenance import commit
from time_to_loss import MODELS
from weights_on_device import draw_on_device

from megatron.optimus.config.load import load
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.process_exit import exit_process

STEPS = 7
LIMIT = 0.05  # of the measured peak
# Measured when a save decoded all moments at once, which was the peak; to be measured again.
OLDER_PEAKS = {"20b-2l-int8"}

B1, B7, B20 = "--preset mula-1b", "--preset mula-7b-a1b", "--preset mula-20b-a2b"
WIDE = "--preset mula-100b-a7b --num-layers 1"
HOST = "--seq-length 128 --micro-batch-size 1 --global-batch-size"
SOLO = {
    "1b": f"{B1} --seq-length 4096 --micro-batch-size 4",
    "7b-4l": f"{B7} --num-layers 4 --seq-length 4096 --micro-batch-size 4",
    "7b-4l-32k": f"{B7} --num-layers 4 --seq-length 4096 --micro-batch-size 8",
    "7b-4l-moe": f"{B7} --num-layers 4 --seq-length 4096 --micro-batch-size 8 --recompute-modules moe",
    "7b-4l-all-bf16-grads": f"{B7} --num-layers 4 --micro-batch-size 8 --recompute-modules moe attention norm "
    "--no-accumulate-allreduce-grads-in-fp32",
    "7b-2l-accumulate": f"{B7} --num-layers 2 --micro-batch-size 2 --global-batch-size 6",
    "1b-all": f"{B1} --micro-batch-size 8 --recompute-modules moe attention norm",
    "1b-8l-offload": f"{B1} --num-layers 8 --micro-batch-size 4 --cpu-offloading-num-layers 4",
    "20b-2l-int8": f"{B20} --num-layers 2 --micro-batch-size 4 --optimizer-state-dtype int8",
    "100b-1l-moe": f"{WIDE} --micro-batch-size 2 --recompute-modules moe",
    "7b-2l-muon": f"{B7} --num-layers 2 --micro-batch-size 2 --optimizer muon",
    "1b-first-half": f"{B1} --micro-batch-size 4 --recompute-modules moe attention --recompute-num-layers 8",
    "720m": f"{MODELS['moe-720m']} --micro-batch-size 64",
    "720m-4": f"{MODELS['moe-720m']} --micro-batch-size 32",
    "7b-4l-host-2": f"{B7} --num-layers 4 {HOST} 2",
    "7b-4l-host-10": f"{B7} --num-layers 4 {HOST} 10",
    "1b-8l-host-2": f"{B1} --num-layers 8 {HOST} 2",
    "1b-8l-host-10": f"{B1} --num-layers 8 {HOST} 10",
}
PAIR = {
    "7b-4l-dp2": f"{B7} --num-layers 4 --seq-length 4096 --micro-batch-size 4",
    "7b-4l-ep2": f"{B7} --num-layers 4 --seq-length 4096 --micro-batch-size 4 --expert-model-parallel-size 2",
    "7b-2l-ep2-a2a": f"{B7} --num-layers 2 --seq-length 4096 --micro-batch-size 4 --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall",
    "7b-2l-tp2": f"{B7} --num-layers 2 --seq-length 4096 --micro-batch-size 4 --tensor-model-parallel-size 2 "
    "--expert-model-parallel-size 2",
    "1b-tp2": f"{B1} --seq-length 4096 --micro-batch-size 4 --tensor-model-parallel-size 2",
    "7b-4l-pp2": f"{B7} --num-layers 4 --micro-batch-size 4 --global-batch-size 16 --pipeline-model-parallel-size 2",
    "1b-pp2-interleaved": f"{B1} --micro-batch-size 2 --global-batch-size 8 --pipeline-model-parallel-size 2 "
    "--pipeline-schedule interleaved-1f1b --virtual-pipeline-model-parallel-size 2",
    "1b-cp2-ulysses": f"{B1} --seq-length 4096 --micro-batch-size 4 --context-parallel-size 2",
    "7b-2l-cp2-ring": f"{B7} --num-layers 2 --seq-length 4096 --micro-batch-size 4 --context-parallel-size 2 "
    "--cp-comm-type p2p",
    "7b-2l-zero2": f"{B7} --num-layers 2 --seq-length 4096 --micro-batch-size 4 --zero-stage 2",
    "7b-2l-reduce-bf16": f"{B7} --num-layers 2 --seq-length 4096 --micro-batch-size 4 --grad-reduce-in-bf16",
}
TINY = {
    "tiny": "--preset mula-tiny --micro-batch-size 2",
    "tiny-all": "--preset mula-tiny --recompute-modules moe norm",
}


def words_of(case: str, ranks: int, device: str, folder: str) -> list[str]:
    """The command line of a case; what it leaves open is one micro-batch a rank, and one rank along every axis."""
    words = case.split()
    defaults = {
        "--global-batch-size": str(int(words[words.index("--micro-batch-size") + 1]) * data_parallel(words, ranks))
        if "--micro-batch-size" in words
        else "16",
        "--expert-model-parallel-size": "1",
        "--pipeline-model-parallel-size": "1",
        "--recompute-modules": "",
        "--train-iters": str(STEPS),
        "--lr-warmup-iters": "0",
        "--eval-interval": "0",
        "--device": device,
        "--data-path": f"{folder}/random",
        "--run-dir": f"{folder}/run",
        "--log-interval": str(10 * STEPS),
    }
    for flag, value in defaults.items():
        if flag not in words:
            words += [flag, *value.split()]
    return words


def data_parallel(words: list[str], ranks: int) -> int:
    for axis in ("tensor-model", "pipeline-model", "context"):
        flag = f"--{axis}-parallel-size"
        ranks //= int(words[words.index(flag) + 1]) if flag in words else 1
    return ranks


# ---- measuring


def run_case(words: list[str], rank: int, ranks: int, device: torch.device) -> dict[str, Any]:
    """One configuration on this rank."""
    from megatron.optimus.context import RunContext
    from megatron.optimus.platform.mesh import Mesh
    from megatron.optimus.training import engine as engines
    from megatron.optimus.training import trainer as training

    engines.initialize_weights = draw_on_device
    config = load(words).config
    before = devices.memory_allocated(device)
    devices.reset_peak_memory(device)
    began = time.perf_counter()
    trainer = training.Trainer(RunContext.of(config, Mesh(config.parallel, rank=rank, world_size=ranks), device))
    trainer.checkpoints.after_step = lambda *args, **kwargs: None  # type: ignore[method-assign]
    result: dict[str, Any] = {
        "built_bytes": devices.memory_allocated(device) - before,
        "built_peak_bytes": devices.peak_memory(device) - before,
        "built_s": time.perf_counter() - began,
        "optimizer_bytes": trainer.engine.optimizer.memory_bytes(),
    }
    times: list[float] = []
    train_step = training.train_step

    def timed(*args: Any, **more: Any) -> Any:
        devices.synchronize(device)
        start = time.perf_counter()
        report = train_step(*args, **more)
        devices.synchronize(device)
        times.append(time.perf_counter() - start)
        return report

    training.train_step = timed  # type: ignore[assignment]
    trainer.fit()
    training.train_step = train_step
    result["peak_bytes"] = devices.peak_memory(device) - before
    result["step_s"] = times
    if device.type != "cpu":
        module = torch.get_device_module(device)
        result["reserved_peak_bytes"] = module.max_memory_reserved(device)
        free, total = module.mem_get_info(device)
        result["outside_bytes"] = total - free - module.memory_reserved(device)
    trainer.close()
    trainer.engine.destroy()
    return result


def worker(index: int, ranks: int, cases: dict[str, str], args: argparse.Namespace, folder: str, queue: Any) -> None:
    """One process: a rank of ``ranks``, or alone with its own share of the cases."""
    from megatron.optimus.platform import environment

    torch.set_num_threads(4 if args.device != "cpu" else 1)
    alone = ranks == 1
    rank = 0 if alone else index
    for name, value in environment.for_local_rank(rank, ranks, environment.free_port()).items():
        environment.set_default(name, value)
    if alone:  # each of these processes takes the first device that it sees for its own
        environment.set_default("CUDA_VISIBLE_DEVICES", str(index))
    device = torch.device(args.device, rank) if args.device != "cpu" else torch.device("cpu")
    devices.set_device(device)
    backend = "gloo" if device.type == "cpu" else "nccl"
    store = f"{folder}/store-{index if alone else 'all'}-{ranks}"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    from megatron.optimus.training.engine import init_engine, shutdown_engine

    init_engine(dist.default_pg_timeout)
    for name, case in cases.items():
        began = time.perf_counter()
        own = tempfile.mkdtemp(dir=folder) if rank == 0 else folder
        words = words_of(case, ranks, args.device, folder)
        words[words.index("--run-dir") + 1] = own if alone else f"{folder}/run-{name}"
        try:
            result = run_case(words, rank, ranks, device)
        except Exception:  # a case that fails must not take the others with it
            result = {"error": traceback.format_exc()[-3000:]}
        result |= {"case": name, "command": case, "ranks": ranks, "rank": rank, "wall_s": time.perf_counter() - began}
        queue.put(result)
        gc.collect()
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()
            torch.get_device_module(device).reset_peak_memory_stats()
        if "error" in result and not alone:
            exit_process(1)  # the other rank waits for this one
    shutdown_engine()
    exit_process(0)


def start(ranks: int, lists: list[dict[str, str]], args: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    """Processes, one for each list of cases; results as they come."""
    context = mp.get_context("spawn")
    queue = context.Queue()
    workers = [
        context.Process(target=worker, args=(index, ranks, cases, args, folder, queue))
        for index, cases in enumerate(lists)
    ]
    for process in workers:
        process.start()
    results: list[dict[str, Any]] = []
    deadline = time.monotonic() + args.limit
    while any(process.is_alive() for process in workers) or not queue.empty():
        try:
            results.append(queue.get(timeout=0.5))
        except Exception:  # nothing yet
            if time.monotonic() > deadline:
                break
            continue
        print(json.dumps(results[-1]), flush=True)
        save(results, args, append=True)
    for process in workers:
        process.kill()
    return results


RESULTS: dict[tuple[str, int], dict[str, Any]] = {}


def save(results: list[dict[str, Any]], args: argparse.Namespace, *, append: bool) -> None:
    RESULTS.update({(result["case"], result["rank"]): result for result in results})
    name = devices.device_name(torch.device(args.device))
    about = {"device": name, "torch": torch.__version__, "steps": STEPS, "commit": commit()}
    body = {"about": about, "results": list(RESULTS.values())}
    Path(f"{args.out}.json").write_text(json.dumps(body, indent=1) + "\n")


def measure(args: argparse.Namespace) -> None:
    from megatron.optimus.data.indexed import IndexedDatasetWriter

    gpus = torch.cuda.device_count() if args.device == "cuda" else 2
    solo, pair = (TINY, TINY) if args.device == "cpu" else (SOLO, PAIR)
    if args.only:
        solo, pair = ({name: case for name, case in cases.items() if name in args.only} for cases in (solo, pair))
    with tempfile.TemporaryDirectory() as folder:
        with IndexedDatasetWriter(f"{folder}/random", np.uint16) as writer:
            generator = np.random.default_rng(0)
            top = 4096 if args.device == "cpu" else 32000  # the smallest vocabulary
            writer.add_document(generator.integers(0, top, 2_000_000, dtype=np.uint16))
        names = list(solo)
        groups = min(gpus, 2)
        start(1, [{name: solo[name] for name in names[place::groups]} for place in range(groups)], args, folder)
        if gpus >= 2:
            start(2, [pair, pair], args, folder)


# ---- comparing


def compare(path: Path) -> bool:
    """Prints the table; whether every peak is within LIMIT."""
    from planner_steps import SEPARATE_NORMS

    from megatron.optimus.config.rank_plan import rank_plans
    from megatron.optimus.planner.hardware import H200
    from megatron.optimus.planner.memory import memory_of
    from megatron.optimus.planner.step_time import step_time

    raw = json.loads(path.read_text())
    results = raw["results"]
    machine = H200 if "commit" in raw["about"] else SEPARATE_NORMS  # which the older program's files lack
    good = True
    print("| case | rank | peak, GiB | predicted | error | peak at | step, ms | predicted | error |")
    print("|---|---|---|---|---|---|---|---|---|")
    for result in results:
        if "error" in result:
            print(f"| {result['case']} | {result['rank']} | {result['error'].strip().splitlines()[-1][:80]} |")
            continue
        if result["case"] in OLDER_PEAKS or "-host-" in result["case"]:
            continue
        config = load(words_of(result["command"], result["ranks"], "auto", "x")).config
        members = rank_plans(config, result["ranks"])
        memory = memory_of(members[result["rank"] // (result["ranks"] // len(members))], machine.kernels)
        error = memory.peak / result["peak_bytes"] - 1
        good &= abs(error) <= LIMIT
        step = statistics.median(result["step_s"][2:])
        predicted = step_time(members, machine).total
        print(
            f"| {result['case']} | {result['rank']} | {result['peak_bytes'] / 2**30:.2f} | {memory.peak / 2**30:.2f} "
            f"| {100 * error:+.1f}% | {memory.worst.name} | {step * 1e3:.1f} | {predicted * 1e3:.1f} "
            f"| {100 * (predicted / step - 1):+.1f}% |"
        )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "xpu", "cpu"])
    parser.add_argument("--only", nargs="+", help="names of cases")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for the cases of one number of ranks")
    parser.add_argument("--out", default="planner_memory", help="OUT.json")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="print the table of an earlier measurement")
    args = parser.parse_args()
    if args.compare is not None:
        return 0 if compare(args.compare) else 1
    require_device(parser, args.device)
    measure(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
