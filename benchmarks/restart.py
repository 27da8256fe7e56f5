"""From the kill of a rank to the next step that is new, under ``optimus launch --max-restarts``: seconds, steps lost.

    python benchmarks/restart.py --ranks 4 --kills 5 --memory 0 auto --out restart_cpu.json
    python benchmarks/restart.py --device cuda --ranks 1 --preset mula-7b-a1b --memory auto --out restart_7b.json
    python benchmarks/restart.py --minutes 20 --save-interval 500 --memory auto 0 torchrun --out effective.json

One run for each value of --memory (``--memory-checkpoint-interval``; 0: none). Without --preset it is a tiny MoE on
random tokens that saves every --save-interval steps. Rank after rank gets SIGKILL, each half an interval after a save
on disk; a run that never saves is killed every --save-interval / 2 steps. ``seconds`` end with the first line of
metrics.jsonl of a step that had not been done before, ``first_step_s`` with the first line of the new process.
``step_s`` is the mean time of a step without kills, copies and saves included. Standard output is a line for each kill,
with the load of the machine (/proc/loadavg) before it.

With --minutes a rank is killed every --every seconds instead, and the effective time is the share of the wall time that
the steps which are new take: their number times ``undisturbed_step_s`` (of the run with the fastest steps) over the
time from the end of the steps without kills to the last new step. ``step_s`` is then the median over the whole run, as
the load of a machine changes in so long a time. The value ``torchrun`` of --memory is the same
training under ``torchrun --max-restarts``: new interpreters, state from disk.

A preset runs with bf16 gradients and 8-bit moments, 8 sequences of 2,048 tokens a step, and no save on disk: of
Mula-7B-A1B, 70 GB of device memory, and 84 GB of host memory in two copies of its state.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from a checkout, without installation

from provenance import commit  # noqa: E402

from megatron.optimus.commands.drill_faults import children, ranks_of  # noqa: E402
from megatron.optimus.data.indexed import IndexedDatasetWriter  # noqa: E402

TINY = "--preset mula-tiny --num-layers 2 --hidden-size 64 --num-attention-heads 4 --moe-ffn-hidden-size 64".split()
TINY += "--vocab-size 512 --seq-length 64 --micro-batch-size 1 --global-batch-size 8".split()
LARGE = "--seq-length 2048 --micro-batch-size 1 --global-batch-size 8 --expert-model-parallel-size 1".split()
LARGE += "--optimizer-state-dtype int8 --accumulate-allreduce-grads-in-fp32 false --recompute-modules moe".split()
COMMON = "--train-iters 1000000 --lr-warmup-iters 2 --eval-interval 0 --log-interval 1000".split()
UNDISTURBED = 5  # steps of a new process that are not usual


def steps(run: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


class Run:
    """A launch of which ranks are killed."""

    def __init__(self, folder: Path, ranks: int, words: list[str], memory: str) -> None:
        self.folder, self.is_torchrun = folder, memory == "torchrun"
        folder.mkdir()
        restarts = ["--nproc-per-node", str(ranks), "--max-restarts", "1000"]
        program = ["-m", "megatron.optimus.launch", *restarts, "--memory-checkpoint-interval", memory]
        if self.is_torchrun:
            program = ["-m", "torch.distributed.run", *restarts, "-m", "megatron.optimus.pretrain"]
        command = [sys.executable, *program, *words, "--run-dir", str(folder)]
        # On an accelerator the launcher shares the cores: they pin and hash the copies of the state.
        threads = {"OMP_NUM_THREADS": "1"} if "cpu" in words[words.index("--device") :][:2] else {}
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=threads | os.environ)

    def wait(self, condition: Callable[[list[dict[str, Any]]], Any]) -> Any:
        """Waits until the lines of metrics.jsonl fulfil the condition; returns what it found."""
        while self.process.poll() is None:
            if found := condition(steps(self.folder)):
                return found
            time.sleep(0.02)
        raise SystemExit(f"the launcher ended with exit code {self.process.returncode}:\n{self.log()[-3000:]}")

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def newest_save(self) -> int:
        return max((int(path.name[5:13]) for path in self.folder.glob("checkpoints/step-*")), default=0)

    def ranks(self) -> list[int]:
        return children(self.process.pid) if self.is_torchrun else ranks_of(self.process.pid)

    def end(self) -> None:
        """Kills all: a save of gigabytes is not wanted."""
        opened = [link.resolve() for link in Path(f"/proc/{self.process.pid}/fd").iterdir()]
        everyone = [*self.ranks(), *children(self.process.pid), self.process.pid]
        for pid in everyone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for path in opened:
            if path.name == "alive":  # in the launcher's folder, which ranks that live would remove
                shutil.rmtree(path.parent, ignore_errors=True)


def kill(run: Run, number: int, wait_steps: int, saves: bool) -> dict[str, Any]:
    """Kills one rank and returns how the run went on."""
    saved = run.newest_save()
    while saves and run.newest_save() == saved:  # without one the next attempt waits
        run.wait(bool)
        time.sleep(0.1)
    begun = steps(run.folder)[-1]["step"]
    run.wait(lambda lines: lines[-1]["step"] >= begun + wait_steps)
    load, ranks = os.getloadavg()[0], run.ranks()
    now = time.time()
    os.kill(ranks[number % len(ranks)], signal.SIGKILL)
    last = steps(run.folder)[-1]["step"]
    started = run.wait(lambda lines: [line for line in lines if "startup_s/total" in line and line["wall_time"] > now])
    new = run.wait(lambda lines: [line for line in lines if line["step"] > last and line["wall_time"] > now])
    found = {
        "seconds": new[0]["wall_time"] - now,
        "first_step_s": started[0]["wall_time"] - now,
        "lost_steps": last - (started[0]["step"] - 1),
        "startup_s": {key[10:]: value for key, value in started[0].items() if key.startswith("startup_s/")},
        "load": load,
    }
    print(
        f"kill {number + 1}: {found['seconds']:.2f} s to a new step, {found['first_step_s']:.2f} s to the first one, "
        f"{found['lost_steps']} steps lost, load {load:.1f}",
        flush=True,
    )
    return found


def kill_regularly(run: Run, every: float, minutes: float) -> dict[str, Any]:
    """Kills one rank every so many seconds, also where the run has not yet gone on; counts the steps that are new."""
    first, began, loads = steps(run.folder)[-1]["step"], time.time(), []
    while time.time() < began + 60 * minutes:
        time.sleep(every)  # reading all lines many times a second would take a core from the ranks
        run.wait(bool)
        loads.append(os.getloadavg()[0])
        if ranks := run.ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(ranks[len(loads) % len(ranks)], signal.SIGKILL)
    last = steps(run.folder)[-1]["step"]
    new = run.wait(lambda lines: [line for line in lines if line["step"] > last])[0]  # after the last kill
    found = {"new_steps": new["step"] - first, "wall_s": new["wall_time"] - began, "kills": len(loads)}
    print(f"{found['kills']} kills, {found['new_steps']} new steps in {found['wall_s']:.0f} s", flush=True)
    return {**found, "every_s": every, "largest_load": max(loads)}


def median_step(lines: list[dict[str, Any]]) -> float:
    """Seconds from one step's line to the next one's of the same process, waits for copies and saves included."""
    pairs = itertools.pairwise(lines)
    return statistics.median(new["wall_time"] - old["wall_time"] for old, new in pairs if "startup_s/total" not in new)


def measure(folder: Path, words: list[str], memory: str, args: argparse.Namespace) -> dict[str, Any]:
    """One run with this interval of memory checkpoints."""
    run = Run(folder, args.ranks, words, memory)
    try:
        lines = run.wait(lambda found: found if len(found) >= UNDISTURBED + args.steps else None)
        span = lines[UNDISTURBED - 1 :]
        step_s = (span[-1]["wall_time"] - span[0]["wall_time"]) / (len(span) - 1)
        stalls = [line.get("save_stall_s", 0.0) for line in span[1:]]
        print(f"memory {memory}: a step takes {step_s:.4f} s, of which {sum(stalls) / len(stalls):.4f} s for copies")
        if args.minutes:
            found = kill_regularly(run, args.every, args.minutes)
            return {"memory": memory, "first_step_s": step_s, "step_s": median_step(steps(run.folder)), **found}
        kills = [kill(run, n, args.save_interval // 2, args.preset is None) for n in range(args.kills)]
        chosen = [line for line in run.log().splitlines() if "memory checkpoints every" in line][:1]
    finally:
        run.end()
    about = {"memory_checkpoint_interval": memory, "step_s": step_s, "stall_s": sum(stalls) / len(stalls)}
    medians = {key: statistics.median(one[key] for one in kills) for key in ("seconds", "lost_steps") if kills}
    return {**about, "chosen": chosen, "median": medians, "kills": kills}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument(
        "--memory", nargs="+", default=["0"], help="values of --memory-checkpoint-interval, and torchrun"
    )
    parser.add_argument("--minutes", type=float, help="measure the effective time for so long")
    parser.add_argument("--every", type=float, default=60.0, help="with --minutes: seconds between kills")
    parser.add_argument("--save-interval", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100, help="steps without kills whose time is measured")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--preset", help="a model in place of the tiny one; never saved on disk")
    parser.add_argument("--out", type=Path)
    args, further = parser.parse_known_args()  # options of pretrain
    results = []
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens"
        generator = np.random.default_rng(0)
        with IndexedDatasetWriter(str(tokens), np.uint16) as writer:
            for _ in range(1000):
                writer.add_document(generator.integers(0, 512, 4000))
        model = TINY if args.preset is None else ["--preset", args.preset, *LARGE]
        words = ["--device", args.device, *model, *COMMON]
        words += ["--save-interval", str(args.save_interval if args.preset is None else 0)]
        words += ["--data-path", str(tokens), *further]
        for number, memory in enumerate(args.memory):
            results.append(measure(Path(folder) / f"run-{number}", words, memory, args))
    if args.minutes:
        fastest = min(one["step_s"] for one in results)
        for one in results:
            one["undisturbed_step_s"], one["effective_time"] = fastest, one["new_steps"] * fastest / one["wall_s"]
            print(f"memory {one['memory']}: effective time {one['effective_time']:.3f}")
    if args.out:
        words = [word for word in sys.argv if word not in ("--out", str(args.out))]
        about = {"command": " ".join(words), "commit": commit(), "ranks": args.ranks, "cores": os.cpu_count()}
        args.out.write_text(json.dumps({**about, "runs": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
