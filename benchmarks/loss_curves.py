"""Loss curves of 200 steps in bf16 at every kind of layout on two or four GPUs, against one GPU's, and their noise.

    python benchmarks/loss_curves.py --ranks 2 --out benchmarks/results/loss_curves_h200x2           on two GPUs
    python benchmarks/loss_curves.py --device cpu --steps 3 --rows 2 --alone 3 --out /tmp/curves     shows that it runs
    python benchmarks/loss_curves.py --compare benchmarks/results/loss_curves_h200x2.json            the table

The training program's own steps on a small MoE model and one stream of tokens (tests/distributed/curves.py): the same
sequences in every step, the same global batch, the same mathematics. In bf16 a layout changes where sums are rounded,
and training amplifies that, so that curves differ; the question is whether a layout's differs more than it must.

Noise is measured with one GPU alone, in ways that are the same mathematics too and change only where sums are rounded:
micro-batches of 16, 8 and 4 sequences, and the sequences of a batch in another order. These runs come first, all at the
same time, several to a GPU. Curves are compared by means over WINDOW steps. A curve's distance is that from the mean of
one GPU's curves, at its largest window; for a curve of one GPU itself, from the mean of the others. ``within``: some
curve of one GPU is as far away. Of N curves of one GPU that calls a layout whose curve is of the very same distribution
too far away with a probability of 1 / (N + 1). One GPU's curves that have the same bits count once.
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

from tests.distributed.curves import SEQUENCES, alone, curve  # noqa: E402
from tests.helpers import run_on_gpus  # noqa: E402

WINDOW = 10
ONE = "one GPU, micro-batches of"
# Micro-batch and order of the sequences. The longest first, so that GPUs take them in turns.
ALONE = [(4, 0), (4, 1), (8, 0), (8, 1), (16, 0), *((16, order) for order in range(1, 8))]
PIPELINE = "--micro-batch-size 4 --pipeline-model-parallel-size"
EXPERTS = "--moe-token-dispatcher-type"
ROWS_OF_FOUR = {
    "tp 2 x pp 2, ep 2": f"{PIPELINE} 2 --tensor-model-parallel-size 2 --expert-model-parallel-size 2",
    "ep 4, hierarchical over 2": "--micro-batch-size 4 --expert-model-parallel-size 4 "
    f"{EXPERTS} hierarchical --moe-hierarchical-node-size 2",
}


def rows_of(ranks: int) -> dict[str, str]:
    """Options of every kind of layout, by name, in the order in which they run as far as the time goes."""
    shared = f"--micro-batch-size {SEQUENCES // ranks}"  # replicas have a micro-batch each
    experts = f"{shared} --expert-model-parallel-size {ranks} {EXPERTS}"
    tensor = f"--micro-batch-size {SEQUENCES} --tensor-model-parallel-size {ranks}"
    context = f"--micro-batch-size {SEQUENCES} --context-parallel-size {ranks}"
    chunks = "--virtual-pipeline-model-parallel-size 2 --pipeline-schedule"
    return {
        f"ep {ranks}, symmetric": f"{experts} symmetric",
        f"ep {ranks}, all-to-all": f"{experts} alltoall",
        f"ring cp {ranks}": f"{context} --cp-comm-type p2p",
        f"ulysses cp {ranks}": context,
        f"tp {ranks}, overlapped": f"{tensor} --tp-comm-overlap",
        f"dp {ranks}, zero 2": f"{shared} --zero-stage 2",
        f"pp {ranks}, interleaved, 2 chunks": f"{PIPELINE} {ranks} {chunks} interleaved-1f1b",
        f"ep {ranks}, all-to-all in 2 parts": f"{experts} alltoall --moe-dispatch-chunks 2",
        f"tp {ranks}": tensor,
        f"ep {ranks}, all-gather": f"{experts} allgather",
        f"pp {ranks}, 1f1b": f"{PIPELINE} {ranks}",
        f"dp {ranks}": shared,
        **(ROWS_OF_FOUR if ranks == 4 else {}),
        f"pp {ranks}, zbv": f"{PIPELINE} {ranks} {chunks} zbv",  # from torch 2.13 on
    }


def run(
    rank: int, world: int, rows: dict[str, str], steps: int, end: float, dtype: str, out: str, about: dict[str, Any]
) -> dict[str, Any]:
    """The curves of all layouts that are done at ``end``, of time.time. ``about`` with what there is after each layout
    is written to OUT.json, so that it outlives ranks that fail later."""
    found: dict[str, Any] = {}
    longest = 0.0
    for name, words in rows.items():
        goes_on: list[Any] = [time.time() + longest < end]
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
            write(out, about | {"results": about["results"] | found})
    return found


def run_alone(rank: int, world: int, runs: list[tuple[str, int, int]]) -> dict[str, Any]:
    start = time.monotonic()
    return {"losses": alone(rank, world, runs), "seconds": time.monotonic() - start}


def write(out: str, results: dict[str, Any]) -> None:
    Path(f"{out}.json").write_text(json.dumps(results, indent=1) + "\n")


def windows(losses: list[float]) -> list[float]:
    return [statistics.fmean(losses[at : at + WINDOW]) for at in range(0, len(losses), WINDOW)]


def distance(one: list[float], others: list[list[float]]) -> float:
    """Of a curve from the mean of others, at the window where it is largest."""
    means = [statistics.fmean(window) for window in zip(*map(windows, others), strict=True)]
    return max(abs(a - b) for a, b in zip(windows(one), means, strict=True))


def table(results: dict[str, Any]) -> str:
    """Markdown."""
    serial = [row["losses"] for name, row in results.items() if name.startswith(ONE)]
    serial = [losses for place, losses in enumerate(serial) if losses not in serial[:place]]
    noise = [distance(losses, serial[:place] + serial[place + 1 :]) for place, losses in enumerate(serial)]
    lines = ["| layout | loss at the start | in the last ten steps | distance | one GPU's as far | within the noise |"]
    lines.append("|" + "---|" * 6)
    for name, row in results.items():
        if "error" in row:
            lines.append(f"| {name} | {row['error']} | | | | |")
            continue
        losses = row["losses"]
        others = [other for other in serial if other != losses] if name.startswith(ONE) else serial
        away = distance(losses, others)
        as_far = sum(away <= other for other in noise)
        verdict = "" if name.startswith(ONE) else "yes" if as_far else "NO"
        end = statistics.fmean(losses[-WINDOW:])
        lines.append(f"| {name} | {losses[0]:.4f} | {end:.4f} | {away:.4f} | {as_far} of {len(serial)} | {verdict} |")
    middle = statistics.median(noise)
    lines += ["", f"Noise: {len(serial)} curves of one GPU, {middle:.4f} in the middle, at most {max(noise):.4f}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    began = time.time()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, choices=[2, 4])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, help="only the first so many layouts")
    parser.add_argument("--alone", type=int, default=len(ALONE), help="curves of one GPU, 2 to %(default)s")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--seconds", type=float, default=285.0, help="in all; layouts that do not fit are left out")
    parser.add_argument("--out", default="loss_curves", help="OUT.json")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="print the table of an earlier run")
    args = parser.parse_args()
    if args.compare is not None:
        sys.stdout.write(table(json.loads(args.compare.read_text())["results"]))
        return
    if not 2 <= args.alone <= len(ALONE):
        parser.error(f"--alone {args.alone} must be 2 to {len(ALONE)}: distances of fewer have no meaning")
    require_device(parser, args.device, args.ranks)
    about: dict[str, Any] = {
        "command": " ".join(["benchmarks/loss_curves.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "commit": commit(),
    }
    # From the end of the list where there are to be fewer: the shortest.
    chosen = ALONE[-args.alone :]
    own = [(f"--micro-batch-size {size} --params-dtype {args.dtype}", args.steps, order) for size, order in chosen]
    noise = run_on_gpus(run_alone, len(own), own, timeout=args.seconds, device=args.device)
    names = [f"{ONE} {size}" + (f", order {order}" if order else "") for size, order in chosen]
    about["results"] = dict(zip(names, noise, strict=True))
    write(args.out, about)
    rows = dict(list(rows_of(args.ranks).items())[: args.rows])
    words = (rows, args.steps, began + args.seconds, args.dtype, args.out, about)
    left = args.seconds - (time.time() - began)
    ranks = run_on_gpus(run, args.ranks, *words, timeout=left + 60, device=args.device)
    about["results"] |= ranks[0]
    write(args.out, about)
    sys.stdout.write(table(about["results"]))


if __name__ == "__main__":
    main()
