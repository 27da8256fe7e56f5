"""What integrity checks cost: seconds of each, as a share of a training step.

    python benchmarks/integrity.py --output integrity.json -- --preset mula-tiny --data-path data/corpus --device cpu
    torchrun --nproc-per-node 8 benchmarks/integrity.py --output integrity.json -- --preset mula-7b-a1b ...

What follows ``--`` are options of ``optimus pretrain``. The device is waited for before and after each check, so that
its time is that of the check alone. The run is a short one, with both kinds of checks, each of which is timed in every
step but the first. A gradient check needs two ranks or more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installation

import torch
from provenance import commit

from megatron.optimus import pretrain
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.process_exit import run_program

seconds: dict[str, list[float]] = {"before_update": [], "after_update": [], "check_gradients": []}


def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """The method with its time on this rank's device appended to ``seconds``."""

    def call(self: Any, *args: Any) -> Any:
        device = self._run.device
        devices.synchronize(device)
        began = time.perf_counter()
        result = work(self, *args)
        devices.synchronize(device)
        seconds[name].append(time.perf_counter() - began)
        return result

    return call


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--run-dir", default="runs/integrity")
    parser.add_argument("--steps", type=int, default=20)
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:cut])
    from megatron.optimus.training.integrity import Integrity

    for name in seconds:
        setattr(Integrity, name, timed(name, getattr(Integrity, name)))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    words = ["--train-iters", str(options.steps), "--integrity-interval", "1", "--save-interval", "0"]
    words += ["--integrity-gradient-interval", "1" if world > 1 else "0", "--run-dir", options.run_dir]
    code = pretrain.main([*sys.argv[cut + 1 :], "--eval-interval", "0", *words])
    if code == 0 and os.environ.get("RANK", "0") == "0":
        lines = [json.loads(line) for line in Path(options.run_dir, "metrics.jsonl").read_text().splitlines()]
        each = {name: statistics.median(found[1:]) for name, found in seconds.items()}
        states = each["before_update"] + each["after_update"]
        step = statistics.median(line["step_time_s"] for line in lines[1:]) - states - each["check_gradients"]
        result = {
            "commit": commit(),
            "options": sys.argv[cut + 1 :],
            "ranks": world,
            "device": devices.device_name(torch.device(devices.default_kind())),
            "load": os.getloadavg(),
            "step_s": step,
            "states_s": states,
            "states_share": states / step,
            "gradients_s": each["check_gradients"],
            "gradient_interval_for_1_percent": round(100 * each["check_gradients"] / step),
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n")
        sys.stdout.write(json.dumps(result) + "\n")
    return code


if __name__ == "__main__":
    run_program(main)
