"""Hyperparameters of a kernel call from a parameter group."""

from __future__ import annotations

import pytest
import torch

from deepspeed_ext.optimizers.kernels.options import AdamOptions, MomentumOptions, SGDOptions


def test_fields_are_host_numbers_of_the_group() -> None:
    group = {"params": [], "lr": torch.tensor(0.5), "betas": (0.9, 0.99), "eps": 1, "weight_decay": 0, "maximize": 1}
    found = AdamOptions.from_group(group)
    assert found == AdamOptions(0.5, 0.9, 0.99, 1.0, 0.0, decoupled_weight_decay=True, maximize=True)
    assert [type(value) for value in (found.lr, found.eps, found.maximize)] == [float, float, bool]


def test_what_the_group_lacks_has_the_default_or_is_an_error() -> None:
    assert SGDOptions.from_group({"lr": 1, "momentum": 0, "weight_decay": 0}) == SGDOptions(1.0, 0.0, 0.0)
    with pytest.raises(TypeError, match="momentum"):
        MomentumOptions.from_group({"nesterov": True})
