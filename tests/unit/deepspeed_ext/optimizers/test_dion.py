"""Dion against the algorithm written down."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepspeed_ext.optimizers import OWN_OPTIMIZERS
from tests.unit.deepspeed_ext.optimizers.matrix_oracles import STEPS, values


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
