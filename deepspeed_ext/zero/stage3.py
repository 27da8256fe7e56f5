"""The states of DeepSpeed's own ZeRO-3 optimizer, by parameter, in the form in which ours gives its own.

A checkpoint that is written from these shards knows nothing of ZeRO-3: it loads at any other stage and layout, and any
other loads here. DeepSpeed keeps, for groups of parameters, one flat fp32 tensor of this rank's parts and the
optimizer's states of the same shape; where a parameter's part lies is in ``grad_position``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

STATE_KINDS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Stage3Shard:
    """What this rank owns of one parameter: elements [start, stop) of it, flattened, as live fp32 views.

    ``param``: a stand-in on the meta device with the whole parameter's shape and dtype; the real one is empty.
    """

    name: str
    param: nn.Parameter
    start: int
    stop: int
    tensors: dict[str, Tensor]


class Stage3States:
    """Reads and writes the AdamW states of an engine with ZeRO-3, in device or host memory. Every method is local.

    Raises ValueError for another optimizer than torch's Adam or AdamW, and for states on NVMe.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        basic = self._optimizer.optimizer
        if not isinstance(basic, (torch.optim.Adam, torch.optim.AdamW)):
            raise ValueError(f"checkpoints of ZeRO-3 need torch's Adam or AdamW, not {type(basic).__name__}")
        if self._optimizer.swap_optimizer:
            raise ValueError("checkpoints of ZeRO-3 need the states in device or host memory, not on NVMe")

    def state_shards(self) -> list[Stage3Shard]:
        """This rank's parts; padding is left out, and so is a parameter of which this rank has nothing."""
        optimizer = self._optimizer
        shards = []
        for name, param in self._engine.module.named_parameters():
            group, offset, size = optimizer.grad_position[optimizer.get_param_id(param)]
            start = optimizer._get_param_partition_rank(param) * size
            stop = min(start + size, param.ds_numel)
            if start >= stop:
                continue
            master = optimizer.fp32_partitioned_groups_flat[group]
            flat = {"master": master.detach(), **{kind: self._states(master)[kind] for kind in STATE_KINDS}}
            tensors = {kind: tensor.narrow(0, offset, stop - start) for kind, tensor in flat.items()}
            whole = nn.Parameter(torch.empty(param.ds_shape, dtype=param.dtype, device="meta"), requires_grad=False)
            shards.append(Stage3Shard(name, whole, start, stop, tensors))
        return shards

    def forget_copies(self) -> None:
        """Nothing: all shards are live, none is a copy."""

    @property
    def step_count(self) -> int:
        """Optimizer steps applied."""
        return int(self._states(self._optimizer.fp32_partitioned_groups_flat[0])["step"])

    @step_count.setter
    def step_count(self, value: int) -> None:
        for master in self._optimizer.fp32_partitioned_groups_flat:
            self._states(master)["step"].fill_(value)

    def sync_params_from_master(self) -> None:
        """Publishes what was written into the masters: call it before the next forward, which gathers them."""
        optimizer = self._optimizer
        optimizer._partition_all_parameters()  # as its step does: what is whole now would stay as it was
        for group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)

    def _states(self, master: Tensor) -> dict[str, Tensor]:
        """AdamW's, which torch makes in the first step only; a checkpoint may come before."""
        state = self._optimizer.optimizer.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for kind in STATE_KINDS:
                state[kind] = torch.zeros_like(master, requires_grad=False)
        return dict(state)
