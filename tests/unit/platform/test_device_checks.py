"""Checks of one device: a wrong product and a flipped bit are found."""

import pytest
import torch

from megatron.optimus.platform import device_checks


def test_a_flipped_bit_of_memory_is_found(monkeypatch):
    monkeypatch.setattr(device_checks, "_HOST_BYTES", 1 << 20)
    copy = torch.Tensor.copy_

    def flip(self, other):
        copy(self, other)
        self[5] ^= 1 << 9
        return self

    assert device_checks.check_memory(torch.device("cpu"))["tested_gib"] > 0
    monkeypatch.setattr(torch.Tensor, "copy_", flip)
    with pytest.raises(device_checks.BadDevice, match=r"memory pattern: \d+ of .* words wrong .* limit 0"):
        device_checks.check_memory(torch.device("cpu"))
