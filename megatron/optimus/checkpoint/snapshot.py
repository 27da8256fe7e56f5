"""A copy of the training state in host memory, taken while the next step's forward and backward already run.

Only the optimizer's step changes what is saved. So on an accelerator the copy runs on a stream of its own beside the
next forward and backward, and whoever is about to update calls ``before_update`` first: the update is queued behind the
copy, and the host does not wait. On the CPU the copy is done when ``take`` returns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.optimus.checkpoint.slices import TensorSlice

_BLOCK_BYTES = 4 << 30
_ALIGNED = 16  # of every view, so that it may have any dtype


def place_in_blocks(lengths: Sequence[int], block_bytes: int = _BLOCK_BYTES) -> tuple[list[tuple[int, int]], list[int]]:
    """Where each of ``lengths`` bytes goes: (block, first byte in it), and every block's size.

    Pinned memory is given out in powers of two: 21 GB at once would be 32 GiB. So blocks hold ``block_bytes``, a power
    of two, or less; what is longer has one of its own. Where more than an eighth of the memory would be waste, as in
    the last one, what it holds goes to blocks of half the size.
    """
    places = [(0, 0)] * len(lengths)
    sizes: list[int] = []
    for group in _blocks(
        [(-(-length // _ALIGNED) * _ALIGNED, index) for index, length in enumerate(lengths)], block_bytes
    ):
        position = 0
        for length, index in group:
            places[index] = len(sizes), position
            position += length
        sizes.append(position)
    return places, sizes


def _blocks(items: list[tuple[int, int]], block_bytes: int) -> list[list[tuple[int, int]]]:
    """(aligned length, index) of what shares a block, block by block."""
    groups: list[list[tuple[int, int]]] = []
    sizes: list[int] = []
    fitting = 0  # blocks before this one are full enough
    for length, index in items:
        block = next((b for b in range(fitting, len(sizes)) if sizes[b] + length <= block_bytes), len(sizes))
        if block == len(sizes):
            groups.append([])
            sizes.append(0)
        groups[block].append((length, index))
        sizes[block] += length
        while fitting < len(sizes) and sizes[fitting] >= block_bytes - block_bytes // 64:
            fitting += 1
    result = []
    for group, size in zip(groups, sizes, strict=True):
        taken = 1 << (size - 1).bit_length() if size else 0
        is_wasteful = taken - size > taken // 8 and len(group) > 1
        result += _blocks(group, taken // 2) if is_wasteful else [group]
    return result


class Snapshot:
    """Host memory for one kind of checkpoint, pinned beside an accelerator, used again by every save."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._on_host = self._device.type == "cpu"
        self._stream = None if self._on_host else torch.Stream(self._device)
        self._copied: torch.Event | None = None
        self._blocks: list[torch.Tensor] = []
        self._lengths: list[tuple[int, torch.dtype]] = []  # of the views: made anew only where a save differs
        self._places: list[torch.Tensor] = []
        self._sources: Sequence[TensorSlice] = ()  # decoded states are ours alone: they must outlive the copy

    def reserve(self, slices: Sequence[TensorSlice]) -> None:
        """Takes the memory that a copy of ``slices`` will need: pinning gigabytes takes seconds."""
        self._views(slices)

    @torch.no_grad()
    def take(self, slices: Sequence[TensorSlice]) -> list[torch.Tensor]:
        """Starts the copy; returns one 1-D host tensor per slice, in its stored dtype, filled after ``wait``."""
        views = self._views(slices)
        if self._stream is None:
            _copy(slices, views)
            return views
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        self._sources = slices
        with self._stream:
            _copy(slices, views)
            self._copied = self._stream.record_event()
        return views

    def _views(self, slices: Sequence[TensorSlice]) -> list[torch.Tensor]:
        lengths = [(len(piece.tensor), piece.dtype) for piece in slices]
        if lengths != self._lengths or not self._places:
            places, sizes = place_in_blocks([length * dtype.itemsize for length, dtype in lengths])
            if [len(block) for block in self._blocks] != sizes:
                self._blocks = self._places = []  # gone before the next ones are made
                self._blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=not self._on_host) for size in sizes]
            self._places = [
                self._blocks[block][start : start + length * dtype.itemsize].view(dtype)
                for (block, start), (length, dtype) in zip(places, lengths, strict=True)
            ]
            self._lengths = lengths
        return list(self._places)

    def before_update(self) -> None:
        """Queues what follows on the current stream behind the copy. Call before the state changes."""
        if self._copied is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._copied)

    def wait(self) -> None:
        """Returns when the copy is complete; any thread may call it."""
        if self._copied is not None:
            self._copied.synchronize()
            self._sources = ()


def _copy(slices: Sequence[TensorSlice], views: list[torch.Tensor]) -> None:
    """One call for all: there may be thousands, and training stands still meanwhile."""
    if views:
        torch._foreach_copy_(views, [piece.tensor for piece in slices], non_blocking=True)
