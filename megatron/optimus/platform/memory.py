"""Describes an out-of-memory error in one line: what the memory was for, how much was asked, and how much is free.

Functions that take much memory are marked with ``needs_memory``. The innermost mark names the part.
"""

from __future__ import annotations

import errno
import functools
import re
import resource
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from megatron.optimus.platform import device as devices

P = ParamSpec("P")
T = TypeVar("T")

GIB = 2**30
# What torch, its backends and numpy say besides the errors' classes.
_WORDS = ("out of memory", "can't allocate memory", "unable to allocate", "out_of_device_memory", "out_of_host_memory")
_ASKED = re.compile(r"(?:tried|unable) to allocate (\d+(?:\.\d+)?) ?(bytes|[KMGTPE]i?B)", re.IGNORECASE)
_UNITS = {letter: 1 << 10 * power for power, letter in enumerate("bkmgtpe")}


class OutOfMemory(Exception):
    """Memory could not be had; the message is one line.

    Attributes:
        device: whose memory it is; "cpu" is the host.
        total: bytes that this process could have there at most.
    """

    def __init__(self, message: str, device: torch.device, total: int) -> None:
        super().__init__(message)
        self.device, self.total = device, total


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that memory could not be allocated, on a device or the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS)


def asked_bytes(error: BaseException) -> int | None:
    """Returns how many bytes the allocation that failed was of, as far as its message says."""
    found = _ASKED.search(str(error))
    return None if found is None else round(float(found[1]) * _UNITS[found[2][0].lower()])


def reason(error: BaseException) -> str:
    """Describes an error in one line: of memory, the bytes asked, free and held; of anything else its message."""
    if not is_out_of_memory(error):
        return str(error)
    device, free, held, _ = _place(error)
    return _described(error, device, free, held)


def needs_memory(part: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Makes a function raise OutOfMemory, naming ``part``, where it raises another error of memory."""

    def mark(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                device, free, held, total = _place(error)
                message = f"out of memory in {part}: {_described(error, device, free, held)}"
                traceback.clear_frames(error.__traceback__)  # they hold what did fit
                raise OutOfMemory(message, device, total) from error

        return call

    return mark


def _place(error: BaseException) -> tuple[torch.device, int, int, int]:
    """The device whose memory is meant, its free bytes, those that this process holds, and all that it can have."""
    kind = devices.default_kind()
    is_hosts = isinstance(error, (MemoryError, OSError)) or "DefaultCPUAllocator" in str(error)
    if kind == "cpu" or (is_hosts and not isinstance(error, torch.OutOfMemoryError)):
        free, held = host_memory()
        return torch.device("cpu"), free, held, free + held
    device = torch.device(kind, torch.accelerator.current_device_index())
    free, held, total = devices.memory_info(device)
    return device, free, held, total


def _described(error: BaseException, device: torch.device, free: int, held: int) -> str:
    asked = asked_bytes(error)
    size = "more" if asked is None else f"{asked / GIB:.2f} GiB" if asked >= GIB / 100 else f"{asked:,} bytes"
    where = "host memory" if device.type == "cpu" else f"{device} ({devices.device_name(device)})"
    return f"asked for {size} of {where}, {free / GIB:.2f} GiB are free and this process holds {held / GIB:.2f}"


def host_memory() -> tuple[int, int]:
    """Returns the bytes that this process can still have of the host's memory, and those that it holds."""
    virtual, held = (int(word) * resource.getpagesize() for word in _read("/proc/self/statm", "0 0").split()[:2])
    found = re.search(r"MemAvailable:\s+(\d+)", _read("/proc/meminfo"))
    limits = [int(found[1]) * 1024] if found else []
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space - virtual)
    most, now = (_read(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if most.isdigit() and now.isdigit():
        limits.append(int(most) - int(now))
    return max(0, min(limits, default=0)), held


def _read(path: str, default: str = "") -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return default
