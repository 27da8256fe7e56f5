"""Attention within documents: several documents share a row of tokens, and no token sees another document's.

No mask of S x S is made. Rows are concatenated and documents are ranges of that one axis, so the cost is the sum of the
squares of their lengths. In half precision on CUDA this is torch's variable-length flash attention, one kernel for all
documents; elsewhere, and for heads that it does not take, one call of scaled_dot_product_attention for each document.

Shapes: B sequences, S positions, T = B * S tokens, N documents, H query heads, G key/value heads, d head width.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.optimus.platform.device import pins_memory

logger = logging.getLogger("optimus")


@dataclass(frozen=True)
class Documents:
    """The boundaries of a micro-batch's documents among its T tokens, row after row. Every row begins a document.

    Attributes:
        cu_seqlens_host: the first token of each document, then T; on the host.
        cu_seqlens_N1: the same as int32 [N + 1], on the device of the tokens.
    """

    cu_seqlens_host: tuple[int, ...]
    cu_seqlens_N1: Tensor

    @classmethod
    def from_starts(cls, starts: Sequence[Sequence[int]], length: int) -> Documents:
        """Makes the boundaries of rows of ``length`` tokens.

        Args:
            starts: for each row the positions at which a document begins; 0 is one whether it is listed or not.
            length: tokens of a row.
        """
        firsts = {row * length + start for row, own in enumerate(starts) for start in (0, *own)}
        cu_seqlens_host = (*sorted(firsts), len(starts) * length)
        return cls(cu_seqlens_host, torch.tensor(cu_seqlens_host, dtype=torch.int32))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        return [stop - start for start, stop in zip(self.cu_seqlens_host, self.cu_seqlens_host[1:], strict=False)]

    def to(self, device: torch.device) -> Documents:
        """A copy on the device; does not wait for it."""
        return Documents(self.cu_seqlens_host, self.cu_seqlens_N1.to(device, non_blocking=pins_memory(device)))

    def pin_memory(self) -> Documents:
        """A copy whose tensor is in pinned memory."""
        return Documents(self.cu_seqlens_host, self.cu_seqlens_N1.pin_memory())


def document_attention(q_BHSd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, documents: Documents) -> Tensor:
    """Causal attention in which each token sees its own document only.

    Returns:
        The output [B, H, S, d] in the dtype of the queries.

    Raises:
        ValueError: if the documents are not those of B x S tokens.
    """
    rows, _, length, _ = q_BHSd.shape
    if documents.cu_seqlens_host[-1] != rows * length:
        raise ValueError(f"documents end at token {documents.cu_seqlens_host[-1]}, the batch has {rows} x {length}")
    # The kernel takes heads of such widths alone; scaled_dot_product_attention pads others.
    fits = q_BHSd.shape[-1] % 8 == 0 and q_BHSd.shape[-1] <= 256
    if q_BHSd.is_cuda and fits and q_BHSd.dtype in (torch.float16, torch.bfloat16) and _has_varlen():
        return _fused(q_BHSd, k_BGSd, v_BGSd, documents)
    return _one_by_one(q_BHSd, k_BGSd, v_BGSd, documents)


@cache
def _has_varlen() -> bool:
    """Whether this torch has the kernel, as from 2.10 on; one warning where it has not."""
    found = importlib.util.find_spec("torch.nn.attention.varlen") is not None
    if not found:
        logger.warning("torch %s has no attention of varying lengths: one call a document; use torch 2.10 or newer",
                       torch.__version__)  # fmt: skip
    return found


@cache
def _varlen() -> tuple[Callable[..., Tensor], frozenset[str]]:
    """torch's kernel and the names of its parameters, which differ between versions of torch."""
    # Imported here because torch's compiler comes with it: seconds and 70 MB.
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)  # type: ignore[return-value]


def _fused(q_BHSd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, documents: Documents) -> Tensor:
    varlen_attn, parameters = _varlen()
    groups = q_BHSd.shape[1] // k_BGSd.shape[1]
    options: dict[str, Any] = {"is_causal": True} if "is_causal" in parameters else {"window_size": (-1, 0)}
    if groups > 1 and "enable_gqa" in parameters:
        options["enable_gqa"] = True
    elif groups > 1:
        k_BGSd, v_BGSd = (x.repeat_interleave(groups, dim=1) for x in (k_BGSd, v_BGSd))
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHSd, k_BGSd, v_BGSd))  # [T, heads, d]
    cu_seqlens_N1, longest = documents.cu_seqlens_N1, max(documents.lengths)
    out_THd = varlen_attn(q, k, v, cu_seqlens_N1, cu_seqlens_N1, longest, longest, **options)
    return out_THd.unflatten(0, (q_BHSd.shape[0], q_BHSd.shape[2])).transpose(1, 2)


def _one_by_one(q_BHSd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, documents: Documents) -> Tensor:
    grouped = q_BHSd.shape[1] != k_BGSd.shape[1]
    lengths = documents.lengths
    # [1, heads, T, d], cut along the tokens
    cut = [x.transpose(0, 1).flatten(1, 2).unsqueeze(0).split(lengths, dim=2) for x in (q_BHSd, k_BGSd, v_BGSd)]
    out = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        for q, k, v in zip(*cut, strict=True)
    ]
    return torch.cat(out, dim=2).squeeze(0).unflatten(1, (q_BHSd.shape[0], q_BHSd.shape[2])).transpose(0, 1)
