"""The MoE layers that moe_layer.py measures: what one rank of expert parallelism has of a model's layer."""

from __future__ import annotations

import argparse
import re

MODELS = {  # model width, inner width, experts, experts a token
    "mula-7b": (2048, 1024, 64, 8),
    "mula-20b": (2048, 1024, 96, 8),
    "mula-100b": (3072, 1536, 144, 8),
    "mula-220b": (3072, 1536, 240, 8),
    "mula-tiny": (192, 192, 8, 2),
}
ON_GPU = ["mula-7b", "mula-20b", "mula-100b/ep4", "mula-220b/ep12"]
ON_CPU = ["mula-tiny"]


def shape_of(name: str) -> tuple[int, int, int, int]:
    """Model width, inner width, experts of one rank and experts a token of MODEL or MODEL/epN. Raises ValueError.

    All slots of the measured tokens fall to the experts of this rank, as many as come to a rank when every rank of the
    group has that many tokens and routing is balanced.
    """
    found = re.fullmatch(r"([^/]+)(?:/ep([1-9]\d*))?", name)
    if not found or found[1] not in MODELS:
        raise ValueError(f"{name} is no shape; one of {', '.join(MODELS)}, and /epN for one of N ranks: {ON_GPU[-1]}")
    width, inner, experts, topk = MODELS[found[1]]
    ranks = int(found[2] or 1)
    if experts % ranks or experts // ranks < topk:
        possible = [str(n) for n in range(1, experts // topk + 1) if experts % n == 0]
        raise ValueError(
            f"{name}: {experts} experts over {ranks} ranks; N must divide them and leave a rank the {topk} that each "
            f"token takes: {', '.join(possible)}"
        )
    return width, inner, experts // ranks, topk


def shape_name(text: str) -> str:
    """For argparse: the name, if it is a shape's."""
    try:
        shape_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
