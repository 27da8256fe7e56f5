"""A copy of the training state in host memory, taken while the next step's forward and backward already run.

Only the optimizer's step changes what is saved. So on an accelerator the copy runs on a stream of its own beside the
next forward and backward, and whoever is about to update calls ``before_update`` first: the update is queued behind the
copy, and the host does not wait. On the CPU the copy is done when ``take`` returns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.optimus.checkpoint.slices import TensorSlice


class Snapshot:
    """Host memory for one kind of checkpoint, pinned beside an accelerator, used again by every save."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._on_host = self._device.type == "cpu"
        self._stream = None if self._on_host else torch.Stream(self._device)
        self._copied: torch.Event | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._sources: Sequence[TensorSlice] = ()  # decoded states are ours alone: they must outlive the copy

    @torch.no_grad()
    def take(self, slices: Sequence[TensorSlice]) -> list[torch.Tensor]:
        """Starts the copy; returns one 1-D host tensor per slice, in its stored dtype, filled after ``wait``."""
        views = self._views(slices)
        if self._stream is None:
            for view, piece in zip(views, slices, strict=True):
                view.copy_(piece.tensor)
            return views
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        self._sources = slices
        with self._stream:
            for view, piece in zip(views, slices, strict=True):
                view.copy_(piece.tensor, non_blocking=True)
            self._copied = self._stream.record_event()
        return views

    def _views(self, slices: Sequence[TensorSlice]) -> list[torch.Tensor]:
        sizes = [len(piece.tensor) * piece.dtype.itemsize for piece in slices]
        starts, total = [], 0
        for size in sizes:
            starts.append(total)
            total += -(-size // 16) * 16  # every view aligned to its dtype
        if len(self._buffer) != total:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # gone before the next one is made
            self._buffer = torch.empty(total, dtype=torch.uint8, pin_memory=not self._on_host)
        return [
            self._buffer[start : start + size].view(piece.dtype)
            for start, size, piece in zip(starts, sizes, slices, strict=True)
        ]

    def before_update(self) -> None:
        """Queues what follows on the current stream behind the copy. Call before the state changes."""
        if self._copied is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._copied)

    def wait(self) -> None:
        """Returns when the copy is complete; any thread may call it."""
        if self._copied is not None:
            self._copied.synchronize()
            self._sources = ()
