"""Small models and their checkpoints that the tests of Megatron's format share."""

from __future__ import annotations

import pytest
import torch

from megatron.optimus.checkpoint import load, load_manifest, model_slices, save
from megatron.optimus.config.schema import Normalization, QKNormScope, RunConfig, ScoreFunction
from megatron.optimus.config.serialize import from_dict, to_dict
from megatron.optimus.convert.formats import WEIGHT, matrices
from megatron.optimus.models.decoder import Decoder

pytest.importorskip("megatron.core")


def our_checkpoint(folder, config, seed=0):
    torch.manual_seed(seed)
    model = Decoder(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if parameter.dim() == 1 else 0.0))
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(torch.randn_like(buffer))
    slices = model_slices(model, dense=True, experts=True)
    run = RunConfig(model=config)
    save(folder, 5, slices, kind="model", consumed_samples=40, config=to_dict(run), metadata={})
    return model


def our_model(folder):
    model = Decoder(from_dict(load_manifest(folder).config).model)
    load(folder, model_slices(model, dense=True, experts=True))
    return model


def assert_same_weights(left, right):
    assert left.dtypes == right.dtypes and left.dtypes
    for name, start, stop in matrices(left.model):
        a, b = left.read(name, WEIGHT, start, stop), right.read(name, WEIGHT, start, stop)
        assert torch.equal(a, b), name
    assert left.buffers.keys() == right.buffers.keys()
    assert all(torch.equal(left.buffers[name], right.buffers[name]) for name in left.buffers)


SMALL = dict(
    num_layers=4,
    hidden_size=24,
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=6,
    ffn_hidden_size=16,
    vocab_size=300,  # padded to 512 on two ranks and 1,024 on four: the last ranks hold zeros only
)


MODELS = {
    "mula-moe": dict(num_experts=4, moe_ffn_hidden_size=8, moe_router_topk=2),
    "biased-sigmoid": dict(
        num_experts=4,
        moe_ffn_hidden_size=8,
        moe_router_topk=2,
        moe_router_score_function=ScoreFunction.SIGMOID,
        moe_router_enable_expert_bias=True,
        moe_router_norm_topk_prob=True,
    ),
    "shared": dict(
        num_experts=4,
        moe_ffn_hidden_size=8,
        moe_router_topk=2,
        moe_shared_expert_intermediate_size=12,
        moe_shared_expert_gate=True,
        add_qkv_bias=True,
    ),
    "dense-first": dict(num_experts=4, moe_ffn_hidden_size=8, moe_router_topk=2, moe_layer_freq=[0, 1, 0, 1]),
    "mula-dense": dict(normalization=Normalization.LAYERNORM_NONPARAMETRIC, qk_layernorm=False),
    "llama-tied": dict(qk_layernorm=False, untie_embeddings_and_output_weights=False),
    "qwen3": dict(qk_layernorm_scope=QKNormScope.HEAD),
}


def edit(folder, rank, change):
    [file] = folder.glob(f"iter_*/{rank}/model_optim_rng.pt")
    content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)
