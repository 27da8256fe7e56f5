"""Shampoo after ten steps against another implementation, and what it does when a root fails."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed_ext.optimizers import OWN_OPTIMIZERS, shampoo
from deepspeed_ext.optimizers.shampoo import _joined, _split
from tests.unit.deepspeed_ext.optimizers.matrix_oracles import assert_alike, trained, values

pytorch_optimizer = pytest.importorskip("pytorch_optimizer")


@pytest.mark.parametrize("shape", [(12, 12), (12, 28), (28, 12)])
@pytest.mark.parametrize(("graft", "beta1", "frequency", "block_size"), [("sgd", 0.9, 1, 100), ("sgd", 0.0, 3, 7)])
def test_shampoo(shape: tuple[int, int], graft: str, beta1: float, frequency: int, block_size: int) -> None:
    """The oracle takes the plain graft before ``start_preconditioning_step``, with a momentum of its own."""
    ours = dict(matrix_betas=(beta1, 0.9), weight_decay=0.1, precondition_frequency=frequency, block_size=block_size)
    theirs = dict(
        betas=(beta1, 0.9),
        weight_decay=0.1,
        decoupled_weight_decay=True,
        moving_average_for_momentum=True,
        nesterov=False,
        start_preconditioning_step=frequency,
        preconditioning_compute_steps=frequency,
        block_size=block_size,
        shape_interpretation=False,
        graft_type=1,
        use_svd=True,
        matrix_eps=1e-6,
    )
    assert_alike(
        trained(lambda param: OWN_OPTIMIZERS["Shampoo"]([param], lr=0.02, graft=graft, **ours), shape),
        trained(lambda param: pytorch_optimizer.ScalableShampoo([param], lr=0.02, **theirs), shape),
        tolerance=1e-3,  # their ridge is absolute
    )


def test_shampoo_with_the_norm_of_rmsprop() -> None:
    """Theirs has no bias correction, so its rate is corrected instead; without momentum that is the same."""

    class Corrected(pytorch_optimizer.ScalableShampoo):
        taken = 0

        def step(self, closure: Any = None) -> Any:
            self.taken += 1
            self.param_groups[0]["lr"] = 0.02 * (1 - 0.9**self.taken) ** 0.5
            return super().step(closure)

    theirs = dict(
        betas=(0.0, 0.9),
        moving_average_for_momentum=True,
        nesterov=False,
        start_preconditioning_step=1,
        preconditioning_compute_steps=1,
        shape_interpretation=False,
        graft_type=3,
        use_svd=True,
    )
    ours = dict(matrix_betas=(0.0, 0.9), weight_decay=0.0, precondition_frequency=1)
    assert_alike(
        trained(lambda param: OWN_OPTIMIZERS["Shampoo"]([param], lr=0.02, **ours), (12, 16)),
        trained(lambda param: Corrected([param], **theirs), (12, 16)),
        tolerance=1e-3,
    )


def test_blocks_are_cut_and_joined() -> None:
    batch_BMN = values((3, 13, 8), 1)
    blocks = _split(batch_BMN, 5)
    assert blocks.shape == (3, 6, 5, 5) and torch.equal(blocks[1, 3, :, :3], batch_BMN[1, 5:10, 5:])
    assert not blocks[1, 4, 3:].any() and torch.equal(_joined(blocks, batch_BMN.shape), batch_BMN)


@pytest.mark.parametrize("raises", [True, False])
def test_a_root_that_fails_is_said_once(
    raises: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The block goes on with the direction of the grafted optimizer, and the next root is used again."""
    monkeypatch.setattr(shampoo, "_warned", [])
    eigh = torch.linalg.eigh

    def broken(matrix: Tensor) -> Any:
        if raises:
            raise torch.linalg.LinAlgError("no convergence")
        return tuple(x * torch.nan for x in eigh(matrix))

    param = nn.Parameter(values((6, 6), 0))
    optimizer = OWN_OPTIMIZERS["Shampoo"](
        [param], lr=0.1, weight_decay=0.0, precondition_frequency=1, matrix_betas=(0.0, 0.9)
    )
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "deepspeed_ext"):
        patch.setattr(torch.linalg, "eigh", broken)
        for seed in (1, 2):
            before, param.grad = param.detach().clone(), values((6, 6), seed)
            optimizer.step()
            if seed == 1:
                torch.testing.assert_close(param.detach(), before - 0.1 * param.grad.sign(), atol=1e-5, rtol=0)
    assert [record.message.startswith("Shampoo: 1 of 1 inverse roots") for record in caplog.records] == [True]
    optimizer.step()
    assert optimizer.state[param]["matrices"]["left_root"].isfinite().all()
    assert optimizer.state[param]["matrices"]["left_root"].any() and param.isfinite().all()
