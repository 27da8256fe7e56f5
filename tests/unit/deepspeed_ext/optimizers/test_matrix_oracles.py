"""SOAP, Shampoo, NorMuon, GaLore and Dion after ten steps against well-kept implementations, in one process, fp32."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed_ext.optimizers import OWN_OPTIMIZERS, shampoo
from deepspeed_ext.optimizers.base import LocalMatrices, Shard, StepScalars
from deepspeed_ext.optimizers.muon import orthogonalize
from deepspeed_ext.optimizers.shampoo import _joined, _split

galore_torch = pytest.importorskip("galore_torch")
pytorch_optimizer = pytest.importorskip("pytorch_optimizer")

STEPS = 10
MATRIX_OPTIMIZERS = ("Muon", "NorMuon", "SOAP", "Shampoo", "GaLore", "Dion")


def values(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trained(build: Callable[[nn.Parameter], torch.optim.Optimizer], shape: tuple[int, ...]) -> Tensor:
    """The weights after ten steps."""
    param = nn.Parameter(values(shape, 0))
    optimizer = build(param)
    for step in range(1, STEPS + 1):
        param.grad = values(shape, step)
        optimizer.step()
    return param.detach()


def assert_alike(actual: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    moved = (expected - values(tuple(expected.shape), 0)).abs().max()
    assert moved > 1e-3 and (actual - expected).abs().max() < tolerance * moved


@pytest.mark.parametrize(("shape", "max_dim"), [((12, 12), 100), ((12, 12), 3), ((12, 30), 12)])
def test_soap(shape: tuple[int, int], max_dim: int) -> None:
    """The wide one has a basis on its short side only: the first gradient leaves the other side's undetermined."""
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.0, "precondition_frequency": 3}
    assert_alike(
        trained(lambda param: OWN_OPTIMIZERS["SOAP"]([param], max_dim=max_dim, **options), shape),
        trained(lambda param: pytorch_optimizer.SOAP([param], max_precondition_dim=max_dim, **options), shape),
    )


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


def test_dion_against_the_algorithm_written_down() -> None:
    """Of each matrix by itself; one has no gradient in its first step, as an expert without tokens."""
    param = nn.Parameter(values((3, 8, 20), 0))
    optimizer = OWN_OPTIMIZERS["Dion"]([param], lr=0.02, weight_decay=0.1, rank_fraction=0.5, momentum=0.9)
    weights = [one.clone() for one in param.detach()]
    states: list[tuple[Tensor, Tensor]] = []
    for step in range(1, STEPS + 1):
        param.grad = values((3, 8, 20), step)
        if step == 1:
            param.grad[2] = 0
        optimizer.step()
        if step == 1:  # the random first basis
            rule, group = optimizer.shard_optimizer(optimizer.param_groups[0]), optimizer.param_groups[0]
            basis = rule.new_matrix_states(1, (8, 20), group, torch.device("cpu"))["basis"][0]
            assert basis.shape == (20, 4) and 0.5 < basis.std() < 1.5
            states = [(torch.zeros(8, 20), basis)] * 3
        for index, (old, basis) in enumerate(states):
            if step == 1 and index == 2:
                weights[index] *= 1 - 0.1 * 0.02
                continue
            momentum = old + param.grad[index]
            left, _ = torch.linalg.qr(momentum @ basis)
            right = momentum.T @ left
            states[index] = momentum - 0.1 * left @ right.T, right / (right.norm(dim=0, keepdim=True) + 1e-8)
            weights[index] = (1 - 0.1 * 0.02) * weights[index] - 0.02 * (8 / 20) ** 0.5 * left @ states[index][1].T
    torch.testing.assert_close(param.detach(), torch.stack(weights), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MATRIX_OPTIMIZERS)
def test_experts_are_matrices_of_their_own_and_idle_ones_stay_finite(name: str) -> None:
    """In one batch or by themselves; one of them never has a gradient. A skipped step changes nothing at all."""
    options = {"weight_decay": 0.0} | ({"rank": 3} if name == "GaLore" else {})
    options |= {"precondition_frequency": 2} if name in ("SOAP", "Shampoo") else {}
    whole = nn.Parameter(values((3, 8, 20), 0))
    parts = [nn.Parameter(one.clone()) for one in whole.detach()]
    together, apart = (OWN_OPTIMIZERS[name](params, lr=0.01, **options) for params in ([whole], parts))
    for step in range(1, 5):
        whole.grad = values((3, 8, 20), step)
        whole.grad[1] = 0
        for part, gradient in zip(parts, whole.grad, strict=True):
            part.grad = gradient.clone()
        together.step()
        apart.step()
    torch.testing.assert_close(whole.detach(), torch.stack([p.detach() for p in parts]), rtol=1e-4, atol=1e-5)
    assert torch.equal(whole[1], values((3, 8, 20), 0)[1]) and not torch.equal(whole[0], values((3, 8, 20), 0)[0])
    assert_nothing_changes_when_skipped(together, whole)


def assert_nothing_changes_when_skipped(optimizer: Any, param: nn.Parameter) -> None:
    group, state = optimizer.param_groups[0], optimizer.state[param]
    tensors = {**state["shard"], **state["matrices"], "param": param.detach()}
    before = {kind: tensor.clone() for kind, tensor in tensors.items()}
    assert state["matrices"] or type(optimizer).__name__ == "Muon"
    flat = param.detach().view(-1)
    shard = Shard(flat, torch.full_like(flat, torch.nan), flat, state["shard"])
    scalars = StepScalars.of(param.device, 6, scale=torch.nan, skip=True)  # a step of roots and projectors
    matrices = LocalMatrices(3, (8, 20), state["matrices"])
    optimizer.shard_optimizer(group).update_matrices_([shard], matrices, group, scalars)
    assert all(torch.equal(tensors[kind], value) for kind, value in before.items())


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
        ("Dion", {"lr": -1.0}, "lr=-1.0 and weight_decay=0.01 must not be negative"),
    ]:
        with pytest.raises(ValueError, match=message):
            OWN_OPTIMIZERS[name](matrix, **options)
    with pytest.raises(ValueError, match=r"GaLore needs matrices, a parameter has shape \(3,\)"):
        OWN_OPTIMIZERS["GaLore"]([nn.Parameter(torch.zeros(3))])
