"""By how many labels a step's losses are divided, where they have to be counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.optimus.data.loader import Batch
from megatron.optimus.training.step import _labels_each


@pytest.mark.parametrize(("own", "others"), [((3, 5), 16), ((1, 0), 0), ((0, 0), 1), ((0, 0), 0)])
def test_the_mean_over_all_micro_batches_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, own: tuple[int, ...], others: int
) -> None:
    """Also of fewer labels than ranks: losses divided so, averaged over micro-batches and ranks, give the mean loss."""
    ranks, tokens = 4, torch.zeros(1, 8, dtype=torch.int64)
    mesh: Any = SimpleNamespace(group=lambda axis: "group", size=lambda axis: ranks)

    def all_reduce(mean: torch.Tensor, group: object) -> None:
        mean += others / len(own)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    each = _labels_each([Batch(tokens, tokens, num_labels=count) for count in own], mesh)
    total = sum(own) + others
    assert float(each) == max(total, 1) / (len(own) * ranks)
