"""The stream of updates on a GPU; tests/distributed/lazy_updates.py holds who must wait for it."""

from __future__ import annotations

import pytest
import torch

from deepspeed_ext.zero.update_stream import UpdateStream


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_each_stream_waits_for_the_other() -> None:
    """An update sees what was queued before ``begin``, and who waits for it sees what it wrote."""
    device, cycles = torch.device("cuda", 0), 50_000_000
    gradient, weight = torch.zeros(1000, device=device), torch.zeros(1000, device=device)
    stream = UpdateStream(device)

    def update() -> None:
        torch.cuda._sleep(cycles)
        weight.copy_(gradient)

    torch.cuda._sleep(cycles)
    gradient.fill_(1)
    stream.begin(gradient)
    pending = stream.submit(update)
    pending.wait()
    seen = weight.clone()
    assert seen.eq(1).all()
