"""Random small configurations of transformers' architectures: the same logits there and here, both ways."""

import random

import pytest
import torch

from megatron.optimus.checkpoint import load, load_manifest, model_slices, save
from megatron.optimus.config.serialize import from_dict, to_dict
from megatron.optimus.convert import convert
from megatron.optimus.models.decoder import Decoder

pytest.importorskip("transformers")
from .convert_cases import LLAMA3, VOCAB, hf_model, loaded

_HEADS_FILL_WIDTH = ("olmo", "olmoe", "qwen2", "qwen2_moe", "granitemoeshared")  # no head_dim in their configurations


def random_shape(kind, seed):
    """Keyword arguments of a transformers configuration; widths fit its grouped products (rows of 16 bytes)."""
    draw = random.Random(f"{kind}{seed}")
    groups, per_group = draw.choice([1, 2, 3]), draw.choice([1, 2, 4])
    heads, head_dim = groups * per_group, 4 * draw.choice([1, 2, 3])
    changes = dict(
        hidden_size=heads * head_dim if kind in _HEADS_FILL_WIDTH else draw.choice([24, 36, 40]),
        intermediate_size=draw.choice([12, 20, 32]),
        num_hidden_layers=draw.choice([1, 2, 3]),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        tie_word_embeddings=draw.random() < 0.3,
        rope_parameters=draw.choice([LLAMA3, {"rope_type": "default", "rope_theta": draw.choice([100.0, 1e6])}]),
    )
    if kind not in _HEADS_FILL_WIDTH:
        changes["head_dim"] = head_dim
    if kind not in ("olmo", "llama", "qwen2"):
        experts = draw.choice([3, 5, 8])
        changes |= dict(num_experts=experts, num_experts_per_tok=draw.randint(1, experts))
        if kind != "mixtral":
            changes["norm_topk_prob"] = draw.random() < 0.5
    if kind == "granitemoeshared":
        changes |= dict(num_local_experts=changes.pop("num_experts"), attention_multiplier=head_dim**-0.5)
        changes |= dict(shared_intermediate_size=draw.choice([4, 20, 28]))
        del changes["norm_topk_prob"]  # always, by another name
    if kind in ("qwen2_moe", "qwen3_moe"):
        changes["moe_intermediate_size"] = draw.choice([8, 16])
    if kind == "qwen2_moe":
        changes |= dict(shared_expert_intermediate_size=draw.choice([4, 20, 28]), qkv_bias=draw.random() < 0.5)
    return changes


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "kind", ["olmo", "olmoe", "llama", "mixtral", "qwen2", "qwen2_moe", "granitemoeshared", "qwen3_moe"]
)
def test_random_configurations_give_the_same_logits(tmp_path, kind, seed):
    """Both ways: what transformers saved gives the same logits here, and what we export gives ours in transformers."""
    hf_model(kind, seed=seed, **random_shape(kind, seed)).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "ours", to="optimus")
    run = from_dict(load_manifest(tmp_path / "ours").config)
    ours = Decoder(run.model)
    load(tmp_path / "ours", model_slices(ours, dense=True, experts=True))
    tokens = torch.randint(0, VOCAB, (2, 40))
    theirs = loaded(tmp_path / "hf")
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert (ours(tokens).logits_BSV - expected).abs().max() <= 1e-5 * expected.abs().max()
        for parameter in ours.parameters():  # other weights, so that the export is really ours
            parameter.copy_(torch.randn_like(parameter) * 0.1)
        expected = ours(tokens).logits_BSV
    slices = model_slices(ours, dense=True, experts=True)
    save(tmp_path / "run", 1, slices, kind="model", consumed_samples=0, config=to_dict(run), metadata={})
    convert(tmp_path / "run", tmp_path / "back", to="hf", verify=True)
    with torch.no_grad():
        found = loaded(tmp_path / "back")(tokens).logits
    assert expected.abs().max() > 0.01
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
