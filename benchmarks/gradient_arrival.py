"""Host time of a backward of many small parameters under the sharded optimizer, on 1 and 2 CPU ranks.

python benchmarks/gradient_arrival.py [--against TREE] [--rounds 10] [--output FILE]

Autograd computes next to nothing here: what is measured are the hooks, the copies into the buckets and the launches.
``--against``: the root of another source tree (a git worktree of an older commit); the deepspeed_ext of both is
measured alternately in the same processes. Times are processor time of the main thread, which waiting does not enter:
"backward_ms" of one backward with what follows it up to the next forward, "step_ms" of one ``step()``; the median of
a round, then the smallest and the median of all rounds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

Rounds = dict[str, dict[str, list[float]]]  # by case, by tree


class Case(NamedTuple):
    """What is measured on any number of ranks."""

    stage: int
    accumulation: int


ROOT = Path(__file__).resolve().parents[1]
CASES = [Case(stage, accumulation) for stage in (1, 2) for accumulation in (1, 4)]
ELEMENTS, ALIGNMENT = 16, 256  # of a parameter, and what it takes in a flat buffer
WARM_UP = 5


class _Ones(torch.autograd.Function):
    """Gives every parameter a gradient of ones in one node of autograd."""

    @staticmethod
    def forward(ctx: Any, *params: torch.Tensor) -> torch.Tensor:
        ctx.gradients = torch.ones_like(params[0]).expand(len(params), -1)
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ctx.gradients.clone().unbind()


def load(tree: Path) -> Any:
    """Imports deepspeed_ext from a source tree, beside one that was imported from another."""
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed_ext"]:
        del sys.modules[name]
    sys.path.insert(0, str(tree))
    package = importlib.import_module("deepspeed_ext")
    del sys.path[0]
    assert Path(str(package.__file__)).is_relative_to(tree), package.__file__
    return package


def measure(package: Any, case: Case, num_params: int, bucket_numel: int, steps: int) -> dict[str, float]:
    """Median milliseconds of one backward and of one step."""
    params = [torch.nn.Parameter(torch.randn(ELEMENTS, dtype=torch.bfloat16)) for _ in range(num_params)]
    assert dist.group.WORLD is not None
    optimizer = package.EPZeroOptimizer(
        torch.optim.AdamW(params, lr=1e-3),
        {param: str(index) for index, param in enumerate(params)},
        groups=package.ZeroGroups(dense=dist.group.WORLD, expert={}),
        options=package.ZeroOptions(stage=case.stage, bucket_numel=bucket_numel),
    )
    backwards, whole_steps = [], []
    for _ in range(WARM_UP + steps):
        for micro_batch in range(case.accumulation):
            is_last = micro_batch == case.accumulation - 1
            loss = _Ones.apply(*params)
            began = time.thread_time()
            optimizer.set_gradient_accumulation_boundary(is_last)
            loss.backward()
            if is_last or case.stage == 2:
                optimizer.reduce_gradients()
            optimizer.backward_epilogue()
            backwards.append(time.thread_time() - began)
        began = time.thread_time()
        optimizer.step()
        whole_steps.append(time.thread_time() - began)
    optimizer.destroy()
    return {
        "backward_ms": statistics.median(backwards[WARM_UP * case.accumulation :]) * 1e3,
        "step_ms": statistics.median(whole_steps[WARM_UP:]) * 1e3,
    }


def worker(rank: int, ranks: int, store: str, args: argparse.Namespace) -> None:
    """Measures all cases in turn; rank 0 prints the rounds of each tree as one JSON line."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    packages = {"this tree": load(ROOT)}
    if args.against:
        packages["against"] = load(args.against.resolve())
    found: Rounds = {}
    for _ in range(args.rounds):
        for case in CASES:
            for name, package in packages.items():
                times = measure(package, case, args.parameters, args.per_bucket * ALIGNMENT, args.steps)
                for kind, value in times.items():
                    label = f"stage {case.stage}, {ranks} rank(s), {case.accumulation} micro-batch(es), {kind}"
                    found.setdefault(label, {}).setdefault(name, []).append(value)
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(ranks: int) -> Rounds:
    """All rounds on so many ranks, started with the words of this command."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, *sys.argv, "--worker", str(ranks), f"{folder}/store"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "LOCAL_RANK": "0"}
        started = [
            subprocess.Popen([*words, str(rank)], env=env, stdout=subprocess.PIPE, text=True) for rank in range(ranks)
        ]
        outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("a rank failed")
    found: Rounds = json.loads(outputs[0].splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="root of another source tree, measured alternately")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40, help="steps of a round, warm-up apart")
    parser.add_argument("--parameters", type=int, default=200)
    parser.add_argument("--per-bucket", type=int, default=20, help="parameters that fit into one bucket")
    parser.add_argument("--output", type=Path, help="file for the raw results")
    parser.add_argument("--worker", nargs=3, metavar=("RANKS", "STORE", "RANK"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        ranks, store, rank = args.worker
        return worker(int(rank), int(ranks), store, args)
    found = run_ranks(1) | run_ranks(2)
    for label, rounds in found.items():
        shown = [f"{name} {min(values):.3f} / {statistics.median(values):.3f}" for name, values in rounds.items()]
        print(f"{label:52} {'   '.join(shown)}")
    if args.output:
        about = {"command": " ".join(sys.argv), "torch": torch.__version__, "rounds": found}
        args.output.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
