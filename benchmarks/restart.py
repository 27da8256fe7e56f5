"""Seconds from the kill of a rank to the end of the next step, under ``optimus launch --max-restarts``.

    python benchmarks/restart.py --ranks 4 --kills 5 --out restart_cpu.json

A tiny MoE on random tokens saves every 20 steps; after a save one rank, another each time, gets SIGKILL. The time ends
with the first line that metrics.jsonl gains from a new process. Standard output is a line for each kill, with the load
of the machine (/proc/loadavg) before it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from a checkout, without installation

from provenance import commit  # noqa: E402

from megatron.optimus.data.indexed import IndexedDatasetWriter  # noqa: E402

TINY = "--preset mula-tiny --num-layers 2 --hidden-size 64 --num-attention-heads 4 --moe-ffn-hidden-size 64".split()
TINY += "--vocab-size 512 --seq-length 64 --micro-batch-size 1 --global-batch-size 8 --train-iters 1000000".split()
TINY += "--lr-warmup-iters 2 --save-interval 20 --eval-interval 0 --log-interval 1000 --max-restarts 1000".split()


def steps(run: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def wait_for_start(run: Path, after: float, process: subprocess.Popen[bytes]) -> float:
    """Waits until a process that started after this time of day has done a step; returns when that ended."""
    while process.poll() is None:
        for line in reversed(steps(run)):
            if "startup_s/total" in line and line["wall_time"] > after:
                return float(line["wall_time"])
        time.sleep(0.02)
    raise SystemExit(f"the launcher ended with exit code {process.returncode}; see {run}/log")


def children(pid: int) -> list[int]:
    """Processes that this one has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ranks_of(launcher: int) -> list[int]:
    """The launcher's fork server forks the ranks."""
    return [rank for server in children(launcher) for rank in children(server)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run, tokens = Path(folder) / "run", Path(folder) / "tokens"
        run.mkdir()
        generator = np.random.default_rng(0)
        with IndexedDatasetWriter(str(tokens), np.uint16) as writer:
            for _ in range(200):
                writer.add_document(generator.integers(0, 512, 1000))
        command = [sys.executable, "-m", "megatron.optimus.launch", "--nproc-per-node", str(args.ranks), *TINY]
        command += ["--data-path", str(tokens), "--run-dir", str(run)]
        with (run / "log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
        kills = []
        try:
            wait_for_start(run, 0.0, process)
            for number in range(args.kills):
                saved = max(run.glob("checkpoints/step-*"), default=None)
                while max(run.glob("checkpoints/step-*"), default=None) == saved:  # without one the next attempt waits
                    time.sleep(0.1)
                load, ranks = os.getloadavg()[0], ranks_of(process.pid)
                now = time.time()
                os.kill(ranks[number % len(ranks)], signal.SIGKILL)
                kills.append({"seconds": wait_for_start(run, now, process) - now, "load": load})
                print(f"kill {number + 1}: {kills[-1]['seconds']:.2f} s, load {load:.1f}", flush=True)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)
    if args.out:
        about = {"command": " ".join(sys.argv), "commit": commit(), "ranks": args.ranks, "cores": os.cpu_count()}
        args.out.write_text(json.dumps({**about, "kills": kills}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
