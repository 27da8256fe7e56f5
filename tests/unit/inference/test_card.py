"""The card of evaluation: its numbers by hand, and a page that is well formed, self-contained and escapes its texts."""

from __future__ import annotations

import pytest

from megatron.optimus.inference.card import _answers, _standard_error, calibration


def test_calibration_by_hand() -> None:
    found = calibration([(0.95, True), (0.91, False), (0.35, False), (1.0, True)])
    assert found is not None
    assert [None if one is None else (one.count, one.accuracy) for one in found.bins][3] == (1, 0.0)
    assert found.bins[9] is not None and found.bins[9].count == 3
    assert found.bins[9].confidence == pytest.approx(0.953333, rel=1e-5)
    assert found.ece == pytest.approx((3 * abs(0.953333 - 2 / 3) + 0.35) / 4, rel=1e-5)
    assert (found.accuracy, found.confidence) == (0.5, pytest.approx(0.8025))
    assert sum(one is not None for one in found.bins) == 2 and calibration([]) is None


def test_confidence_is_the_choices_share_and_errors_are_of_means() -> None:
    samples = [
        {"doc_id": 0, "filter": "none", "filtered_resps": [(-1.0, False), (-2.0, True)], "acc": 1.0},
        {"doc_id": 1, "filter": "none", "filtered_resps": [(-800.0, False), (-800.0, True)], "acc": 0.0},
        {"doc_id": 1, "filter": "none", "filtered_resps": [], "perplexity": (1.0, 2)},
    ]
    assert _answers(samples) == [(pytest.approx(0.7310586), True), (pytest.approx(0.5), False)]
    assert _standard_error("acc,none", 0.5, samples[:2]) == pytest.approx(0.5)
    assert _standard_error("acc,none", 0.7, samples[:2]) is None, "it is no mean over items"
    assert _standard_error("perplexity,none", 0.7, samples[2:]) is None
