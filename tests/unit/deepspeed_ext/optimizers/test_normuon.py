"""NorMuon after ten steps against another implementation, in one process, fp32."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from deepspeed_ext.optimizers import OWN_OPTIMIZERS
from deepspeed_ext.optimizers.muon import orthogonalize
from tests.unit.deepspeed_ext.optimizers.matrix_oracles import assert_alike, trained

pytorch_optimizer = pytest.importorskip("pytorch_optimizer")


@pytest.mark.parametrize("shape", [(12, 12), (12, 30), (30, 12)])
def test_normuon(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With one Newton-Schulz iteration for both, since theirs is in bf16; ours is held to torch's in test_muon.py."""

    def newton_schulz(update: Tensor, num_steps: int, weights: Any, **others: Any) -> Tensor:
        return orthogonalize(update.view(-1, *update.shape[-2:]), num_steps, 1e-7).view(update.shape)

    monkeypatch.setattr("pytorch_optimizer.optimizer.muon.base.zero_power_via_newton_schulz_5", newton_schulz)
    monkeypatch.setattr("pytorch_optimizer.optimizer.muon.normuon.zero_power_via_newton_schulz_5", newton_schulz)
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "beta2": 0.9}
    assert_alike(
        trained(
            lambda param: OWN_OPTIMIZERS["NorMuon"]([param], adjust_lr_fn="original", **options),
            shape,
        ),
        trained(
            lambda param: pytorch_optimizer.NorMuon([{"params": [param], "use_muon": True}], foreach=False, **options),
            shape,
        ),
    )
