"""Updates that run as late as a GPU's stream may run them: when somebody waits; test_param_all_gather.py runs it.

Whoever forgets to wait reads old weights or states, or overwrites a gradient before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import deepspeed_ext
from tests.distributed.zero_stack import UNIT, Stack, input_of

STEPS = 5


class LazyStream:
    """Stands for ``UpdateStream``: an update runs when somebody waits for it, and no other one with it."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []

    def begin(self, *kept: Any) -> None:
        assert not self.queue, "a step began before the updates of the last one had been waited for"

    def submit(self, update: Callable[[], None]) -> Any:
        self.queue.append(update)
        return _Work(self, update)


class _Work:
    def __init__(self, stream: LazyStream, update: Callable[[], None]) -> None:
        self.stream, self.update = stream, update

    def wait(self) -> None:
        if self.update in self.stream.queue:
            self.stream.queue.remove(self.update)
            self.update()


def _build(group: dist.ProcessGroup, is_lazy: bool) -> tuple[Stack, Any]:
    model = Stack(torch.bfloat16)
    optimizer = deepspeed_ext.EPZeroOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4),
        {p: n for n, p in model.named_parameters()},
        groups=deepspeed_ext.ZeroGroups(dense=group, expert={}),
        options=deepspeed_ext.ZeroOptions(bucket_numel=UNIT, overlap_param_gather=True, max_norm=0.5),
        module=model,
    )
    assert optimizer._update_stream is None  # of a GPU alone
    if is_lazy:
        optimizer._update_stream = LazyStream()
    return model, optimizer


def _step(model: Stack, optimizer: Any, step: int) -> torch.Tensor:
    """Two micro-batches; only every other step uses ``side``. Returns the losses."""
    losses = []
    for micro in range(2):
        optimizer.set_gradient_accumulation_boundary(micro == 1)
        losses.append(model(input_of(2 * step + micro, 0).bfloat16(), use_side=step % 2 == 0))
        losses[-1].backward()
        if micro == 1:
            optimizer.reduce_gradients()
        optimizer.backward_epilogue()
    optimizer.step()
    return torch.stack(losses).detach()


def _flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def _set_average(optimizer: Any) -> torch.Tensor:
    optimizer.update_average(0.25)
    return _flat(shard.average for shard in optimizer._shards())


def _evaluate_average(model: Stack, optimizer: Any) -> torch.Tensor:
    with optimizer.averaged_parameters():
        return _flat(model.parameters())


def _offloaded(model: Stack, optimizer: Any) -> torch.Tensor:
    optimizer.offload_states()
    optimizer.reload_states()
    return _flat(model.parameters())


# What reads after a step; each waits itself.
READERS: dict[str, Callable[[Stack, Any], torch.Tensor]] = {
    "forward": lambda model, optimizer: model(input_of(99, 0).bfloat16(), use_side=True).detach(),
    "part": lambda model, optimizer: model.layers[2](input_of(99, 0).bfloat16()).detach(),
    "state dict": lambda model, optimizer: _flat(model.state_dict().values()),
    "parameters": lambda model, optimizer: (optimizer.wait_for_params(), _flat(model.parameters()))[1],
    "shards": lambda model, optimizer: _flat(t for one in optimizer.state_shards() for t in one.tensors.values()),
    "file": lambda model, optimizer: _flat(
        shard["master"] for shard in optimizer.state_dict()["base_optimizer_state"]["deepspeed_ext"]["shards"]
    ),
    "states": lambda model, optimizer: _flat(t for own in optimizer.state.values() for t in own.values()),
    "torch's states": lambda model, optimizer: _flat(own["exp_avg"] for own in optimizer.optimizer.state.values()),
    "hp param": lambda model, optimizer: model.layers[1].weight.get_full_hp_param(),
    "checksums": lambda model, optimizer: _flat(t for _, t in deepspeed_ext.StateChecksums(optimizer)._states()),
    "average": lambda model, optimizer: _set_average(optimizer),
    "evaluation": _evaluate_average,
    "from masters": lambda model, optimizer: (optimizer.sync_params_from_master(), _flat(model.parameters()))[1],
    "offload": _offloaded,
    "restart": lambda model, optimizer: (optimizer.restart_average(), _set_average(optimizer))[1],
    "norm": lambda model, optimizer: optimizer.outcome,
}


def lazy_updates(rank: int) -> dict[str, Any]:
    """For each reader: whether updates were left to do, and whether it and all later steps gave the serial bits."""
    groups = [dist.new_group([one]) for one in range(dist.get_world_size())]
    found = {}
    for name, read in READERS.items():
        runs = [_build(groups[rank], is_lazy) for is_lazy in (False, True)]
        for _, optimizer in runs:
            optimizer.keep_average(evaluates=True)
        same, left = True, []
        for step in range(STEPS):
            losses = [_step(model, optimizer, step) for model, optimizer in runs]
            left.append(len(runs[1][1]._update_stream.queue))
            values = [read(model, optimizer) for model, optimizer in runs] if step > 1 else losses
            same &= torch.equal(*losses) and torch.equal(*values)
        ends = []
        for model, optimizer in runs:
            optimizer.destroy()
            ends.append(_flat([*model.parameters(), *(shard.master for shard in optimizer._shards())]))
        found[name] = min(left[1:]) > 5, same and torch.equal(*ends)
    return found
