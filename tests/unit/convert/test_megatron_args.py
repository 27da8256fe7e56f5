"""Megatron's arguments, translated to our options and back."""

from __future__ import annotations

import torch

from megatron.optimus.checkpoint import load, model_slices, resolve
from megatron.optimus.config.schema import ModelConfig, QKNormScope
from megatron.optimus.convert import Options, convert, open_source
from megatron.optimus.models.decoder import Decoder
from tests.unit.convert.megatron_cases import MODELS, SMALL, assert_same_weights, our_checkpoint, our_model


def test_the_model_is_understood_from_the_arguments_alone(tmp_path):
    """Without our description beside the files, Megatron's own arguments must say the same."""
    cases = {
        "moe": dict(
            num_experts=4, moe_ffn_hidden_size=8, moe_router_topk=2, qk_layernorm=False, moe_router_norm_topk_prob=True
        ),
        "shared": MODELS["shared"] | dict(qk_layernorm=False, moe_router_norm_topk_prob=True),
        "dense-first": MODELS["dense-first"] | dict(qk_layernorm=False, moe_router_norm_topk_prob=True),
        "qwen3": dict(qk_layernorm_scope=QKNormScope.HEAD),
        "dense": MODELS["mula-dense"],
    }
    for name, options in cases.items():
        config = ModelConfig(**SMALL, **options)
        our_checkpoint(tmp_path / name, config)
        convert(tmp_path / name, tmp_path / f"m-{name}", to="megatron", options=Options(tp=2))
        [sidecar] = (tmp_path / f"m-{name}").glob("iter_*/optimus_model.json")
        sidecar.unlink()
        found = open_source(tmp_path / f"m-{name}")
        assert_same_weights(found, open_source(tmp_path / name))
        ours = Decoder(config)
        load(resolve(tmp_path / name), model_slices(ours, dense=True, experts=True))
        convert(tmp_path / f"m-{name}", tmp_path / f"o-{name}", to="optimus")
        tokens = torch.randint(0, 300, (1, 9))
        with torch.no_grad():
            assert torch.equal(our_model(tmp_path / f"o-{name}")(tokens).logits_BSV, ours(tokens).logits_BSV)
