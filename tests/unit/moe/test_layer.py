"""A MoE layer against a slow reference: every expert and every token by itself, in fp64."""

from __future__ import annotations

import pytest
import torch

from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.moe.layer import MoE
from megatron.optimus.platform.metrics import Recorder
from megatron.optimus.platform.ranks import Ranks

WIDTH, INNER, EXPERTS, TOPK = 8, 6, 4, 2
SHARED = 3  # experts that every token passes, each as wide as a routed one


def layer_of(*, gate: bool) -> MoE:
    config = ModelConfig(
        hidden_size=WIDTH,
        num_attention_heads=2,
        num_experts=EXPERTS,
        moe_ffn_hidden_size=INNER,
        moe_router_topk=TOPK,
        moe_shared_expert_intermediate_size=SHARED * INNER,
        moe_shared_expert_gate=gate,
    )
    torch.manual_seed(0)
    layer = MoE(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def swiglu(x_D: torch.Tensor, gate_FD: torch.Tensor, up_FD: torch.Tensor, down_DF: torch.Tensor) -> torch.Tensor:
    return down_DF @ (torch.nn.functional.silu(gate_FD @ x_D) * (up_FD @ x_D))


def reference(weights: dict[str, torch.Tensor], x_TD: torch.Tensor) -> torch.Tensor:
    rows = []
    for x_D in x_TD:
        scores_E = torch.softmax(weights["router.weight"] @ x_D, dim=0)
        y_D = torch.zeros_like(x_D)
        for expert in scores_E.topk(TOPK).indices.tolist():
            gate_FD, up_FD = weights["experts.gate_up_weight"][expert].split(INNER)
            y_D = y_D + scores_E[expert] * swiglu(x_D, gate_FD, up_FD, weights["experts.down_weight"][expert])
        shared_D = torch.zeros_like(x_D)
        for expert in range(SHARED):
            own = slice(expert * INNER, (expert + 1) * INNER)
            gate_FD, up_FD = (weights[f"shared_experts.mlp.{name}_proj.weight"][own] for name in ("gate", "up"))
            shared_D = shared_D + swiglu(x_D, gate_FD, up_FD, weights["shared_experts.mlp.down_proj.weight"][:, own])
        if "shared_experts.gate.weight" in weights:
            shared_D = torch.sigmoid(weights["shared_experts.gate.weight"] @ x_D) * shared_D
        rows.append(y_D + shared_D)
    return torch.stack(rows)


@pytest.mark.parametrize("gate", [False, True])
def test_equals_experts_one_by_one(gate: bool) -> None:
    """Output and every gradient; so several shared experts are one MLP of their widths' sum."""
    layer = layer_of(gate=gate)
    x_TD = torch.randn(7, WIDTH, requires_grad=True)
    factor_TD = torch.randn(7, WIDTH)
    y_BSD, _ = layer(x_TD.view(1, 7, WIDTH))
    (y_BSD[0] * factor_TD).sum().backward()

    weights = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    x64_TD = x_TD.detach().double().requires_grad_()
    expected_TD = reference(weights, x64_TD)
    (expected_TD * factor_TD.double()).sum().backward()

    torch.testing.assert_close(y_BSD[0], expected_TD.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x_TD.grad, x64_TD.grad.float(), rtol=1e-5, atol=1e-5)
    for name, parameter in layer.named_parameters():
        grad = weights[name].grad.float()
        assert grad.any(), name
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def test_every_slot_is_processed() -> None:
    layer, recorder = layer_of(gate=False), Recorder(Ranks.alone())
    with recorder.recording():
        y_BSD, _ = layer(torch.randn(2, 7, WIDTH))
    assert y_BSD.shape == (2, 7, WIDTH)
    assert recorder.values["dropped_tokens"] == 0 and layer.router.step_counts_E.sum() == 2 * 7 * TOPK
