"""What goes wrong on one rank alone, brought to all of them: no rank may leave a step that others wait in.

The rank notes the error, drops what caused it and goes on; its part of the norm becomes NaN, which skips the step on
all ranks. A norm that is not finite is known to the host one step later, at the same point on every rank: there they
ask each other why. Where nothing fails, nobody asks and nothing is sent.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_ext.zero.agreement import gather

logger = logging.getLogger("deepspeed_ext")


class Failures:
    """``groups``: those whose ranks learn of one norm together, see ``global_norm``."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self._groups = [group for group in groups if dist.get_world_size(group) > 1]
        self._device = device
        self._noted: str | None = None  # since the last step
        self._last: str | None = None  # in the last step
        self._before: str | None = None  # in the one before, of which the host learns in this one

    def note(self, error: Exception) -> None:
        """The present step cannot be taken. Raises the error where there is no other rank."""
        if not self._groups:
            raise error
        if self._noted is None:
            self._noted = str(error)
            logger.error("%s (the step is skipped on all ranks, and the next one ends with this error)", error)

    def counted(self) -> list[Tensor]:
        """What the norm has to count besides the gradients; once in every step."""
        self._before, self._last, self._noted = self._last, self._noted, None
        return [] if self._last is None else [torch.full((1,), math.nan, device=self._device)]

    def tell(self) -> None:
        """Raises RuntimeError, in the same words on every rank, if one had noted an error for the step before. To be
        called by all ranks when they learn that it was skipped. Collective."""
        said = {dist.get_rank(): self._before}
        for group in self._groups:
            said = {rank: words for ranks in gather(said, group).values() for rank, words in ranks.items()}
        ranks = sorted(rank for rank, words in said.items() if words is not None)
        if ranks:
            raise RuntimeError(
                f"{said[ranks[0]]} (on {len(ranks)} rank(s), first rank {ranks[0]}; that step was skipped on all ranks)"
            )
