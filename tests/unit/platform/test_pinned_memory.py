"""Host memory for copies of the training state."""

from __future__ import annotations

import gc

import pytest
import torch

from megatron.optimus.platform import pinned_memory
from megatron.optimus.platform.pinned_memory import pinned_buffers

SIZES = [5, 4096, 1 << 20, 3 * 4096 + 1, 20 << 20]


def test_buffers_for_the_cpu_are_ordinary_memory() -> None:
    buffers = pinned_buffers(SIZES, torch.device("cpu"))
    assert [len(buffer) for buffer in buffers] == SIZES
    assert all(buffer.dtype == torch.uint8 for buffer in buffers)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_buffers_for_cuda_are_pinned_and_take_copies_from_end_to_end() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    threads = torch.get_num_threads()
    buffers = pinned_buffers(SIZES, device)
    assert torch.get_num_threads() == threads
    for size, buffer in zip(SIZES, buffers, strict=True):
        values = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
        assert buffer.is_pinned()
        buffer.copy_(values, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(buffer, values.cpu())
    view = buffers[-1][4096:]
    del buffers, buffer
    gc.collect()
    assert view.is_pinned()  # a view keeps its buffer


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_memory_is_unregistered_before_it_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same addresses come back with the next allocation, and CUDA refuses to register memory twice."""
    undone: list[int] = []
    real = pinned_memory.unregister_host_memory
    monkeypatch.setattr(
        pinned_memory, "unregister_host_memory", lambda address: (undone.append(address), real(address))
    )
    device = torch.device("cuda", torch.cuda.current_device())
    for _ in range(3):
        [buffer] = pinned_buffers([8 << 20], device)
        address = buffer.data_ptr()
        assert buffer.is_pinned()
        del buffer
        gc.collect()
        assert undone[-1] == address


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_where_the_driver_refuses_torch_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_memory, "register_host_memory", lambda *_: False)
    [buffer] = pinned_buffers([1 << 20], torch.device("cuda", torch.cuda.current_device()))
    assert buffer.is_pinned()
