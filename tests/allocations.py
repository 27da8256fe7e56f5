"""Measures the memory that operations of torch allocate, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Records, as a context, how large the largest tensor is that an operation of this thread makes.

    Views and results that are written into given tensors are not counted. ``largest``: bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and _storage(leaf) not in known]
        self.largest = max([self.largest, *(one.untyped_storage().nbytes() for one in made)])
        return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
