"""What a restart from the weights alone costs: the loss after it against the run that kept its moments.

    python benchmarks/model_only_restart.py --output benchmarks/results/model_only_restart.json

A small MoE in bf16 is trained on this machine; in the middle it leaves a model-only checkpoint. A second run takes up
that checkpoint (step, learning rate and data position go on, masters are rebuilt from bf16, moments start at zero).
Both see the same batches, so the difference of their losses step by step is the gap.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.optimus.training.metrics import read_metrics  # noqa: E402
from tests.integration.conftest import write_corpus  # noqa: E402

OPTIONS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-experts 8 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 64 --vocab-size 64 --max-position-embeddings 64 --seq-length 64 --params-dtype bf16 "
    "--micro-batch-size 8 --global-batch-size 8 --lr 2e-3 --min-lr 2e-4 --lr-warmup-iters 20 "
    "--eval-interval 0 --save-interval 0 --device cpu"
).split()


def pretrain(run_dir: Path, tokens: Path, *options: object) -> list[dict[str, Any]]:
    words = [sys.executable, "-m", "megatron.optimus.pretrain", *OPTIONS, "--run-dir", str(run_dir)]
    words += ["--data-path", str(tokens), *map(str, options)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    return read_metrics(run_dir / "metrics.jsonl")


def one_seed(folder: Path, tokens: Path, seed: int, steps: int) -> dict[str, Any]:
    half = steps // 2
    common = ["--seed", seed, "--train-iters", steps]
    kept = pretrain(folder / "kept", tokens, *common, "--model-only-save-interval", half)[half:]
    checkpoint = folder / "kept" / "checkpoints" / f"model-{half:08d}"
    restarted = pretrain(folder / "restarted", tokens, *common, "--load", checkpoint)
    assert [line["step"] for line in restarted] == [line["step"] for line in kept], "step and position go on"
    assert [line["lr"] for line in restarted] == [line["lr"] for line in kept], "the learning rate goes on"
    assert [line["consumed_tokens"] for line in restarted] == [line["consumed_tokens"] for line in kept]
    gaps = [new["loss"] - old["loss"] for new, old in zip(restarted, kept, strict=True)]
    return {
        "seed": seed,
        "loss_kept_last_20": round(mean(line["loss"] for line in kept[-20:]), 5),
        "gap_first_step": round(gaps[0], 6),
        "gap_largest": round(max(gaps), 5),
        "gap_largest_at": gaps.index(max(gaps)) + 1,
        "gap_steps_1_to_10": round(mean(gaps[:10]), 5),
        "gap_last_20": round(mean(gaps[-20:]), 5),
        "gaps": [round(gap, 5) for gap in gaps],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="restarted in the middle")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        tokens = write_corpus(Path(name) / "corpus")
        seeds = [one_seed(Path(name) / str(seed), tokens, seed, options.steps) for seed in range(1, options.seeds + 1)]
    keys = ("gap_first_step", "gap_largest", "gap_steps_1_to_10", "gap_last_20", "loss_kept_last_20")
    result = {
        "command": " ".join(["python", "benchmarks/model_only_restart.py", *sys.argv[1:]]),
        "steps": options.steps,
        "restarted_after": options.steps // 2,
        "mean": {key: round(mean(one[key] for one in seeds), 5) for key in keys},
        "standard_deviation": {key: round(stdev(one[key] for one in seeds), 5) for key in keys if len(seeds) > 1},
        "seeds": seeds,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps([result["mean"], result["standard_deviation"]]))


if __name__ == "__main__":
    main()
