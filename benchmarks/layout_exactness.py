"""How far each tested layout of ranks is from one process: ``python benchmarks/layout_exactness.py``.

Runs the cases of tests/distributed on gloo ranks of this machine in fp32, writes
benchmarks/results/layout_exactness.json and logs the table of docs/parallelism.md. A deviation is the largest absolute
difference of a tensor over its largest absolute value, over all ranks; for losses, relative to the loss.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.distributed import test_training_layouts  # noqa: E402
from tests.distributed.layouts import Case, deviations  # noqa: E402
from tests.distributed.parallel import test_context, test_pipeline, test_tensor  # noqa: E402
from tests.helpers import run_distributed  # noqa: E402

logger = logging.getLogger("layout_exactness")


def measure(ranks: int, cases: dict[str, Case]) -> list[dict[str, Any]]:
    rows = []
    for name, found in deviations(ranks, cases).items():
        grads = {tensor: value for tensor, value in found.items() if tensor not in ("losses", "logits")}
        worst = max(grads, key=lambda tensor: grads[tensor])
        row = dict(ranks=ranks, layout=name, losses=found["losses"], logits=found["logits"], gradients=grads[worst])
        rows.append(row | dict(worst_gradient=worst, tensors=len(grads)))
        logger.info(
            "| %d | %s | %.0e | %.0e | %.0e |", ranks, name, *(row[k] for k in ("losses", "logits", "gradients"))
        )
    return rows


def measure_pipelines() -> list[dict[str, Any]]:
    """Gradients; the test behind it holds losses to 1e-6 on the ranks."""
    rows = []
    for ranks, cases in test_pipeline.CASES.items():
        of_ranks = run_distributed(test_pipeline.one_stage, ranks, cases)
        for name in cases:
            worst = max(value for result in of_ranks for value in result[name]["deviations"].values())
            rows.append(dict(ranks=ranks, layout=f"pipeline: {name}", gradients=worst))
            logger.info("| %d | %s | %.0e |", ranks, name, worst)
    return rows


def measure_training() -> list[dict[str, Any]]:
    """Losses and gradient norm of three optimizer steps, and the weights after them."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        measured = test_training_layouts.measure(Path(folder))
    for ranks, of_ranks in measured.items():
        for name in of_ranks[0]:
            lines = max(result[name]["lines"] for result in of_ranks)
            worst = max(value for result in of_ranks for key, value in result[name].items() if key != "lines")
            rows.append(dict(ranks=ranks, layout=f"three steps: {name}", lines=lines, weights=worst))
            logger.info("| %d | %s | %.0e | %.0e |", ranks, name, lines, worst)
    return rows


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    rows = measure(4, test_tensor.CASES) + measure(4, test_context.CASES)
    rows += measure(8, test_context.EIGHT)
    rows += measure_pipelines() + measure_training()
    result = dict(command="python benchmarks/layout_exactness.py", torch=torch.__version__, machine=platform.machine())
    path = ROOT / "benchmarks" / "results" / "layout_exactness.json"
    path.write_text(json.dumps(result | dict(rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
