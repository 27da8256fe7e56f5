"""--pin-memory changes when batches are copied, and no number: whole runs with and without it, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.conftest import Program
from tests.integration.test_documents import DOCUMENTS, OPTIONS, metrics, words  # noqa: F401  # a fixture

ON_GPU = pytest.mark.gpu
# part of every sequence is cut out for a rank before it is pinned; ring: an early and a late piece
RING = ("--context-parallel-size", 2, "--cp-comm-type", "p2p")


@pytest.mark.parametrize(
    ("device", "ranks", "options"),
    [
        pytest.param("cpu", 2, RING, id="cpu, cp 2"),  # where there is nothing to pin for
        pytest.param("auto", 1, (), id="accelerator", marks=ON_GPU),
        pytest.param("auto", 2, RING, id="accelerator, cp 2", marks=ON_GPU),
    ],
)
def test_losses_are_the_same_bits(
    tmp_path: Path,
    words: Path,  # noqa: F811
    pretrain: Program,
    device: str,
    ranks: int,
    options: tuple[object, ...],
) -> None:
    if device != "cpu" and torch.accelerator.device_count() < ranks:
        pytest.skip(f"needs {ranks} accelerator(s), this machine has {torch.accelerator.device_count()}")
    found = []
    for pins in ("true", "false"):
        common = [*OPTIONS, *DOCUMENTS, *options, "--data-path", words, "--device", device, "--deterministic"]
        result = pretrain(tmp_path / pins, *common, "--pin-memory", pins, "--train-iters", 6, ranks=ranks)
        assert result.returncode == 0, result.stderr[-2000:]
        found.append(metrics(tmp_path / pins))
    assert found[0] == found[1] and len(found[0]) == 6
