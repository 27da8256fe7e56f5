"""Idle states on the host: their memory is freed behind the same tensors, and everything returns to where it was."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import Tensor, nn

from deepspeed_ext.zero.offload import HostStates


class Buffer(SimpleNamespace):
    """In the place of a flat buffer: two parameters, masters, and two states that share one storage."""

    def __init__(self) -> None:
        flat, self.masters, both = torch.arange(10.0).bfloat16(), torch.arange(10.0), torch.arange(20.0)
        self.param_buffer, self.states = flat, both.split(10)
        self.slices = {"a": slice(0, 4), "b": slice(4, 10)}
        self.params = {name: nn.Parameter(flat[own].view(2, -1)) for name, own in self.slices.items()}

    def state_tensors(self) -> tuple[Tensor, ...]:
        return self.states

    def slice_of(self, name: str) -> slice:
        return self.slices[name]


def tensors(buffer: Buffer) -> list[Tensor]:
    return [buffer.masters, buffer.param_buffer, *buffer.states]


def test_everything_goes_and_returns() -> None:
    buffer, gradient = Buffer(), torch.full((10,), 3.0)
    host = HostStates([buffer], lambda: [gradient])  # type: ignore[list-item]
    before = [tensor.clone() for tensor in (*tensors(buffer), gradient)]
    views = [buffer.masters[3:5], buffer.states[1][:2]]
    host.offload(None, pin_memory=False)
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in (*tensors(buffer), gradient))
    assert buffer.params["b"].detach().flatten().tolist() == [4, 5, 6, 7, 8, 9], "a program may read its parameters"
    with pytest.raises(
        RuntimeError, match=r"step\(\) needs optim_states, hp_params, lp_params, lp_grads, which offload"
    ):
        host.require("step()")
    host.offload(None, pin_memory=False)  # nothing is left to take
    host.reload()
    host.require("step()")
    assert all(torch.equal(now, then) for now, then in zip((*tensors(buffer), gradient), before, strict=True))
    assert views[0].tolist() == [3, 4] and views[1].tolist() == [10, 11]
    buffer.param_buffer[4] = 50
    assert buffer.params["b"][0, 0] == 50, "parameters are views of their buffer again"


def test_what_is_asked_for_alone_goes() -> None:
    buffer = Buffer()
    host = HostStates([buffer], lambda: [])  # type: ignore[list-item]
    host.offload([OffloadStateTypeEnum.hp_params], pin_memory=False)
    assert buffer.masters.untyped_storage().nbytes() == 0 < buffer.states[0].untyped_storage().nbytes()
    host.require("a forward", "lp_params")
    with pytest.raises(RuntimeError, match=r"state_dict needs hp_params, which .* call engine\.reload_states"):
        host.require("state_dict", "hp_params", "optim_states")
    host.reload()
    assert buffer.masters.tolist() == list(range(10))
