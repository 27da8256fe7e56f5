"""The gradient's noise measured in a step, beside its definition, and on gradients of known covariance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed_ext
from deepspeed_ext.groups import ZeroGroups
from deepspeed_ext.zero.gradient_noise import GROUPS
from megatron.optimus.training.noise_scale import FIELD, GradientNoiseScale
from tests.helpers import run_distributed

SIZES = {"weight": 700, "matrix": 900, "expert": 1100}  # several buckets of 512 elements


class Case(NamedTuple):
    ranks: int
    accumulation: int
    options: Mapping[str, Any] | None = None
    by_ranks: bool = False  # as pipelines are measured


class Inputs(nn.Module):
    """Parameters whose gradients are the inputs."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: nn.Parameter(torch.zeros(n, dtype=dtype)) for name, n in SIZES.items()})

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return torch.stack([(self.weights[name] * inputs[name]).sum() for name in SIZES]).sum()


def sharded(model: Inputs, options: Mapping[str, Any]) -> Any:
    """Experts have two owners each where there are four ranks, and else are replicated on all."""
    world, rank = dist.get_world_size(), dist.get_rank()
    assert dist.group.WORLD is not None
    expert = dist.group.WORLD
    if world == 4:
        expert = [dist.new_group([first, first + 2]) for first in (0, 1)][rank % 2]
    model.weights["expert"].allreduce, model.weights["expert"].group_name = False, "ep_size_2"
    names = {p: n for n, p in model.named_parameters()}
    groups = [
        {"params": [model.weights["weight"]], "use_muon": False},
        {"params": [model.weights["matrix"], model.weights["expert"]], "use_muon": True},
    ]
    return deepspeed_ext.EPZeroOptimizer(
        torch.optim.SGD(groups, lr=0.0),
        names,
        groups=ZeroGroups(dense=dist.group.WORLD, expert={"ep_size_2": expert}),
        options=deepspeed_ext.ZeroOptions(bucket_numel=512, measure_gradient_noise=True, **options),
        module=model,
    )


def take_step(model: Inputs, optimizer: Any, micro_batches: list[dict[str, Tensor]]) -> None:
    for number, inputs in enumerate(micro_batches):
        is_last = number + 1 == len(micro_batches)
        optimizer.set_gradient_accumulation_boundary(is_last)
        (model(inputs) / len(micro_batches)).backward()
        if is_last or optimizer.options.stage == 2:  # as the engine does
            optimizer.reduce_gradients()
        optimizer.backward_epilogue()
    optimizer.step()


def inputs_of(step: int, micro: int, rank: int, noise: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return {name: 0.5 + noise * torch.randn(n, generator=generator) for name, n in SIZES.items()}


def by_definition(case: Case, step: int) -> Tensor:
    """|G|^2 and tr(Sigma) / B from the gradients of each rank's first unit and the mean over all."""
    rows = torch.zeros(3, 2, dtype=torch.float64)
    each = [[inputs_of(step, m, r) for m in range(case.accumulation)] for r in range(case.ranks)]
    for row, name in enumerate(SIZES):
        owners: list[range] = [range(case.ranks)]
        if name == "expert" and case.ranks == 4:  # what a rank sends is the sum of its group's losses
            owners = [range(0, 4, 2), range(1, 4, 2)]
        for own in owners:
            micro_RMN = torch.stack([torch.stack([each[r][m][name] for m in range(case.accumulation)]) for r in own])
            unit_RUN = micro_RMN.double() * len(own) / case.ranks  # of the mean over the ranks of the dense group
            if case.by_ranks:
                unit_RUN = unit_RUN.mean(1, keepdim=True)
            count = unit_RUN.shape[0] * unit_RUN.shape[1]
            if count == 1:
                continue
            mean = unit_RUN.mean((0, 1)).square().sum()
            unit = unit_RUN[:, 0].square().sum(1).mean()
            rows[row] += torch.stack([count * mean - unit, unit - mean]) / (count - 1)
    return rows


def _measured(rank: int, world: int, cases: list[Case]) -> list[Tensor]:
    found = []
    for case in cases:
        model = Inputs()
        optimizer = sharded(model, case.options or {})
        if case.by_ranks:
            optimizer.measure_ranks_only()
        for step in range(3):  # the first backward and those that overlap take different ways
            take_step(model, optimizer, [inputs_of(step, m, rank) for m in range(case.accumulation)])
            found.append(optimizer.gradient_noise.clone())
        optimizer.destroy()
    return found


CASES = {
    1: [Case(1, 4), Case(1, 1)],
    2: [Case(2, 1), Case(2, 3), Case(2, 3, {"stage": 2}), Case(2, 3, {"reduce_each_micro_batch": True})],
    4: [Case(4, 2), Case(4, 2, {"stage": 2, "overlap_comm": False}), Case(4, 2, by_ranks=True)],
}


@pytest.mark.parametrize("ranks", CASES)
def test_a_measurement_is_that_of_the_definition(ranks: int) -> None:
    expected = [by_definition(case, step) for case in CASES[ranks] for step in range(3)]
    for measured in run_distributed(_measured, ranks, CASES[ranks]):
        for found, wanted in zip(measured, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-9)


def _scale(rank: int, world: int, accumulation: int) -> dict[str, float]:
    """Of samples with a known gradient and covariance: |G|^2 is 0.25 n and tr(Sigma) 9 n, so the scale is 36."""
    model, scale, found = Inputs(), GradientNoiseScale(), {}
    optimizer = sharded(model, {})
    for step in range(150):
        take_step(model, optimizer, [inputs_of(step, m, rank, noise=3.0) for m in range(accumulation)])
        found = scale.observe(optimizer.gradient_noise.flatten().tolist(), world * accumulation, skipped=False)
    return found


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 8), (2, 4)])
def test_known_noise_is_found_by_ranks_and_by_micro_batches(ranks: int, accumulation: int) -> None:
    for found in run_distributed(_scale, ranks, accumulation):
        assert found.keys() == {FIELD, *(f"{FIELD}/{name}" for name in GROUPS)}
        assert found[FIELD] == pytest.approx(36, rel=0.05)
        assert all(value == pytest.approx(36, rel=0.12) for value in found.values())
