"""Our tensors under Hugging Face's names, and back (configurations: hf_config.py, hf_families.py).

Hugging Face files hold one matrix per expert and projection; we hold all experts of a layer in one tensor. In memory
order every such matrix is one contiguous range of our flattened tensor, so a mapping is a list of ranges and both
directions are exact copies.

Shapes: V vocabulary, D hidden, F inner width (of one expert in MoE layers), E experts, H query heads, K kv heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.optimus.config.schema import ModelConfig, Normalization, QKNormScope
from megatron.optimus.models.hf_families import family_of


@dataclass(frozen=True)
class HFTensor:
    """A Hugging Face tensor: elements [start, start + product of shape) of one of our flattened tensors. Where several
    of our tensors have one of the same name, each is some rows of it, in the order of ours."""

    name: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and global shapes of all our parameters, in model order."""
    c = config
    width, kv_width = c.num_attention_heads * c.head_dim, c.num_kv_heads * c.head_dim
    has_norm_weights = c.normalization is Normalization.RMSNORM
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (c.vocab_size, c.hidden_size)}
    moe_layers = set(c.moe_layers)
    for layer in range(c.num_layers):
        prefix = f"layers.{layer}."
        if has_norm_weights:
            shapes[prefix + "attention_norm.weight"] = (c.hidden_size,)
        for projection, rows in (("q", width), ("k", kv_width), ("v", kv_width)):
            shapes[f"{prefix}attention.{projection}_proj.weight"] = (rows, c.hidden_size)
            if c.add_qkv_bias:
                shapes[f"{prefix}attention.{projection}_proj.bias"] = (rows,)
        shapes[prefix + "attention.o_proj.weight"] = (c.hidden_size, width)
        if c.qk_layernorm:
            per_head = c.qk_layernorm_scope is QKNormScope.HEAD
            shapes[prefix + "attention.q_norm.weight"] = (c.head_dim if per_head else width,)
            shapes[prefix + "attention.k_norm.weight"] = (c.head_dim if per_head else kv_width,)
        if has_norm_weights:
            shapes[prefix + "mlp_norm.weight"] = (c.hidden_size,)
        if layer in moe_layers:
            inner = c.moe_ffn_hidden_size
            shapes[prefix + "moe.router.weight"] = (c.num_experts, c.hidden_size)
            shapes[prefix + "moe.experts.gate_up_weight"] = (c.num_experts, 2 * inner, c.hidden_size)
            shapes[prefix + "moe.experts.down_weight"] = (c.num_experts, c.hidden_size, inner)
            shapes |= _shared_experts(c, prefix + "moe.shared_experts.")
        else:
            shapes |= _mlp(prefix + "mlp.", c.hidden_size, c.ffn_hidden_size)
    if has_norm_weights:
        shapes["final_norm.weight"] = (c.hidden_size,)
    if c.untie_embeddings_and_output_weights:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return shapes


def _mlp(prefix: str, width: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        prefix + "gate_proj.weight": (inner, width),
        prefix + "up_proj.weight": (inner, width),
        prefix + "down_proj.weight": (width, inner),
    }


def _shared_experts(c: ModelConfig, prefix: str) -> dict[str, tuple[int, ...]]:
    if not c.moe_shared_expert_intermediate_size:
        return {}
    gate = {prefix + "gate.weight": (1, c.hidden_size)} if c.moe_shared_expert_gate else {}
    return _mlp(prefix + "mlp.", c.hidden_size, c.moe_shared_expert_intermediate_size) | gate


_TOP_LEVEL = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "attention.q_proj.weight": "self_attn.q_proj.weight",
    "attention.k_proj.weight": "self_attn.k_proj.weight",
    "attention.v_proj.weight": "self_attn.v_proj.weight",
    "attention.q_proj.bias": "self_attn.q_proj.bias",
    "attention.k_proj.bias": "self_attn.k_proj.bias",
    "attention.v_proj.bias": "self_attn.v_proj.bias",
    "attention.o_proj.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "mlp.gate_proj.weight": "mlp.gate_proj.weight",
    "mlp.up_proj.weight": "mlp.up_proj.weight",
    "mlp.down_proj.weight": "mlp.down_proj.weight",
    "moe.shared_experts.mlp.gate_proj.weight": "mlp.shared_expert.gate_proj.weight",
    "moe.shared_experts.mlp.up_proj.weight": "mlp.shared_expert.up_proj.weight",
    "moe.shared_experts.mlp.down_proj.weight": "mlp.shared_expert.down_proj.weight",
    "moe.shared_experts.gate.weight": "mlp.shared_expert_gate.weight",
}
_GRANITE = {  # both projections of the shared experts in one matrix, all experts in one tensor, as ours
    "moe.shared_experts.mlp.gate_proj.weight": "shared_mlp.input_linear.weight",
    "moe.shared_experts.mlp.up_proj.weight": "shared_mlp.input_linear.weight",
    "moe.shared_experts.mlp.down_proj.weight": "shared_mlp.output_linear.weight",
    "moe.router.weight": "block_sparse_moe.router.layer.weight",
    "moe.experts.gate_up_weight": "block_sparse_moe.input_linear.weight",
    "moe.experts.down_weight": "block_sparse_moe.output_linear.weight",
}
_MOE_BLOCK = {"mixtral": "block_sparse_moe."}  # elsewhere "mlp."
_PROJECTIONS = {"mixtral": ("w1", "w3", "w2")}  # gate, up, down
_USUAL_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def to_hf(config: ModelConfig, name: str) -> list[HFTensor]:
    """The Hugging Face tensors that together are our tensor ``name``, in the order of their ranges.

    Raises KeyError when the model has no parameter of that name, ConfigError when no Hugging Face architecture fits.
    """
    model_type = family_of(config).model_type
    shape = parameter_shapes(config)[name]
    if name in _TOP_LEVEL:
        return [HFTensor(_TOP_LEVEL[name], shape)]
    _, layer, rest = name.split(".", 2)
    prefix = f"model.layers.{layer}."
    in_layer = _IN_LAYER | (_GRANITE if model_type == "granitemoeshared" else {})
    if rest in in_layer:
        return [HFTensor(prefix + in_layer[rest], shape)]
    prefix += _MOE_BLOCK.get(model_type, "mlp.")
    if rest == "moe.router.weight":
        return [HFTensor(prefix + "gate.weight", shape)]
    width, inner = config.hidden_size, config.moe_ffn_hidden_size
    gate, up, down = _PROJECTIONS.get(model_type, _USUAL_PROJECTIONS)
    if rest == "moe.experts.gate_up_weight":  # rows 0 ... F-1 of each expert: gate, F ... 2F-1: up
        return [
            HFTensor(
                f"{prefix}experts.{expert}.{projection}.weight",
                (inner, width),
                (2 * expert + half) * inner * width,
            )
            for expert in range(config.num_experts)
            for half, projection in enumerate((gate, up))
        ]
    return [
        HFTensor(f"{prefix}experts.{expert}.{down}.weight", (width, inner), expert * inner * width)
        for expert in range(config.num_experts)
    ]
