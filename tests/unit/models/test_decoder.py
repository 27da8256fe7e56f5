"""Our decoder against transformers' OLMoE and OLMo on the same random weights: logits, loss and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.optimus.config.schema import ModelConfig, Normalization
from megatron.optimus.models.decoder import Decoder

transformers = pytest.importorskip("transformers")

COMMON = dict(
    num_layers=3, hidden_size=48, num_attention_heads=4, ffn_hidden_size=80, vocab_size=101, max_position_embeddings=64
)
HF_COMMON = dict(
    num_hidden_layers=3,
    hidden_size=48,
    num_attention_heads=4,
    vocab_size=101,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    pad_token_id=None,
    eos_token_id=None,
    bos_token_id=None,
)


def olmoe(**changes: object) -> tuple[Decoder, torch.nn.Module]:
    moe = dict(num_experts=6, moe_ffn_hidden_size=20, moe_router_topk=2)
    ours = Decoder(ModelConfig(**{**COMMON, **moe, **changes}))
    hf = transformers.OlmoeConfig(
        **HF_COMMON,
        intermediate_size=20,
        num_experts=6,
        num_experts_per_tok=2,
        num_key_value_heads=changes.get("num_query_groups", 4),
        norm_topk_prob=changes.get("moe_router_norm_topk_prob", False),
        clip_qkv=changes.get("clip_qkv"),
    )
    return ours, transformers.OlmoeForCausalLM(hf)


def olmo(**changes: object) -> tuple[Decoder, torch.nn.Module]:
    dense = dict(normalization=Normalization.LAYERNORM_NONPARAMETRIC, qk_layernorm=False)
    ours = Decoder(ModelConfig(**{**COMMON, **dense, **changes}))
    hf = transformers.OlmoConfig(
        **{key: value for key, value in HF_COMMON.items() if key != "rms_norm_eps"},
        intermediate_size=80,
        num_key_value_heads=4,
        clip_qkv=changes.get("clip_qkv"),
        tie_word_embeddings=not changes.get("untie_embeddings_and_output_weights", True),
    )
    return ours, transformers.OlmoForCausalLM(hf)


def pair_weights(ours: Decoder, theirs: torch.nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """(our parameter, their parameter) under our names; the in-memory expert weights have the same layout."""
    renamed = dict(theirs.named_parameters())
    pairs = {}
    for name, weight in ours.named_parameters():
        hf = name
        for mine, other in (
            ("layers.", "model.layers."),
            ("attention_norm", "input_layernorm"),
            ("mlp_norm", "post_attention_layernorm"),
            ("attention.", "self_attn."),
            ("moe.router", "mlp.gate"),
            ("moe.experts.gate_up_weight", "mlp.experts.gate_up_proj"),
            ("moe.experts.down_weight", "mlp.experts.down_proj"),
            ("final_norm", "model.norm"),
            ("embedding", "model.embed_tokens"),
        ):
            hf = hf.replace(mine, other)
        pairs[name] = (weight, renamed.pop(hf))
    assert not renamed, f"without a counterpart: {list(renamed)}"
    return pairs


CASES = {
    "olmoe": (olmoe, {}),
    "olmoe-gqa": (olmoe, {"num_query_groups": 2}),
    "olmoe-renormalised": (olmoe, {"moe_router_norm_topk_prob": True}),
    "olmoe-clip": (olmoe, {"clip_qkv": 0.3}),
    "olmo": (olmo, {}),
    "olmo-clip": (olmo, {"clip_qkv": 0.3}),
    "olmo-tied": (olmo, {"untie_embeddings_and_output_weights": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_equal_transformers(case: str) -> None:
    build, changes = CASES[case]
    torch.manual_seed(0)
    ours, theirs = build(**changes)
    theirs.train()
    pairs = pair_weights(ours, theirs)
    with torch.no_grad():
        for mine, other in pairs.values():
            other.copy_(torch.randn_like(other) * (0.2 if other.dim() > 1 else 0.1) + (1.0 if other.dim() == 1 else 0))
            mine.copy_(other)
    tokens_BS = torch.randint(2, 101, (2, 17))
    out = ours(tokens_BS[:, :-1], tokens_BS[:, 1:])
    ref = theirs(tokens_BS[:, :-1])
    scale = ref.logits.abs().max()
    assert (ours(tokens_BS[:, :-1]).logits_BSV - ref.logits).abs().max() <= 1e-5 * scale

    ref_loss = torch.nn.functional.cross_entropy(ref.logits.flatten(0, 1), tokens_BS[:, 1:].flatten())
    loss = out.loss_sum / tokens_BS[:, 1:].numel()
    torch.testing.assert_close(loss, ref_loss, rtol=1e-5, atol=0)
    loss.backward()
    ref_loss.backward()
    for name, (mine, other) in pairs.items():
        largest = other.grad.abs().max()
        assert largest > 0, name
        assert (mine.grad - other.grad).abs().max() <= 1e-5 * largest + 1e-8, name
