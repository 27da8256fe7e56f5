"""Seconds from the launch of the training program to its first steps, with the line that the program printed at each.

    python benchmarks/first_step.py --repetitions 3 --out first_step.json -- --preset mula-7b-a1b --seq-length 4096 ...

The program runs as a process of its own, on random tokens, and is stopped after ``--steps`` steps; what follows ``--``
are its options. The clock starts before the process is made. The first run of a machine compiles kernels and reads
files that later runs find in caches, so it is reported apart. ``--profile FILE`` writes cProfile's table of one more
run, whose times are longer than without it.
"""

from __future__ import annotations

import argparse
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def write_tokens(prefix: Path, vocab_size: int, documents: int) -> None:
    """Writes a token file of random ids, 4,096 a document."""
    import numpy as np

    sys.path.insert(0, str(ROOT))
    from megatron.optimus.data.index_writer import IndexWriter

    generator = np.random.default_rng(0)
    with IndexWriter(prefix, vocab_size) as writer:
        for _ in range(documents):
            writer.add_document(generator.integers(0, vocab_size, 4096))


def start(words: list[str], data: Path, run_dir: Path, steps: int, profile: Path | None = None) -> dict[str, Any]:
    """Runs the program once.

    Returns seconds since the launch of each line it printed, of its first step's line of metrics, and of its end.
    """
    program = [sys.executable, *(["-m", "cProfile", "-o", str(profile)] if profile else []), "-u", "-m"]
    if profile:
        program.remove("-u")
    command = [*program, "megatron.optimus.pretrain", *words, "--data-path", str(data), "--run-dir", str(run_dir)]
    command += ["--train-iters", str(steps), "--save-interval", "0"]
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert process.stdout is not None
    lines = [(round(time.perf_counter() - began, 3), line.rstrip()) for line in process.stdout]
    code = process.wait()
    if code:
        raise SystemExit("\n".join(line for _, line in lines[-30:]))
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {"lines": lines, "end_s": round(time.perf_counter() - began, 3), "metrics": metrics}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=50304)
    parser.add_argument("--documents", type=int, default=500)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(Path(folder) / "tokens", args.vocab_size, args.documents)
        runs = []
        for number in range(args.repetitions):
            runs.append(start(args.words, Path(folder) / "tokens", Path(folder) / f"run{number}", args.steps))
            print(json.dumps(runs[-1], indent=1), flush=True)
        if args.profile:
            found = Path(folder) / "profile"
            start(args.words, Path(folder) / "tokens", Path(folder) / "profiled", args.steps, found)
            with args.profile.open("w") as stream:
                pstats.Stats(str(found), stream=stream).sort_stats("cumulative").print_stats(120)
    if args.out:
        args.out.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
