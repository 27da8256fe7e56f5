"""The specification of the fused kernels: in fp32 it takes the steps of torch's optimizers and of Lion's definition."""

from __future__ import annotations

import pytest
import torch

from deepspeed_ext.optimizers import StepScalars
from deepspeed_ext.optimizers.kernels import reference
from tests.unit.deepspeed_ext.optimizers.cases import CASES, make_shard, run

CPU = torch.device("cpu")
OF_TORCH = {
    "adamw": (torch.optim.AdamW, dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)),
    "adam_maximize": (
        torch.optim.Adam,
        dict(lr=1e-2, betas=(0.0, 0.999), eps=1e-6, weight_decay=0.1, maximize=True),
    ),
    "sgd_dampened": (
        torch.optim.SGD,
        dict(lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.1, maximize=True),
    ),
    "sgd_plain": (torch.optim.SGD, dict(lr=1e-2, weight_decay=0.1)),
}


@pytest.mark.parametrize("case", OF_TORCH)
def test_steps_are_those_of_torch(case: str) -> None:
    kind, options = OF_TORCH[case]
    shard = make_shard(CASES[case][2], "fp32", torch.float32, "cpu", numel=97)
    param = torch.nn.Parameter(shard.master.clone())
    optimizer = kind([param], **options)
    for state in shard.state.values():
        state.zero_()
    for step in range(1, 5):
        shard.grad = torch.randn(97, generator=torch.Generator().manual_seed(step))
        param.grad = shard.grad * 0.5
        optimizer.step()
        before = shard.master.clone()
        run(reference, case, shard, StepScalars.of(CPU, step, scale=torch.nan, skip=True))
        assert torch.equal(shard.master, before), "a skipped step changes nothing"
        run(reference, case, shard, StepScalars.of(CPU, step, scale=0.5))
    torch.testing.assert_close(shard.master, param.detach(), rtol=1e-5, atol=1e-6)


def test_a_step_of_lion_is_its_definition() -> None:
    shard = make_shard(("exp_avg",), "fp32", torch.float32, "cpu", numel=97)
    master, average, gradient = (t.double() for t in (shard.master, shard.state["exp_avg"], shard.grad))
    run(reference, "lion", shard, StepScalars.of(CPU, 1))
    expected = master * (1 - 1e-2 * 0.1) - 1e-2 * (0.9 * average + 0.1 * gradient).sign()
    torch.testing.assert_close(shard.master.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(shard.state["exp_avg"].double(), 0.99 * average + 0.01 * gradient, rtol=1e-5, atol=1e-6)
