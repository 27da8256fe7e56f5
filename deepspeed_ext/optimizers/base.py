"""What an update rule is: how one optimizer changes the part of a bucket that a rank owns.

The sharded optimizer (deepspeed_ext.zero) owns buckets, reduction, norm and publishing; a rule owns the arithmetic.
Every rule reads the summed gradient once and writes master, state and parameter, on the device, without the host
waiting for it: what the step has to know (clip coefficient, skip, step number) comes as 0-dim device tensors.

A new optimizer is one new file: a ``ShardOptimizer`` with the arithmetic, and a ``ShardableOptimizer``, which
is what users construct. It runs on whole parameters too, without any sharding; tests compare the two.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from deepspeed_ext.optimizers import states


class ShardPolicy(Enum):
    """What the update of an element depends on. Buckets are cut anywhere under either."""

    FLAT = "flat"  # on that element alone: shards are updated one by one
    MATRIX = "matrix"  # on its whole matrix: a family's shards are updated together, see MatrixOptimizer


@dataclass
class Shard:
    """What one rank owns of one bucket; all tensors are 1-D, contiguous, of the same length n and on one device.

    ``master``: fp32. ``grad``: fp32, bf16 or fp16, the SUM over the group's ranks, unscaled; a rule must not keep it
    and may overwrite it. ``param``: the model's dtype (fp32, bf16 or fp16), this rank's slice of the bucket's
    parameters; the rule writes the new values there. It may be ``master`` itself where no other copy exists. ``state``:
    made by ``new_state``. Elements that belong to no parameter (padding) must hold zeros in master and grad; every rule
    keeps them at zero.
    """

    master: Tensor
    grad: Tensor
    param: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StepScalars:
    """What a step knows, as 0-dim fp32 tensors on the shard's device; reading them on the host would stall the step.

    ``scale``: factor on the gradient, clip coefficient / (gradient divisor * loss scale). ``skip``: 1.0 if the norm was
    not finite: nothing at all may change; else 0.0. ``step``: number of this step if applied, 1 for the first.
    """

    scale: Tensor
    skip: Tensor
    step: Tensor

    @classmethod
    def of(cls, device: torch.device, step: int, scale: float = 1.0, skip: bool = False) -> StepScalars:
        """From host values."""
        values = torch.tensor([scale, float(skip), float(step)], dtype=torch.float32, device=device)
        return cls(*values.unbind())


class ShardOptimizer(ABC):
    """One optimizer's arithmetic on shards; stateless itself, so that one object serves any number of shards.

    ``state_kinds``: names of the element-wise states, under which checkpoints hold them ("exp_avg", ...). ``options``
    in all methods is the live param group, so a changed lr takes effect at the next step; the keys that decide what
    the state looks like (``state_dtype``) must not change after ``new_state``.
    """

    policy: ShardPolicy = ShardPolicy.FLAT
    state_kinds: tuple[str, ...] = ()
    unsigned_kinds: frozenset[str] = frozenset()  # states that are never negative; they get the finer 8-bit code

    def new_state(self, shard: Shard, options: Mapping[str, Any]) -> dict[str, Tensor]:
        """Zero states for a shard, in ``options["state_dtype"]`` ("fp32" by default, "bf16", "int8").

        "int8" adds one fp32 tensor of block scales per kind, under "<kind>.scale". Raises ValueError for another
        state_dtype.
        """
        state_dtype = states.StateDtype.parse(options.get("state_dtype", "fp32"))
        state: dict[str, Tensor] = {}
        for kind in self.state_kinds:
            state.update(states.zeros(kind, shard.master, state_dtype, signed=kind not in self.unsigned_kinds))
        return state

    @abstractmethod
    def update_(self, shard: Shard, options: Mapping[str, Any], scalars: StepScalars) -> None:
        """One step: new master, state and param of the shard from its gradient; nothing changes if ``scalars.skip``.

        Launches work on the device and does not wait for it.
        """

    def read_state(self, shard: Shard, kind: str) -> Tensor:
        """One state as fp32 [n]: the live tensor where it is kept in fp32, else a decoded copy."""
        return states.read(shard.state, kind)

    def write_state(self, shard: Shard, kind: str, value: Tensor) -> None:
        """Sets one state from fp32 [n], rounded to nearest where it is kept in less.

        Writing what ``read_state`` returned changes no bit. int8 states move between layouts bit for bit as long as
        every shard and parameter starts at a multiple of ``states.BLOCK`` elements, else blocks are re-encoded.
        """
        states.write(shard.state, kind, value)


class WholeMatrices(Protocol):
    """The matrices behind the shards of one family, whose parts may lie on several ranks."""

    def transform(self, updates: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> None:
        """Replaces every whole matrix in ``updates`` by what ``function`` makes of it. Collective over the group.

        ``updates``: one 1-D tensor for each shard, of its length. ``function`` gets any number of matrices of one
        shape, [B, M, N], and returns as many; each matrix passes through it on one rank only.
        """

    def ranges(self, shard: int) -> Sequence[tuple[int, int, tuple[int, int]]]:
        """Stretches [start, stop) of a shard that belong to matrices of one shape: (start, stop, (rows, columns))."""


class MatrixOptimizer(ShardOptimizer):
    """A rule whose update of an element depends on its whole matrix; masters and states are flat shards all the same.

    ``update_matrices_`` takes the place of ``update_``.
    """

    policy = ShardPolicy.MATRIX

    def update_(self, shard: Shard, options: Mapping[str, Any], scalars: StepScalars) -> None:
        """Not for this kind of rule: raises TypeError."""
        raise TypeError(f"{type(self).__name__} updates whole families: use update_matrices_")

    @abstractmethod
    def update_matrices_(
        self, shards: Sequence[Shard], matrices: WholeMatrices, options: Mapping[str, Any], scalars: StepScalars
    ) -> None:
        """One step on all shards that a rank owns of one family. Collective over the family's group."""


class LocalMatrices:
    """WholeMatrices of one parameter that this process holds whole: ``count`` matrices one after the other."""

    def __init__(self, count: int, shape: tuple[int, int]) -> None:
        self._count, self._shape = count, shape

    def transform(self, updates: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> None:
        """See WholeMatrices.transform."""
        batch_BMN = updates[0].view(self._count, *self._shape)
        batch_BMN.copy_(function(batch_BMN))

    def ranges(self, shard: int) -> Sequence[tuple[int, int, tuple[int, int]]]:
        """See WholeMatrices.ranges."""
        return [(0, self._count * self._shape[0] * self._shape[1], self._shape)]


def count_matrices(name: str, shape: Sequence[int], stacked: int = 1) -> tuple[int, tuple[int, int]]:
    """How many matrices a parameter is, and their (rows, columns).

    Leading dimensions count matrices (the experts of a 3-D weight), and each of those is ``stacked`` matrices one below
    the other (the parameter's attribute ``stacked_matrices``: gate and up projection in one tensor). Raises ValueError
    for fewer than two dimensions, or rows that ``stacked`` does not divide.
    """
    if len(shape) < 2:
        raise ValueError(f"parameter {name!r} of shape {tuple(shape)} is not a matrix")
    *leading, rows, columns = shape
    if rows % stacked:
        raise ValueError(f"parameter {name!r}: stacked_matrices={stacked} must divide its {rows} rows")
    return math.prod(leading) * stacked, (rows // stacked, columns)


class ShardableOptimizer(torch.optim.Optimizer):
    """Base of this package's torch optimizers: options in param_groups, arithmetic in an ShardOptimizer.

    Handed to ``deepspeed_ext.initialize`` only its param_groups serve and the sharded optimizer runs the rule. Used
    alone it is a plain torch optimizer that runs the same rule on each whole parameter, with an fp32 master copy of
    parameters in a lower precision.
    """

    def shard_optimizer(self, group: Mapping[str, Any]) -> ShardOptimizer:
        """The rule that updates the parameters of ``group``."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step on every parameter that has a gradient. Returns the closure's loss, None without one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rule = self.shard_optimizer(group)
            for param in group["params"]:
                if param.grad is not None:
                    self._step_param(rule, group, param)
        return loss

    def _step_param(self, rule: ShardOptimizer, group: dict[str, Any], param: Tensor) -> None:
        state = self.state[param]
        if not state:
            state["step"] = 0
            if param.dtype != torch.float32 or not param.is_contiguous():
                state["master"] = param.detach().float().contiguous().reshape(-1)
        flat = param.detach().reshape(-1)  # a copy only where the parameter is not contiguous
        shard = Shard(
            master=state.get("master", flat),
            grad=param.grad.detach().reshape(-1).clone(),  # type: ignore[union-attr]  # rules may overwrite it
            param=flat,
            state=state.get("shard", {}),
        )
        if "shard" not in state:
            shard.state = state["shard"] = rule.new_state(shard, group)
        state["step"] += 1
        scalars = StepScalars.of(param.device, state["step"])
        if isinstance(rule, MatrixOptimizer):
            matrices = LocalMatrices(*count_matrices("", param.shape, getattr(param, "stacked_matrices", 1)))
            rule.update_matrices_([shard], matrices, group, scalars)
        else:
            rule.update_(shard, group, scalars)
        if not param.is_contiguous():
            param.copy_(flat.view(param.shape))
