"""Optimizers that update flat shards of parameters, and the registry of those that a configuration can name.

Two kinds of class work together. A torch optimizer (``torch.optim.AdamW``, ``Lion`` ...) is what users construct: it
holds the parameter groups with their options. A ``ShardOptimizer`` holds the arithmetic: it updates the part of a flat
buffer that this rank owns. ``shard_optimizer_for`` finds the second for the first.

To add an optimizer, write one file here with both classes; it is found by the name of its torch optimizer:

- element-wise: a ``ShardOptimizer`` whose ``update_`` may be plain torch. For a fused kernel derive from
  ``ElementwiseOptimizer`` instead (elementwise.py has the existing ones), add its hyperparameters to kernels/options.py
  and the function, under one name, to kernels/reference.py, cpu.py and triton_ops.py;
  In plain torch and fast enough: a ``BlockOptimizer`` with ``update_block`` (adopt.py);
- sums over whole tensors: a ``TensorOptimizer`` with ``update_tensors_`` (lars.py);
- whole matrices: a ``MatrixOptimizer`` with ``update_matrices_`` (muon.py is the example); where the states are whole
  matrices too, an ``OwnerOptimizer`` with ``matrix_states`` and ``direction`` (soap.py), and a ``MatrixAndAdamW``;
- either way a ``ShardableOptimizer`` with the options, whose ``rule`` it is.

Checkpoints, resharding and 8-bit states need nothing more; the update itself must honour ``StepScalars.skip``. The
names in ``state_kinds`` must not change, since checkpoints hold states under them. tests/unit/deepspeed_ext/optimizers/
test_new_optimizer.py adds one of each kind.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import torch

from deepspeed_ext.optimizers.apex import ShardFusedAdam, is_fused_adam
from deepspeed_ext.optimizers.base import (
    MatrixOptimizer,
    Shard,
    ShardableOptimizer,
    ShardOptimizer,
    StepScalars,
    WholeMatrices,
)
from deepspeed_ext.optimizers.elementwise import ElementwiseOptimizer, Lion, ShardAdam, ShardSGD
from deepspeed_ext.optimizers.muon import Muon, ShardMuon
from deepspeed_ext.optimizers.owner_states import MatrixAndAdamW, OwnerOptimizer
from deepspeed_ext.optimizers.wrapped import WrappedOptimizer

__all__ = [
    "OPTIMIZERS",
    "OWN_OPTIMIZERS",
    "ElementwiseOptimizer",
    "Lion",
    "MatrixAndAdamW",
    "MatrixOptimizer",
    "Muon",
    "OwnerOptimizer",
    "Shard",
    "ShardOptimizer",
    "ShardableOptimizer",
    "StepScalars",
    "WholeMatrices",
    "library_optimizer",
    "own_optimizer",
    "shard_optimizer_for",
]

OptimizerClass = Callable[..., torch.optim.Optimizer]


def _own_classes() -> dict[str, type[ShardableOptimizer]]:
    """The torch optimizers that the modules of this folder define, by name."""
    modules = [f"{__name__}.{found.name}" for found in pkgutil.iter_modules(__path__) if not found.ispkg]
    classes = [value for name in modules for value in vars(importlib.import_module(name)).values()]
    return {
        one.__name__: one
        for one in classes
        if isinstance(one, type)
        and issubclass(one, ShardableOptimizer)
        and one not in (ShardableOptimizer, MatrixAndAdamW)
    }


OWN_OPTIMIZERS = _own_classes()
# "optimizer": {"type": NAME} in a DeepSpeed configuration; case does not matter. Those that need parameter groups of
# their own, as Muon does, are absent: users pass them as optimizer=.
OPTIMIZERS: dict[str, OptimizerClass] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "SGD": torch.optim.SGD,
    **{name: one for name, one in OWN_OPTIMIZERS.items() if not one.needs_groups},
}


def own_optimizer(name: str) -> type[ShardableOptimizer]:
    """Finds a torch optimizer of this folder; "schedule-free-sgd" is ScheduleFreeSGD.

    Raises:
        ValueError: there is none of that name.
    """
    by_name = {known.lower(): one for known, one in OWN_OPTIMIZERS.items()}
    found = by_name.get(name.replace("-", "").lower())
    if found is None:
        near = difflib.get_close_matches(name.replace("-", "").lower(), by_name, 1)
        hint = f"; did you mean {by_name[near[0]].__name__}?" if near else ""
        raise ValueError(f"optimizer {name!r} is not one of {', '.join(OWN_OPTIMIZERS)}{hint}")
    return found


def library_optimizer(name: str) -> OptimizerClass:
    """Finds an optimizer of the package pytorch_optimizer, whatever the case of its name.

    Raises:
        ValueError: the package is not installed, or has none of that name.
    """
    try:
        library = importlib.import_module("pytorch_optimizer")
    except ModuleNotFoundError:
        raise ValueError("the package is not installed; pip install pytorch_optimizer") from None
    found = {one.__name__.lower(): one for one in vars(library).values() if _is_optimizer(one)}
    if name.lower() not in found:
        names = [one.__name__ for one in found.values()]
        near = difflib.get_close_matches(name.lower(), found, 1)
        hint = f"did you mean {found[near[0]].__name__}?" if near else f"it has {', '.join(sorted(names))}"
        raise ValueError(f"pytorch_optimizer has no {name}; {hint}")
    return found[name.lower()]


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer


def shard_optimizer_for(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> ShardOptimizer:
    """Returns the object that runs a torch optimizer on shards of the parameters of one parameter group.

    Optimizers of this package return their own. torch's AdamW, Adam, SGD and Muon have fused updates; their subclasses
    may compute something else and do not. Any other optimizer is taken for element-wise and runs as it is.

    Args:
        optimizer: holds the options.
        group: one of its ``param_groups``.

    Returns:
        An object to be used for ``new_state`` and ``update_`` of all shards of this group.

    Raises:
        ValueError: the optimizer cannot run on shards, see WrappedOptimizer.
    """
    if isinstance(optimizer, ShardableOptimizer):
        return optimizer.shard_optimizer(group)
    kind = type(optimizer)
    if kind in (torch.optim.Adam, torch.optim.AdamW) and not group["amsgrad"]:
        return ShardAdam()
    if kind is torch.optim.SGD:
        return ShardSGD(group["momentum"])
    if kind is getattr(torch.optim, "Muon", None):  # from torch 2.9 on
        return ShardMuon()
    if is_fused_adam(optimizer):
        return ShardFusedAdam(optimizer, group)
    return WrappedOptimizer(optimizer, group)
