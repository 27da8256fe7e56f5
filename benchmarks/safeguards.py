"""CPU time of each safeguard, on ranks that compute on the CPU, where nothing fails: what all together cost.

    OPTIMUS_MEMORY_FOLDER=/dev/shm/safeguards torchrun --nproc-per-node 2 benchmarks/safeguards.py \\
        --output safeguards.json -- --preset mula-tiny --data-path data/corpus

What follows ``--`` are options of ``optimus pretrain``. All safeguards are on, as in benchmarks/protection.py, which
measures whole steps. Here it is the CPU time of the functions in which each one does its work, with those of its
threads, as a share of the CPU time of a step: other programs on the machine hardly change that. What a safeguard does
to the speed of the rest of the step (caches, memory) is not in it. The first fifth of the steps does not count.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installation

from protection import GUARDS
from provenance import commit

from megatron.optimus import pretrain
from megatron.optimus.platform.process_exit import run_program

ALWAYS_ON = "losses and norms, always on"
seconds: dict[str, float] = defaultdict(float)


def count(kind: type, method: str, part: str, thread_of: str = "") -> None:
    """Has a method's CPU time added to a part, and what it notes of its threads in an attribute."""
    work = getattr(kind, method)

    @functools.wraps(work)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        began, noted = time.thread_time(), seconds[part]
        try:
            return work(self, *args, **kwargs)
        finally:
            # A method of the same part that this one has called is in its time already.
            seconds[part] = noted + (getattr(self, thread_of) if thread_of else time.thread_time() - began)

    setattr(kind, method, counted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--run-dir", default="runs/safeguards")
    parser.add_argument("--steps", type=int, default=250)
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:cut])
    from megatron.optimus.checkpoint.memory import MemoryCheckpoints
    from megatron.optimus.training.checkpointing import Checkpoints
    from megatron.optimus.training.health import Health
    from megatron.optimus.training.integrity import Integrity
    from megatron.optimus.training.stragglers import StepSampler
    from megatron.optimus.training.trainer import Trainer

    count(Checkpoints, "after_step", "memory checkpoints")  # there are none on disk
    count(MemoryCheckpoints, "_finish", "memory checkpoints' threads", "_thread_s")
    for method in ("before_update", "after_update", "choose_intervals"):
        count(Integrity, method, "checksums of weights and states")
    count(Integrity, "check_gradients", "comparisons of gradients")
    count(Trainer, "_check_devices", "products of each device")
    count(StepSampler, "_sample", "samples of what ranks do")
    count(Health, "observe", ALWAYS_ON)
    count_step, marks, intervals = Trainer._count_step, [], dict[str, int]()

    def counted_step(self: Trainer, *args: Any) -> Any:
        queued = count_step(self, *args)
        if self.step in (options.steps // 5, options.steps - 1):
            marks.append((time.process_time(), dict(seconds)))
            found = {"memory": self.checkpoints._memory, "integrity": self.integrity}
            intervals.update({name: one._interval.steps for name, one in found.items() if one is not None})
            intervals["gradients"] = self.integrity._gradient_interval.steps
        return queued

    Trainer._count_step = counted_step  # type: ignore[assignment, method-assign]
    words = f"--train-iters {options.steps} --save-interval 0 --eval-interval 0 --device cpu --run-dir".split()
    words = [*" ".join(GUARDS.values()).split(), *words, options.run_dir]
    code = pretrain.main([*sys.argv[cut + 1 :], *words])
    if code == 0 and os.environ.get("RANK", "0") == "0":
        (cpu, before), (cpu_end, end) = marks
        num_steps = options.steps - 1 - options.steps // 5
        parts = {part: 1e3 * (end[part] - before.get(part, 0.0)) / num_steps for part in end}
        total = sum(cost for part, cost in parts.items() if part != ALWAYS_ON)
        step = 1e3 * (cpu_end - cpu) / num_steps
        result = {
            "commit": commit(),
            "options": sys.argv[cut + 1 :],
            "guards": GUARDS,
            "ranks": int(os.environ.get("WORLD_SIZE", "1")),
            "load": os.getloadavg(),
            "steps": num_steps,
            "cpu_ms_of_a_step": step,
            "cost": total / (step - total),
            "parts_ms_a_step": parts,
            "intervals": intervals,
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n")
        sys.stdout.write(json.dumps(result) + "\n")
    return code


if __name__ == "__main__":
    run_program(main)
