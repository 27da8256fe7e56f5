"""What a start costs as ranks are added: importing the program, meeting the others, making the process groups.

    python benchmarks/startup.py --ranks 2 4 8 16 32 64 --out benchmarks/results/startup_gloo.json

Real gloo ranks on this machine, forked from one process that has imported the program, so that the importing, which
shares the cores among all ranks here and has its own on a cluster, is measured apart. ``groups`` is the making of
every group of the grid of ranks (platform/mesh.py): pp 2, ep 2, and cp 2 from 16 ranks on. Every time is that of the
slowest rank.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installation


def rank_main(rank: int, ranks: int, store: str, queue: Any) -> None:
    import torch
    import torch.distributed as dist

    from megatron.optimus.config.schema import ParallelConfig
    from megatron.optimus.platform.mesh import Mesh

    torch.set_num_threads(1)
    began = time.perf_counter()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    met = time.perf_counter()
    config = ParallelConfig(
        pipeline_model_parallel_size=2 if ranks > 2 else 1,
        context_parallel_size=2 if ranks >= 16 else 1,
        expert_model_parallel_size=2,
    )
    mesh = Mesh(config, rank=rank, world_size=ranks)
    grouped = time.perf_counter()
    for axis in ("world", "dense", "edp", "ep", "pp"):
        if mesh.group(axis) is not None:
            dist.all_reduce(torch.ones(1), group=mesh.group(axis))
    used = time.perf_counter()
    queue.put((met - began, grouped - met, used - grouped))
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks: int) -> dict[str, float]:
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        queue: Any = context.SimpleQueue()
        workers = [context.Process(target=rank_main, args=(r, ranks, f"{folder}/store", queue)) for r in range(ranks)]
        for worker in workers:
            worker.start()
        times = [queue.get() for _ in workers]
        for worker in workers:
            worker.join()
    meet, groups, first = (max(column) for column in zip(*times, strict=True))
    return {"ranks": ranks, "meet_s": meet, "groups_s": groups, "first_collectives_s": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("startup_gloo.json"))
    args = parser.parse_args()
    began = time.perf_counter()
    import torch

    import megatron.optimus.parallel.apply
    import megatron.optimus.platform.mesh  # noqa: F401

    imported = time.perf_counter() - began
    imported_files = sum(getattr(module, "__file__", None) is not None for module in list(sys.modules.values()))
    results = []
    for ranks in args.ranks:
        each = [measure(ranks) for _ in range(args.repetitions)]
        results.append({key: sorted(one[key] for one in each)[len(each) // 2] for key in each[0]})
        print(json.dumps(results[-1]), flush=True)
    about = {"import_s": imported, "cores": os.cpu_count(), "torch": torch.__version__, "machine": platform.machine()}
    about |= {"imported_files": imported_files}
    about |= {"repetitions": args.repetitions, "load_average": os.getloadavg()}
    args.out.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
