"""Any other element-wise torch optimizer on fp32 master weights; slower, since the host reads the step's scalars."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.optimizers.base import Shard, ShardOptimizer, StepScalars

# The update of an element depends on other elements, or on more than a gradient: wrong on a slice of a tensor.
_NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


def _own_options(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> dict[str, Any]:
    names = inspect.signature(kind.__init__).parameters
    return {key: value for key, value in group.items() if key in names and key not in ("self", "params")}


class WrappedOptimizer(ShardOptimizer):
    """Runs ``type(optimizer)`` on the master weights of each shard; the shard's state holds that optimizer's tensors.

    Raises:
        ValueError: the optimizer is known not to be element-wise, or keeps a number besides ``step`` for each tensor
            (NAdam, ASGD), which a checkpoint of a part of a tensor has no place for.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
        self._class = type(optimizer)
        name = self._class.__name__
        if name in _NOT_ELEMENTWISE:
            raise ValueError(f"{name} needs whole tensors; shards serve element-wise optimizers such as AdamW or SGD")
        if group.get("state_dtype", "fp32") != "fp32":
            raise ValueError(f"{name} keeps its states in fp32; state_dtype={group['state_dtype']!r} is not for it")
        self._optimizers: dict[Tensor, torch.optim.Optimizer] = {}  # by the master weights that they update
        self.state_kinds = tuple(self._start(torch.zeros(2), group))

    @torch.no_grad()
    def _start(self, master: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Makes the optimizer of a shard and returns its states, which a step on a zero gradient creates."""
        before = master.clone()
        optimizer = self._class([master], **_own_options(self._class, group))
        optimizer.param_groups[0]["weight_decay"] = 0.0  # for this step: decay would enter the moments
        master.grad = torch.zeros_like(master)
        optimizer.step()
        master.grad = None
        master.copy_(before)
        state = optimizer.state[master]
        kept = {key: value for key, value in state.items() if key != "step" and value is not None}
        others = [key for key, value in kept.items() if getattr(value, "shape", None) != master.shape]
        if others:
            raise ValueError(f"{self._class.__name__} keeps {others} for each tensor, which shards cannot carry")
        self._optimizers[master] = optimizer
        return kept

    def new_state(self, shard: Shard, options: Mapping[str, Any]) -> dict[str, Tensor]:
        """See ShardOptimizer.new_state."""
        return self._start(shard.master, options)

    @torch.no_grad()
    def update_(self, shard: Shard, options: Mapping[str, Any], scalars: StepScalars) -> None:
        """See ShardOptimizer.update_. Unlike other optimizers it waits for the device."""
        if scalars.skip.item():
            return
        master = shard.master
        optimizer = self._optimizers[master]
        optimizer.param_groups[0].update(_own_options(self._class, options))
        state = optimizer.state[master]
        state.update(shard.state)
        if isinstance(state.get("step"), Tensor):
            state["step"].fill_(scalars.step.item() - 1)
        elif "step" in state:
            state["step"] = int(scalars.step.item()) - 1
        master.grad = shard.grad.float() * scalars.scale
        optimizer.step()
        master.grad = None
        if shard.param.data_ptr() != master.data_ptr():
            shard.param.copy_(master)
