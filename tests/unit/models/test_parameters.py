"""The declared parameters against those of the decoder, whole and split over ranks."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.optimus.config.family import ParameterKind, layer_parameters
from megatron.optimus.config.load import load
from megatron.optimus.config.schema import ModelConfig, Normalization, ParallelConfig, QKNormScope
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.huggingface.config import model_config_from_hf
from megatron.optimus.models.parameters import count_parameters, gradient_order, parameter_spec, parameters
from tests.helpers import run_distributed

BASE = dict(num_layers=3, hidden_size=16, num_attention_heads=4, num_query_groups=2, vocab_size=32)
EXPERTS = dict(num_experts=4, moe_ffn_hidden_size=12, moe_router_topk=2, moe_layer_freq=[0, 1, 1])
SHARED = dict(moe_shared_expert_intermediate_size=20)


def configs() -> list[ModelConfig]:
    """Every option that adds, removes or resizes a parameter, with every other one."""
    choices = itertools.product(
        ({}, EXPERTS, EXPERTS | SHARED, EXPERTS | SHARED | {"moe_shared_expert_gate": True}),
        (dict(qk_layernorm=False), *(dict(qk_layernorm_scope=scope) for scope in QKNormScope)),
        (dict(normalization=norm) for norm in Normalization),
        (dict(add_qkv_bias=bias) for bias in (False, True)),
        (dict(untie_embeddings_and_output_weights=untied) for untied in (False, True)),
        (dict(kv_channels=width) for width in (None, 6)),
    )
    return [ModelConfig(**BASE, **{name: v for part in parts for name, v in part.items()}) for parts in choices]


def test_names_shapes_and_order_are_the_decoders() -> None:
    for config in configs():
        with torch.device("meta"):
            model = Decoder(config)
        found = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
        assert [(name, spec.shape) for name, spec in parameters(config).items()] == found, config
        assert all(parameter_spec(config, name) == spec for name, spec in parameters(config).items())


@pytest.mark.parametrize("name", ["layers.3.mlp_norm.weight", "layers.01.mlp_norm.weight", "layers.0.router", "norm"])
def test_a_parameter_that_the_model_has_not_is_a_key_error(name: str) -> None:
    with pytest.raises(KeyError):
        parameter_spec(ModelConfig(**BASE), name)


def test_kinds_follow_from_names_and_every_gradient_has_its_place() -> None:
    for config in configs():
        for name, spec in parameters(config).items():
            assert (spec.kind is ParameterKind.BIAS) == name.endswith("bias")
            assert (spec.kind is ParameterKind.EMBEDDING) == name.endswith(("embedding.weight", "lm_head.weight"))
            assert (spec.kind in (ParameterKind.BIAS, ParameterKind.NORM)) == (len(spec.shape) == 1)
            assert spec.is_expert == (".experts." in name)
        for is_moe in {False, config.is_moe}:
            assert sorted(gradient_order(config, is_moe=is_moe)) == sorted(layer_parameters(config, is_moe=is_moe))


def split_dims(rank: int, world: int) -> list[dict[str, int | None]]:
    """Of each model's parameters the dim in which the program has split them."""
    from megatron.optimus.parallel.apply import parallelize
    from megatron.optimus.platform.mesh import Mesh

    shards = ParallelConfig(tensor_model_parallel_size=2, expert_model_parallel_size=1, expert_tensor_parallel_size=2)
    mesh, found = Mesh(shards, rank=rank, world_size=world), []
    for config in configs():
        with torch.device("meta"):
            model = Decoder(config)
        parallelize(model, mesh, shards, 32)
        found.append({name: getattr(p, "partition_dim", None) for name, p in model.named_parameters()})
    return found


def test_dims_are_those_that_the_program_splits() -> None:
    [found, _] = run_distributed(split_dims, 2)
    for config, dims in zip(configs(), found, strict=True):
        assert {name: spec.split_dim for name, spec in parameters(config).items()} == dims, config


TOTALS = {
    "mula-1b": (1_279_787_008, 1_279_787_008),
    "mula-7b-a1b": (6_919_161_856, 1_282_017_280),
    "mula-20b-a2b": (20_076_824_576, 2_360_084_480),
    "mula-100b-a7b": (99_987_557_376, 7_578_651_648),
    "mula-220b-a10b": (220_205_681_664, 10_020_719_616),
    "olmo-1b": (1_176_764_416, 1_176_764_416),
    "olmoe-1b-7b": (6_919_161_856, 1_282_017_280),
}


@pytest.mark.parametrize("preset", TOTALS)
def test_exact_totals(preset: str) -> None:
    counts = count_parameters(load(["--preset", preset]).config.model)
    assert (counts.total, counts.active) == TOTALS[preset]


def test_exact_totals_with_shared_experts_are_those_of_transformers() -> None:
    """Qwen1.5-MoE-A2.7B, the defaults of its configuration: 60 experts of which 4 are chosen."""
    transformers = pytest.importorskip("transformers")
    defaults = transformers.Qwen2MoeConfig()
    model = model_config_from_hf(defaults.to_dict())
    with torch.device("meta"):
        whole = transformers.Qwen2MoeForCausalLM(defaults).num_parameters()
    experts = 24 * 60 * 3 * 2048 * 1408
    counts = count_parameters(model)
    assert (counts.total, counts.active, counts.expert) == (whole, whole - experts * 56 // 60, experts)
    assert (whole, counts.active) == (14_315_784_192, 2_689_173_504)


def test_exact_totals_with_dense_layers_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.Qwen3MoeConfig(num_hidden_layers=5, mlp_only_layers=[0, 3], num_experts=16)
    with torch.device("meta"):
        whole = transformers.Qwen3MoeForCausalLM(theirs).num_parameters()
    counts = count_parameters(model_config_from_hf(theirs.to_dict()))
    experts = 3 * 16 * 3 * 2048 * 768
    assert (counts.total, counts.active, counts.expert) == (whole, whole - experts // 2, experts)
