"""A copy of the training state in host memory, taken while the next step's forward and backward already run.

Only the optimizer's step changes what is saved. So on an accelerator the copy runs on a stream of its own beside the
next forward and backward, and whoever is about to update the state calls ``before_update`` first: the update is queued
behind the copy, and the host does not wait. On the CPU the copy is done when ``take`` returns.

A stream takes about a thousand copies before it makes the host wait, and a rank may have thousands of slices. But they
are parts of a few flat buffers, so neighbouring slices are coalesced: they are one copy and lie side by side there too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from megatron.optimus.checkpoint.slices import TensorSlice
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.device import DeviceEvent
from megatron.optimus.platform.pinned_memory import pinned_buffers

_BUFFER_BYTES = 1 << 30  # several, so that CPU threads allocate them side by side
_ALIGNED = 16  # start of every copy, so that it may have any dtype
_GAP_BYTES = 4096  # cheaper to copy than to begin anew; parameters in a bucket are aligned to less
_COPY_BYTES = 128 << 20  # long enough for the bus
_CAST_BYTES = 64 << 20  # most device memory that a cast takes beside the state

Allocate = Callable[[Sequence[int], torch.device], list[torch.Tensor]]


class CoalescedCopy(NamedTuple):
    """Slices that are copied together: their indices, and the element of the copy at which each begins."""

    indices: list[int]
    offsets: list[int]

    def numel(self, slices: Sequence[TensorSlice]) -> int:
        """Elements of the copy, gaps included."""
        last = slices[self.indices[-1]]
        return self.offsets[-1] + last.stop - last.start


def coalesce(slices: Sequence[TensorSlice], most_bytes: int = _COPY_BYTES) -> list[CoalescedCopy]:
    """Groups slices that follow each other in one storage and have the same dtypes, with at most small gaps.

    Args:
        slices: in any order.
        most_bytes: a copy takes no more of its storage, unless a single slice is larger.

    Returns:
        The copies in the order of their first slices, wherever the storages lie in memory: so the same slices in other
        memory are grouped alike.
    """
    order = sorted(range(len(slices)), key=lambda index: slices[index].tensor.data_ptr())
    copies: list[CoalescedCopy] = []
    alike: object = None
    first = stop = limit = 0
    for index in order:
        piece = slices[index]
        tensor, itemsize = piece.tensor, piece.tensor.itemsize
        begin, kind = tensor.data_ptr(), (tensor.dtype, piece.dtype, tensor.device)
        end = begin + (piece.stop - piece.start) * itemsize
        offset, rest = divmod(begin - first, itemsize)
        if 0 <= begin - stop <= _GAP_BYTES and kind == alike and end <= limit and rest == 0:
            copies[-1].indices.append(index)
            copies[-1].offsets.append(offset)
        else:
            copies.append(CoalescedCopy([index], [0]))
            storage = tensor.untyped_storage()  # another one may begin where this ends
            first, alike, limit = begin, kind, min(storage.data_ptr() + storage.nbytes(), begin + most_bytes)
        stop = end
    return sorted(copies, key=lambda copy: min(copy.indices))


def pack_into_buffers(
    lengths: Sequence[int], buffer_bytes: int = _BUFFER_BYTES
) -> tuple[list[tuple[int, int]], list[int]]:
    """Distributes copies over host buffers that waste little pinned memory.

    torch gives pinned memory out in powers of two: 21 GB at once would be 32 GiB. So a buffer holds ``buffer_bytes``, a
    power of two, or less, and a longer copy has a buffer of its own. Where more than an eighth of a buffer would be
    waste, as in the last one, what it holds goes to buffers of half the size.

    Args:
        lengths: bytes of each copy.
        buffer_bytes: of a full buffer.

    Returns:
        For each copy its (buffer, first byte in it); the bytes of each buffer.
    """
    places = [(0, 0)] * len(lengths)
    sizes: list[int] = []
    aligned = [(-(-length // _ALIGNED) * _ALIGNED, index) for index, length in enumerate(lengths)]
    for group in _pack(aligned, buffer_bytes):
        position = 0
        for length, index in group:
            places[index] = len(sizes), position
            position += length
        sizes.append(position)
    return places, sizes


def _pack(items: list[tuple[int, int]], buffer_bytes: int) -> list[list[tuple[int, int]]]:
    """(aligned length, index) of what shares a buffer, buffer by buffer: each goes into the first that has room."""
    groups: list[list[tuple[int, int]]] = []
    sizes: list[int] = []
    fitting = 0  # buffers before this one are full enough
    for length, index in items:
        buffer = next((b for b in range(fitting, len(sizes)) if sizes[b] + length <= buffer_bytes), len(sizes))
        if buffer == len(sizes):
            groups.append([])
            sizes.append(0)
        groups[buffer].append((length, index))
        sizes[buffer] += length
        while fitting < len(sizes) and sizes[fitting] >= buffer_bytes - buffer_bytes // 64:
            fitting += 1
    result = []
    for group, size in zip(groups, sizes, strict=True):
        taken = 1 << (size - 1).bit_length() if size else 0
        is_wasteful = taken - size > taken // 8 and len(group) > 1
        result += _pack(group, taken // 2) if is_wasteful else [group]
    return result


class Snapshot:
    """Host memory for one kind of checkpoint, pinned beside an accelerator and used again by every save.

    Args:
        device: where the slices are.
        allocate: returns host memory: a uint8 tensor for each number of bytes.
    """

    def __init__(self, device: torch.device | str, allocate: Allocate = pinned_buffers) -> None:
        self._device, self._allocate_buffers = torch.device(device), allocate
        self._stream = torch.Stream(self._device) if devices.has_streams(self._device) else None
        self._copied: torch.Event | None = None
        # Around the update's wait for the last copy, once that is queued.
        self._held: tuple[DeviceEvent, DeviceEvent] | None = None
        self._buffers: list[torch.Tensor] = []
        self._layout: object = None  # of the state; the views are made anew only when it changes
        self._views: list[torch.Tensor] = []  # one a slice
        self._copy_views: list[torch.Tensor] = []  # one a coalesced copy
        self._sources: Sequence[TensorSlice] = ()  # nobody else may hold them: they must outlive the copy

    def reserve(self, slices: Sequence[TensorSlice]) -> None:
        """Allocates the memory that a copy of ``slices`` will need; pinning gigabytes takes seconds."""
        self._allocate(slices, coalesce(slices))

    @torch.no_grad()
    def take(self, slices: Sequence[TensorSlice]) -> list[torch.Tensor]:
        """Starts the copy. Returns one 1-D host tensor per slice, in its stored dtype, filled after ``wait``."""
        copies = coalesce(slices)
        self._allocate(slices, copies)
        sources = [slices[copy.indices[0]].tensor.as_strided((copy.numel(slices),), (1,)) for copy in copies]
        if self._stream is None:
            _copy(sources, self._copy_views)
            devices.synchronize(self._device)
        else:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
            self._sources, self._held = slices, None
            with self._stream:
                _copy(sources, self._copy_views)
                self._copied = self._stream.record_event()
        return list(self._views)

    def _allocate(self, slices: Sequence[TensorSlice], copies: list[CoalescedCopy]) -> None:
        lengths = [(piece.stop - piece.start, piece.dtype) for piece in slices]
        if (copies, lengths) == self._layout:
            return
        self._layout = None
        dtypes = [lengths[copy.indices[0]][1] for copy in copies]
        sizes = [copy.numel(slices) * dtype.itemsize for copy, dtype in zip(copies, dtypes, strict=True)]
        places, buffer_sizes = pack_into_buffers(sizes)
        if [len(buffer) for buffer in self._buffers] != buffer_sizes:
            self._buffers = self._views = self._copy_views = []  # freed before the next ones are allocated
            self._buffers = self._allocate_buffers(buffer_sizes, self._device)
        self._copy_views = [
            self._buffers[buffer][start : start + size].view(dtype)
            for dtype, size, (buffer, start) in zip(dtypes, sizes, places, strict=True)
        ]
        views = {
            index: view[offset : offset + lengths[index][0]]
            for copy, view in zip(copies, self._copy_views, strict=True)
            for index, offset in zip(*copy, strict=True)
        }
        self._views = [views[index] for index in range(len(slices))]
        self._layout = (copies, lengths)

    def before_update(self) -> None:
        """Queues what follows on the current stream behind the copy. Call it before the state changes."""
        if self._copied is not None and self._held is None:  # once: what is queued later is behind the copy too
            begin = DeviceEvent(self._device)
            torch.accelerator.current_stream(self._device).wait_event(self._copied)
            self._held = begin, DeviceEvent(self._device)

    def device_stall_s(self) -> float:
        """Seconds that the device stood still between ``before_update`` and the end of the copy, which must be over.

        Does not wait: 0 where the device has not come to the update yet, because then it will not stand still.
        """
        if self._held is None or not self._held[0].is_done:
            return 0.0
        return self._held[1].seconds_since(self._held[0])

    def wait(self) -> None:
        """Waits until the copy is complete. Any thread may call it."""
        if self._copied is not None:
            self._copied.synchronize()
            self._sources = ()


def _copy(sources: list[torch.Tensor], views: list[torch.Tensor]) -> None:
    """Copies all in one call, because training stands still meanwhile."""
    parts = [part for pair in zip(sources, views, strict=True) for part in _cast_parts(*pair)]
    if parts:
        torch._foreach_copy_([view for _, view in parts], [source for source, _ in parts], non_blocking=True)


def _cast_parts(source: torch.Tensor, view: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(source, view) of a copy in one part, or in several where the device casts it first, to memory of its own."""
    if source.dtype == view.dtype:
        return [(source, view)]
    numel = _CAST_BYTES // view.itemsize
    return list(zip(source.split(numel), view.split(numel), strict=True))
