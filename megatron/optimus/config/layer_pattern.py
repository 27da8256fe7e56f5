"""Reads ``moe_layer_freq``, which says which layers have experts: one number, or a 0 or 1 for each layer."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from megatron.optimus.config.values import require

MOST_LAYERS = 100_000  # limit of an expression's length, so that a typing error such as [0]*1000000000 takes no memory


def check_layer_pattern(freq: Sequence[int], num_layers: int) -> None:
    """Raises ConfigError unless ``freq`` names one or more of the layers."""
    is_pattern = len(freq) == num_layers and set(freq) <= {0, 1} and any(freq)
    require(
        is_pattern or (len(freq) == 1 and freq[0] >= 1),
        f"moe_layer_freq={shown(freq)} ({len(freq)} numbers): give one number of 1 or more, or for each of num_layers="
        f"{num_layers} a 0 or 1, not all of them 0",
    )


def layers_of_pattern(freq: Sequence[int], num_layers: int) -> Sequence[int]:
    """Lists the layers with experts, ascending: every N-th from the first on, or those that have a 1."""
    if len(freq) == 1:
        return range(0, num_layers, freq[0])  # no list: a damaged file may say a billion layers
    return [layer for layer, has_experts in enumerate(freq) if has_experts]


def shown(freq: Sequence[int]) -> str:
    """Writes a pattern for a message, a long one cut short."""
    words = [str(number) for number in freq]
    return " ".join(words if len(words) <= 20 else [*words[:20], "..."])


def parse_integers(text: str) -> list[int] | None:
    """Evaluates an expression like ``([0]*3+[1]*58)``: lists of whole numbers, + and *. None for anything else."""
    try:
        found = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return found if isinstance(found, list) else None


def _value(node: ast.expr) -> int | list[int]:
    """Evaluates a node to a number or a list of them. Raises ValueError for what is neither."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        elements = [_value(element) for element in node.elts]
        if all(isinstance(element, int) for element in elements):
            return elements  # type: ignore[return-value]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return _bounded(len(left) + len(right), left + right)
        if isinstance(left, int):
            left, right = right, left
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            return _bounded(len(left) * right, left, times=right)
    raise ValueError(ast.dump(node))


def _bounded(length: int, part: list[int], times: int = 1) -> list[int]:
    if length > MOST_LAYERS:
        raise ValueError(f"{length} numbers")
    return part * times
