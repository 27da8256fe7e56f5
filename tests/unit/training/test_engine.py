"""Parameter groups: who decays, whom Muon takes, and that every option reaches the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_ext.ds_config import zero_options
from deepspeed_ext.optimizers import shard_optimizer_for
from deepspeed_ext.optimizers.adafactor import ShardAdafactor
from deepspeed_ext.optimizers.ademamix import ShardAdEMAMix
from deepspeed_ext.optimizers.adopt import ShardADOPT
from deepspeed_ext.optimizers.cautious import ShardCautiousAdamW
from deepspeed_ext.optimizers.elementwise import ShardAdam, ShardLion, ShardSGD
from deepspeed_ext.optimizers.lamb import ShardLamb
from deepspeed_ext.optimizers.lars import ShardLARS
from deepspeed_ext.optimizers.mars import ShardMARS
from deepspeed_ext.optimizers.muon import ShardMuon
from deepspeed_ext.optimizers.normuon import ShardNorMuon
from deepspeed_ext.optimizers.schedule_free import ShardScheduleFreeAdamW, ShardScheduleFreeSGD
from deepspeed_ext.optimizers.sophia import ShardSophia
from deepspeed_ext.optimizers.wrapped import WrappedOptimizer
from megatron.optimus.config.checks import check_trainable
from megatron.optimus.config.load import load
from megatron.optimus.config.schema import (
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    OptimizerName,
    RunConfig,
)
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.planner.optimizer_state import library_states
from megatron.optimus.training.engine import (
    _own_options,
    build_optimizer,
    deepspeed_config,
    optimizer_of,
    param_groups,
)

IN_FP32 = (ShardAdafactor, ShardScheduleFreeAdamW, ShardScheduleFreeSGD, WrappedOptimizer)
SCHEDULE_FREE = "--lr-decay-style constant --schedule-free-beta 0.61 --schedule-free-warmup-iters 9"
OPTIONS_OF = {
    "sgd": "--sgd-momentum 0.4",
    "lion": "--lion-beta1 0.6 --lion-beta2 0.5",
    "muon": "--muon-momentum 0.3 --muon-num-ns-steps 7 --muon-adjust-lr-fn original",
    "normuon": "--muon-momentum 0.3 --muon-num-ns-steps 7 --normuon-beta2 0.25",
    "galore": "--galore-rank 4",
    "adafactor": "--adafactor-beta2-decay=-0.7 --adafactor-clip-threshold 2",
    "ademamix": "--ademamix-beta1 0.61 --ademamix-beta2 0.62 --ademamix-beta3 0.63 --ademamix-alpha 3 "
    "--ademamix-warmup-iters 9",
    "adopt": "--adopt-beta1 0.61 --adopt-beta2 0.62 --adopt-eps 1e-3",
    "lamb": "--lamb-max-weight-norm 7",
    "lars": "--lars-momentum 0.61 --lars-trust-coefficient 0.05",
    "mars": "--mars-beta1 0.61 --mars-beta2 0.62 --mars-gamma 0.05",
    "schedule-free-adamw": SCHEDULE_FREE,
    "schedule-free-sgd": SCHEDULE_FREE,
    "sophia": "--sophia-interval 4 --sophia-beta1 0.61 --sophia-beta2 0.62 --sophia-gamma 0.4",
    "pytorch_optimizer:AdaBelief": "--optimizer-options eps=1e-6 rectify=true betas=[0.5,0.6]",
}
SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32, "moe_ffn_hidden_size": 8}


def moe() -> nn.Module:
    model = Decoder(ModelConfig(num_experts=4, moe_router_topk=2, **SHAPE))  # type: ignore[arg-type]
    model.register_parameter("some_bias", nn.Parameter(torch.zeros(3)))
    model.register_parameter("frozen", nn.Parameter(torch.zeros(3, 3), requires_grad=False))
    return model


def names(model: nn.Module, group: dict[str, Any]) -> set[str]:
    by_parameter = {parameter: name for name, parameter in model.named_parameters()}
    return {by_parameter[parameter] for parameter in group["params"]}


def test_by_default_everything_decays_in_one_group() -> None:
    model = moe()
    (group,) = param_groups(model, OptimizerConfig())
    assert names(model, group) == {name for name, _ in model.named_parameters()} - {"frozen"}
    assert group["weight_decay"] == 0.1 and group["state_dtype"] == "fp32" and group["betas"] == (0.9, 0.95)


@pytest.mark.parametrize(
    ("option", "spared"),
    [
        ("weight_decay_norms", lambda name: "norm" in name),
        ("weight_decay_biases", lambda name: name == "some_bias"),
        ("weight_decay_embeddings", lambda name: name in ("embedding.weight", "lm_head.weight")),
    ],
)
def test_each_exclusion_spares_its_kind_and_no_other(option: str, spared: Any) -> None:
    model = moe()
    groups = {group["weight_decay"]: group for group in param_groups(model, OptimizerConfig(**{option: False}))}
    trained = {name for name, _ in model.named_parameters()} - {"frozen"}
    assert groups.keys() == {0.0, 0.1}
    assert names(model, groups[0.0]) == {name for name in trained if spared(name)} != set()
    assert names(model, groups[0.1]) == {name for name in trained if not spared(name)}


def test_muon_takes_hidden_matrices_and_knows_stacked_ones() -> None:
    model = moe()
    config = OptimizerConfig(optimizer=OptimizerName.MUON, weight_decay_embeddings=False)
    groups = param_groups(model, config)
    matrices = set().union(*(names(model, group) for group in groups if group["use_muon"]))
    assert "layers.0.moe.experts.gate_up_weight" in matrices and "layers.1.attention.q_proj.weight" in matrices
    others = set().union(*(names(model, group) for group in groups if not group["use_muon"]))
    assert others == {n for n, _ in model.named_parameters() if "norm" in n} | {
        "embedding.weight",
        "lm_head.weight",
        "some_bias",
    }
    assert dict(model.named_parameters())["layers.0.moe.experts.gate_up_weight"].stacked_matrices == 2
    assert not matrices & others and len(groups) == 3


@pytest.mark.parametrize(
    ("name", "rule", "reached"),
    [
        ("adam", ShardAdam, {"betas": (0.8, 0.7), "eps": 1e-5, "lr": 0.5}),
        ("sgd", ShardSGD, {"momentum": 0.4, "decoupled_weight_decay": True, "lr": 0.5}),
        ("lion", ShardLion, {"betas": (0.6, 0.5), "lr": 0.5}),
        ("muon", ShardMuon, {"momentum": 0.3, "ns_steps": 7, "adjust_lr_fn": "original", "adam_eps": 1e-5}),
        ("normuon", ShardNorMuon, {"momentum": 0.3, "ns_steps": 7, "beta2": 0.25, "adam_eps": 1e-5}),
        ("adafactor", ShardAdafactor, {"beta2_decay": -0.7, "clip_threshold": 2.0}),
        ("ademamix", ShardAdEMAMix, {"betas": (0.61, 0.62, 0.63), "alpha": 3.0, "warmup_iters": 9, "eps": 1e-8}),
        ("adopt", ShardADOPT, {"betas": (0.61, 0.62), "eps": 1e-3}),
        ("cautious-adamw", ShardCautiousAdamW, {"betas": (0.8, 0.7), "eps": 1e-5}),
        ("lamb", ShardLamb, {"betas": (0.8, 0.7), "eps": 1e-5, "max_weight_norm": 7.0, "correct_bias": True}),
        ("lars", ShardLARS, {"momentum": 0.61, "trust_coefficient": 0.05}),
        ("mars", ShardMARS, {"betas": (0.61, 0.62), "gamma": 0.05}),
        ("schedule-free-adamw", ShardScheduleFreeAdamW, {"betas": (0.61, 0.7), "eps": 1e-5, "warmup_iters": 9}),
        ("schedule-free-sgd", ShardScheduleFreeSGD, {"momentum": 0.61, "warmup_iters": 9}),
        ("sophia", ShardSophia, {"betas": (0.61, 0.62), "gamma": 0.4}),
        ("pytorch_optimizer:AdaBelief", WrappedOptimizer, {"eps": 1e-6, "rectify": True, "betas": (0.5, 0.6)}),
    ],
)
def test_every_optimizer_gets_its_options(name: str, rule: type, reached: dict[str, Any]) -> None:
    flags = {
        "optimizer": name,
        "lr": 0.5,
        "adam-beta1": 0.8,
        "adam-beta2": 0.7,
        "adam-eps": 1e-5,
        "weight-decay": 0.25,
    }
    own = "--optimizer-state-dtype bf16 " * (rule not in IN_FP32) + OPTIONS_OF.get(name, "")
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    config = load([*words, *own.split()]).config.optimizer
    optimizer = optimizer_of(config.optimizer).build(param_groups(moe(), config))
    group = next(group for group in optimizer.param_groups if group.get("use_muon", True))
    assert isinstance(shard_optimizer_for(optimizer, group), rule)
    assert {key: group[key] for key in reached} == reached
    assert group["state_dtype"] == ("fp32" if rule in IN_FP32 else "bf16") and group["weight_decay"] == 0.25


@pytest.mark.parametrize(
    ("words", "reached"),
    [
        (
            "soap --soap-beta1 0.3 --soap-beta2 0.4 --soap-precondition-frequency 3 --soap-max-dim 9",
            {"matrix_betas": (0.3, 0.4), "precondition_frequency": 3, "max_dim": 9, "eps": 1e-5},
        ),
        (
            "shampoo --shampoo-beta1 0.3 --shampoo-beta2 0.4 --shampoo-eps 1e-4 --shampoo-graft sgd "
            "--shampoo-block-size 7 --shampoo-precondition-frequency 3",
            {"matrix_betas": (0.3, 0.4), "eps": 1e-4, "graft": "sgd", "block_size": 7, "graft_eps": 1e-5},
        ),
        (
            "galore --galore-rank 5 --galore-update-proj-gap 7 --galore-scale 0.5",
            {"matrix_betas": (0.8, 0.7), "eps": 1e-5, "rank": 5, "update_proj_gap": 7, "scale": 0.5},
        ),
        ("dion --dion-momentum 0.3 --dion-rank-fraction 0.5", {"momentum": 0.3, "rank_fraction": 0.5}),
    ],
)
def test_matrix_optimizers_get_their_options_and_adamw_gets_adams(words: str, reached: dict[str, Any]) -> None:
    adams = "--adam-beta1 0.8 --adam-beta2 0.7 --adam-eps 1e-5"
    config = load(f"--optimizer {words} {adams}".split()).config.optimizer
    optimizer = optimizer_of(config.optimizer).build(param_groups(moe(), config))
    matrices, others = (
        next(group for group in optimizer.param_groups if group["use_muon"] is kind) for kind in (True, False)
    )
    assert {key: matrices[key] for key in reached} == reached and type(matrices.get("graft", "")) is str
    assert isinstance(shard_optimizer_for(optimizer, others), ShardAdam)
    assert others["betas"] == (0.8, 0.7) and others["adam_eps"] == 1e-5


@pytest.mark.parametrize(
    "name",
    [*(name.value for name in OptimizerName if not name.is_of_library)]
    + [f"pytorch_optimizer:{name}" for name in ("Adan", "Tiger", "signsgd")],
)
def test_every_optimizer_keeps_the_states_that_the_planner_counts(name: str) -> None:
    words = f"--optimizer {name} {OPTIONS_OF.get(name, '')}".replace("eps=1e-6 betas=[0.5,0.6]", "").split()
    config = load(words).config.optimizer
    counted = library_states(config.optimizer) if config.optimizer.is_of_library else config.optimizer.num_states
    optimizer = build_optimizer(moe(), config)
    for group in optimizer.param_groups:
        states = counted if group.get("use_muon", True) else 2  # AdamW's
        assert len(shard_optimizer_for(optimizer, group).state_kinds) == states


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("pytorch_optimizer:AdaBeleif", "pytorch_optimizer has no AdaBeleif; did you mean AdaBelief?"),
        ("pytorch_optimizer:Lamb", "Lamb keeps ['weight_norm', 'adam_norm', 'trust_ratio'] for each tensor"),
        ("pytorch_optimizer:StableAdamW", "StableAdamW is not element-wise: a slice of a tensor is not updated as"),
        ("pytorch_optimizer:SGDP", "SGDP is not element-wise"),
        ("pytorch_optimizer:AdamP", "AdamP is not element-wise"),
        ("pytorch_optimizer:Prodigy", "Prodigy adapts d_de_nom, d_hat, d_numerator to all its tensors"),
        ("pytorch_optimizer:SophiaH", "SophiaH needs second derivatives"),
        ("pytorch_optimizer:MADGRAD", "MADGRAD keeps numbers of its own that no checkpoint of shards holds"),
        ("pytorch_optimizer:ScheduleFreeAdamW", "ScheduleFreeAdamW has two modes, train() and eval()"),
        ("pytorch_optimizer:AliG", "AliG does not run on slices of tensors: NoClosureError"),
        ("pytorch_optimizer:SAM", "missing 1 required positional argument: 'base_optimizer'"),
        (
            "pytorch_optimizer:Tiger --optimizer-options beta3=1",
            "has no option 'beta3' (value '1'); did you mean beta?",
        ),
    ],
)
def test_what_cannot_run_on_shards_is_one_line(words: str, message: str) -> None:
    config = load(f"--optimizer {words}".split()).config.optimizer
    with pytest.raises(ConfigError) as info:
        build_optimizer(moe(), config)
    assert message in str(info.value) and "\n" not in str(info.value)


def test_an_optimizer_for_matrices_has_adams_options_for_the_rest() -> None:
    config = OptimizerConfig(optimizer=OptimizerName.MUON, muon_momentum=0.3, adam_beta1=0.8, adam_eps=1e-5)
    found = _own_options({"params": None, "lr": None, "momentum": None, "betas": None}, config)
    assert found == {"momentum": 0.3, "betas": (0.8, config.adam_beta2), "adam_eps": 1e-5}


def test_errors() -> None:
    with pytest.raises(ConfigError, match="optimizer='adamx' is not one of adam, sgd, muon, lion"):
        load(["--optimizer", "adamx"])
    with pytest.raises(ConfigError, match=r"lion_beta2=1.0 is out of range"):
        OptimizerConfig(optimizer=OptimizerName.LION, lion_beta2=1.0)
    with pytest.raises(ConfigError, match="optimizer=soap keeps its states in fp32, not optimizer_state_dtype=int8"):
        load("--optimizer soap --optimizer-state-dtype int8".split())
    with pytest.raises(ConfigError, match=r"dion_rank_fraction=1\.5 exceeds 1"):
        OptimizerConfig(optimizer=OptimizerName.DION, dion_rank_fraction=1.5)
    config = RunConfig(optimizer=OptimizerConfig(optimizer=OptimizerName.MUON), data=DataConfig(data_path=["x"]))
    config.parallel.tensor_model_parallel_size = 2
    check_trainable(config)


@pytest.mark.parametrize("clip_grad", [0.0, 0.5, 1.0])
def test_clip_grad_keeps_its_meaning_whatever_deepspeeds_default_is(clip_grad: float) -> None:
    config = load(["--preset", "mula-tiny", "--clip-grad", str(clip_grad)]).config
    options = zero_options(deepspeed_config(config, 1))
    assert options.max_norm == clip_grad and options.check_grad_overflow
