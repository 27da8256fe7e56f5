# SPDX-License-Identifier: Apache-2.0
"""A decoder-only language model that Optimus has trained, in plain PyTorch. Loaded with ``trust_remote_code=True``.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto")

Attention is torch's scaled_dot_product_attention. Fine-tuning works; the losses that balance experts are not computed.
Needs torch and transformers 5.

Shapes: B sequences, S new positions, P positions in all, D model width, H query heads, G key/value heads, d head width,
T tokens, E experts, K experts of a token, F inner width of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_optimus import OptimusConfig

LEAST_SUM = 1e-20  # what a token's weights are divided by at least: a sigmoid's scores may all be 0


# ---- norms and positions


class OptimusRMSNorm(nn.Module):
    """RMSNorm with a scale."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the last dim; shape and dtype are those of x."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class OptimusLayerNorm(nn.Module):
    """LayerNorm without scale and shift."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.width = width
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the last dim in fp32; shape and dtype are those of x."""
        return F.layer_norm(x.float(), (self.width,), eps=self.eps).to(x.dtype)


def build_norm(config: OptimusConfig) -> nn.Module:
    """Makes the norm that the configuration names."""
    norm = OptimusRMSNorm if config.normalization == "rmsnorm" else OptimusLayerNorm
    return norm(config.hidden_size, config.rms_norm_eps)


def rope_table(config: OptimusConfig, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, fp32 [B, 1, S, d]."""
    rope = config.rope_parameters
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions_BS.device) / config.head_dim
    frequency = rope["rope_theta"] ** -exponent
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        frequency = frequency / rope["factor"]
    elif kind == "llama3":  # low frequencies are divided, high ones kept, those between in proportion
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        rotations = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
        keep = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
        frequency = frequency * (keep + (1.0 - keep) / rope["factor"])
    elif kind != "default":
        raise ValueError(f"rope_type={kind!r} is not supported; use default, linear or llama3")
    angle = positions_BS[:, None, :, None].float() * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x_BHSd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair (i, i + d / 2) of every head, in fp32."""
    x = x_BHSd.float()
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x_BHSd.dtype)


def attention_mask_of(padding_BP: Tensor | None, past: int, length: int, device: torch.device) -> Tensor | None:
    """Which keys each query sees, bool [1 or B, 1, S, P]; None where all see all those up to their own.

    A query that is padding sees itself, because a softmax over no key would be NaN.
    """
    if padding_BP is not None and padding_BP.dim() != 2:
        raise ValueError(f"attention_mask has {padding_BP.dim()} dimensions; [sequences, positions] is supported")
    total = past + length
    if padding_BP is not None and bool(padding_BP[:, :total].all()):
        padding_BP = None
    if padding_BP is None and (past == 0 or length == 1):
        return None
    query, key = torch.arange(past, total, device=device)[:, None], torch.arange(total, device=device)
    mask = (key <= query)[None, None]
    if padding_BP is None:
        return mask
    return mask & padding_BP[:, None, None, :total].bool() | (key == query)


# ---- layers


class OptimusAttention(nn.Module):
    """Causal attention with rotary positions, for H query heads and G key/value heads of width d."""

    def __init__(self, config: OptimusConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim, self.clip = layer, config.head_dim, config.clip_qkv
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.add_qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.add_qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.add_qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.norm_heads = config.qk_layernorm_scope == "head"
        widths = (config.head_dim, config.head_dim) if self.norm_heads else (queries, keys)
        self.q_norm, self.k_norm = (
            OptimusRMSNorm(width, config.rms_norm_eps) if config.qk_layernorm else nn.Identity() for width in widths
        )

    def forward(self, x_BSD: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None) -> Tensor:
        """Computes [B, S, D] of x_BSD and, with a cache, of the positions before it.

        Args:
            x_BSD: inputs at the new positions.
            rope: cosine and sine of their angles, as ``rope_table`` has them.
            mask: as ``attention_mask_of`` has it.
            cache: keys and values of earlier positions; those of the new ones are added.
        """
        q_BHSd = rotate(self.heads(self.q_proj(x_BSD), self.q_norm), *rope)
        k_BGPd = rotate(self.heads(self.k_proj(x_BSD), self.k_norm), *rope)
        v_BGPd = self.heads(self.v_proj(x_BSD))
        if cache is not None:
            total = cache.get_seq_length(self.layer) + x_BSD.shape[1]
            k_BGPd, v_BGPd = cache.update(k_BGPd, v_BGPd, self.layer)
            k_BGPd, v_BGPd = k_BGPd[:, :, :total], v_BGPd[:, :, :total]  # a cache of fixed size is longer
        out_BHSd = F.scaled_dot_product_attention(
            q_BHSd,
            k_BGPd,
            v_BGPd,
            attn_mask=mask,
            is_causal=mask is None and q_BHSd.shape[2] > 1,
            enable_gqa=q_BHSd.shape[1] != k_BGPd.shape[1],
        )
        return self.o_proj(out_BHSd.transpose(1, 2).flatten(2))

    def heads(self, x_BSW: Tensor, norm: Callable[[Tensor], Tensor] = nn.Identity()) -> Tensor:  # noqa: B008
        """[B, S, heads * d] to [B, heads, S, d]; clips after the norm."""
        if self.norm_heads:
            x_BSW = norm(x_BSW.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        else:
            x_BSW = norm(x_BSW)
        if self.clip is not None:
            x_BSW = x_BSW.clamp(-self.clip, self.clip)
        return x_BSW.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class OptimusMLP(nn.Module):
    """The SwiGLU MLP, down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Computes [..., D] in the dtype of x."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class OptimusRouter(nn.Module):
    """Chooses a token's experts and their weights, in fp32. Of equal scores the lower expert is taken."""

    def __init__(self, config: OptimusConfig) -> None:
        super().__init__()
        self.topk, self.normalize = config.num_experts_per_tok, config.norm_topk_prob
        self.sigmoid = config.moe_router_score_function == "sigmoid"
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        bias = torch.zeros(config.num_experts) if config.moe_router_enable_expert_bias else None
        self.register_buffer("e_score_correction_bias", bias)
        self.e_score_correction_bias: Tensor | None

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights, fp32 [T, K], and the experts, int64 [T, K], of each token."""
        logits_TE = F.linear(x_TD.float(), self.weight.float())
        scores_TE = logits_TE.sigmoid() if self.sigmoid else logits_TE.softmax(dim=-1)
        choice_TE = scores_TE.detach()
        if self.e_score_correction_bias is not None:
            choice_TE = choice_TE + self.e_score_correction_bias
        indices_TK = choice_TE.sort(dim=-1, descending=True, stable=True).indices[:, : self.topk]
        weights_TK = scores_TE.gather(-1, indices_TK)
        if self.normalize:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True).clamp(min=LEAST_SUM)
        return weights_TK, indices_TK


class OptimusExperts(nn.Module):
    """The routed SwiGLU experts of a layer, stacked: two tensors are read from the file and not two for each expert."""

    def __init__(self, config: OptimusConfig) -> None:
        super().__init__()
        experts, width, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, width))  # rows 0..F-1 gate, F..2F-1 up
        self.down_proj = nn.Parameter(torch.empty(experts, width, inner))

    def forward(self, x_TD: Tensor, weights_TK: Tensor, indices_TK: Tensor) -> Tensor:
        """The weighted sum of each token's experts: its rows are sorted by expert, computed, and added up in fp32."""
        topk = indices_TK.shape[1]
        expert_N, slot_N = indices_TK.flatten().sort(stable=True)
        rows_ND, counts_E = x_TD[slot_N // topk], expert_N.bincount(minlength=self.gate_up_proj.shape[0])
        inner_NF = self.swiglu(self.product(rows_ND, self.gate_up_proj, counts_E))
        y_ND = self.product(inner_NF, self.down_proj, counts_E).float() * weights_TK.flatten()[slot_N, None]
        y_TKD = torch.zeros_like(y_ND).index_copy(0, slot_N, y_ND).unflatten(0, (-1, topk))
        return y_TKD.sum(dim=1).to(x_TD.dtype)

    @staticmethod
    def swiglu(gate_up_N2F: Tensor) -> Tensor:
        """silu(gate) * up, where the first F columns are the gate: [N, 2F] -> [N, F]."""
        gate_NF, up_NF = gate_up_N2F.chunk(2, dim=-1)
        return F.silu(gate_NF) * up_NF

    @staticmethod
    def product(rows_NI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
        """Each row times its expert's matrix, in one grouped product on GPUs where shapes allow it."""
        outputs, inputs = weight_EOI.shape[1:]
        grouped = getattr(F, "grouped_mm", None)  # torch 2.10
        is_bf16 = rows_NI.dtype is torch.bfloat16 and weight_EOI.dtype is torch.bfloat16
        if grouped is not None and rows_NI.is_cuda and is_bf16 and inputs % 8 == 0 and outputs % 8 == 0:
            return grouped(rows_NI, weight_EOI.transpose(1, 2), offs=counts_E.cumsum(0).int())
        counts = counts_E.tolist()
        parts = [F.linear(rows, weight_EOI[e]) for e, rows in enumerate(rows_NI.split(counts)) if counts[e]]
        return torch.cat(parts)


class OptimusMoE(nn.Module):
    """A Mixture of Experts; the shared ones process every token."""

    def __init__(self, config: OptimusConfig) -> None:
        super().__init__()
        self.gate = OptimusRouter(config)
        self.experts = OptimusExperts(config)
        shared = config.moe_shared_expert_intermediate_size
        self.shared_expert = OptimusMLP(config.hidden_size, shared) if shared else None
        self.shared_expert_gate = (
            nn.Linear(config.hidden_size, 1, bias=False) if config.moe_shared_expert_gate else None
        )

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Sums the routed and the shared experts: [B, S, D] -> [B, S, D]."""
        x_TD = x_BSD.flatten(0, 1)
        y_BSD = self.experts(x_TD, *self.gate(x_TD)).view_as(x_BSD)
        if self.shared_expert is None:
            return y_BSD
        shared_BSD = self.shared_expert(x_BSD)
        if self.shared_expert_gate is not None:
            shared_BSD = torch.sigmoid(self.shared_expert_gate(x_BSD)) * shared_BSD
        return y_BSD + shared_BSD


class OptimusDecoderLayer(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)); the MLP is dense or a Mixture of Experts."""

    def __init__(self, config: OptimusConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = build_norm(config)
        self.self_attn = OptimusAttention(config, layer)
        self.post_attention_layernorm = build_norm(config)
        is_moe = config.num_experts > 0 and layer not in config.mlp_only_layers
        self.mlp = OptimusMoE(config) if is_moe else OptimusMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x_BSD: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None) -> Tensor:
        """Computes [B, S, D]; the arguments are those of ``OptimusAttention.forward``."""
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), rope, mask, cache)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


# ---- models


class OptimusPreTrainedModel(PreTrainedModel):
    """What both models tell transformers: their configuration, how they are split and initialised."""

    config_class = OptimusConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("OptimusDecoderLayer",)
    _skip_keys_device_placement = ("cache", "past_key_values")
    _supports_sdpa = True
    _keep_in_fp32_modules_strict = ("e_score_correction_bias",)  # eight bits would swallow the steps that made it

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, OptimusRouter | OptimusExperts):
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=self.config.initializer_range)


class OptimusModel(OptimusPreTrainedModel):
    """Embedding, layers and the last norm."""

    def __init__(self, config: OptimusConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(OptimusDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = build_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Returns the last hidden states [B, S, D], the cache and, on request, the input of every layer.

        Args:
            input_ids: int64 [B, S]; or ``inputs_embeds``, one of the two.
            attention_mask: [B, P] over cached and new positions, 0 at padding; None: no padding.
            position_ids: int64 [B, S]; None: those after the cached ones.
            past_key_values: the cache, to which keys and values are added.
            inputs_embeds: [B, S, D] in place of the embedding.
            use_cache: whether to make a cache where none is given; None: the configuration's.
            output_hidden_states: None: the configuration's.

        Raises:
            ValueError: both of input_ids and inputs_embeds, or none.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x_BSD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None and not (self.gradient_checkpointing and self.training):
            past_key_values = DynamicCache()
        past = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        length = x_BSD.shape[1]
        if position_ids is None:
            position_ids = torch.arange(past, past + length, device=x_BSD.device)[None]
        rope = rope_table(self.config, position_ids)
        mask = attention_mask_of(attention_mask, past, length, x_BSD.device)
        wants_all = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        inputs = []  # of every layer
        for layer in self.layers:
            inputs += [x_BSD] if wants_all else []
            x_BSD = layer(x_BSD, rope, mask, past_key_values)
        x_BSD = self.norm(x_BSD)
        hidden_states = (*inputs, x_BSD) if wants_all else None
        return BaseModelOutputWithPast(x_BSD, past_key_values, hidden_states)


class OptimusForCausalLM(OptimusPreTrainedModel, GenerationMixin):
    """The model with its output projection."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - transformers replaces it

    def __init__(self, config: OptimusConfig) -> None:
        super().__init__(config)
        self.model = OptimusModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits, and with ``labels`` [B, S] the mean cross-entropy of the next tokens (-100: none)."""
        found = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, output_hidden_states
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(found.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=found.past_key_values, hidden_states=found.hidden_states
        )
        return output.to_tuple() if return_dict is False else output
