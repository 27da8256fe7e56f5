"""Element-wise optimizers on shards against torch's on the whole parameter, Lion against its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_ext.optimizers import Lion, Shard, StepScalars, shard_optimizer_for
from deepspeed_ext.optimizers.elementwise import ShardAdam, ShardSGD
from tests.unit.deepspeed_ext.optimizers.sharded import Shards, gradients

NUMEL, STEPS = 1500, 12
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    "adam_decoupled": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2}),
    "sgd_momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}),
    "sgd_nesterov": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    "radam": (torch.optim.RAdam, {"lr": 1e-2}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-2}),
}


def start(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    weights = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    return weights, kind([torch.nn.Parameter(weights.clone())], **options)


@pytest.mark.parametrize("name", KINDS)
def test_shards_equal_torch_with_a_changing_lr_and_skipped_steps(name: str) -> None:
    weights, oracle = start(*KINDS[name])
    group = oracle.param_groups[0]
    shard_optimizer = shard_optimizer_for(oracle, group)
    shards = Shards(shard_optimizer, group, weights, cut=512, param_dtype=torch.bfloat16)
    for step, gradient in enumerate(gradients(NUMEL, STEPS)):
        group["lr"] = 1e-2 / (1 + step)
        group["params"][0].grad = gradient.clone()
        oracle.step()
        shards.update(gradient * 8, scale=1 / 8)
        if step % 3 == 0:
            shards.update(torch.full_like(gradient, torch.nan), scale=float("nan"), skip=True)
    weight = group["params"][0].detach()
    torch.testing.assert_close(shards.master(), weight, rtol=1e-5, atol=1e-6)
    assert torch.equal(shards.param(), shards.master().bfloat16())
    for kind in shard_optimizer.state_kinds:
        expected = oracle.state[group["params"][0]][kind]
        assert (shards.state(kind) - expected).abs().max() <= 1e-6 * expected.abs().max(), kind
    moved = (weight - weights).abs() / (weights.abs() + 1e-3)
    assert moved.median() > 1e-3


def test_lion_equals_its_definition() -> None:
    weights = torch.randn(NUMEL, dtype=torch.float64)
    lion = Lion([torch.nn.Parameter(weights.float())], lr=1e-2, betas=(0.9, 0.98), weight_decay=0.1)
    group = lion.param_groups[0]
    shards = Shards(shard_optimizer_for(lion, group), group, weights.float(), cut=512, param_dtype=torch.bfloat16)
    m = torch.zeros_like(weights)
    for gradient in gradients(NUMEL, STEPS):
        group["params"][0].grad = gradient.clone()
        lion.step()
        shards.update(gradient * 4, scale=1 / 4)
        weights = weights - 1e-2 * ((0.9 * m + 0.1 * gradient).sign() + 0.1 * weights)
        m = 0.98 * m + 0.02 * gradient
    torch.testing.assert_close(shards.master().double(), weights, rtol=1e-5, atol=1e-6)
    assert torch.equal(shards.master(), group["params"][0].detach())


def test_sgd_can_decay_weights_instead_of_gradients() -> None:
    weights, oracle = start(torch.optim.SGD, {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1})
    options = {**oracle.param_groups[0], "decoupled_weight_decay": True}
    shards = Shards(shard_optimizer_for(oracle, options), options, weights, cut=512, param_dtype=torch.float32)
    shards.update(torch.zeros(NUMEL))
    torch.testing.assert_close(shards.master(), weights * (1 - 0.5 * 0.1))
    assert not shards.state("momentum_buffer").any()


@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16])
def test_bf16_gradients_are_read_as_they_are(param_dtype: torch.dtype) -> None:
    weights, oracle = start(torch.optim.AdamW, {"lr": 1e-2})
    group = oracle.param_groups[0]
    shards = Shards(shard_optimizer_for(oracle, group), group, weights, cut=2048, param_dtype=param_dtype)
    for gradient in gradients(NUMEL, 3):
        group["params"][0].grad = gradient.bfloat16().float()
        oracle.step()
        shards.update(gradient.bfloat16())
    torch.testing.assert_close(shards.master(), group["params"][0].detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "shard_optimizer", [ShardAdam(), ShardSGD(0.9), shard_optimizer_for(Lion([torch.zeros(1)]), {})]
)
def test_padding_stays_zero(shard_optimizer: Any) -> None:
    options = {
        "lr": 0.1,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "momentum": 0.9,
        "state_dtype": "int8",
    }
    shards = Shards(shard_optimizer, options, torch.zeros(512), cut=512, param_dtype=torch.bfloat16)
    for _ in range(3):
        shards.update(torch.zeros(512))
    assert not shards.master().any() and not shards.param().any()
    assert not any(shards.state(kind).any() for kind in shard_optimizer.state_kinds)


def test_second_moments_in_bf16_and_int8_decay_as_in_fp32() -> None:
    """Rounded to nearest, one under beta2 = 0.999 would stay where the first gradients put it."""
    size = torch.where(torch.arange(1024) % 16 == 0, 1.0, 0.5)  # every 8-bit block has elements that do not shrink
    kept = {}
    for dtype in ("fp32", "bf16", "int8"):
        options = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "state_dtype": dtype}
        shards = Shards(ShardAdam(), options, torch.zeros(1024), cut=1024, param_dtype=torch.bfloat16)
        shards.update(size * 10)
        for _ in range(400):
            shards.update(torch.where(size == 1.0, size * 10, size * 1e-3))
        kept[dtype] = shards.state("exp_avg_sq")[size < 1].mean().item()
    assert kept["fp32"] == pytest.approx(25e-3 * 0.999**400, rel=1e-2)
    assert kept["bf16"] == pytest.approx(kept["fp32"], rel=1e-2)
    assert kept["int8"] == pytest.approx(kept["fp32"], rel=0.1)


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "int8"])
def test_states_written_into_a_fresh_shard_continue_bit_for_bit(state_dtype: str) -> None:
    options = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "state_dtype": state_dtype}
    weights, grads = torch.randn(NUMEL), gradients(NUMEL, 6)
    first = Shards(ShardAdam(), options, weights, cut=NUMEL, param_dtype=torch.bfloat16)
    for gradient in grads[:3]:
        first.update(gradient)
    shard_optimizer, source = ShardAdam(), first.shards[0]
    target = Shard(source.master.clone(), torch.empty(0), source.param.clone())
    target.state = shard_optimizer.new_state(target, options)
    for kind in shard_optimizer.state_kinds:
        shard_optimizer.write_state(target, kind, shard_optimizer.read_state(source, kind).clone())
    for step, gradient in enumerate(grads[3:], start=4):
        first.update(gradient)
        target.grad = gradient.clone()
        shard_optimizer.update_(target, options, StepScalars.of(weights.device, step))
    assert torch.equal(target.master, source.master)
    assert all(torch.equal(target.state[key], source.state[key]) for key in source.state)
