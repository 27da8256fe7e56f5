"""The memory of a rank that the other GPUs of its node read and write; symmetric.py says when.

Shapes: T tokens of each rank, P ranks, K experts per token, D model width.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ALIGNMENT = 256  # bytes, of each part of the memory


class Way(enum.Enum):
    OUT = "out"
    BACK = "back"


class Shape(NamedTuple):
    """Of one rank's tokens."""

    num_tokens: int
    width: int
    topk: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Part:
    """A tensor in the memory, at the same place on every rank."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def parts_of(shape: Shape, num_ranks: int) -> tuple[dict[str, _Part], int]:
    """What the memory of a rank holds, and its bytes: little more than P T D elements."""
    tokens, width, topk, dtype = shape
    parts, end = {}, 0
    for name, size, kind in (
        ("rows", (tokens, width), dtype),
        ("indices", (tokens, topk), torch.int32),
        ("weights", (tokens, topk), torch.float32),
        ("answers", (num_ranks - 1, tokens, width), dtype),  # of the other ranks, in order
        ("dweights", (tokens, topk), torch.float32),
    ):
        parts[name] = _Part(end, size, kind)
        end += -(-math.prod(size) * kind.itemsize // _ALIGNMENT) * _ALIGNMENT
    return parts, max(end, _ALIGNMENT)


class Staging:
    """A rank's memory that its peers read and write, and the way to theirs. All exchanges run in one stream."""

    def __init__(
        self,
        memory: Tensor,
        addresses: Sequence[int],
        rank: int,
        shape: Shape,
        barrier: Callable[[], None],
        keep: object = None,
        memories: Sequence[Tensor] = (),
    ) -> None:
        """``memory``: uint8, as many bytes as ``parts_of`` says. ``addresses``: where each rank's begins, in order.
        ``barrier``: queues a wait for all ranks in the current stream. ``keep``: what must live as long.
        ``memories``: every rank's, as this one sees them."""
        self.rank, self.num_ranks, self.shape = rank, len(addresses), shape
        self.keep = keep
        self._barrier = barrier
        self._last: Way | None = None
        self.under_way: Callable[[], Any] | None = None  # makes the current stream wait for an exchange in another one
        parts, _ = parts_of(shape, len(addresses))
        self._own: dict[str, Tensor] = {}
        self._at_P: dict[str, Tensor] = {}
        for name, part in parts.items():
            end = part.offset + math.prod(part.shape) * part.dtype.itemsize
            self._own[name] = memory[part.offset : end].view(part.dtype).view(part.shape)
            places = [address + part.offset for address in addresses]
            self._at_P[name] = torch.tensor(places, dtype=torch.int64, device=memory.device)
        answers = parts["answers"]
        each = math.prod(answers.shape[1:]) * answers.dtype.itemsize
        places = [address + answers.offset + (rank - (peer < rank)) * each for peer, address in enumerate(addresses)]
        # Where this rank's answers begin on every other; its own element is never used.
        self.own_answers_at_P = torch.tensor(places, dtype=torch.int64, device=memory.device)
        end = answers.offset + math.prod(answers.shape) * answers.dtype.itemsize
        self.answers_of = [there[answers.offset : end].view(answers.dtype).view(answers.shape) for there in memories]

    def own(self, name: str) -> Tensor:
        """A part of this rank's memory."""
        return self._own[name]

    def at_P(self, name: str) -> Tensor:
        """Where the part begins on every rank: int64 [P]."""
        return self._at_P[name]

    def begin(self, way: Way) -> None:
        """Before the writes of an exchange."""
        if self.under_way is not None:
            self.under_way()
        if self._last is way:
            self._barrier()
        self._last = way

    def turn(self) -> None:
        """Between its writes and its reads."""
        self._barrier()
