"""What protection costs where nothing fails: steps of ``optimus launch`` with every safeguard on, and without.

    python benchmarks/protection.py --out protection.json -- --preset mula-tiny --data-path data/corpus --device cpu
    python benchmarks/protection.py --ranks 4 --steps 200 --each --out protection.json -- --preset mula-1b ...

What follows ``--`` are options of ``optimus pretrain``. Runs of both kinds take turns, are watched by the launcher and
end after --steps; the guarded one also copies its state to host memory, compares checksums of weights and states, with
two ranks or more the gradient of a micro-batch (all as often as ``auto`` chooses), times the devices every 100 steps,
and is ready to roll back. ``--each`` also switches on each safeguard alone.

Steps in the first fifth do not count, in which ``auto`` chooses. A time is the mean of the others with the pauses
between them, and a median is one of steps without. CPU time is that of the launcher and all ranks, with their threads:
on a machine with other work it says more than the time of a step, though what shares a cache changes it too.
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
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from a checkout, without installation

from provenance import commit  # noqa: E402

from megatron.optimus.training.metrics import read_metrics  # noqa: E402

GUARDS = {
    "memory": "--memory-checkpoint-interval auto",
    "integrity": "--integrity-interval auto",
    "gradients": "--integrity-gradient-interval auto",  # two ranks or more
    "stragglers": "--straggler-check-interval 100",
    "rollbacks": "--on-nan rollback --on-loss-spike rollback",
}


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and of all that it has started, those that have ended included."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    own = sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_seconds(int(child)) for child in children)


def measure(options: list[str], args: argparse.Namespace) -> dict[str, float]:
    """Mean seconds of a step of one run, pauses included, the median without, and the mean CPU seconds."""
    folder = Path(tempfile.mkdtemp(prefix="protection-"))
    words = [sys.executable, "-m", "megatron.optimus", "launch", "--nproc-per-node", str(args.ranks)]
    words += ["--max-restarts", "3", *options, "--run-dir", str(folder / "run")]
    words += f"--train-iters {args.steps} --save-interval 0 --eval-interval 0 --log-interval 100".split()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    try:
        cpu: dict[int, float] = {}  # by the last step that was done
        metrics, output = folder / "run" / "metrics.jsonl", folder / "output"
        with output.open("wb") as file:
            launch = subprocess.Popen(words, stdout=file, stderr=file, env=environment)
        try:
            while launch.poll() is None:
                done = len(read_metrics(metrics)) if metrics.exists() else 0
                if done not in cpu and done < args.steps:  # the ranks end after the last one
                    cpu[done] = cpu_seconds(launch.pid)
                time.sleep(0.1)
        finally:
            launch.kill()
        if launch.returncode:
            said = output.read_text(errors="replace")[-2000:]
            raise SystemExit(f"exit code {launch.returncode}: {' '.join(words)}\n{said}")
        counted = sorted(step for step in cpu if step >= args.steps // 5)
        lines = read_metrics(metrics)[args.steps // 5 :]
        return {
            "mean_s": statistics.mean(line["step_time_s"] + (line.get("pause_s") or 0.0) for line in lines),
            "median_s": statistics.median(line["step_time_s"] for line in lines),
            "cpu_s": (cpu[counted[-1]] - cpu[counted[0]]) / max(1, counted[-1] - counted[0]),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--turns", type=int, default=2, help="runs of each kind")
    parser.add_argument("--each", action="store_true", help="each safeguard alone too")
    parser.add_argument("--out", type=Path)
    parser.add_argument("options", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    options = args.options[args.options[:1] == ["--"] :]
    guards = {name: words.split() for name, words in GUARDS.items() if args.ranks > 1 or name != "gradients"}
    kinds = {"plain": [], **(guards if args.each else {}), "guarded": [word for one in guards.values() for word in one]}
    result: dict[str, Any] = {"commit": commit(), "options": options, "guards": guards, "ranks": args.ranks}
    result |= {"cores": os.cpu_count(), "runs": []}
    for turn in range(args.turns):
        for kind in [*kinds][:: 1 if turn % 2 == 0 else -1]:
            run: dict[str, Any] = {"kind": kind, "load": os.getloadavg()[0], **measure([*options, *kinds[kind]], args)}
            result["runs"].append(run)
            told = ", ".join(f"{name} {1e3 * run[f'{name}_s']:.2f} ms" for name in ("mean", "median", "cpu"))
            print(f"{kind}: {told}", flush=True)
            for name in ("mean_s", "cpu_s"):
                each = {of: [one[name] for one in result["runs"] if one["kind"] == of] for of in ("plain", "guarded")}
                if all(each.values()):
                    share = statistics.mean(each["guarded"]) / statistics.mean(each["plain"]) - 1
                    result[f"cost_of_{name.removesuffix('_s')}"] = share
            if args.out:
                args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"everything on costs {result['cost_of_mean']:+.2%} of a step, {result['cost_of_cpu']:+.2%} of its CPU time")


if __name__ == "__main__":
    main()
