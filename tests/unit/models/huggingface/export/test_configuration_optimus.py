"""The configuration that an export carries: values that follow from others, and files that transformers writes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
from megatron.optimus.models.huggingface.export.configuration_optimus import OptimusConfig


def test_what_is_not_given_follows_from_the_rest() -> None:
    config = OptimusConfig(hidden_size=64, num_attention_heads=4)
    assert (config.head_dim, config.num_key_value_heads) == (16, 4)
    assert config.rope_parameters["rope_type"] == "default" and config.mlp_only_layers == []
    given = OptimusConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=24)
    assert (given.head_dim, given.num_key_value_heads) == (24, 2)
    assert OptimusConfig(mlp_only_layers=[0]).mlp_only_layers == [0] and OptimusConfig().mlp_only_layers == []


def test_a_file_gives_the_same_configuration(tmp_path: Path) -> None:
    llama3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    config = OptimusConfig(
        num_experts=8,
        mlp_only_layers=[0, 2],
        norm_topk_prob=True,
        clip_qkv=8.0,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_shared_expert_intermediate_size=24,
        tie_word_embeddings=True,
        rope_parameters=llama3 | {"original_max_position_embeddings": 2048},
        eos_token_id=[3, 5],
    )
    config.save_pretrained(tmp_path)
    again = OptimusConfig.from_pretrained(tmp_path)
    ours, theirs = again.to_dict(), config.to_dict()
    assert ours["model_type"] == "optimus" and ours["eos_token_id"] == [3, 5] and ours["tie_word_embeddings"]
    assert {name: ours[name] for name in theirs} == theirs
