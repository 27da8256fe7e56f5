"""Keys and values of many sequences in pages of one pool, so that sequences join and leave the batch at every step.

The new tokens of all sequences stand in one row without padding, so norms, projections and experts compute nothing
else. Only attention knows sequences: those with one new token attend together, over pages gathered for groups of
similar length; the others (prompts) attend one by one, as ``generate`` does.

Shapes: T new tokens of all sequences, B sequences of a group, S new tokens of one sequence, P keys, H query heads,
G key/value heads, d head width, D model width, N pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.optimus.inference.cache import core_attentions, hidden_states
from megatron.optimus.layers.documents import Documents
from megatron.optimus.layers.rope import rope_table
from megatron.optimus.models.decoder import Decoder

PAGE_TOKENS = 16


def num_pages(tokens: int) -> int:
    """The number of pages that hold so many tokens."""
    return -(-tokens // PAGE_TOKENS)


@dataclass(frozen=True)
class Chunk:
    """The next tokens of one sequence.

    Attributes:
        tokens: token ids.
        start: position of the first of them; those before it are in the cache.
        pages: the sequence's pages in the order of its positions, enough for the last of the tokens.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]

    @property
    def stop(self) -> int:
        """The position after the last of the tokens."""
        return self.start + len(self.tokens)


class PagedCache:
    """The pool of pages in every layer. Who uses which page is the scheduler's business."""

    def __init__(self, model: Decoder, pages: int, device: torch.device) -> None:
        """Makes a pool; memory is taken with the first tokens.

        Args:
            model: whose layers compute with it.
            pages: number of pages of PAGE_TOKENS tokens.
            device: of the model.
        """
        self._model, self._device = model, device
        self._rope = rope_table(model.config.max_position_embeddings, model.config, device)
        self._layers = [_LayerPages(pages) for _ in model.layers]

    def forward(self, chunks: Sequence[Chunk]) -> tuple[Tensor, list[slice]]:
        """Runs the model on the next tokens of some sequences and keeps their keys and values.

        Args:
            chunks: at most one of each sequence.

        Returns:
            Hidden states after the final norm, [T, D], and the rows of each chunk.
        """
        # Sequences with one new token first, by how many pages they have: each group is then a range of rows.
        order = sorted(
            range(len(chunks)), key=lambda place: (len(chunks[place].tokens) > 1, _size_class(chunks[place]))
        )
        rows, count = [slice(0)] * len(chunks), 0
        for place in order:
            rows[place] = slice(count, count + len(chunks[place].tokens))
            count = rows[place].stop
        ordered = [chunks[place] for place in order]
        tokens_T, positions_T, slots_T = self._on_device(
            [token for chunk in ordered for token in chunk.tokens],
            [position for chunk in ordered for position in range(chunk.start, chunk.stop)],
            [
                chunk.pages[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS
                for chunk in ordered
                for position in range(chunk.start, chunk.stop)
            ],
        )
        parts = self._parts(ordered)
        for layer in self._layers:
            layer.slots_T, layer.parts = slots_T, parts
        cos, sin = self._rope
        with core_attentions(self._model, self._layers):
            x_BSD = hidden_states(self._model, tokens_T[None], (cos[positions_T], sin[positions_T]))
        return x_BSD[0], rows

    def _on_device(self, *values: list[int]) -> list[Tensor]:
        return list(torch.tensor(values).to(self._device).unbind())

    def _parts(self, ordered: Sequence[Chunk]) -> list[_Part]:
        """Divides the rows into those that attend together."""
        parts: list[_Part] = []
        first = row = 0
        while first < len(ordered):
            chunk = ordered[first]
            group = [chunk]
            if len(chunk.tokens) == 1:
                rest = ordered[first + 1 :]
                size = _size_class(chunk)
                for other in rest:
                    if len(other.tokens) > 1 or _size_class(other) != size:
                        break
                    group.append(other)
            tokens = sum(len(one.tokens) for one in group)
            parts.append(self._part(group, slice(row, row + tokens)))
            first, row = first + len(group), row + tokens
        return parts

    def _part(self, group: Sequence[Chunk], rows: slice) -> _Part:
        chunk = group[0]
        if len(chunk.tokens) > 1 and chunk.start == 0:
            return _Part(rows, None, None)
        pages = max(num_pages(one.stop) for one in group)
        table_BN = torch.tensor([(*one.pages[:pages], *[0] * (pages - len(one.pages))) for one in group])
        keys_P = torch.arange(pages * PAGE_TOKENS, device=self._device)
        last = [one.stop - 1 for one in group] if len(group) > 1 else range(chunk.start, chunk.stop)
        mask_XP = keys_P <= torch.tensor(list(last), device=self._device)[:, None]
        return _Part(rows, table_BN.to(self._device), mask_XP)


def _size_class(chunk: Chunk) -> int:
    """Equal for sequences whose numbers of pages differ by less than a factor of two."""
    return (num_pages(chunk.stop) - 1).bit_length()


@dataclass(frozen=True)
class _Part:
    """Rows that attend together: a whole prompt, a later part of one, or one new token of each of several sequences."""

    rows: slice
    table_BN: Tensor | None  # their pages; None: nothing but the new tokens themselves
    mask_XP: Tensor | None  # the keys that each row sees


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros, because what memory held might be NaN, and NaN stays NaN under a mask."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    # numpy's zeros take memory only when they are written to; a pool may be larger than what is ever used of it.
    zeros = np.zeros(math.prod(shape) * like.element_size(), dtype=np.uint8)
    return torch.from_numpy(zeros).view(like.dtype).view(shape)


class _LayerPages:
    """One layer's pool, and its core attention over it."""

    def __init__(self, pages: int) -> None:
        self._pages = pages
        self._keys_NPGd: Tensor | None = None
        self._values_NPGd: Tensor | None = None
        self.slots_T: Tensor  # where the new tokens go, page * PAGE_TOKENS + offset
        self.parts: list[_Part]

    def __call__(self, q_BHSd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, documents: Documents | None) -> Tensor:
        assert documents is None, "prompts are whole documents"
        q_HTd, k_GTd, v_GTd = q_BHSd[0], k_BGSd[0], v_BGSd[0]
        if self._keys_NPGd is None or self._values_NPGd is None:
            shape = (self._pages, PAGE_TOKENS, k_GTd.shape[0], k_GTd.shape[2])
            self._keys_NPGd, self._values_NPGd = _zeros(shape, k_GTd), _zeros(shape, k_GTd)
        self._keys_NPGd.flatten(0, 1).index_copy_(0, self.slots_T, k_GTd.transpose(0, 1))
        self._values_NPGd.flatten(0, 1).index_copy_(0, self.slots_T, v_GTd.transpose(0, 1))
        outputs = [self._attend(part, q_HTd, k_GTd, v_GTd) for part in self.parts]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1))[None]

    def _attend(self, part: _Part, q_HTd: Tensor, k_GTd: Tensor, v_GTd: Tensor) -> Tensor:
        """The output [H, rows, d] of the part's rows."""
        q_HSd = q_HTd[:, part.rows]
        if part.table_BN is None:
            k_GSd, v_GSd = k_GTd[:, part.rows], v_GTd[:, part.rows]
            grouped = len(q_HSd) != len(k_GSd)
            return F.scaled_dot_product_attention(
                q_HSd[None], k_GSd[None], v_GSd[None], is_causal=True, enable_gqa=grouped
            )[0]
        assert self._keys_NPGd is not None and self._values_NPGd is not None and part.mask_XP is not None
        k_BGPd = self._keys_NPGd[part.table_BN].flatten(1, 2).transpose(1, 2)
        v_BGPd = self._values_NPGd[part.table_BN].flatten(1, 2).transpose(1, 2)
        if len(part.table_BN) == 1 and q_HSd.shape[1] > 1:
            grouped = len(q_HSd) != k_BGPd.shape[1]
            mask_SP = part.mask_XP
            return F.scaled_dot_product_attention(q_HSd[None], k_BGPd, v_BGPd, attn_mask=mask_SP, enable_gqa=grouped)[0]
        # One new token of each sequence: the query heads of a key head take the place of positions, so that every
        # kernel can compute grouped heads.
        q_BGXd = q_HSd.transpose(0, 1).unflatten(1, (k_BGPd.shape[1], -1))
        out_BGXd = F.scaled_dot_product_attention(q_BGXd, k_BGPd, v_BGPd, attn_mask=part.mask_XP[:, None, None])
        return out_BGXd.flatten(1, 2).transpose(0, 1)
