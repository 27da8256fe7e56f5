"""Muon by a DeepSpeed configuration: matrices and others, whose options come from their own key, lr or the default."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_ext.muon_section import build_muon


def params(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    """Matrices are marked for Muon."""
    found = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for param in found:
        param.use_muon = param.dim() > 1  # type: ignore[attr-defined]
    return found


def halves(options: dict[str, Any], given: list[Any]) -> list[dict[str, Any]]:
    groups = build_muon(options, given, None).param_groups
    return [{key: group[key] for key in ("use_muon", "lr", "weight_decay")} for group in groups]


def test_each_half_has_its_rate() -> None:
    given = params((4, 6), (6,))
    assert halves({}, given) == [
        {"use_muon": True, "lr": 0.02, "weight_decay": 0.0},
        {"use_muon": False, "lr": 3e-4, "weight_decay": 0.0},
    ]
    assert [half["lr"] for half in halves({"lr": 0.1}, given)] == [0.1, 0.1]
    assert [half["lr"] for half in halves({"lr": 0.1, "adam_lr": 0.2}, given)] == [0.1, 0.2]
    assert [half["lr"] for half in halves({"muon_lr": 0.3}, [{"params": given, "lr": 0.5}])] == [0.5, 0.5]


def test_the_halves_hold_what_is_trained() -> None:
    given = params((4, 6), (6,), (3, 3))
    given[2].requires_grad_(False)
    given[0].muon_num_heads = 2  # type: ignore[attr-defined]
    groups = build_muon({"momentum": 0.8, "betas": [0.5, 0.6], "eps": 1e-3}, given, None).param_groups
    assert [list(map(id, group["params"])) for group in groups] == [[id(given[0])], [id(given[1])]]
    assert groups[0]["momentum"] == 0.8 and groups[1]["betas"] == (0.5, 0.6) and groups[1]["adam_eps"] == 1e-3
    assert given[0].stacked_matrices == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ns_steps": 3}, "ns_steps unknown; known: adam_lr, adam_w_mode, "),
        ({"ns_method": "svd"}, "ns_method='svd' is unknown; use gram or standard"),
    ],
)
def test_options_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_muon(options, params((4, 6)), None)


def test_parameters_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"one of shape \(3,\) is not: it is not of model="):
        build_muon({}, [torch.nn.Parameter(torch.zeros(3))], None)
    with pytest.raises(ValueError, match=r"shape \(2, 2, 3, 3\) is a convolution's"):
        build_muon({}, params((2, 2, 3, 3)), None)
