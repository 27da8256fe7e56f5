"""Updates of buckets on a stream of their own, beside the next forward.

An update is bound by memory, a forward by arithmetic. Whoever reads what an update writes, or writes what it reads,
waits first (``ParamAllGather.wait``); a module's forward waits for the buckets of its own parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Pending(Protocol):
    """Work for which somebody can wait, as ``dist.Work``."""

    def wait(self) -> Any:
        """On a GPU: makes the current stream wait."""


class UpdateStream:
    """A stream of a GPU for updates.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        # The highest priority: its few programs are placed before those of a product that waits for room.
        self._stream = torch.Stream(device, priority=-1)
        self._kept: tuple[Any, ...] = ()

    def begin(self, *kept: Any) -> None:
        """Starts a step's updates after all that is queued on the current stream.

        Args:
            kept: tensors that the updates read. They must not be freed before the updates have run, so they are kept
                until the next ``begin``, before which the current stream has waited for all updates.
        """
        self._stream.wait_stream(torch.accelerator.current_stream())
        self._kept = kept

    def submit(self, update: Callable[[], None]) -> Pending:
        """Queues the kernels of an update."""
        with self._stream:
            update()
        return _Recorded(self._stream.record_event())


class _Recorded:
    """Work that an event ends."""

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.accelerator.current_stream().wait_event(self._event)
