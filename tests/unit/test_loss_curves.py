"""What benchmarks/loss_curves.py runs, and what it makes of the curves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron.optimus.config.checks import check
from megatron.optimus.config.load import load
from tests.distributed.curves import MODEL

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import loss_curves


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_row_is_a_layout_of_its_own_for_that_many_ranks(ranks: int) -> None:
    rows = loss_curves.rows_of(ranks)
    configs = {name: load((MODEL + "--device cuda " + words).split()).config for name, words in rows.items()}
    for name, config in configs.items():
        if "zbv" not in name:  # needs a newer torch than this may be
            check(config, ranks)
    assert len({repr(config) for config in configs.values()}) == len(rows)
    axes = [configs[f"{kind} {ranks}"].parallel for kind in ("tp", "ulysses cp", "dp")]
    assert [(p.tensor_model_parallel_size, p.context_parallel_size) for p in axes] == [(ranks, 1), (1, ranks), (1, 1)]


def curve(height: float) -> list[float]:
    """Farthest from 0 in its second window, by ``height``; a single step is further away and must not count."""
    return [0.0] * 9 + [height] + [height] * 10


def table(layout: float) -> str:
    one_gpu = {f"{loss_curves.ONE} {size}": {"losses": curve(size)} for size in (1.0, 2.0, 6.0)}
    again = {f"{loss_curves.ONE} 1, again": {"losses": curve(1.0)}}
    return loss_curves.table(one_gpu | again | {"layout": {"losses": curve(layout)}})


def test_noise_is_each_curve_against_the_mean_of_the_others_and_same_bits_count_once() -> None:
    # 1 from (2 + 6) / 2: 3; 2 from 3.5: 1.5; 6 from 1.5: 4.5.
    assert "Noise: 3 curves of one GPU, 3.0000 in the middle, at most 4.5000." in table(0.0)
    assert "| layout | 0.0000 | 7.0000 | 4.0000 | 1 of 3 | yes |" in table(7.0)  # the mean is 3
    assert "| layout | 0.0000 | 8.0000 | 5.0000 | 0 of 3 | NO |" in table(8.0)
