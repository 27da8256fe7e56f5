"""Bytes that ring attention holds while it works, counted from ring_attention.py and partial_attention.py.

Sizes are elements of a rank and a micro-batch: ``queries`` [B, H, S, d] and ``keys`` [B, G, S, d], of which there are
as many values. In a step all queries meet half the keys or half the queries all keys, whichever the rank; slices are
made contiguous for the kernel. What is kept for the backward is not in these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

FP32 = 4


@dataclass(frozen=True)
class RingSizes:
    """``scratch``: bytes that the kernel's backward allocates for itself, for each element of its queries;
    ``workspace``: and besides. ``repeats``: key/value heads are repeated where query heads share them."""

    queries: int
    keys: int
    element: int  # bytes
    ranks: int
    scratch: int = 0
    workspace: int = 0
    repeats: bool = False

    @property
    def travelling(self) -> int:
        """Keys and values at hand, and those that arrive, except for the rank's own: on two ranks one set of them."""
        return 2 * self.keys * self.element * min(2, self.ranks - 1)


def forward_bytes(sizes: RingSizes) -> int:
    """Most of the forward besides what it keeps: keys and values as they came, the result in fp32, keys and values on
    their way, a step's result and what it takes to make or merge it. (Queries as they came are where the output will
    be.)"""
    queries, keys = sizes.queries * sizes.element, sizes.keys * sizes.element
    wide = sizes.queries * FP32
    repeated = queries if _repeats(sizes) else 0  # half the keys and values, for all heads
    cut_queries = queries // 2 + queries // 2 + 2 * repeated + sizes.workspace  # copied, and their result
    cut_keys = keys + queries + repeated + sizes.workspace
    merging = queries + (wide if sizes.element != FP32 else 0)
    step = max(cut_queries, cut_keys, merging)
    return 2 * keys + wide + sizes.travelling + step


def backward_bytes(sizes: RingSizes) -> int:
    """Most of the backward besides what was kept: its gradient as it came, contiguous copies of it and of the output,
    gradients in fp32, those of keys and values twice (arriving, and sent or added up), and a step's own."""
    queries = sizes.queries * sizes.element
    step = max(half_the_queries(sizes), half_the_keys(sizes))
    return 3 * queries + sums_bytes(sizes) + sizes.travelling + step


def sums_bytes(sizes: RingSizes) -> int:
    """Gradients in fp32: of the queries, and twice of keys and values."""
    return FP32 * (sizes.queries + 2 * 2 * sizes.keys)


def half_the_queries(sizes: RingSizes) -> int:
    """Half of gradient, queries and output copied; their gradients, and those of all keys and values."""
    queries, keys = sizes.queries * sizes.element, sizes.keys * sizes.element
    repeated = 4 * queries + 2 * (FP32 * sizes.keys - keys) if _repeats(sizes) else 0  # and their gradients, summed
    return 3 * queries // 2 + queries // 2 + 2 * keys + repeated + sizes.scratch * sizes.queries // 2 + sizes.workspace


def half_the_keys(sizes: RingSizes) -> int:
    """Half of keys and values copied; their gradients, and those of all queries."""
    queries, keys = sizes.queries * sizes.element, sizes.keys * sizes.element
    repeated = 2 * queries + FP32 * sizes.keys - keys if _repeats(sizes) else 0
    return keys + queries + keys + repeated + sizes.scratch * sizes.queries + sizes.workspace


def _repeats(sizes: RingSizes) -> bool:
    return sizes.repeats and sizes.keys != sizes.queries
