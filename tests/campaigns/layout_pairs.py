"""Every layout's checkpoint into every other layout, by real ranks of the training program.

    python -m tests.campaigns.layout_pairs --output benchmarks/results/layout_pairs.json

Four gloo ranks. Each layout trains two steps and saves. Each layout then takes up each other's checkpoint, saves what
it holds at once, and trains a step. What it saved must be the checkpoint it came from bit for bit, in all masters,
moments and buffers, so going there and back changes nothing; the step's loss must be that of the layout that goes on
with its own checkpoint, within ``--tolerance``, relative.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.optimus.checkpoint.verify import compare
from megatron.optimus.config.load import load
from megatron.optimus.context import RunContext
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.training.metrics import read_metrics
from tests.campaigns.kill_resume import _commit
from tests.helpers import run_distributed
from tests.integration.conftest import TINY, write_corpus

RANKS = 4
STEPS = 2
MOE = {
    "dp 4": "",
    "ep 2": "--expert-model-parallel-size 2",
    "ep 4": "--expert-model-parallel-size 4",
    "ep 2, ZeRO-2": "--expert-model-parallel-size 2 --zero-stage 2",
    "tp 2, ep 2": "--tensor-model-parallel-size 2 --expert-model-parallel-size 2",
    "tp 2, experts tp 2, ep 2": "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 2 "
    "--expert-model-parallel-size 2",
    "pp 2, ep 2": "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2",
    "pp 2, tp 2": "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2",
    "cp 2, ep 4": "--context-parallel-size 2 --expert-model-parallel-size 4",
}
_FFN = "--num-experts 0 --ffn-hidden-size 64 "
DENSE = {
    "dp 4": _FFN,
    "tp 4": _FFN + "--tensor-model-parallel-size 4",
    "pp 2, tp 2": _FFN + "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2",
    "ZeRO-3": _FFN + "--zero-stage 3",
}
OPTIONS = [*TINY, *"--micro-batch-size 1 --lr-decay-iters 8 --eval-interval 0 --save-interval 100".split()]


def trainer_of(folder: Path, run: str, flags: str, *words: object) -> Any:
    from megatron.optimus.training.trainer import Trainer

    argv = [*OPTIONS, *flags.split(), "--run-dir", folder / run, "--data-path", folder / "corpus", *words]
    config = load([str(word) for word in argv]).config
    mesh = Mesh(config.parallel, rank=dist.get_rank(), world_size=dist.get_world_size())
    return Trainer(RunContext.of(config, mesh, torch.device("cpu")))


def close(trainer: Any) -> None:
    trainer.close()
    trainer.engine.destroy()
    dist.barrier()


def checkpoint_of(folder: Path, run: str) -> Path:
    return folder / run / "checkpoints" / f"step-{STEPS:08d}"


def all_pairs(rank: int, world: int, root: str, families: dict[str, dict[str, str]]) -> list[dict[str, Any]]:
    """One line for each pair, on rank 0."""
    from megatron.optimus.training.engine import init_engine, shutdown_engine

    init_engine(timedelta(seconds=300))
    lines = []
    for family, layouts in families.items():
        folder = Path(root) / family
        if rank == 0:
            folder.mkdir()
            write_corpus(folder / "corpus")
        dist.barrier()
        for name, flags in layouts.items():
            trainer = trainer_of(folder, name, flags, "--train-iters", STEPS)
            trainer.fit()
            close(trainer)
        for first in layouts:
            for second, flags in layouts.items():
                loss, differing = one_pair(rank, folder, first, second, flags)
                lines.append({"family": family, "from": first, "to": second, "loss": loss, "differing": differing})
    shutdown_engine()
    return lines if rank == 0 else []


def one_pair(rank: int, folder: Path, first: str, second: str, flags: str) -> tuple[float, list[str]]:
    """(loss of the step after loading, tensors that were not saved as they had been loaded)."""
    run = f"{first} to {second}"
    trainer = trainer_of(folder, run, flags, "--load", checkpoint_of(folder, first), "--train-iters", STEPS + 1)
    assert trainer.step == STEPS
    trainer.checkpoints._save("full", trainer.step, trainer.consumed_samples)
    trainer.checkpoints.finish()
    differing = []
    if rank == 0:
        found = compare(checkpoint_of(folder, first), checkpoint_of(folder, run), jobs=1)
        assert len(found) > 20
        differing = [f"{one.name} ({one.kind})" for one in found if one.kind != "rng" and not one.is_same]
    trainer.fit()
    close(trainer)
    [line] = [line for line in read_metrics(folder / run / "metrics.jsonl") if line["step"] == STEPS + 1]
    return line["loss"], differing


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    own = {(line["family"], line["from"]): line["loss"] for line in lines if line["from"] == line["to"]}
    pairs = [line for line in lines if line["from"] != line["to"]]
    for line in lines:
        line["loss_deviation"] = abs(line["loss"] / own[line["family"], line["from"]] - 1)
    return {
        "pairs": len(pairs),
        "pairs_not_bitwise": sum(bool(line["differing"]) for line in lines),
        "largest_relative_deviation_of_the_loss": max(line["loss_deviation"] for line in pairs),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tolerance", type=float, default=1e-6)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="layout-pairs-") as root:
        families = {"moe": MOE, "dense": DENSE}
        lines = run_distributed(all_pairs, RANKS, root, families, timeout=3600)[0]
    result = summary(lines) | {
        "tolerance": options.tolerance,
        "ranks": RANKS,
        "layouts": families,
        "seed": load(OPTIONS).config.training.seed,
        "commit": _commit(),
        "torch": torch.__version__,
        "wall_s": round(time.monotonic() - began),
        "lines": lines,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "lines"}, indent=1))
    is_good = result["pairs_not_bitwise"] == 0
    return 0 if is_good and result["largest_relative_deviation_of_the_loss"] <= options.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
