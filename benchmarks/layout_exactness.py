"""How far each tested layout of ranks is from one process: ``python benchmarks/layout_exactness.py``.

Runs the cases of tests/distributed on gloo ranks of this machine in fp32, writes
benchmarks/results/layout_exactness.json and logs the table of docs/parallelism.md. A deviation is the largest absolute
difference of a tensor over its largest absolute value, over all ranks; for losses, relative to the loss.
"""

from __future__ import annotations

import json
import logging
import platform
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.distributed import test_context_parallel, test_tensor_parallel  # noqa: E402
from tests.distributed.layouts import Case, deviations  # noqa: E402

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


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    rows = measure(4, test_tensor_parallel.CASES) + measure(4, test_context_parallel.CASES)
    rows += measure(8, test_context_parallel.EIGHT)
    result = dict(command="python benchmarks/layout_exactness.py", torch=torch.__version__, machine=platform.machine())
    path = ROOT / "benchmarks" / "results" / "layout_exactness.json"
    path.write_text(json.dumps(result | dict(rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
