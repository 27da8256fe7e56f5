"""Keeps the keys and values of earlier tokens, so that a step computes its new tokens only.

Sequences of a batch are padded on the left, so that their newest tokens stand in one column. A padding position is
seen by itself alone: a row of the mask without any key would give NaN.

Shapes: B sequences, S new tokens, P positions so far, H query heads, G key/value heads, d head width, D model width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.optimus.layers.attention import CoreAttention
from megatron.optimus.layers.documents import Documents
from megatron.optimus.layers.rope import RopeTable, rope_at, rope_table
from megatron.optimus.models.decoder import Decoder


class KVCache:
    """The keys and values of every layer for one batch.

    Attributes:
        length: P, the positions that are filled, padding included.
        mask_BSP: the keys that each new token sees, bool [B, 1, S, P + S]; None where ``is_causal`` says it.
        is_causal: whether the new tokens are whole sequences without padding.
    """

    def __init__(self, model: Decoder, paddings: Sequence[int], capacity: int, device: torch.device) -> None:
        """Makes an empty cache; memory is taken with the first tokens.

        Args:
            model: whose layers compute with it.
            paddings: number of padding tokens on the left of each sequence.
            capacity: most positions, padding included.
            device: of the model.
        """
        self.length, self.capacity = 0, capacity
        self.mask_BSP: Tensor | None = None
        self.is_causal = False
        self._model = model
        self._paddings_B1 = torch.tensor(paddings, device=device)[:, None] if any(paddings) else None
        self._rope = rope_table(capacity, model.config, device)
        self._layers = [_LayerCache(self) for _ in model.layers]

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Runs the model on the next tokens of each sequence and keeps their keys and values.

        Args:
            tokens_BS: int64; the first call has the padding on the left.

        Returns:
            Hidden states after the final norm, [B, S, D].
        """
        stop = self.length + tokens_BS.shape[1]
        assert stop <= self.capacity, f"{stop} positions, the cache has {self.capacity}"
        rope = self._prepare(torch.arange(self.length, stop, device=tokens_BS.device))
        with core_attentions(self._model, self._layers):
            x_BSD = hidden_states(self._model, tokens_BS, rope)
        self.length = stop
        return x_BSD

    def _prepare(self, columns_S: Tensor) -> RopeTable:
        """Sets the mask for new tokens in these columns of the cache; returns the rotations of their positions."""
        is_first = self.length == 0
        if self._paddings_B1 is None:
            self.is_causal = is_first
            self.mask_BSP = None
            if not is_first and len(columns_S) > 1:
                keys_P = torch.arange(self.length + len(columns_S), device=columns_S.device)
                self.mask_BSP = (keys_P <= columns_S[:, None])[None, None]
            cos, sin = self._rope
            return cos[columns_S], sin[columns_S]
        keys_P = torch.arange(self.length + len(columns_S), device=columns_S.device)
        own_SP, earlier_SP = keys_P == columns_S[:, None], keys_P <= columns_S[:, None]
        self.mask_BSP = ((keys_P >= self._paddings_B1)[:, None] & earlier_SP | own_SP)[:, None]
        return rope_at(self._rope, (columns_S - self._paddings_B1).clamp(min=0))


@contextlib.contextmanager
def core_attentions(model: Decoder, cores: Sequence[CoreAttention]) -> Iterator[None]:
    """Makes the layers attend by these functions, one a layer, in place of that of training."""
    attentions = [block.attention for block in model.layers]
    before: list[CoreAttention] = [attention.core_attention for attention in attentions]  # type: ignore[misc,union-attr]
    for attention, core in zip(attentions, cores, strict=True):
        attention.core_attention = core  # type: ignore[union-attr]
    try:
        yield
    finally:
        for attention, core in zip(attentions, before, strict=True):
            attention.core_attention = core  # type: ignore[union-attr]


def hidden_states(model: Decoder, tokens_BS: Tensor, rope: RopeTable) -> Tensor:
    """All of the model but its output projection: [B, S, D] after the final norm."""
    x_BSD = model.embedding(tokens_BS)
    for block in model.layers:
        x_BSD, _ = block(x_BSD, rope)
    return model.final_norm(x_BSD)


class _LayerCache:
    """One layer's keys and values, and its core attention over them."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._keys_BGPd: Tensor | None = None
        self._values_BGPd: Tensor | None = None

    def __call__(self, q_BHSd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, documents: Documents | None) -> Tensor:
        assert documents is None, "prompts are whole documents"
        if self._keys_BGPd is None or self._values_BGPd is None:
            shape = (*k_BGSd.shape[:2], self._cache.capacity, k_BGSd.shape[3])
            self._keys_BGPd, self._values_BGPd = k_BGSd.new_empty(shape), v_BGSd.new_empty(shape)
        start, stop = self._cache.length, self._cache.length + k_BGSd.shape[2]
        self._keys_BGPd[:, :, start:stop] = k_BGSd
        self._values_BGPd[:, :, start:stop] = v_BGSd
        return F.scaled_dot_product_attention(
            q_BHSd,
            self._keys_BGPd[:, :, :stop],
            self._values_BGPd[:, :, :stop],
            attn_mask=self._cache.mask_BSP,
            is_causal=self._cache.is_causal,
            enable_gqa=q_BHSd.shape[1] != k_BGSd.shape[1],
        )
