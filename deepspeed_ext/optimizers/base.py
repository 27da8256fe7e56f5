"""Interfaces between the sharded optimizer (deepspeed_ext.zero) and the arithmetic of each optimizer.

deepspeed_ext.zero owns flat buffers, reduction, gradient norm and all-gather. A ``ShardOptimizer`` owns the arithmetic:
it reads the summed gradient once and writes master weights, states and parameters. The host never waits for the device:
clip coefficient, skip flag and step number are 0-dim device tensors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from deepspeed_ext.optimizers import states

AVERAGE = "ema"  # kind of the average in checkpoints


@dataclass
class Shard:
    """The part of one bucket that this rank owns: 1-D contiguous tensors of the same length n on one device.

    Padding (elements of no parameter) must be zero in ``master`` and ``grad``; every optimizer keeps it at zero.

    Attributes:
        master: fp32 [n].
        grad: fp32, bf16 or fp16 [n], the unscaled SUM over the ranks of the group. An optimizer may overwrite it and
            must not keep it.
        param: fp32, bf16 or fp16 [n], this rank's slice of the model's parameters, where the new values are written. It
            is ``master`` itself for fp32 parameters.
        state: tensors made by ``ShardOptimizer.new_state``.
        average: fp32 [n], a moving average of ``master`` (``EPZeroOptimizer.keep_average``); None: none is kept.
    """

    master: Tensor
    grad: Tensor
    param: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)
    average: Tensor | None = None

    @property
    def kept(self) -> dict[str, Tensor]:
        """The states and the average by name, as files keep them beside the master."""
        return self.state if self.average is None else {**self.state, AVERAGE: self.average}


@dataclass(frozen=True)
class StepScalars:
    """Scalars of one step as 0-dim fp32 tensors on the shard's device; reading them on the host would stall the step.

    Attributes:
        scale: factor on the gradient, clip coefficient / (gradient divisor * loss scale).
        skip: 1.0 if the gradient norm was not finite, then nothing at all may change; else 0.0.
        step: number of this step if it is applied, 1 for the first.
        read_host_step: returns ``step`` on the host; ``host_step`` calls it once.
        shares_device: a forward runs at the same time; kernels leave it most of the device.
    """

    scale: Tensor
    skip: Tensor
    step: Tensor
    read_host_step: Callable[[], int]
    shares_device: bool = False

    @classmethod
    def of(cls, device: torch.device, step: int, scale: float = 1.0, skip: bool = False) -> StepScalars:
        """Copies values of the host to ``device``."""
        values = torch.tensor([scale, float(skip), float(step)], dtype=torch.float32, device=device)
        scale_, skip_, step_ = values.unbind()
        return cls(scale_, skip_, step_, lambda: step)

    @cached_property
    def host_step(self) -> int:
        """``step`` on the host, for optimizers that do something in every n-th step only.

        It follows from what the steps before did: the device, which is at this step's forward or backward, is not
        waited for.
        """
        return self.read_host_step()


class ShardOptimizer(ABC):
    """Updates shards of one parameter group. It keeps no state itself, so one object serves any number of shards.

    ``options`` of all methods is the live parameter group: a changed lr takes effect at the next step. Keys that decide
    what the states look like (``state_dtype``) must not change after ``new_state``.

    Attributes:
        state_kinds: names of the element-wise states, under which checkpoints hold them ("exp_avg", ...).
        unsigned_kinds: states that are never negative; their 8-bit code is finer.
        weight_kinds: states that are weights themselves, as schedule-free's "z". The model then computes with other
            weights than the masters (``write_training_point``), so that fp32 parameters have masters beside them too.
    """

    state_kinds: tuple[str, ...] = ()
    unsigned_kinds: frozenset[str] = frozenset()
    weight_kinds: tuple[str, ...] = ()

    def new_state(self, shard: Shard, options: Mapping[str, Any]) -> dict[str, Tensor]:
        """Creates the zero states of a shard.

        Args:
            shard: gives length and device.
            options: ``state_dtype`` is "fp32" (the default), "bf16" or "int8".

        Returns:
            One tensor [n] for each of ``state_kinds``, and for int8 its fp32 block scales under "<kind>.scale".

        Raises:
            ValueError: ``state_dtype`` is unknown.
        """
        state_dtype = states.StateDtype.parse(options.get("state_dtype", "fp32"))
        state: dict[str, Tensor] = {}
        for kind in self.state_kinds:
            state.update(states.zeros(kind, shard.master, state_dtype, signed=kind not in self.unsigned_kinds))
        return state

    @abstractmethod
    def update_(self, shard: Shard, options: Mapping[str, Any], scalars: StepScalars) -> None:
        """Takes one step: writes master, states and parameter of the shard. Does not wait for the device.

        Args:
            shard: its gradient is ``shard.grad * scalars.scale``.
            options: the parameter group.
            scalars: of this step; if ``scalars.skip`` is 1.0, the update must change nothing.
        """

    def write_training_point(self, shard: Shard, options: Mapping[str, Any]) -> None:
        """Writes the parameters that the model is trained with: the masters, rounded, where it has no other."""
        if shard.param.data_ptr() != shard.master.data_ptr():
            shard.param.copy_(shard.master)

    def update_whole_(self, shard: Shard, param: Tensor, options: Mapping[str, Any], scalars: StepScalars) -> None:
        """Takes one step on a parameter that this process holds whole, flattened in ``shard``."""
        self.update_(shard, options, scalars)

    def read_state(self, shard: Shard, kind: str) -> Tensor:
        """Returns one state as fp32 [n]: the live tensor if the state is kept in fp32, else a decoded copy."""
        return states.read(shard.state, kind)

    def write_state(self, shard: Shard, kind: str, value: Tensor) -> None:
        """Sets one state from fp32 [n], rounded to nearest if the state is kept in fewer bits.

        Writing what ``read_state`` returned changes no bit. int8 states move between layouts bit for bit if every shard
        and parameter starts at a multiple of ``states.BLOCK`` elements; else blocks are encoded anew.
        """
        states.write(shard.state, kind, value)


# Gets matrices of one shape [B, M, N] and their states [B, ...] by name; returns as many matrices and the new states.
MatrixFunction = Callable[[Tensor, dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]


class CurvatureOptimizer(ShardOptimizer):
    """An optimizer that also averages an estimate of the loss's curvature, now and then, as Sophia does."""

    @abstractmethod
    def update_curvature_(
        self, shard: Shard, options: Mapping[str, Any], scalars: StepScalars, num_labels: Tensor
    ) -> None:
        """Averages an estimate into the states; the weights stay. Does not wait for the device.

        Args:
            shard: its gradient times ``scalars.scale`` is that of the mean over sampled labels.
            options: the parameter group.
            scalars: as in a step, without clipping.
            num_labels: how many labels of the global batch the mean is over, 0-dim.
        """


class WholeMatrices(Protocol):
    """The whole matrices whose elements lie in the shards of one flat buffer, on several ranks if it is sharded."""

    def transform(self, updates: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> None:
        """Replaces every whole matrix in ``updates`` by ``function`` of it. Collective over the group.

        Args:
            updates: one 1-D tensor for each shard, of the shard's length.
            function: gets any number of matrices of one shape, [B, M, N], and returns as many. Each matrix passes
                through it on one rank only.
        """

    def transform_with_states(self, updates: Sequence[Tensor], function: MatrixFunction, skip: Tensor) -> None:
        """Replaces every whole matrix by what ``function`` makes of it and its states. Collective over the group.

        Args:
            updates: one 1-D tensor for each shard, of the shard's length.
            function: returns new matrices, and of the states those that change; it must not write into its arguments.
            skip: 1.0 leaves all states as they are, else 0.0; 0-dim on the device.
        """

    def ranges(self, shard: int) -> Sequence[tuple[int, int, tuple[int, int]]]:
        """Returns ranges [start, stop) of a shard that hold matrices of one shape: (start, stop, (rows, columns)).

        The shape is that of the whole matrix, of which the shard may hold a part only.
        """


class MatrixOptimizer(ShardOptimizer):
    """Updates whole matrices, as Muon does. Master weights and ``state_kinds`` are flat shards, as for any optimizer.

    ``update_matrices_`` takes the place of ``update_``. What has another shape than the matrix (Kronecker factors,
    eigenbases, projectors) or must not be cut is a *matrix state*: ``matrix_states`` declares its shape, it lives at
    the matrix's owner alone, and ``WholeMatrices.transform_with_states`` hands it out and stores what is returned.
    Checkpoints hold it by parameter and matrix, so it is resumed at any layout, and a skipped step leaves it alone.
    """

    def matrix_states(self, shape: tuple[int, int], options: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Declares the fp32 states that live whole at a matrix's owner; by default there are none.

        Args:
            shape: rows and columns of the whole matrix.
            options: the parameter group.

        Returns:
            For each state its shape. Names must differ from those of ``state_kinds`` and must not change.
        """
        return {}

    def new_matrix_states(
        self, count: int, shape: tuple[int, int], options: Mapping[str, Any], device: torch.device
    ) -> dict[str, Tensor]:
        """Creates the zero states of ``count`` matrices of one shape, fp32 [count, ...] each."""
        declared = self.matrix_states(shape, options)
        return {kind: torch.zeros(count, *sizes, device=device) for kind, sizes in declared.items()}

    def update_(self, shard: Shard, options: Mapping[str, Any], scalars: StepScalars) -> None:
        """Raises TypeError: one shard does not hold whole matrices."""
        raise TypeError(f"{type(self).__name__} updates whole matrices; use update_matrices_")

    @abstractmethod
    def update_matrices_(
        self, shards: Sequence[Shard], matrices: WholeMatrices, options: Mapping[str, Any], scalars: StepScalars
    ) -> None:
        """Takes one step on all shards that a rank owns of one flat buffer. Collective over the buffer's group."""


BATCH_ELEMENTS = 1 << 26  # of matrices that are worked on at once: Newton-Schulz takes about 6 bytes for each


def update_matrices_with_states_(
    batch_BMN: Tensor, states: Mapping[str, Tensor], function: MatrixFunction, skip: Tensor
) -> None:
    """Runs ``function`` on matrices and their states and writes both in place, the states unless ``skip``.

    Large batches go in parts, which bounds the memory of temporaries.
    """
    part = max(1, BATCH_ELEMENTS // batch_BMN[0].numel())
    for start in range(0, len(batch_BMN), part):
        some = slice(start, start + part)
        own = {kind: tensor[some] for kind, tensor in states.items()}
        result_BMN, new = function(batch_BMN[some], own)
        batch_BMN[some] = result_BMN
        for kind, value in new.items():
            own[kind].copy_(torch.where(skip != 0, own[kind], value))


class LocalMatrices:
    """WholeMatrices of one parameter that this process holds whole: ``count`` matrices one after the other."""

    def __init__(self, count: int, shape: tuple[int, int], states: Mapping[str, Tensor] | None = None) -> None:
        self._count, self._shape = count, shape
        self._states = states or {}

    def transform(self, updates: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> None:
        """See WholeMatrices.transform."""
        batch_BMN = updates[0].view(self._count, *self._shape)
        batch_BMN.copy_(function(batch_BMN))

    def transform_with_states(self, updates: Sequence[Tensor], function: MatrixFunction, skip: Tensor) -> None:
        """See WholeMatrices.transform_with_states."""
        update_matrices_with_states_(updates[0].view(self._count, *self._shape), self._states, function, skip)

    def ranges(self, shard: int) -> Sequence[tuple[int, int, tuple[int, int]]]:
        """See WholeMatrices.ranges."""
        return [(0, self._count * self._shape[0] * self._shape[1], self._shape)]


def count_matrices(name: str, shape: Sequence[int], stacked: int = 1) -> tuple[int, tuple[int, int]]:
    """Counts the matrices that one parameter holds.

    Leading dimensions count matrices (the experts of a 3-D weight), and each of those may be several matrices one below
    the other (gate and up projection in one tensor).

    Args:
        name: for the error.
        shape: of the parameter, at least two dimensions.
        stacked: matrices one below the other (the parameter's attribute ``stacked_matrices``).

    Returns:
        The number of matrices and their (rows, columns).

    Raises:
        ValueError: fewer than two dimensions, or rows that ``stacked`` does not divide.
    """
    if len(shape) < 2:
        raise ValueError(f"parameter {name!r} of shape {tuple(shape)} is not a matrix")
    *leading, rows, columns = shape
    if rows % stacked:
        raise ValueError(f"parameter {name!r}: stacked_matrices={stacked} must divide its {rows} rows")
    return math.prod(leading) * stacked, (rows // stacked, columns)


class ShardableOptimizer(torch.optim.Optimizer):
    """Base class of this package's torch optimizers: options in param_groups, arithmetic in a ShardOptimizer.

    Passed to ``deepspeed_ext.initialize``, only its param_groups are used: the sharded optimizer runs the
    ShardOptimizer. Used alone it is an ordinary torch optimizer that runs the same arithmetic on each whole parameter,
    with an fp32 master copy of parameters in a lower precision.

    Attributes:
        rule: the ShardOptimizer.
        needs_groups: its parameter groups must say more than options do, so that a configuration alone cannot name it.
    """

    rule: type[ShardOptimizer]
    needs_groups = False

    def shard_optimizer(self, group: Mapping[str, Any]) -> ShardOptimizer:
        """Returns the object that updates the parameters of ``group``."""
        return self.rule()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned. States keep their dtypes; torch would cast them to the parameter's."""
        super().load_state_dict({**state_dict, "state": {}})
        params = [param for group in self.param_groups for param in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for param, number in zip(params, numbers, strict=True):
            if number in state_dict["state"]:
                self.state[param] = _on_device(state_dict["state"][number], param.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Takes one step on every parameter that has a gradient; returns the closure's loss, None without one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            shard_optimizer = self.shard_optimizer(group)
            for param in group["params"]:
                if param.grad is not None:
                    self._step_param(shard_optimizer, group, param)
        return loss

    def _step_param(self, shard_optimizer: ShardOptimizer, group: dict[str, Any], param: Tensor) -> None:
        state = self.state[param]
        if not state:
            state["step"] = 0
            if param.dtype != torch.float32 or not param.is_contiguous() or shard_optimizer.weight_kinds:
                state["master"] = param.detach().to(torch.float32, copy=True).contiguous().reshape(-1)
        flat = param.detach().reshape(-1)  # a copy only where the parameter is not contiguous
        shard = Shard(
            master=state.get("master", flat),
            grad=param.grad.detach().reshape(-1).clone(),  # type: ignore[union-attr]  # may be overwritten
            param=flat,
            state=state.get("shard", {}),
        )
        if "shard" not in state:
            shard.state = state["shard"] = shard_optimizer.new_state(shard, group)
        state["step"] += 1
        scalars = StepScalars.of(param.device, state["step"])
        if isinstance(shard_optimizer, MatrixOptimizer):
            count, shape = count_matrices("", param.shape, getattr(param, "stacked_matrices", 1))
            if "matrices" not in state:
                state["matrices"] = shard_optimizer.new_matrix_states(count, shape, group, param.device)
            matrices = LocalMatrices(count, shape, state["matrices"])
            shard_optimizer.update_matrices_([shard], matrices, group, scalars)
        else:
            shard_optimizer.update_whole_(shard, param, group, scalars)
        if not param.is_contiguous():
            param.copy_(flat.view(param.shape))


def _on_device(value: Any, device: torch.device) -> Any:
    """A state of a parameter, with the tensors of all dictionaries in it on a device."""
    if isinstance(value, Mapping):
        return {key: _on_device(inner, device) for key, inner in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value
