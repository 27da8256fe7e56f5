"""Rules of one section: a section with impossible values cannot exist."""

import math
from typing import Any

import pytest

from megatron.optimus.config.choices import OptimizerName as NAME
from megatron.optimus.config.schema import (
    CheckpointConfig,
    ConfigError,
    DataConfig,
    LoggingConfig,
    LRDecayStyle,
    ModelConfig,
    OptimizerConfig,
    OptimizerStateDtype,
    ParallelConfig,
    TrainingConfig,
    divisors,
    one_of,
    parse_split,
)

CONSTANT = {"lr_decay_style": LRDecayStyle.CONSTANT}


@pytest.mark.parametrize(
    ("section", "values", "parts"),
    [
        (ModelConfig, {"num_layers": 0}, ["num_layers=0", "1 or more"]),
        (ModelConfig, {"vocab_size": -1}, ["vocab_size=-1"]),
        (ModelConfig, {"num_experts": -1}, ["num_experts=-1", "0 or more"]),
        (ModelConfig, {"moe_aux_loss_coeff": -0.1}, ["moe_aux_loss_coeff=-0.1"]),
        (ModelConfig, {"norm_epsilon": 0.0}, ["norm_epsilon=0.0", "above 0"]),
        (ModelConfig, {"norm_epsilon": math.nan}, ["norm_epsilon=nan"]),
        (ModelConfig, {"clip_qkv": 0.0}, ["clip_qkv=0.0"]),
        (ModelConfig, {"hidden_size": 12, "num_attention_heads": 5}, ["=5", "hidden_size=12", "1, 2, 3, 4, 6 or 12"]),
        (ModelConfig, {"num_query_groups": 3}, ["num_query_groups=3", "num_attention_heads=16", "1, 2, 4, 8 or 16"]),
        (ModelConfig, {"num_query_groups": 0}, ["num_query_groups=0"]),
        (ModelConfig, {"kv_channels": 7}, ["head width 7", "even", "kv_channels=8"]),
        (ModelConfig, {"hidden_size": 12, "num_attention_heads": 4}, ["head width 3", "even"]),
        (ModelConfig, {"num_experts": 4, "moe_router_topk": 5}, ["moe_router_topk=5", "num_experts=4", "at most 4"]),
        (ModelConfig, {"moe_shared_expert_intermediate_size": -1}, ["moe_shared_expert_intermediate_size=-1", "0 or"]),
        (ModelConfig, {"moe_shared_expert_intermediate_size": 8}, ["size=8 with num_experts=0", "use 0"]),
        (ModelConfig, {"num_experts": 8, "moe_shared_expert_gate": True}, ["gate=True", "or use False"]),
        (ModelConfig, {"moe_layer_freq": [2]}, ["moe_layer_freq=2 with num_experts=0"]),
        (ModelConfig, {"num_experts": 8, "moe_layer_freq": []}, ["(0 numbers)", "one number of 1 or more"]),
        (ModelConfig, {"num_experts": 8, "moe_layer_freq": [0]}, ["moe_layer_freq=0 (1 numbers)"]),
        (ModelConfig, {"num_experts": 8, "moe_layer_freq": [0] * 16}, ["num_layers=16 a 0 or 1, not all of them 0"]),
        (ModelConfig, {"num_experts": 8, "moe_layer_freq": [0, 1]}, ["=0 1 (2 numbers)", "each of num_layers=16"]),
        (ModelConfig, {"num_experts": 8, "moe_layer_freq": [2] + [1] * 15}, ["=2 1 1", "(16 numbers)"]),
        (ParallelConfig, {"expert_model_parallel_size": 0}, ["expert_model_parallel_size=0"]),
        (ParallelConfig, {"distributed_timeout_minutes": 0.0}, ["distributed_timeout_minutes=0.0"]),
        (OptimizerConfig, {"lr": 0.0}, ["lr=0.0"]),
        (OptimizerConfig, {"lr": 1e-5}, ["min_lr=4e-05", "lr=1e-05", "at most 1e-05"]),
        (OptimizerConfig, {"adam_beta1": 1.0}, ["adam_beta1=1.0", "0 <= adam_beta1 < 1"]),
        (OptimizerConfig, {"adam_beta2": -0.1}, ["adam_beta2=-0.1"]),
        (OptimizerConfig, {"zero_stage": 4}, ["zero_stage=4", "0, 1, 2 or 3"]),
        (OptimizerConfig, {"lr_warmup_iters": 9, "lr_decay_iters": 8}, ["lr_warmup_iters=9", "lr_decay_iters=8"]),
        (OptimizerConfig, {"clip_grad": -1.0}, ["clip_grad=-1.0"]),
        (
            OptimizerConfig,
            {"lars_momentum": 0.5},
            ["lars_momentum=0.5 is an option of lars", "=adam; leave"],
        ),
        (OptimizerConfig, {"lion_beta1": 0.5, "optimizer": NAME.SGD}, ["lion_beta1=0.5", "option of lion", "=sgd"]),
        (OptimizerConfig, {"schedule_free_beta": 0.8}, ["option of schedule-free-adamw or schedule-free-sgd"]),
        (OptimizerConfig, {"evaluate_ema": True}, ["evaluate_ema=True is for a moving average; set ema_decay"]),
        (OptimizerConfig, {"ema_interval": 2}, ["ema_interval=2 is for a moving average"]),
        (OptimizerConfig, {"ema_decay": 1.0}, ["ema_decay=1.0 is out of range", "0.999"]),
        (OptimizerConfig, {"ema_decay": 0.9, "zero_stage": 3}, ["ema_decay=0.9 needs zero_stage=1 or 2"]),
        (
            OptimizerConfig,
            {"ema_decay": 0.9, "optimizer": NAME.SCHEDULE_FREE_SGD} | CONSTANT,
            ["optimizer=schedule-free-sgd keeps an average of its own"],
        ),
        (OptimizerConfig, {"sophia_interval": 10}, ["sophia_interval=10 is an option of sophia"]),
        (OptimizerConfig, {"qk_clip_threshold": 9.0}, ["qk_clip_threshold=9.0 is an option of muon or normuon"]),
        (OptimizerConfig, {"qk_clip_threshold": -1.0, "optimizer": NAME.MUON}, ["qk_clip_threshold=-1.0"]),
        (OptimizerConfig, {"optimizer_options": ["eps=1"]}, ["optimizer_options=eps=1 is for", "optimizer=adam"]),
        (OptimizerConfig, {"optimizer": NAME.SOPHIA}, ["optimizer=sophia needs sophia_interval", "10 is usual"]),
        (OptimizerConfig, {"optimizer": NAME.SOPHIA, "sophia_interval": 0}, ["sophia_interval=0", "1 or more"]),
        (OptimizerConfig, {"optimizer": NAME.LIBRARY}, ["pytorch_optimizer:NAME: NAME is a class", "AdaBelief"]),
        (
            OptimizerConfig,
            {"optimizer": NAME("pytorch_optimizer:Tiger"), "optimizer_options": ["beta"]},
            ["'beta' is not NAME=VALUE"],
        ),
        (
            OptimizerConfig,
            {"optimizer": NAME("pytorch_optimizer:Tiger"), "optimizer_state_dtype": OptimizerStateDtype.INT8},
            ["optimizer=pytorch_optimizer:Tiger keeps its states in fp32", "optimizer_state_dtype=int8"],
        ),
        (
            OptimizerConfig,
            {"optimizer": NAME.SCHEDULE_FREE_SGD, "lr_warmup_iters": 5},
            ["no learning-rate schedule", "lr_decay_style=cosine, lr_warmup_iters=5", "schedule_free_warmup_iters"],
        ),
        (
            OptimizerConfig,
            CONSTANT | {"optimizer": NAME.SCHEDULE_FREE_ADAMW, "optimizer_state_dtype": OptimizerStateDtype.BF16},
            ["keeps its states in fp32", "optimizer_state_dtype=bf16"],
        ),
        (TrainingConfig, {"train_iters": 0}, ["train_iters=0"]),
        (TrainingConfig, {"micro_batch_size": 0}, ["micro_batch_size=0"]),
        (TrainingConfig, {"rampup_batch_size": [4, 2]}, ["rampup_batch_size=4 2", "three whole numbers"]),
        (TrainingConfig, {"rampup_batch_size": [4, 0, 9], "train_samples": 99}, ["=4 0 9", "above 0"]),
        (TrainingConfig, {"rampup_batch_size": [4, 2, 9]}, ["=4 2 9 needs", "train_samples", "replaces train_iters"]),
        (TrainingConfig, {"rampup_batch_size": [8, 2, 9], "train_samples": 99}, ["begins with 8", "batch_size=8"]),
        (TrainingConfig, {"rampup_batch_size": [2, 4, 9], "train_samples": 99}, ["increment 4", "8 - 2 = 6", "use 3"]),
        (TrainingConfig, {"train_samples": 7}, ["train_samples=7", "batch of 8"]),
        (OptimizerConfig, {"lr_warmup_samples": 9, "lr_decay_samples": 8}, ["=9 exceeds lr_decay_samples=8"]),
        (OptimizerConfig, {"lr_wsd_decay_samples": 8}, ["lr_wsd_decay_samples=8 is for lr_decay_style=WSD"]),
        (TrainingConfig, {"seed": -1}, ["seed=-1"]),
        (DataConfig, {"split": "90;5;5"}, ["'90;5;5'", "969,30,1"]),
        (DataConfig, {"split": ""}, ["split=''"]),
        (DataConfig, {"split": "1,-1"}, ["'1,-1'"]),
        (DataConfig, {"split": "1,nan"}, ["'1,nan'"]),
        (DataConfig, {"split": "1,inf"}, ["'1,inf'"]),
        (DataConfig, {"split": "1,1,1,1"}, ["'1,1,1,1'"]),
        (DataConfig, {"data_path": ["a", ""]}, ["data_path", "empty"]),
        (DataConfig, {"valid_data_path": ["web="]}, ["'web='", "NAME=PREFIX"]),
        (DataConfig, {"valid_data_path": ["0.5", "a"]}, ["'0.5'", "without weights"]),
        (DataConfig, {"test_data_path": ["step=a"]}, ["test_data_path", "'step'", "another name"]),
        (DataConfig, {"test_data_path": ["x/web"], "valid_data_path": ["web=b"]}, ["both have a set web", "another"]),
        (DataConfig, {"valid_data_path": ["test=a"]}, ["'test'", "another name"]),
        (DataConfig, {"valid_data_path": ["x/web", "web=x/web.bin"]}, ["'web'", "x/web twice"]),
        (CheckpointConfig, {"save_retain": 0}, ["save_retain=0", "1 or more"]),
        (CheckpointConfig, {"finetune": True}, ["finetune", "load"]),
        (LoggingConfig, {"log_interval": 0}, ["log_interval=0"]),
        (LoggingConfig, {"run_dir": ""}, ["run_dir"]),
    ],
)
def test_impossible_values(section: type, values: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as info:
        section(**values)
    for part in parts:
        assert part in str(info.value)


def test_values_at_the_limits_are_allowed() -> None:
    ModelConfig(num_experts=8, moe_router_topk=8, num_query_groups=16, moe_z_loss_coeff=0.0)
    ModelConfig(hidden_size=100, num_attention_heads=7, kv_channels=8)  # kv_channels frees the two from each other
    ModelConfig(num_experts=0, moe_router_topk=8)  # a dense model ignores the router
    OptimizerConfig(lr=4e-5, adam_beta1=0.0, clip_grad=0.0, lr_warmup_iters=8, lr_decay_iters=8)
    CheckpointConfig(finetune=True, load="x", save_interval=0)


def test_split_shares() -> None:
    assert [float(share) for share in parse_split(DataConfig().split)] == [0.969, 0.03, 0.001]
    assert parse_split("3, 1") == (0.75, 0.25, 0.0)
    assert parse_split("100") == (1.0, 0.0, 0.0)


def test_names_of_validation_sets() -> None:
    words = ["data/web.bin", "code=a/1", "code=a/2.idx", "/x=y/books", "./c=d", "law=e=f"]
    found = {"web": ["data/web"], "code": ["a/1", "a/2"], "books": ["/x=y/books"], "c=d": ["./c=d"], "law": ["e=f"]}
    assert DataConfig(valid_data_path=words).valid_sets == found


def test_one_of() -> None:
    assert [one_of([1]), one_of([1, 2]), one_of([1, 2, 4])] == ["1", "1 or 2", "1, 2 or 4"]


def test_divisors_of_any_number_are_found_at_once():
    for number in (-1, *range(300)):
        assert divisors(number) == [candidate for candidate in range(1, number + 1) if number % candidate == 0]
    assert divisors(10**12 + 39) == [1, 10**12 + 39]
    assert divisors(2**62)[-1] == 2**62
