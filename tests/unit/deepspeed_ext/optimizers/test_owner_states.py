"""Options of optimizers whose states live with the owners of matrices: what is out of range is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed_ext.optimizers import OWN_OPTIMIZERS


def test_errors() -> None:
    matrix = [nn.Parameter(torch.zeros(4, 6))]
    for name, options, message in [
        ("SOAP", {"precondition_frequency": 0}, "precondition_frequency=0 and max_dim=8192 must be at least 1"),
        ("SOAP", {"matrix_betas": (0.9, 1.0)}, r"matrix_betas=\(0.9, 1.0\) are out of range"),
        ("SOAP", {"state_dtype": "int8"}, "state_dtype=int8: SOAP keeps the states of a matrix with its owner"),
        ("Shampoo", {"graft": "adam"}, "graft='adam' is unknown; use rmsprop or sgd"),
        ("GaLore", {"rank": 5}, "rank=5 exceeds the shorter side of every matrix; use at most 4"),
        ("Dion", {"rank_fraction": 0.0}, r"rank_fraction=0.0 and momentum=0.95 are out of range"),
        ("NorMuon", {"beta2": 1.0}, "beta2=1.0 is out of range"),
        ("Dion", {"lr": -1.0}, "lr=-1.0 must not be negative"),
    ]:
        with pytest.raises(ValueError, match=message):
            OWN_OPTIMIZERS[name](matrix, **options)
    with pytest.raises(ValueError, match=r"GaLore needs matrices, a parameter has shape \(3,\)"):
        OWN_OPTIMIZERS["GaLore"]([nn.Parameter(torch.zeros(3))])
