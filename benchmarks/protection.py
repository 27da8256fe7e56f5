"""What protection costs where nothing fails: steps of ``optimus launch`` with every safeguard on, and without.

    python benchmarks/protection.py --out protection.json -- --preset mula-tiny --data-path data/corpus --device cpu
    python benchmarks/protection.py --ranks 4 --steps 200 --out protection.json -- --preset mula-1b ...

What follows ``--`` are options of ``optimus pretrain``. Runs of both kinds take turns, are watched by the launcher and
end after --steps; the guarded one also copies its state to host memory, compares checksums of weights and states (both
as often as ``auto`` chooses), with two ranks or more the gradient of a micro-batch every 100 steps, times the devices
every 100 steps, and is ready to roll back. A time is the mean of the steps after the first fifth, in which ``auto``
chooses.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from a checkout, without installation

from provenance import commit  # noqa: E402

from megatron.optimus.training.metrics import read_metrics  # noqa: E402

GUARDS = "--memory-checkpoint-interval auto --integrity-interval auto --straggler-check-interval 100".split()
GUARDS += "--on-nan rollback --on-loss-spike rollback".split()
GRADIENTS = "--integrity-gradient-interval 100".split()


def step_times(options: list[str], args: argparse.Namespace) -> list[float]:
    """Seconds of each step of one run, in its order."""
    folder = Path(tempfile.mkdtemp(prefix="protection-"))
    words = [sys.executable, "-m", "megatron.optimus", "launch", "--nproc-per-node", str(args.ranks)]
    words += ["--max-restarts", "3", *options, "--run-dir", str(folder / "run")]
    words += f"--train-iters {args.steps} --save-interval 0 --eval-interval 0 --log-interval 100".split()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(words, check=False, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise SystemExit(f"exit code {done.returncode}: {' '.join(words)}\n{(done.stdout + done.stderr)[-2000:]}")
        return [line["step_time_s"] for line in read_metrics(folder / "run" / "metrics.jsonl")]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--turns", type=int, default=2, help="runs of each kind")
    parser.add_argument("--out", type=Path)
    parser.add_argument("options", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    options = args.options[args.options[:1] == ["--"] :]
    guards = GUARDS + (GRADIENTS if args.ranks > 1 else [])
    result: dict[str, Any] = {"commit": commit(), "options": options, "guards": guards, "ranks": args.ranks, "runs": []}
    means: dict[str, list[float]] = {"plain": [], "guarded": []}
    for turn in range(args.turns):
        kinds = ["plain", "guarded"][:: 1 if turn % 2 == 0 else -1]
        for kind in kinds:
            seconds = step_times([*options, *(guards if kind == "guarded" else [])], args)
            timed = seconds[args.steps // 5 :]
            means[kind].append(statistics.mean(timed))
            result["runs"].append({"kind": kind, "mean_s": means[kind][-1], "median_s": statistics.median(timed)})
            print(
                f"{kind}: mean {1e3 * means[kind][-1]:.2f} ms, median {1e3 * statistics.median(timed):.2f} ms",
                flush=True,
            )
            result["cost"] = statistics.mean(means["guarded"] or [0]) / statistics.mean(means["plain"] or [1]) - 1
            if args.out:
                args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"everything on costs {result['cost']:+.2%}")


if __name__ == "__main__":
    main()
