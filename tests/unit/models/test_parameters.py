"""The declared parameters against those of the decoder, whole and split over ranks."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.optimus.config.family import ParameterKind, layer_parameters
from megatron.optimus.config.schema import ModelConfig, Normalization, ParallelConfig, QKNormScope
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.parameters import gradient_order, parameter_spec, parameters
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
