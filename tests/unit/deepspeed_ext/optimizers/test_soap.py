"""SOAP after ten steps against another implementation, in one process, fp32."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_ext.optimizers import OWN_OPTIMIZERS
from tests.unit.deepspeed_ext.optimizers.matrix_oracles import assert_alike, trained

pytorch_optimizer = pytest.importorskip("pytorch_optimizer")


@pytest.mark.parametrize(("shape", "max_dim"), [((12, 12), 100), ((12, 12), 3), ((12, 30), 12)])
def test_soap(shape: tuple[int, int], max_dim: int) -> None:
    """The wide one has a basis on its short side only: the first gradient leaves the other side's undetermined."""
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.0, "precondition_frequency": 3}
    assert_alike(
        trained(lambda param: OWN_OPTIMIZERS["SOAP"]([param], max_dim=max_dim, **options), shape),
        trained(lambda param: pytorch_optimizer.SOAP([param], max_precondition_dim=max_dim, **options), shape),
    )
