"""Values in a checkpoint that are not finite or far too large; the manifest says so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

WARNINGS_FIELD = "warnings"  # in the manifest's metadata
# Beyond any weight of a model that learns, and any moment of gradients that bf16 can sum. Where the highest bit of an
# exponent flips, values below 2 become 1e36 and more.
_LIMITS = {"weight": 1e4, "master": 1e4}
_LIMIT = 1e12
_MOST_LISTED = 8


def largest_magnitude(tensor: torch.Tensor) -> float:
    """Returns the largest magnitude, NaN if any value is; 0 for integers and without elements.

    Args:
        tensor: on the CPU, of any shape and dtype.
    """
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return 0.0
    low, high = torch.aminmax(tensor.detach())
    return float(torch.maximum(high, -low))  # a NaN goes through both


def describe_values(largest: Mapping[tuple[str, str], Sequence[float]]) -> list[str]:
    """Returns a line for each tensor that is not finite or too large, at most _MOST_LISTED and how many more.

    Args:
        largest: by name and kind, the largest magnitude of each piece.
    """
    lines = []
    for (name, kind), values in largest.items():
        if not all(map(math.isfinite, values)):
            lines.append(f"{name} ({kind}) holds values that are not finite")
        elif max(values) > _LIMITS.get(kind, _LIMIT):
            lines.append(f"{name} ({kind}) holds a value of magnitude {max(values):.3g}")
    return shorten(lines)


def shorten(lines: Sequence[str]) -> list[str]:
    """Returns the first _MOST_LISTED lines, and one that counts the others."""
    more = len(lines) - _MOST_LISTED
    return [*lines[:_MOST_LISTED], *([f"and {more} more"] if more > 0 else [])]


def warnings_of(metadata: Mapping[str, object]) -> list[str]:
    """Returns the marks of a checkpoint, as its manifest's metadata holds them; what is no text is left out."""
    found = metadata.get(WARNINGS_FIELD)
    lines = [line for line in found if isinstance(line, str)] if isinstance(found, list) else []
    return shorten(["".join(c if c.isprintable() else "?" for c in line[:300]) for line in lines])
