"""Optimizers, engines and precisions that a DeepSpeed configuration names: weights on gloo ranks are those of stock."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch._dynamo
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

import deepspeed_ext
from tests.distributed.deepspeed_ext import stock
from tests.helpers import run_distributed

WORLD, STEPS = 2, 10


class _Attention(nn.Module):
    """A model with what Muon tells apart: an embedding, projections of heads, a 3-D weight, vectors, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(num_attention_heads=3, num_key_value_heads=3, hidden_size=12, head_dim=4)
        self.embed = nn.Embedding(16, 12)
        self.q_proj, self.up = nn.Linear(12, 12), nn.Linear(12, 24)
        self.experts = nn.Parameter(torch.randn(3, 24, 7) * 0.1)
        self.lm_head = nn.Linear(7, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.abs().mul(8).long() % 16
        h = torch.tanh(self.up(torch.tanh(self.q_proj(self.embed(tokens)))))
        logits = self.lm_head(torch.einsum("bsd,edf->bsf", h, self.experts).tanh())
        return nn.functional.cross_entropy(logits.flatten(0, 1), (tokens.flatten() * 3 + 1) % 16)


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class _UncorrectedAdamW(torch.optim.Optimizer):
    """AdamW without bias correction, as DeepSpeed's FusedAdam computes it. Its states are a tensor, a number and None.

    Only for the oracle does it lack a state kind: the second moment is one too.
    """

    def __init__(self, params: Any, lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99) -> None:
        super().__init__(params, {"lr": lr, "beta1": beta1, "beta2": beta2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                if not state:
                    state |= {"step": 0, "note": None, "m": torch.zeros_like(param), "v": torch.zeros_like(param)}
                state["step"] += 1
                state["m"].lerp_(param.grad, 1 - group["beta1"])
                state["v"].lerp_(param.grad.square(), 1 - group["beta2"])
                param.sub_(group["lr"] * state["m"] / (state["v"].sqrt() + 1e-8))


def _config(optimizer: dict[str, Any] | None, **additions: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 300},
    }
    sections = additions if optimizer is None else {"optimizer": optimizer, **additions}
    return config | copy.deepcopy(sections)  # some versions of stock change what they are given


def _step(engine: Any, rank: int, numbers: Iterable[int]) -> list[Tensor]:
    """Takes micro-steps on batches of their numbers; returns the weights."""
    dtype = next(engine.module.parameters()).dtype
    for number in numbers:
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * number + rank))
        engine.backward(engine(x if isinstance(engine.module, _Attention) else x.to(dtype)))
        engine.step()
    return [param.detach().float().clone() for param in engine.module.parameters()]


def _trained(initialize: Any, rank: int, model: nn.Module, config: dict[str, Any], **given: Any) -> list[Tensor]:
    engine, *_ = initialize(model=model, config=stock.config_for(initialize, config), **given)
    weights = _step(engine, rank, range(2 * STEPS))
    engine.destroy()
    return weights


def _muon(initialize: Any, rank: int) -> dict[str, list[Tensor]]:
    """Ours is the Muon of 0.19.8: earlier versions of stock's compute something else, or ignore groups."""
    if not hasattr(deepspeed, "resolve_per_head_muon_after_sharding"):
        return {}
    rates = {"muon_lr": 0.03, "adam_lr": 0.01, "momentum": 0.9, "betas": [0.8, 0.9], "eps": 1e-8}
    cases: dict[str, dict[str, Any]] = {"rates": {"lr": 0.5, "weight_decay": 0.1, **rates}, "defaults": {}}
    cases |= {"L2": {**rates, "adam_w_mode": False, "weight_decay": 0.1}}
    cases |= {"heads": {"lr": 0.02, "per_head_muon": True}}
    found = {}
    for name, params in cases.items():
        for stage in (1, 2) if name == "rates" else (1,):
            section = {"type": "Muon", "params": {"torch_adam": True, **params}}
            zero = {"stage": stage, "reduce_bucket_size": 300}
            model = _Attention()
            found[f"{name} {stage}"] = _trained(initialize, rank, model, _config(section, zero_optimization=zero))
    model = _Attention()
    section = {"type": "Muon", "params": {"torch_adam": True, "weight_decay": 0.5, "adam_lr": 0.01}}
    plain = [param for name, param in model.named_parameters() if name.startswith("up")]
    rest = [param for name, param in model.named_parameters() if not name.startswith("up")]
    groups = [{"params": plain, "weight_decay": 0.0, "lr": 0.005}, {"params": rest}]
    found["groups"] = _trained(initialize, rank, model, _config(section), model_parameters=groups)
    return found


def _others(initialize: Any, rank: int, is_stock: bool) -> dict[str, list[Tensor]]:
    """bias_correction, torch's classes by name, states that are no tensors, "auto", and masters in 16 bits."""
    found = {}
    section = {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.99], "bias_correction": False}}
    model = _Layers()
    if is_stock:  # its own FusedAdam, which takes the key, would be compiled
        optimizer = _UncorrectedAdamW(model.parameters())
        found["bias_correction"] = _trained(initialize, rank, model, _config(None), optimizer=optimizer)
    else:
        found["bias_correction"] = _trained(initialize, rank, model, _config(section))
    model = _Layers()
    optimizer = _UncorrectedAdamW(model.parameters())
    found["no tensors"] = _trained(initialize, rank, model, _config(None), optimizer=optimizer)
    section = {"type": "RMSprop", "params": {"lr": 0.01, "alpha": 0.9}}
    found["RMSprop"] = _trained(initialize, rank, _Layers(), _config(section))
    zero = {"stage": 1, "reduce_bucket_size": "auto", "overlap_comm": "auto"}
    section = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    config = _config(section, zero_optimization=zero, bf16={"enabled": False, "check_grad_overflow": "auto"})
    found["auto"] = _trained(initialize, rank, _Layers(), config)
    narrow = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if stock.HAS_NARROW_MASTERS:
        found["bf16 masters"] = _trained(initialize, rank, _Layers(), _config(section, bf16=narrow))
    return found


def _second_engine(initialize: Any, rank: int, stage: int) -> tuple[list[Tensor], str]:
    """The weights after a second engine on a model, and the error of going on with the first one."""
    zero = {"stage": stage, "reduce_bucket_size": 300}
    section = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    model = _Layers()
    config = _config(section, zero_optimization=zero)
    first, *_ = initialize(model=model, config=stock.config_for(initialize, config))
    # Ours: the third step has begun. Its gradients are dropped; stock would add them to the next engine's.
    _step(first, rank, range(5 if initialize is deepspeed_ext.initialize else 4))
    second, *_ = initialize(model=model, config=stock.config_for(initialize, config))
    if initialize is not deepspeed_ext.initialize:
        first.destroy()  # what ours does itself
    weights = _step(second, rank, range(6, 12))
    message = ""
    if initialize is deepspeed_ext.initialize:
        with pytest.raises(RuntimeError) as error:
            _step(first, rank, [12])
        message = str(error.value)
        first.destroy()  # as when it is collected; the second one's access to masters must stay
        for weight, param in zip(weights, model.parameters(), strict=True):
            assert torch.equal(weight, param) and torch.equal(weight, safe_get_full_fp32_param(param))
    second.destroy()
    return weights, message


def _both(rank: int, world: int) -> list[dict[str, Any]]:
    deepspeed_ext.init_distributed()
    torch._dynamo.config.disable = True  # stock's Newton-Schulz would be compiled for minutes
    results = []
    for initialize in (deepspeed.initialize, deepspeed_ext.initialize):
        found: dict[str, Any] = {"muon": _muon(initialize, rank)}
        found["others"] = _others(initialize, rank, initialize is deepspeed.initialize)
        found["second"] = [_second_engine(initialize, rank, stage) for stage in (1, 2)]
        results.append(found)
    results.append({"refused": _refused()})
    deepspeed_ext.shutdown()
    return results


def _refused() -> str:
    """Masters in 16 bits are DeepSpeed's own optimizer, which would mix experts that are spread over ranks."""
    narrow = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    section = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    with pytest.raises(ValueError) as error:
        deepspeed_ext.initialize(
            model=_Layers(), config=_config(section, bf16=narrow), is_expert=lambda name: "ep_size_2"
        )
    return str(error.value)


def test_weights_are_those_of_stock() -> None:
    for theirs, ours, refused in run_distributed(_both, WORLD):
        assert "DeepSpeed's own optimizer (masters in 16 bits) would mix the experts" in refused["refused"]
        for kind in ("muon", "others"):
            assert ours[kind].keys() == theirs[kind].keys()
            for what, weights in ours[kind].items():
                for weight, expected in zip(weights, theirs[kind][what], strict=True):
                    torch.testing.assert_close(weight, expected, rtol=0, atol=1e-5, msg=lambda m, w=what: f"{w}: {m}")
        for (weights, message), (expected, _) in zip(ours["second"], theirs["second"], strict=True):
            assert message == "forward: a later engine has taken this engine's model; go on with that one"
            for weight, other in zip(weights, expected, strict=True):
                torch.testing.assert_close(weight, other, rtol=0, atol=1e-5)
