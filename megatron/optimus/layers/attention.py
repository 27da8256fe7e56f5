"""Causal self-attention.

Shapes: B sequences, S positions, D model width, H query heads, G key/value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.optimus.config.schema import ModelConfig, QKNormScope
from megatron.optimus.layers.documents import Documents, document_attention
from megatron.optimus.layers.mlp import Project, ProjectOut, project, project_out
from megatron.optimus.layers.norm import RMSNorm
from megatron.optimus.layers.rope import RopeTable, apply_rope

Attend = Callable[[Tensor, Tensor, Tensor, Documents | None], Tensor]


def causal_attention(q_BHSd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, documents: Documents | None) -> Tensor:
    """Each position sees those up to its own, of its own document only where documents are given: [B, H, S, d]."""
    if documents is not None:
        return document_attention(q_BHSd, k_BGSd, v_BGSd, documents)
    grouped = q_BHSd.shape[1] != k_BGSd.shape[1]
    return F.scaled_dot_product_attention(q_BHSd, k_BGSd, v_BGSd, is_causal=True, enable_gqa=grouped)


class Attention(nn.Module):
    """Multi-head or grouped-query attention with RoPE and, optionally, QK-norm over the full width or each head's."""

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
        self.project: Project = project
        self.project_out: ProjectOut = project_out
        self.attend: Attend = causal_attention  # context parallelism puts another one here

    def forward(self, x_BSD: Tensor, rope: RopeTable, documents: Documents | None = None) -> Tensor:
        q_BSW, k_BSW, v_BSW = self.project(x_BSD, (self.q_proj, self.k_proj, self.v_proj))
        length = rope[0].shape[-2]
        q_BHSd = self._heads(self._normed(q_BSW, self.q_norm), length)
        k_BGSd = self._heads(self._normed(k_BSW, self.k_norm), length)
        v_BGSd = self._heads(v_BSW, length)
        q_BHSd, k_BGSd = apply_rope(q_BHSd, rope), apply_rope(k_BGSd, rope)
        out_BHSd = self.attend(q_BHSd, k_BGSd, v_BGSd, documents)
        return self.project_out(out_BHSd.transpose(1, 2).flatten(2), self.o_proj)

    def _normed(self, x_BSW: Tensor, norm: nn.Module) -> Tensor:
        if not self.norm_heads:
            return norm(x_BSW)
        return norm(x_BSW.unflatten(-1, (-1, self.head_dim))).flatten(-2)

    def _heads(self, x_BSW: Tensor, length: int) -> Tensor:
        """[B, S, heads * d], or all tokens in one row, -> [B, heads, S, d]; clipping after the norm, as in OLMoE."""
        if self.clip_qkv is not None:
            x_BSW = x_BSW.clamp(-self.clip_qkv, self.clip_qkv)
        return x_BSW.reshape(-1, length, x_BSW.shape[-1] // self.head_dim, self.head_dim).transpose(1, 2)
