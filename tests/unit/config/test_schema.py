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
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)


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
        (OptimizerConfig, {"qk_clip_threshold": -1.0, "optimizer": NAME.MUON}, ["qk_clip_threshold=-1.0"]),
        (OptimizerConfig, {"optimizer": NAME.SOPHIA, "sophia_interval": 0}, ["sophia_interval=0", "1 or more"]),
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


def test_names_of_validation_sets() -> None:
    words = ["data/web.bin", "code=a/1", "code=a/2.idx", "/x=y/books", "./c=d", "law=e=f"]
    found = {"web": ["data/web"], "code": ["a/1", "a/2"], "books": ["/x=y/books"], "c=d": ["./c=d"], "law": ["e=f"]}
    assert DataConfig(valid_data_path=words).valid_sets == found
