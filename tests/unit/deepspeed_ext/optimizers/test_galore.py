"""GaLore after ten steps against the authors' package, in one process, fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_ext.optimizers import OWN_OPTIMIZERS
from tests.unit.deepspeed_ext.optimizers.matrix_oracles import assert_alike, trained

galore_torch = pytest.importorskip("galore_torch")


@pytest.mark.parametrize("shape", [(12, 12), (12, 30), (30, 12)])
def test_galore(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle leaves the signs of a new projector to the SVD; here they follow the old one's, as ours do."""
    project = galore_torch.galore_projector.GaLoreProjector.get_orthogonal_matrix

    def aligned(self: Any, weights: Tensor, rank: int, type: str) -> Tensor:
        found, dim = project(self, weights, rank, type), 1 if type == "right" else 0
        if self.ortho_matrix is not None:
            found = found * torch.where((found * self.ortho_matrix).sum(dim, keepdim=True) < 0, -1.0, 1.0)
        return found

    monkeypatch.setattr(galore_torch.galore_projector.GaLoreProjector, "get_orthogonal_matrix", aligned)
    group = {"rank": 4, "update_proj_gap": 3, "scale": 0.25}
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.0}
    assert_alike(
        trained(lambda param: OWN_OPTIMIZERS["GaLore"]([param], **group, **options), shape),
        trained(
            lambda param: galore_torch.GaLoreAdamW(
                [{"params": [param], "proj_type": "std", **group}], no_deprecation_warning=True, **options
            ),
            shape,
        ),
    )
