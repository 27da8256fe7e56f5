"""Maps our tensors to those of Hugging Face: names, shapes and ranges.

Hugging Face files hold one matrix per expert and projection; we hold all experts of a layer in one tensor. In memory
order every such matrix is one contiguous range of our flattened tensor, so a mapping is a list of ranges and both
directions are exact copies.

Shapes: D hidden, F inner width of one expert, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.optimus.config.schema import ConfigError, ModelConfig
from megatron.optimus.models.huggingface.architectures import Architecture, architecture_of
from megatron.optimus.models.parameters import parameter_spec


@dataclass(frozen=True)
class HFTensor:
    """A Hugging Face tensor as elements [start, stop) of one of our flattened tensors.

    Where several of our tensors have one of the same name, each is some rows of it, in the order of ours.
    """

    name: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def stop(self) -> int:
        """The element after its last one in our flattened tensor."""
        return self.start + math.prod(self.shape)


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


def buffers_to_hf(config: ModelConfig, architecture: Architecture | None = None) -> dict[str, str]:
    """Their names of our buffers, the biases that steer the choice of experts, where the architecture has such."""
    theirs = (architecture or architecture_of(config)).names.get("moe.router.expert_bias")
    if theirs is None or not config.moe_router_enable_expert_bias:
        return {}
    return {f"layers.{layer}.moe.router.expert_bias": f"model.layers.{layer}.{theirs}" for layer in config.moe_layers}


def to_hf(config: ModelConfig, name: str, architecture: Architecture | None = None) -> list[HFTensor]:
    """The Hugging Face tensors that together are our tensor ``name``, in the order of their ranges.

    ``architecture``: None is the one that ``architecture_of`` finds. Raises KeyError when the model has no parameter of
    that name, ConfigError when no Hugging Face architecture fits.
    """
    architecture = architecture or architecture_of(config)
    shape = parameter_spec(config, name).shape
    if name in _TOP_LEVEL:
        return [HFTensor(_TOP_LEVEL[name], shape)]
    _, layer, in_layer = name.split(".", 2)
    prefix = f"model.layers.{layer}."
    names = _IN_LAYER | architecture.names
    if in_layer in names:
        return [HFTensor(prefix + names[in_layer], shape)]
    prefix += architecture.moe_module
    if in_layer == "moe.router.weight":
        return [HFTensor(f"{prefix}.gate.weight", shape)]
    width, inner = config.hidden_size, config.moe_ffn_hidden_size
    gate, up, down = architecture.expert_projections
    if in_layer == "moe.experts.gate_up_weight":  # rows 0 ... F-1 of each expert: gate, F ... 2F-1: up
        return [
            HFTensor(
                f"{prefix}.experts.{expert}.{projection}.weight",
                (inner, width),
                (2 * expert + half) * inner * width,
            )
            for expert in range(config.num_experts)
            for half, projection in enumerate((gate, up))
        ]
    if in_layer != "moe.experts.down_weight":
        raise ConfigError(f"{name} has no name in Hugging Face's {architecture.title}; its ``names`` lack {in_layer}")
    return [
        HFTensor(f"{prefix}.experts.{expert}.{down}.weight", (width, inner), expert * inner * width)
        for expert in range(config.num_experts)
    ]
