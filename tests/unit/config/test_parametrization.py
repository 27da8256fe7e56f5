"""muP and CompleteP: the multipliers in the weights train as those in the forward do, and every tensor's factors."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_ext.optimizers.muon import lr_ratio
from megatron.optimus.config.checks import check
from megatron.optimus.config.load import load
from megatron.optimus.config.parametrization import ADAM_LIKE, MUON_LIKE, initial_scale, update_scaling
from megatron.optimus.config.schema import (
    ConfigError,
    ModelConfig,
    MuonLRAdjustment,
    OptimizerConfig,
    OptimizerName,
    Parametrization,
)
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.initialize import initialize_weights
from megatron.optimus.training.engine import build_optimizer, param_groups
from megatron.optimus.training.trainer import Trainer

WIDTH, DEPTH = 4.0, 3.0  # growth since the base model
DENSE = ModelConfig(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    ffn_hidden_size=48,
    vocab_size=20,
    init_method_std=0.3,
    add_qkv_bias=True,
    parametrization=Parametrization.COMPLETEP,
    base_hidden_size=8,
    base_num_layers=1,
)
MOE = replace(
    DENSE, num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16, base_moe_ffn_hidden_size=8,
    moe_shared_expert_intermediate_size=16, moe_shared_expert_gate=True, moe_layer_freq=[0, 1, 1],
)  # fmt: skip
OPTIONS = OptimizerConfig(lr=2e-2, weight_decay=0.2, adam_eps=1e-3, clip_grad=0.0)


def build(config: ModelConfig) -> Decoder:
    with torch.device("meta"):
        model = Decoder(config)
    initialize_weights(model, seed=3, device=torch.device("cpu"), dtype=torch.float32)
    return model


def by_paper(name: str) -> tuple[float, float, float, float]:
    """CompleteP's table (arXiv 2505.01618, alpha = 1): standard deviation, rate, decay and epsilon as factors, for
    weights that are multiplied in the forward."""
    if name in ("embedding.weight", "final_norm.weight"):
        return 1, 1, 1, 1 / WIDTH
    if name == "lm_head.weight":
        return 1, 1, 1, 1 / WIDTH
    if name.endswith(("norm.weight", "bias")):
        return 1, 1, 1, 1 / (WIDTH * DEPTH)
    return 1 / math.sqrt(WIDTH), 1 / WIDTH, WIDTH, 1 / (WIDTH * DEPTH)


def with_multipliers(untied: bool) -> tuple[Decoder, torch.optim.Optimizer]:
    """The same model in the papers' form: standard draws times the table's factors, and multipliers in the forward."""
    plain = {"parametrization": Parametrization.STANDARD, "base_hidden_size": None, "base_num_layers": None}
    model = build(replace(DENSE, untie_embeddings_and_output_weights=untied, **plain))
    groups = []
    for name, weight in model.named_parameters():
        std, rate, decay, eps = by_paper(name)
        if weight.dim() > 1:
            weight.data.mul_(std)
        groups.append(
            {
                "params": [weight],
                "lr": OPTIONS.lr * rate,
                "weight_decay": OPTIONS.weight_decay * decay,
                "eps": OPTIONS.adam_eps * eps,
            }
        )
    for layer in model.layers:
        for branch in (layer.attention, layer.mlp):
            branch.register_forward_hook(lambda module, inputs, out: out / DEPTH)
    model.lm_head.register_forward_hook(lambda module, inputs, out: out / WIDTH)
    return model, torch.optim.AdamW(groups, betas=(OPTIONS.adam_beta1, OPTIONS.adam_beta2))


@pytest.mark.parametrize("untied", [True, False])
def test_multipliers_in_the_weights_train_as_those_in_the_forward(untied: bool) -> None:
    def logits_after_steps(model: Decoder, optimizer: torch.optim.Optimizer) -> Tensor:
        tokens_BS = torch.randint(20, (4, 9), generator=torch.Generator().manual_seed(1))
        for _ in range(4):
            logits = model(tokens_BS[:, :-1]).logits_BSV
            F.cross_entropy(logits.flatten(0, 1), tokens_BS[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model(tokens_BS).logits_BSV.detach()

    model = build(replace(DENSE, untie_embeddings_and_output_weights=untied))
    found = logits_after_steps(model, build_optimizer(model, OPTIONS))
    expected = logits_after_steps(*with_multipliers(untied))
    assert expected.std() > 0.1  # it has learned something to compare
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


def test_every_tensor_has_its_factors() -> None:
    """In a model whose experts' inner width grows by 2, the rest by 4, and the depth by 3."""
    vector, hidden, out = (1, 1 / 12), (1 / 4, 1 / 12), (1 / 12, 1 / 4)
    expected = {
        "embedding.weight": (1, 1 / 4),
        "lm_head.weight": (1 / 4, 1),
        "final_norm.weight": (1, 1 / 4),
        "attention_norm.weight": vector,
        "mlp_norm.weight": vector,
        "attention.q_norm.weight": vector,
        "attention.k_norm.weight": vector,
        **{f"attention.{name}_proj.bias": vector for name in "qkv"},
        **{f"attention.{name}_proj.weight": hidden for name in "qkv"},
        "attention.o_proj.weight": out,
        "mlp.gate_proj.weight": hidden,
        "mlp.up_proj.weight": hidden,
        "mlp.down_proj.weight": out,
        "moe.router.weight": (1 / 4, 1 / 3),
        "moe.shared_experts.gate.weight": (1 / 4, 1 / 3),
        "moe.experts.gate_up_weight": (1 / 4, 1 / 6),
        "moe.experts.down_weight": (1 / 6, 1 / 4),
        "moe.shared_experts.mlp.gate_proj.weight": (1 / 4, 1 / 6),
        "moe.shared_experts.mlp.up_proj.weight": (1 / 4, 1 / 6),
        "moe.shared_experts.mlp.down_proj.weight": (1 / 6, 1 / 4),
    }
    model = build(MOE)
    names = {weight: name for name, weight in model.named_parameters()}
    seen: dict[str, Any] = {}
    groups = param_groups(model, OPTIONS)
    for group in groups:
        for weight in group["params"]:
            rate = group.get("lr_scale", 1.0)
            assert group["lr"] == OPTIONS.lr * rate
            assert group["weight_decay"] * rate == pytest.approx(OPTIONS.weight_decay)
            seen[names[weight].split(".", 2)[-1] if "layers." in names[weight] else names[weight]] = (
                rate,
                group["eps"] / OPTIONS.adam_eps,
            )
    assert seen == {name: pytest.approx(factors) for name, factors in expected.items()}
    assert len(groups) <= 10  # each is a flat buffer
    stds = {"moe.experts.down_weight": 1 / math.sqrt(2) / 3, "moe.router.weight": 1 / 4, "lm_head.weight": 1 / 4}
    stds |= {"moe.experts.gate_up_weight": 1 / 2, "attention.o_proj.weight": 1 / 6, "embedding.weight": 1}
    for name, weight in model.named_parameters():
        for end, factor in stds.items():
            if name.endswith(end):
                assert weight.std().item() == pytest.approx(MOE.init_method_std * factor, rel=0.15), name


@pytest.mark.parametrize("adjustment", list(MuonLRAdjustment))
@pytest.mark.parametrize("optimizer", MUON_LIKE)
def test_muons_update_grows_as_the_root_of_rows_over_columns(
    adjustment: MuonLRAdjustment, optimizer: OptimizerName
) -> None:
    options = OptimizerConfig(optimizer=optimizer, muon_adjust_lr_fn=adjustment)
    for name, rows, columns, growth_out, growth_in, depth in [
        ("layers.0.attention.q_proj.weight", 64, 32, 4, 4, 1),
        ("layers.0.attention.o_proj.weight", 32, 64, 4, 4, 3),
        ("layers.1.moe.experts.gate_up_weight", 16, 32, 2, 4, 1),
        ("layers.1.moe.experts.down_weight", 32, 16, 4, 2, 3),
        ("layers.1.moe.router.weight", 4, 32, 1, 4, 1),
    ]:
        shape = (4, 2 * rows, columns) if "gate_up" in name else (rows, columns)
        found = update_scaling(MOE, options, name, shape)
        base = (round(rows / growth_out), round(columns / growth_in))
        growth = found.lr * lr_ratio(adjustment.value, (rows, columns)) / lr_ratio(adjustment.value, base)
        assert growth == pytest.approx(math.sqrt(growth_out / growth_in) / depth), name
    head = update_scaling(MOE, options, "lm_head.weight", (20, 32))
    assert head == update_scaling(MOE, OPTIONS, "lm_head.weight", (20, 32))  # AdamW's


def test_mup_reads_no_depth_and_a_base_model_is_standard() -> None:
    mup = replace(MOE, parametrization=Parametrization.MUP, base_num_layers=None)
    base = replace(MOE, base_hidden_size=32, base_num_layers=3, base_moe_ffn_hidden_size=16)
    assert update_scaling(mup, OPTIONS, "layers.0.attention.o_proj.weight", (32, 32)) == (1 / 4, 1 / 4)
    for name, weight in build(base).named_parameters():
        assert update_scaling(base, OPTIONS, name, tuple(weight.shape)) == (1, 1)
        assert initial_scale(base, name, weight.dim()) == 1
    assert len(param_groups(build(base), OPTIONS)) == 1


def test_the_schedule_sets_each_groups_share_of_the_rate() -> None:
    groups = [{"lr": 0.0, "lr_scale": 0.25}, {"lr": 0.0}]
    trainer = SimpleNamespace(
        engine=SimpleNamespace(optimizer=SimpleNamespace(param_groups=groups)),
        rates=SimpleNamespace(learning_rate=lambda *at: 8.0, largest_grad_norm=lambda *at: 1.0),
        health=SimpleNamespace(largest_norm=lambda step: 1.0),
        step=0,
        consumed_samples=0,
    )
    assert Trainer._set_rates(trainer) == 8.0
    assert [group["lr"] for group in groups] == [2.0, 8.0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--parametrization mup", "needs base_hidden_size"),
        ("--parametrization completep --base-hidden-size 64", "needs base_num_layers"),
        ("--parametrization mup --base-hidden-size 64 --base-num-layers 2", "base_num_layers=2 is not read"),
        ("--base-hidden-size 64", "base_hidden_size=64 is not read with parametrization=standard"),
        ("--parametrization mup --base-hidden-size 64 --base-moe-ffn-hidden-size 8", "num_experts=0; leave it out"),
        (
            "--parametrization mup --base-hidden-size 64 --no-untie-embeddings-and-output-weights "
            "--normalization layernorm-nonparametric",
            "needs a final norm with a scale",
        ),
        ("--parametrization mup --base-hidden-size 64 --optimizer lamb", "no rule for the rates of optimizer=lamb"),
        ("--parametrization mup --base-hidden-size 64 --optimizer sgd", "use adam, cautious-adamw"),
    ],
)
def test_what_has_no_rule_is_refused_in_one_line(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(load(flags.split()).config, 1)


def test_no_optimizer_is_of_both_kinds() -> None:
    assert not set(ADAM_LIKE) & set(MUON_LIKE)
    assert all(name.is_for_matrices for name in MUON_LIKE) and not any(name.is_for_matrices for name in ADAM_LIKE)
