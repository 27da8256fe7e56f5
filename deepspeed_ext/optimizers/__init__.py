"""Optimizers that update flat shards of parameters, and the registry of those that a configuration can name.

Two kinds of class work together. A torch optimizer (``torch.optim.AdamW``, ``Lion`` ...) is what users construct: it
holds the parameter groups with their options. A ``ShardOptimizer`` holds the arithmetic: it updates the part of a flat
buffer that this rank owns. ``shard_optimizer_for`` finds the second for the first.

To add an optimizer, write one file here with both classes and register it by one line in ``OPTIMIZERS``:

- element-wise: a ``ShardOptimizer`` whose ``update_`` may be plain torch. For a fused kernel derive from
  ``ElementwiseOptimizer`` instead (elementwise.py has the existing ones), add its hyperparameters to kernels/options.py
  and the function, under one name, to kernels/reference.py, cpu.py and triton_ops.py;
- whole matrices: a ``MatrixOptimizer`` with ``update_matrices_`` (muon.py is the example);
- either way a ``ShardableOptimizer`` with the options, whose ``shard_optimizer`` returns it.

Checkpoints, resharding and 8-bit states need nothing more; the update itself must honour ``StepScalars.skip``. The
names in ``state_kinds`` must not change, since checkpoints hold states under them. tests/unit/deepspeed_ext/optimizers/
test_new_optimizer.py adds one of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

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
from deepspeed_ext.optimizers.wrapped import WrappedOptimizer

__all__ = [
    "OPTIMIZERS",
    "ElementwiseOptimizer",
    "Lion",
    "MatrixOptimizer",
    "Muon",
    "Shard",
    "ShardOptimizer",
    "ShardableOptimizer",
    "StepScalars",
    "WholeMatrices",
    "shard_optimizer_for",
]

# "optimizer": {"type": NAME} in a DeepSpeed configuration; case does not matter. Muon is absent: it needs parameter
# groups that say which parameters are hidden matrices, so users pass it as optimizer=.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "SGD": torch.optim.SGD,
    "Lion": Lion,
}


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
    if kind is torch.optim.Muon:
        return ShardMuon()
    return WrappedOptimizer(optimizer, group)
