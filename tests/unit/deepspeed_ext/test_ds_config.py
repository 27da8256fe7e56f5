"""Which optimizer a configuration selects, which engine runs it, and with which options."""

from __future__ import annotations

import json
from dataclasses import fields
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.lion import FusedLion
from deepspeed.runtime.config import DeepSpeedConfig
from torch import nn

from deepspeed_ext.ds_config import build_torch_optimizer, reason_for_deepspeed, resolve_config, zero_options
from deepspeed_ext.zero.options import DEFAULT_BUCKET_NUMEL, LossScaleOptions, ZeroOptions


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"zero_optimization": {"stage": 1}}, None),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}}}, None),
        ({}, "ZeRO stage 0"),
        ({"zero_optimization": {"stage": 2}}, None),
        ({"zero_optimization": {"stage": 3}}, "ZeRO stage 3"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, "offload"),
        ({"zero_optimization": {"stage": 1}, "sequence_parallel_size": 2}, "sequence parallelism"),
    ],
)
def test_who_runs_it(config: dict[str, Any], reason: str | None) -> None:
    assert reason_for_deepspeed(config, nn.Linear(1, 1), None) == reason


@pytest.mark.parametrize(
    ("section", "kind", "options"),
    [
        ({"type": "AdamW", "params": {"lr": 0.1, "betas": [0.5, 0.6], "torch_adam": True}}, torch.optim.AdamW, {}),
        ({"type": "Adam", "params": {"lr": 0.1}}, torch.optim.AdamW, {}),
        ({"type": "Adam", "params": {"lr": 0.1, "adam_w_mode": False}}, torch.optim.Adam, {}),
        ({"type": "sgd", "params": {"lr": 0.1, "momentum": 0.5}}, torch.optim.SGD, {"momentum": 0.5}),
    ],
)
def test_optimizer_section(section: dict[str, Any], kind: type, options: dict[str, float]) -> None:
    optimizer = build_torch_optimizer({"optimizer": section}, nn.Linear(2, 2).parameters())
    assert type(optimizer) is kind
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert all(optimizer.param_groups[0][key] == value for key, value in options.items())


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (None, "no optimizer"),
        ({"type": "OneBitLamb", "params": {}}, "'OneBitLamb' is not one of"),
        ({"type": "AdamW", "params": {"learning_rate": 1.0}}, "learning_rate"),
        ({"type": "AdamW", "params": {"max_grad_norm": 1.0}}, "gradient_clipping"),
        ({"type": "Lamb", "params": {"bias_correction": False}}, "bias_correction=false is for Adam and AdamW, not L"),
        (
            {"type": "Muon", "params": {"lr": 0.1, "ns_steps": 3}},
            "optimizer.params of Muon: ns_steps unknown; known",
        ),
        ({"type": "Muon", "params": {"ns_method": "svd"}}, "ns_method='svd' is unknown; use gram or standard"),
        (
            {"type": "LBFGSB", "params": {}},
            "'LBFGSB' is not one of .*, Muon or a class of torch.optim",
        ),
        ({"type": "AdamW", "params": {"lr": "0.1"}}, r"optimizer.params.lr='0.1' must be a number"),
        ({"type": "AdamW", "params": {"weight_decay": float("nan")}}, r"weight_decay=nan must be a number"),
        ({"type": "AdamW", "params": {"betas": 0.9}}, r"betas=0.9 must be two numbers"),
        ({"type": "AdamW", "params": {"betas": [0.9, 0.99, 0.999]}}, r"must be two numbers"),
        ({"type": "AdamW", "params": {"betas": [0.9, 1.5]}}, r"betas=\[0.9, 1.5\] are out of range"),
        ({"type": "AdamW", "params": [1]}, r"optimizer.params=\[1\] must be an object"),
    ],
)
def test_bad_optimizer_section(section: dict[str, Any] | None, message: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=message):
        build_torch_optimizer({"optimizer": section}, model.parameters(), model)


def test_configuration_from_dict_path_or_args(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"a": 1}))
    given = {"a": 1}
    resolved = resolve_config(None, given, None)
    assert resolved == given and resolved is not given
    assert resolve_config(None, str(path), None) == given
    assert resolve_config(None, None, given) == given
    assert resolve_config(SimpleNamespace(deepspeed_config=str(path)), None, None) == given
    assert resolve_config(SimpleNamespace(deepspeed_config=None, deepscale_config=str(path)), None, None) == given
    with pytest.raises(ValueError, match="both"):
        resolve_config(SimpleNamespace(deepspeed_config=str(path)), given, None)
    with pytest.raises(ValueError, match="does not exist"):
        resolve_config(None, str(tmp_path / "missing.json"), None)
    with pytest.raises(ValueError, match="is not a file"):
        resolve_config(None, str(tmp_path), None)
    with pytest.raises(ValueError, match="config=3: expected a dict or the path"):
        resolve_config(None, 3, None)
    with pytest.raises(ValueError, match="pass config"):
        resolve_config(None, None, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"zero_optimization": {"stage": 1,}', "c.json' is not JSON: .*line 1"),
        ('{"a": "b', "is not JSON"),
        ("[1, 2]", "holds no JSON object"),
        ("", "holds no JSON object"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        resolve_config(None, str(tmp_path / "c.json"), None)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_is_absent_has_deepspeeds_default(precision: str) -> None:
    """Of every option that a key of DeepSpeed's sets. The exceptions are what README.md names beside the value."""
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    config |= {precision: {"enabled": True}} if precision != "fp32" else {}
    parsed, ours = DeepSpeedConfig(config), zero_options(config)
    fp16 = parsed.float16_config
    stock = {
        "stage": int(parsed.zero_optimization_stage),
        "max_norm": parsed.gradient_clipping,
        "average": parsed.gradient_allreduce_op == "mean",
        "check_grad_overflow": parsed.bfloat16_config.check_grad_overflow,
        "loss_scale": LossScaleOptions(
            initial=2.0**fp16.initial_scale_power,
            is_dynamic=fp16.loss_scale == 0,
            window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            refills_hysteresis=fp16.consecutive_hysteresis,
            minimum=fp16.min_loss_scale,
        )
        if fp16.enabled
        else None,
    }
    assert stock == {name: getattr(ours, name) for name in stock} and stock["max_norm"] == 1.0
    ours_alone = {"overlap_param_gather", "clip_after_steps", "reduce_each_micro_batch"}  # section "deepspeed_ext"
    ours_alone |= {"measure_gradient_noise"}
    differ = {"bucket_numel", "overlap_comm", "grad_dtype", "comm_dtype"}
    assert {field.name for field in fields(ZeroOptions)} == stock.keys() | ours_alone | differ
    assert parsed.zero_config.reduce_bucket_size == 500_000_000 and parsed.zero_config.overlap_comm is False
    assert parsed.grad_accum_dtype is None and parsed.communication_data_type is None


@pytest.mark.parametrize(
    ("kind", "params", "stock"),
    [
        ("Adam", {}, FusedAdam),
        ("AdamW", {}, FusedAdam),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam),
        ("SGD", {}, torch.optim.SGD),
        ("Lion", {}, FusedLion),
    ],
)
def test_an_optimizer_section_has_deepspeeds_defaults(kind: str, params: dict[str, Any], stock: type) -> None:
    """``stock``: what DeepSpeed builds on a GPU, compiled there; its signature says the defaults."""
    built = build_torch_optimizer({"optimizer": {"type": kind, "params": params}}, nn.Linear(2, 2).parameters())
    options = signature(stock.__init__).parameters
    for name in ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov"):
        if name in options:
            assert built.param_groups[0][name] == options[name].default, name


def test_options_of_a_plain_configuration() -> None:
    plain = ZeroOptions(bucket_numel=DEFAULT_BUCKET_NUMEL, max_norm=1.0)
    assert zero_options({"zero_optimization": {"stage": 1}}) == plain
    assert zero_options({"zero_optimization": {"stage": 1}, "gradient_clipping": 0}).max_norm == 0.0
    assert zero_options({"bf16": {"enabled": True}, "fp16": {"enabled": False}}).grad_dtype is torch.float32
    assert zero_options({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}).stage == 1


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, LossScaleOptions(2.0**16, True, 1000, 2, False, 1.0)),
        ({"loss_scale": 128, "hysteresis": 3}, LossScaleOptions(128.0, False, 1000, 3)),
        (
            {
                "initial_scale_power": 9,
                "loss_scale_window": 50,
                "hysteresis": 4,
                "consecutive_hysteresis": True,
                "min_loss_scale": 8,
            },
            LossScaleOptions(512.0, True, 50, 4, True, 8.0),
        ),
    ],
)
def test_loss_scale(section: dict[str, Any], expected: LossScaleOptions) -> None:
    assert zero_options({"fp16": {"enabled": True, **section}}).loss_scale == expected
    assert zero_options({"fp16": {**section, "enabled": False}}).loss_scale is None
    for name in ("float16", "half"):
        autocast = {"torch_autocast": {"enabled": True, "dtype": name}}
        assert zero_options({"fp16": {**section, "enabled": False}, **autocast}).loss_scale == expected
    assert zero_options({"fp16": {**section, "enabled": False}, **autocast}).loss_scale == expected


def test_options_of_a_full_configuration() -> None:
    config = {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "overlap_comm": False},
        "gradient_clipping": 1,
        "data_types": {"grad_accum_dtype": "bf16"},
        "communication_data_type": "fp32",
        "deepspeed_ext": {"overlap_param_gather": True, "clip_after_steps": 7},
    }
    assert zero_options(config) == ZeroOptions(
        stage=2,
        bucket_numel=500_000_000,
        grad_dtype=torch.bfloat16,
        comm_dtype=torch.float32,
        overlap_comm=False,
        overlap_param_gather=True,
        max_norm=1.0,
        clip_after_steps=7,
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both enabled"),
        ({"fp16": {"enabled": True, "hysteresis": 0}}, "hysteresis=0"),
        ({"fp16": {"enabled": True, "loss_scale": -1}}, "loss_scale must be >= 0"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "loss_scale_window must be > 0"),
        (
            {"deepspeed_ext": {"overlap_gather": True}},
            "deepspeed_ext.overlap_gather is not an option; did you mean overlap_param_gather?",
        ),
        (
            {"deepspeed_ext": {"colour": True}},
            "deepspeed_ext.colour is not an option; known: clip_after_steps, measure",
        ),
        ({"deepspeed_ext": {"overlap_param_gather": "true"}}, "overlap_param_gather='true' must be true or false"),
        ({"deepspeed_ext": {"clip_after_steps": 1.5}}, "clip_after_steps=1.5 must be a whole number"),
        ({"zero_optimization": {"reduce_bucket_size": "big"}}, "reduce_bucket_size='big' must be a number"),
        (
            {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "autotuning": {"start_profile_step": "auto"}},
            '^bf16.enabled, gradient_clipping: "auto" is filled in by the Trainer of transformers only; give a value$',
        ),
        ({"gradient_clipping": float("nan")}, "gradient_clipping=nan must be a number"),
        ({"data_types": {"grad_accum_dtype": "fp8"}}, "grad_accum_dtype='fp8'"),
        ({"communication_data_type": "int8"}, "communication_data_type='int8'"),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": 0}}, "reduce_bucket_size=0"),
        ({"gradient_clipping": -1.0}, "gradient_clipping=-1.0"),
        ({"zero_optimization": {"stage": 2, "allgather_bucket_size": 1001}}, "a multiple of .*, 2, got 1001; give an"),
    ],
)
def test_bad_options(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zero_options(config)
