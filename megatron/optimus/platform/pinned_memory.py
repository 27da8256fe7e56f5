"""Pinned host memory in large amounts, for copies of the training state.

On CUDA, torch pins on one thread at 2 GB/s, and with all of its options at 8 GB/s; the state of a 7 B model is 100 GB.
Here the CPU threads touch huge pages side by side and register them, at 35 GB/s on the same machine.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron.optimus.platform.device import pins_memory, register_host_memory, set_device, unregister_host_memory

logger = logging.getLogger("optimus")
T = TypeVar("T")
_PAGE = 4096  # the smallest; touching one byte of each makes the kernel provide all of them


class _RegisteredMemory(mmap.mmap):
    """Anonymous memory that the driver is told of before the kernel takes it back."""

    address: int | None = None  # once it is registered

    def __del__(self) -> None:
        if self.address is not None:
            unregister_host_memory(self.address)


def pinned_buffers(sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """Allocates host memory that ``device`` copies to and from without the host; ordinary memory for the CPU.

    Args:
        sizes: bytes of each buffer, at least 1.
        device: whose copies will use them.

    Returns:
        uint8 tensors, one a size.

    Raises:
        MemoryError, RuntimeError: there is not so much.
    """
    if device.type != "cuda" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return [torch.empty(size, dtype=torch.uint8, pin_memory=pins_memory(device)) for size in sizes]

    def allocate(size: int) -> Tensor:
        memory = _RegisteredMemory(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        buffer[::_PAGE] = 0
        if register_host_memory(buffer.data_ptr(), size):
            memory.address = buffer.data_ptr()
            return buffer
        logger.info("the driver does not pin memory of this process; torch allocates it, which takes longer")
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    return _on_threads(allocate, sizes, device)


def pin_buffers(buffers: Sequence[Tensor], device: torch.device) -> None:
    """Pins memory that exists, until this process ends. Where that cannot be, copies from it only take longer.

    Args:
        buffers: uint8, of whole pages each.
        device: whose copies will use them.
    """
    if device.type == "cuda" and buffers:
        pinned = _on_threads(lambda buffer: register_host_memory(buffer.data_ptr(), len(buffer)), buffers, device)
        if not all(pinned):
            logger.info("the driver does not pin shared memory: copies of the training state take longer")


def _on_threads(action: Callable[[Any], T], items: Sequence[Any], device: torch.device) -> list[T]:
    """Calls ``action`` for each item, on as many threads as torch has; operations in them have one thread each."""

    def start_thread() -> None:
        set_device(device)
        torch.set_num_threads(1)  # of this thread's operations; the threads work side by side

    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads, initializer=start_thread) as pool:
        try:
            return list(pool.map(action, items))
        finally:
            torch.set_num_threads(threads)
