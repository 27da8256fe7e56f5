"""Where the best learning rate lies as a model grows, for each parametrization: does the small model's rate transfer?

    python benchmarks/rate_transfer.py --axis width --sizes 64 128 256 --parametrizations standard mup \\
        --work runs/rate_transfer --out benchmarks/results/rate_transfer_cpu.json
    python benchmarks/rate_transfer.py --axis depth --sizes 2 4 8 --parametrizations mup completep \\
        --work runs/rate_transfer --out benchmarks/results/rate_transfer_cpu.json

Each model is swept by `optimus sweep` over the same rates, in processes of their own: a dense decoder on this source
tree's own files as bytes, constant batch, warm-up and cosine decay to 0. Loss is the mean over the last tenth of the
steps. The best rate is the minimum of a parabola through the best rate of the grid and its neighbours in log-log
coordinates. A run that is started again repeats no sweep; --out is added to, and --plot draws what it holds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from a checkout, without installation

HEAD, BASE_WIDTH, BASE_DEPTH = 16, 64, 2
RATES = ["5e-4", "1e-3", "2e-3", "4e-3", "8e-3", "1.6e-2", "3.2e-2"]


def write_corpus(work: Path) -> Path:
    """Tokenizes the Python files and pages of the source tree as bytes; returns the prefix of the token files."""
    from megatron.optimus.commands import preprocess

    prefix = work / "source"
    if not (work / "source_text_document.idx").exists():
        work.mkdir(parents=True, exist_ok=True)
        folders = ("docs", "megatron", "deepspeed_ext", "tests")
        files = sorted(path for one in folders for end in ("md", "py") for path in (ROOT / one).rglob(f"*.{end}"))
        lines = [json.dumps({"text": path.read_text()}) + "\n" for path in files]
        (work / "source.jsonl").write_text("".join(lines))
        words = ["--input", str(work / "source.jsonl"), "--output-prefix", str(prefix), "--append-eod"]
        if preprocess.main([*words, "--tokenizer-type", "ByteLevelTokenizer", "--workers", "1"]):
            raise SystemExit("the corpus could not be made")
    return work / "source_text_document"


def options_of(args: argparse.Namespace, parametrization: str, size: int, corpus: Path) -> list[str]:
    """The command line of one model's sweep, from ``--`` on."""
    width, depth = (size, BASE_DEPTH) if args.axis == "width" else (BASE_WIDTH, size)
    words = f"--num-layers {depth} --hidden-size {width} --num-attention-heads {width // HEAD} "
    words += f"--ffn-hidden-size {2 * width} --vocab-size 320 --max-position-embeddings {args.seq_length} "
    words += f"--seq-length {args.seq_length} --micro-batch-size {args.batch} --global-batch-size {args.batch} "
    words += f"--params-dtype fp32 --device {args.device} --train-iters {args.steps} --min-lr 0 "
    words += f"--lr-warmup-iters {args.steps // 10} --eval-interval 0 --save-interval 0 --adam-eps 1e-9 "
    if parametrization != "standard":
        words += f"--parametrization {parametrization} --base-hidden-size {BASE_WIDTH} "
    if parametrization == "completep":
        words += f"--base-num-layers {BASE_DEPTH} "
    return [*words.split(), "--data-path", str(corpus)]


def best_rate(rates: list[float], losses: list[float]) -> float:
    """The minimum of the parabola through the lowest loss and its neighbours, over the logarithm of the rate."""
    at = min(range(len(losses)), key=losses.__getitem__)
    if at in (0, len(losses) - 1):
        return rates[at]
    (x0, x1, x2), (y0, y1, y2) = (math.log(rate) for rate in rates[at - 1 : at + 2]), losses[at - 1 : at + 2]
    left, right = (x1 - x0) * (y1 - y2), (x1 - x2) * (y1 - y0)
    return math.exp(x1 - 0.5 * ((x1 - x0) * left - (x1 - x2) * right) / (left - right))


def measure(args: argparse.Namespace, parametrization: str, size: int, corpus: Path) -> dict[str, Any]:
    """Sweeps one model; returns losses by rate and the best one."""
    from megatron.optimus.commands import sweep

    folder = args.work / f"{parametrization}-{args.axis}-{size}"
    grid = ["--vary", f"lr={','.join(RATES)}", "--run-dir", str(folder)]
    if code := sweep.main([*grid, "--", *options_of(args, parametrization, size, corpus)]):
        raise SystemExit(code)
    rows = json.loads((folder / "sweep.json").read_text())
    losses = [row["loss"] if row["state"] == "done" and row["loss"] is not None else math.inf for row in rows]
    rates = [float(row["values"]["lr"]) for row in rows]
    return {
        "axis": args.axis,
        "parametrization": parametrization,
        "size": size,
        "rates": rates,
        "losses": [None if math.isinf(loss) else round(loss, 5) for loss in losses],
        "best_rate": best_rate(rates, losses),
        "lowest_loss": min(losses),
    }


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """A panel for each axis and parametrization, a line for each size."""
    from megatron.optimus.report import figure

    panels = []
    for axis, name in dict.fromkeys((one["axis"], one["parametrization"]) for one in results):
        own = [one for one in results if (one["axis"], one["parametrization"]) == (axis, name)]
        lines = {f"{axis} {one['size']} (best {one['best_rate']:.1e})": (one["rates"], one["losses"]) for one in own}
        panels.append(figure.Panel(f"{name}, {axis}", "learning rate", "loss (nats a byte)", lines))
    figure.draw(path, panels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axis", choices=["width", "depth"], default="width")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--parametrizations", nargs="+", default=["standard", "mup"])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, default=Path("runs/rate_transfer"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    from benchmarks.provenance import commit

    corpus = write_corpus(args.work)
    found = json.loads(args.out.read_text()) if args.out.exists() else {"results": []}
    for parametrization in args.parametrizations:
        for size in args.sizes:
            one = measure(args, parametrization, size, corpus)
            print(f"{parametrization:10} {args.axis} {size:4}: best rate {one['best_rate']:.2e}", flush=True)
            key = (args.axis, parametrization, size)
            others = [row for row in found["results"] if (row["axis"], row["parametrization"], row["size"]) != key]
            found["results"] = [*others, one]
    found |= {
        "commit": commit(),
        "steps": args.steps,
        "tokens_per_step": args.batch * args.seq_length,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, device {args.device}",
    }
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    if args.plot is not None:
        draw(found["results"], args.plot)


if __name__ == "__main__":
    main()
