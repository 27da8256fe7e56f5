"""Causal self-attention.

Shapes: B sequences, S positions, D model width, H query heads, G key/value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.optimus.config.schema import ModelConfig, QKNormScope
from megatron.optimus.layers.documents import Documents, document_attention
from megatron.optimus.layers.mlp import ProjectIn, ProjectOut, project_in, project_out
from megatron.optimus.layers.norm import RMSNorm
from megatron.optimus.layers.rope import RopeTable, apply_rope

CoreAttention = Callable[[Tensor, Tensor, Tensor, Documents | None], Tensor]


def causal_attention(q_BHSd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, documents: Documents | None) -> Tensor:
    """Scaled dot-product attention of each position to those up to its own.

    Args:
        q_BHSd: queries.
        k_BGSd: keys; each of the G heads serves H / G query heads.
        v_BGSd: values.
        documents: where given, a position sees its own document only.

    Returns:
        The output [B, H, S, d] in the dtype of the queries.
    """
    if documents is not None:
        return document_attention(q_BHSd, k_BGSd, v_BGSd, documents)
    grouped = q_BHSd.shape[1] != k_BGSd.shape[1]
    return F.scaled_dot_product_attention(q_BHSd, k_BGSd, v_BGSd, is_causal=True, enable_gqa=grouped)


class Attention(nn.Module):
    """Multi-head or grouped-query attention with RoPE and, optionally, QK-norm over the full width or over each head.

    Tensor parallelism puts other functions into ``project_in`` and ``project_out``, context parallelism into
    ``core_attention``.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.clip_qkv = config.clip_qkv
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=config.add_qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=config.add_qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=config.add_qkv_bias)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)
        self.norm_heads = config.qk_layernorm_scope is QKNormScope.HEAD
        q_norm_width, k_norm_width = (config.head_dim, config.head_dim) if self.norm_heads else (query_width, key_width)
        self.q_norm = RMSNorm(q_norm_width, config.norm_epsilon) if config.qk_layernorm else nn.Identity()
        self.k_norm = RMSNorm(k_norm_width, config.norm_epsilon) if config.qk_layernorm else nn.Identity()
        self.project_in: ProjectIn = project_in
        self.project_out: ProjectOut = project_out
        self.core_attention: CoreAttention = causal_attention

    def forward(self, x_BSD: Tensor, rope: RopeTable, documents: Documents | None = None) -> Tensor:
        """The attention output [B, S, D] in x's dtype; arguments as in ``causal_attention`` and ``apply_rope``."""
        q_BSW, k_BSW, v_BSW = self.project_in(x_BSD, (self.q_proj, self.k_proj, self.v_proj))
        return self.project_out(self.attend(q_BSW, k_BSW, v_BSW, rope, documents), self.o_proj)

    def attend(
        self, q_BSW: Tensor, k_BSW: Tensor, v_BSW: Tensor, rope: RopeTable, documents: Documents | None
    ) -> Tensor:
        """Norms, RoPE and the core attention, all between the projections; the output has the shape of the queries.

        Tensor parallelism gives the tokens of all sequences as one row, [1, B * S, W / t].
        """
        length = rope[0].shape[-2]
        q_BHSd, k_BGSd = self._rotated(q_BSW, self.q_norm, rope), self._rotated(k_BSW, self.k_norm, rope)
        v_BGSd = self._heads(self._clipped(v_BSW), length).transpose(1, 2)
        out_BHSd = self.core_attention(q_BHSd, k_BGSd, v_BGSd, documents)
        return out_BHSd.transpose(1, 2).reshape(q_BSW.shape)

    def _rotated(self, x_BSW: Tensor, norm: nn.Module, rope: RopeTable) -> Tensor:
        """Queries or keys [B, heads, S, d]: normed, clipped as OLMoE does it, and rotated."""
        length = rope[0].shape[-2]
        if isinstance(norm, RMSNorm) and self.clip_qkv is None:
            return norm(self._heads(x_BSW, length), rope)
        normed = norm(self._heads(x_BSW, length)).flatten(-2) if self.norm_heads else norm(x_BSW)
        return apply_rope(self._heads(self._clipped(normed), length).transpose(1, 2), rope)

    def _clipped(self, x_BSW: Tensor) -> Tensor:
        return x_BSW if self.clip_qkv is None else x_BSW.clamp(-self.clip_qkv, self.clip_qkv)

    def _heads(self, x_BSW: Tensor, length: int) -> Tensor:
        """[B, S, heads * d], or [1, B * S, heads * d], to [B, S, heads, d]."""
        return x_BSW.reshape(-1, length, x_BSW.shape[-1] // self.head_dim, self.head_dim)
