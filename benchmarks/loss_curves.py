"""Loss curves of 200 steps in bf16 at every kind of layout on four GPUs, against one GPU's, and the noise of those.

    python benchmarks/loss_curves.py --seconds 140 --out benchmarks/results/loss_curves_h200x4       on four GPUs
    python benchmarks/loss_curves.py --device cpu --steps 3 --rows 2 --out /tmp/curves               shows that it runs
    python benchmarks/loss_curves.py --compare benchmarks/results/loss_curves_h200x4.json            the table

The training program's own steps on a small MoE model and one stream of tokens (tests/distributed/curves.py). In bf16 a
layout changes where sums are rounded, and training amplifies that. What is noise is measured: one GPU trains with
micro-batches of 16, 8 and 4 sequences, which is the same mathematics, too. Curves are compared by means over WINDOW
steps: a layout's distance is that from the nearest of one GPU's curves, the noise is the largest distance between two
of those, both at their largest window. ``within``: the distance is no larger than the noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from device_check import require_device  # noqa: E402
from provenance import commit  # noqa: E402

from tests.distributed.curves import alone, curve  # noqa: E402
from tests.helpers import run_on_gpus  # noqa: E402

RANKS, WINDOW = 4, 10
ALONE = {f"one GPU, micro-batches of {size}": f"--micro-batch-size {size}" for size in (16, 8, 4)}
ALONE["one GPU, micro-batches of 16, again"] = ALONE["one GPU, micro-batches of 16"]
FOR_ALONE = 35.0  # seconds that are left for them, which run at the same time, each on a GPU
PIPELINE = "--micro-batch-size 4 --pipeline-model-parallel-size"
EXPERTS = "--micro-batch-size 4 --expert-model-parallel-size"
ROWS = {  # in this order, as far as the time goes; what few runs have shown comes first
    "pp 4, interleaved, 2 chunks": f"{PIPELINE} 4 --virtual-pipeline-model-parallel-size 2 "
    "--pipeline-schedule interleaved-1f1b",
    "ep 4, symmetric": f"{EXPERTS} 4 --moe-token-dispatcher-type symmetric",
    "ep 4, all-to-all": f"{EXPERTS} 4 --moe-token-dispatcher-type alltoall",
    "ring cp 4": "--micro-batch-size 16 --context-parallel-size 4 --cp-comm-type p2p",
    "tp 4, overlapped": "--micro-batch-size 16 --tensor-model-parallel-size 4 --tp-comm-overlap",
    "dp 4, zero 2": "--micro-batch-size 4 --zero-stage 2",
    "ep 4, all-to-all in 2 parts": f"{EXPERTS} 4 --moe-token-dispatcher-type alltoall --moe-dispatch-chunks 2",
    "ep 4, all-gather": f"{EXPERTS} 4",
    "tp 2 x pp 2, ep 2": f"{PIPELINE} 2 --tensor-model-parallel-size 2 --expert-model-parallel-size 2",
    "ulysses cp 4": "--micro-batch-size 16 --context-parallel-size 4",
    "pp 4, 1f1b": f"{PIPELINE} 4",
    "ep 4, hierarchical over 2": f"{EXPERTS} 4 --moe-token-dispatcher-type hierarchical --moe-hierarchical-node-size 2",
    "pp 4, zbv": f"{PIPELINE} 4 --virtual-pipeline-model-parallel-size 2 --pipeline-schedule zbv",  # torch 2.13
    "tp 4": "--micro-batch-size 16 --tensor-model-parallel-size 4",
    "dp 4": "--micro-batch-size 4",
}


def run(
    rank: int, world: int, rows: dict[str, str], steps: int, seconds: float, dtype: str, out: str
) -> dict[str, Any]:
    """The curves of all layouts for which there is time, then that of this rank alone. What there is after each layout
    is written to OUT.json, so that it outlives ranks that fail later."""
    began, found, longest = time.monotonic(), {}, 0.0
    for name, words in rows.items():
        left = seconds - FOR_ALONE - (time.monotonic() - began)
        goes_on: list[Any] = [left > longest]
        dist.broadcast_object_list(goes_on, src=0)
        if not goes_on[0]:
            found[name] = {"error": "not done, the time was over"}
            continue
        start = time.monotonic()
        try:
            losses = curve(rank, world, f"{words} --params-dtype {dtype}", steps)
            found[name] = {"losses": losses, "seconds": time.monotonic() - start}
        except ValueError as error:  # what this torch or machine cannot run is refused on all ranks alike
            found[name] = {"error": str(error).splitlines()[0]}
        longest = max(longest, time.monotonic() - start)
        if rank == 0:
            Path(f"{out}.json").write_text(json.dumps({"results": found}) + "\n")
    start = time.monotonic()
    own = [(f"{words} --params-dtype {dtype}", steps) for words in ALONE.values()]
    found[list(ALONE)[rank]] = {"losses": alone(rank, world, own), "seconds": time.monotonic() - start}
    return found


def windows(losses: list[float]) -> list[float]:
    return [statistics.fmean(losses[at : at + WINDOW]) for at in range(0, len(losses), WINDOW)]


def distance(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(windows(one), windows(other), strict=True))


def table(results: dict[str, Any]) -> str:
    """Markdown; noise first."""
    curves = {name: row["losses"] for name, row in results.items() if "losses" in row}
    serial = [curves[name] for name in ALONE if name in curves]
    noise = max(distance(one, other) for one in serial for other in serial)
    lines = ["| layout | loss at the start | in the last ten steps | distance from one GPU | within the noise |"]
    lines.append("|" + "---|" * 5)
    for name, row in results.items():
        if "error" in row:
            lines.append(f"| {name} | {row['error']} | | | |")
            continue
        losses = row["losses"]
        others = [curves[other] for other in ALONE if other in curves and other != name]
        away = min(distance(losses, other) for other in others)
        verdict = "yes" if away <= noise else "NO"
        end = statistics.fmean(losses[-WINDOW:])
        lines.append(f"| {name} | {losses[0]:.4f} | {end:.4f} | {away:.4f} | {verdict} |")
    lines += ["", f"Noise: {noise:.4f}, the largest distance between two curves of one GPU."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, help="only the first so many layouts")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--seconds", type=float, default=140.0, help="layouts that do not fit are left out")
    parser.add_argument("--out", default="loss_curves", help="OUT.json")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="print the table of an earlier run")
    args = parser.parse_args()
    if args.compare is not None:
        sys.stdout.write(table(json.loads(args.compare.read_text())["results"]))
        return
    require_device(parser, args.device, RANKS)
    rows = dict(list(ROWS.items())[: args.rows])
    words = (rows, args.steps, args.seconds - 15, args.dtype, args.out)  # the start takes about as long
    ranks = run_on_gpus(run, RANKS, *words, timeout=args.seconds + 120, device=args.device)
    results = ranks[0] | {name: found[name] for found in ranks for name in ALONE if name in found}
    about = {
        "command": " ".join(["benchmarks/loss_curves.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "commit": commit(),
    }
    Path(f"{args.out}.json").write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
    sys.stdout.write(table(results))


if __name__ == "__main__":
    main()
