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
_OF_TORCH = ("self", "params")
_TRIAL_STEPS = 8
_ROWS, _COLUMNS, _SLICE = 6, 8, 20  # of the trial's matrix


def _own_options(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> dict[str, Any]:
    names = inspect.signature(kind.__init__).parameters
    return {key: value for key, value in group.items() if key in names and key not in _OF_TORCH}


class WrappedOptimizer(ShardOptimizer):
    """Runs ``type(optimizer)`` on the master weights of each shard; the shard's state holds that optimizer's tensors.

    An optimizer that is not torch's own is tried on a small matrix, whole and in parts, unbroken and resumed.

    Raises:
        ValueError: the optimizer is not element-wise, needs a closure, or keeps something besides ``step`` (NAdam,
            ASGD) that a checkpoint of a part of a tensor has no place for.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
        self._class, self._template = type(optimizer), optimizer
        self._is_torchs = self._class.__module__.startswith("torch.optim")
        name = self._class.__name__
        if name in _NOT_ELEMENTWISE and self._is_torchs:
            raise ValueError(f"{name} needs whole tensors; shards serve element-wise optimizers such as AdamW or SGD")
        if group.get("state_dtype", "fp32") != "fp32":
            raise ValueError(f"{name} keeps its states in fp32; state_dtype={group['state_dtype']!r} is not for it")
        self._optimizers: dict[Tensor, torch.optim.Optimizer] = {}  # by the master weights that they update
        self._count: Tensor | int | None = None  # of steps, as it keeps it for each tensor
        try:
            self._check(group)
        except _RefusedError:
            raise
        except Exception as error:
            words = " ".join(str(error).split())
            raise ValueError(f"{name} does not run on slices of tensors: {type(error).__name__}: {words}") from error
        self._optimizers.clear()

    def _check(self, group: Mapping[str, Any]) -> None:
        """Finds the states of elements. Raises an error where slices of a tensor are not updated as the whole is."""
        self.state_kinds = tuple(self._first_states(group))
        if not self._is_torchs:
            self._try_out(group)

    def _make(self, param: Tensor, group: Mapping[str, Any]) -> torch.optim.Optimizer:
        optimizer = self._class([param], **_own_options(self._class, group))
        if not self._is_torchs:  # options that it keeps outside of its groups
            own = {key: value for key, value in vars(self._template).items() if key not in ("state", "param_groups")}
            vars(optimizer).update(own)
        return optimizer

    @torch.no_grad()
    def _first_states(self, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """The states of a small tensor after its first steps."""
        param = torch.randn(6, generator=torch.Generator().manual_seed(1))
        optimizer = self._make(param, group)
        for _ in range(2):
            param.grad = torch.ones_like(param)
            optimizer.step()
        return self._kept(optimizer, param)

    def _kept(self, optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Tensor]:
        """The states that belong to elements. Raises _RefusedError where there are others."""
        state = optimizer.state[param]
        self._count = state.get("step")
        kept = {key: value for key, value in state.items() if key != "step" and value is not None}
        others = [key for key, value in kept.items() if getattr(value, "shape", None) != param.shape]
        if others:
            raise _RefusedError(f"{self._class.__name__} keeps {others} for each tensor, which shards cannot carry")
        return kept

    def new_state(self, shard: Shard, options: Mapping[str, Any]) -> dict[str, Tensor]:
        """See ShardOptimizer.new_state. The first step makes the optimizer's own, which may depend on the gradient."""
        return {kind: torch.zeros_like(shard.master) for kind in self.state_kinds}

    @torch.no_grad()
    def update_(self, shard: Shard, options: Mapping[str, Any], scalars: StepScalars) -> None:
        """See ShardOptimizer.update_. Unlike other optimizers it waits for the device."""
        if scalars.skip.item():
            return
        self._step(shard, shard.grad.float() * scalars.scale, options, int(scalars.step.item()))
        if shard.param.data_ptr() != shard.master.data_ptr():
            shard.param.copy_(shard.master)

    def _step(self, shard: Shard, gradient: Tensor, options: Mapping[str, Any], number: int) -> None:
        master = shard.master
        if number == 1 or master not in self._optimizers:
            self._optimizers[master] = self._make(master, options)
        optimizer = self._optimizers[master]
        own, state = optimizer.param_groups[0], optimizer.state[master]
        own.update(_own_options(self._class, options))
        if number > 1:
            state.update(shard.state)
            if isinstance(self._count, Tensor):
                state.setdefault("step", self._count.clone()).fill_(number - 1)
            elif self._count is not None:
                state["step"] = number - 1
            if not self._is_torchs:
                own["step"] = number - 1  # pytorch_optimizer counts in the group
        master.grad = gradient
        optimizer.step()
        master.grad = None
        for kind, kept in shard.state.items():
            if kind in state and state[kind] is not kept:
                kept.copy_(state[kind])

    # ---- the trial

    @torch.no_grad()
    def _try_out(self, group: Mapping[str, Any]) -> None:
        """Raises unless parts of a matrix are updated as the whole is, and a resumed run is the unbroken one."""
        name = self._class.__name__
        if any(callable(getattr(self._class, mode, None)) for mode in ("train", "eval")):
            raise _RefusedError(f"{name} has two modes, train() and eval(), which nothing here switches")
        if "hessian" in inspect.signature(self._class.step).parameters:
            raise _RefusedError(f"{name} needs second derivatives, for which no backward here makes a graph")
        weights = torch.randn(_ROWS, _COLUMNS, generator=torch.Generator().manual_seed(0))
        whole = weights.clone()
        optimizer = self._make(whole, group)
        before = _numbers_of(optimizer)
        for number in range(_TRIAL_STEPS):
            whole.grad = _trial_gradient(whole, number)
            optimizer.step()
        changed = sorted(key for key, value in _numbers_of(optimizer).items() if before.get(key) != value)
        if changed:
            raise _RefusedError(f"{name} adapts {', '.join(changed)} to all its tensors, which shards do not share")
        moved = (whole - weights).abs().max()
        for resumed_at, why in ((0, _NOT_ELEMENTWISE_WORDS), (_TRIAL_STEPS // 2, _NOT_RESUMED_WORDS)):
            error = (self._in_parts(weights, group, resumed_at) - whole).abs().max()
            if not error <= 1e-3 * moved:
                raise _RefusedError(f"{name} {why}")

    def _in_parts(self, weights: Tensor, group: Mapping[str, Any], resumed_at: int) -> Tensor:
        """The weights after the same steps on slices; from step ``resumed_at`` on with new optimizers."""

        def shard_of(part: Tensor) -> Shard:
            shard = Shard(part.clone(), torch.empty(0), part)
            shard.state = self.new_state(shard, group)
            return shard

        shards = [shard_of(part) for part in weights.flatten().split(_SLICE)]
        for number in range(_TRIAL_STEPS):
            if number and number == resumed_at:
                before, shards = shards, [shard_of(shard.master) for shard in shards]
                for old, new in zip(before, shards, strict=True):
                    for kind, value in old.state.items():
                        new.state[kind].copy_(value)
            gradient = _trial_gradient(torch.cat([shard.master for shard in shards]).view_as(weights), number)
            for shard, part in zip(shards, gradient.flatten().split(_SLICE), strict=True):
                self._step(shard, part.clone(), group, number + 1)
        return torch.cat([shard.master for shard in shards]).view_as(weights)


def _numbers_of(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """What an optimizer keeps for all its tensors, its count of steps apart."""
    kept = {**vars(optimizer), **optimizer.param_groups[0]}
    numbers = {key: value for key, value in kept.items() if isinstance(value, float | int | Tensor) and key != "step"}
    return {key: float(value) for key, value in numbers.items() if not isinstance(value, Tensor) or value.numel() == 1}


def _trial_gradient(weights: Tensor, number: int) -> Tensor:
    """A gradient of the trial: random and growing, from the third on nearly orthogonal to each row of the weights."""
    gradient = torch.randn(weights.shape, generator=torch.Generator().manual_seed(number)) * 2.0**number
    if number > 1:
        gradient -= 0.97 * weights * (gradient * weights).sum(1, keepdim=True) / weights.square().sum(1, keepdim=True)
    return gradient


class _RefusedError(ValueError):
    """Says what an optimizer cannot do."""


_NOT_ELEMENTWISE_WORDS = (
    "is not element-wise: a slice of a tensor is not updated as the whole tensor is, so shards cannot run it"
)
_NOT_RESUMED_WORDS = "keeps numbers of its own that no checkpoint of shards holds: a resumed run would be another one"
