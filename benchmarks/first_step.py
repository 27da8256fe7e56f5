"""Seconds from the launch of the training program to the end of its first step, and what they were spent on.

    python benchmarks/first_step.py --out benchmarks/results/first_step_h200.json -- --preset mula-7b-a1b \\
        --seq-length 4096 --micro-batch-size 1 --global-batch-size 4 --vocab-size 50304 \\
        --expert-model-parallel-size 1 --pipeline-model-parallel-size 1 --lr-warmup-iters 100

The program runs as a process of its own, on random tokens; what follows ``--`` are its options. The clock starts before
the process is made and stops when the step's line is in metrics.jsonl; the process is killed a few steps later. The
first run of a machine reads files and compiles kernels that later runs find in caches: it is reported as "cold".
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from a checkout, without installation


def write_tokens(prefix: Path, vocab_size: int, documents: int) -> None:
    """Writes a token file of random ids, 4,096 a document."""
    import numpy as np

    from megatron.optimus.data.indexed import IndexedDatasetWriter, token_dtype

    generator, dtype = np.random.default_rng(0), token_dtype(vocab_size)
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for _ in range(documents):
            writer.add_document(generator.integers(0, vocab_size, 4096, dtype=dtype))


def start(words: list[str], tokens: Path, run_dir: Path, steps: int, timeout_s: float) -> dict[str, Any]:
    """Runs the program once.

    Returns the seconds until the first step's line, the phases that it names, and the metrics of the last step.
    """
    command = [sys.executable, "-m", "megatron.optimus.pretrain", *words, "--data-path", str(tokens)]
    command += ["--run-dir", str(run_dir), "--train-iters", "1000", "--save-interval", "0", "--eval-interval", "0"]
    began = time.perf_counter()
    first = None
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        path, lines = run_dir / "metrics.jsonl", list[str]()
        while process.poll() is None and len(lines) < steps and time.perf_counter() - began < timeout_s:
            time.sleep(0.02)
            lines = path.read_text().splitlines() if path.exists() else []
            if lines and first is None:
                first = time.perf_counter() - began
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        if first is None:
            raise SystemExit("\n".join(output.read().splitlines()[-20:]))
    metrics = [json.loads(line) for line in lines]
    phases = {k.removeprefix("startup_s/"): round(v, 2) for k, v in metrics[0].items() if k.startswith("startup_s/")}
    return {"first_step_s": round(first, 2), "phases_s": phases, "last": metrics[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3, help="besides the cold run")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--vocab-size", type=int, default=50304, help="of the random tokens")
    parser.add_argument("--timeout-s", type=float, default=200)
    parser.add_argument("--out", type=Path)
    parser.add_argument("words", nargs="*", help="options of the training program, after --")
    args = parser.parse_args()
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    found: dict[str, Any] = {"device": name, "cores": os.cpu_count(), "torch": torch.__version__, "words": args.words}
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(Path(folder) / "tokens", args.vocab_size, args.documents)
        for number in range(1 + args.repetitions):
            run = start(args.words, Path(folder) / "tokens", Path(folder) / str(number), args.steps, args.timeout_s)
            found.setdefault("runs", []).append({"run": f"warm {number}" if number else "cold", **run})
            print(json.dumps(found["runs"][-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
