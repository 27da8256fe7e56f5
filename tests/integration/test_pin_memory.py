"""--pin-memory changes when batches are copied, and no number: whole runs with and without it, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.conftest import Program
from tests.integration.test_documents import DOCUMENTS, OPTIONS, metrics, words  # noqa: F401  # a fixture

# part of every sequence is cut out for a rank before it is pinned; ring: an early and a late piece
RING = ("--context-parallel-size", 2, "--cp-comm-type", "p2p")


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "options"), [(1, ()), (2, RING)], ids=["one rank", "cp 2"])
def test_losses_are_the_same_bits(
    tmp_path: Path,
    words: Path,  # noqa: F811
    pretrain: Program,
    ranks: int,
    options: tuple[object, ...],
) -> None:
    if torch.accelerator.device_count() < ranks:
        pytest.skip(f"needs {ranks} accelerator(s), this machine has {torch.accelerator.device_count()}")
    found = []
    for pins in ("true", "false"):
        common = [*OPTIONS, *DOCUMENTS, *options, "--data-path", words, "--deterministic"]
        result = pretrain(tmp_path / pins, *common, "--pin-memory", pins, "--train-iters", 6, ranks=ranks)
        assert result.returncode == 0, result.stderr[-2000:]
        found.append(metrics(tmp_path / pins))
    assert found[0] == found[1] and len(found[0]) == 6
