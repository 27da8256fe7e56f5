"""Errors of memory are told from others, and told in one line."""

from __future__ import annotations

import errno

import numpy as np
import pytest
import torch

from megatron.optimus.platform.memory import OutOfMemory, asked_bytes, is_out_of_memory, needs_memory, reason
from megatron.optimus.platform.ranks import Ranks

CPU = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes. Error code 12"
CASES: list[tuple[Exception, int | None]] = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ..."), 20 << 20),
    (torch.OutOfMemoryError("XPU out of memory. Tried to allocate 1.50 GiB (GPU 0; ...)"), 3 << 29),
    (RuntimeError(f"[enforce fail at alloc_cpu.cpp:121] err == 0. {CPU}"), 8 << 30),
    (RuntimeError("CUDA error: out of memory"), None),
    (RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"), None),
    (MemoryError(), None),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), None),
]


@pytest.mark.parametrize(("error", "asked"), CASES, ids=lambda value: str(value)[:20])
def test_errors_of_memory_are_told_in_one_line(error: Exception, asked: int | None) -> None:
    assert is_out_of_memory(error) and asked_bytes(error) == asked
    text = reason(error)
    assert "\n" not in text and text.startswith("asked for ") and "GiB are free and this process holds" in text
    with pytest.raises(OutOfMemory, match="out of memory in a part: asked for") as raised:
        _outer(error)
    assert raised.value.__cause__ is error and raised.value.total > 0
    with pytest.raises(ValueError, match=r"making it failed on rank 0: asked for .* are free"):
        Ranks.alone().run_on_all_ranks(lambda: _raise(error), "making it", ValueError)


def test_numpy_says_how_much() -> None:
    with pytest.raises(MemoryError) as raised:
        np.empty(1 << 60, np.uint8)
    assert asked_bytes(raised.value) == 1 << 60


OTHERS = [ValueError("out of memory"), RuntimeError("shapes differ"), OSError(errno.ENOSPC, "full")]


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_others_pass(error: Exception) -> None:
    assert not is_out_of_memory(error) and reason(error) == str(error)
    with pytest.raises(type(error)) as raised:
        _outer(error)
    assert raised.value is error


def _raise(error: Exception) -> None:
    raise error


@needs_memory("the whole")
def _outer(error: Exception) -> None:
    _inner(error)


@needs_memory("a part")
def _inner(error: Exception) -> None:
    _raise(error)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
def test_on_a_device_its_memory_is_told() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None

    @needs_memory("a part")
    def take() -> torch.Tensor:
        held = [torch.empty(1 << 28, dtype=torch.uint8, device=device)]
        return torch.cat([*held, torch.empty(1 << 50, dtype=torch.uint8, device=device)])

    what = r"asked for 1048576\.00 GiB of \w+:0 \(.*\), \d+\.\d\d GiB are free"
    with pytest.raises(OutOfMemory, match=what) as raised:
        take()
    assert raised.value.total >= 16 << 30 and raised.value.device.type == device.type
    assert torch.empty(1 << 28, dtype=torch.uint8, device=device).numel(), "and it can be used again"
