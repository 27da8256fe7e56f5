"""A copy of the training state in host memory, taken while the next step's forward and backward already run.

Only the optimizer's step changes what is saved. So on an accelerator the copy runs on a stream of its own beside the
next forward and backward, and whoever is about to update calls ``before_update`` first: the update is queued behind the
copy, and the host does not wait. On the CPU the copy is done when ``take`` returns.

A stream takes about a thousand copies before it makes the host wait, and a rank may have thousands of slices. But they
are parts of a few flat buffers: what lies side by side there lies so on the host too, and is one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron.optimus.checkpoint.slices import TensorSlice
from megatron.optimus.platform.device import DeviceEvent

_BLOCK_BYTES = 4 << 30
_ALIGNED = 16  # of every run, so that it may have any dtype
_GAP_BYTES = 4096  # cheaper to copy than to begin anew; parameters in a bucket are aligned to less
_RUN_BYTES = 128 << 20  # long enough for the bus; and so much, a cast on the device may need beside the state


class Run(NamedTuple):
    """Slices that one copy takes together: their indices, and where each begins in it, counted in elements."""

    indices: list[int]
    offsets: list[int]

    def numel(self, slices: Sequence[TensorSlice]) -> int:
        """Elements of the copy, gaps included."""
        last = slices[self.indices[-1]]
        return self.offsets[-1] + last.stop - last.start


def adjacent_runs(slices: Sequence[TensorSlice], most_bytes: int = _RUN_BYTES) -> list[Run]:
    """Slices that follow each other in one storage, alike in dtypes, with no gap but that of an alignment.

    A run has ``most_bytes`` of its storage at most, unless one slice has more. Their order is that of their first
    slices, wherever the storages happen to lie, so that the same slices in other memory give the same runs.
    """
    order = sorted(range(len(slices)), key=lambda index: slices[index].tensor.data_ptr())
    runs: list[Run] = []
    alike: object = None
    first = stop = limit = 0
    for index in order:
        piece = slices[index]
        tensor, itemsize = piece.tensor, piece.tensor.itemsize
        begin, kind = tensor.data_ptr(), (tensor.dtype, piece.dtype, tensor.device)
        end = begin + (piece.stop - piece.start) * itemsize
        offset, rest = divmod(begin - first, itemsize)
        if 0 <= begin - stop <= _GAP_BYTES and kind == alike and end <= limit and rest == 0:
            runs[-1].indices.append(index)
            runs[-1].offsets.append(offset)
        else:
            runs.append(Run([index], [0]))
            storage = tensor.untyped_storage()  # another one may begin where this ends
            first, alike, limit = begin, kind, min(storage.data_ptr() + storage.nbytes(), begin + most_bytes)
        stop = end
    return sorted(runs, key=lambda run: min(run.indices))


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
        self._held: tuple[DeviceEvent, DeviceEvent] | None = (
            None  # around the wait for the last copy, once that is queued
        )
        self._blocks: list[torch.Tensor] = []
        self._shape: object = None  # of the state: views are made anew only where a save differs
        self._views: list[torch.Tensor] = []  # one a slice
        self._run_views: list[torch.Tensor] = []  # one a run
        self._sources: Sequence[TensorSlice] = ()  # decoded states are ours alone: they must outlive the copy

    def reserve(self, slices: Sequence[TensorSlice]) -> None:
        """Takes the memory that a copy of ``slices`` will need: pinning gigabytes takes seconds."""
        self._place(slices, adjacent_runs(slices))

    @torch.no_grad()
    def take(self, slices: Sequence[TensorSlice]) -> list[torch.Tensor]:
        """Starts the copy; returns one 1-D host tensor per slice, in its stored dtype, filled after ``wait``."""
        runs = adjacent_runs(slices)
        self._place(slices, runs)
        sources = [slices[run.indices[0]].tensor.as_strided((run.numel(slices),), (1,)) for run in runs]
        if self._stream is None:
            _copy(sources, self._run_views)
        else:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
            self._sources, self._held = slices, None
            with self._stream:
                _copy(sources, self._run_views)
                self._copied = self._stream.record_event()
        return list(self._views)

    def _place(self, slices: Sequence[TensorSlice], runs: list[Run]) -> None:
        lengths = [(piece.stop - piece.start, piece.dtype) for piece in slices]
        if (runs, lengths) == self._shape:
            return
        self._shape = None
        dtypes = [lengths[run.indices[0]][1] for run in runs]
        sizes = [run.numel(slices) * dtype.itemsize for run, dtype in zip(runs, dtypes, strict=True)]
        places, block_sizes = place_in_blocks(sizes)
        if [len(block) for block in self._blocks] != block_sizes:
            self._blocks = self._views = self._run_views = []  # gone before the next ones are made
            self._blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=not self._on_host) for size in block_sizes]
        self._run_views = [
            self._blocks[block][start : start + size].view(dtype)
            for dtype, size, (block, start) in zip(dtypes, sizes, places, strict=True)
        ]
        views = {
            index: view[offset : offset + lengths[index][0]]
            for run, view in zip(runs, self._run_views, strict=True)
            for index, offset in zip(*run, strict=True)
        }
        self._views = [views[index] for index in range(len(slices))]
        self._shape = (runs, lengths)

    def before_update(self) -> None:
        """Queues what follows on the current stream behind the copy. Call before the state changes."""
        if self._copied is not None and self._held is None:  # once: what comes later is behind it too
            begin = DeviceEvent(self._device)
            torch.accelerator.current_stream(self._device).wait_event(self._copied)
            self._held = begin, DeviceEvent(self._device)

    def held_s(self) -> float:
        """Seconds that the device stood still between ``before_update`` and the end of the copy, which is over; nobody
        waits: a device that has not come to the update yet will not stand still."""
        if self._held is None or not self._held[0].is_done:
            return 0.0
        return self._held[1].seconds_since(self._held[0])

    def wait(self) -> None:
        """Returns when the copy is complete; any thread may call it."""
        if self._copied is not None:
            self._copied.synchronize()
            self._sources = ()


def _copy(sources: list[torch.Tensor], views: list[torch.Tensor]) -> None:
    """One call for all: training stands still meanwhile."""
    if views:
        torch._foreach_copy_(views, sources, non_blocking=True)
