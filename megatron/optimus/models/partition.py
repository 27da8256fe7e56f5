"""Which part of a whole weight a rank's parameter is: marks on the parameter, and the slice they describe.

Megatron's marks: ``tensor_model_parallel`` (True), ``partition_dim``, ``partition_stride``; and ours: ``global_shape``
(of the whole weight), ``partition_index`` of ``partition_count``. Parameters that every rank has whole carry none. The
initial weights, checkpoints and the gradient norm read them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def block_of(whole: Tensor, dim: int, index: int, count: int, stride: int = 1) -> Tensor:
    """Part ``index`` of ``count`` equal parts along ``dim``, as a view where torch can give one.

    ``stride`` matrices lie one after the other along ``dim`` and each of them is cut: 2 for gate and up in one weight.
    """
    return whole.unflatten(dim, (stride, count, -1)).select(dim + 1, index).flatten(dim, dim + 1)


def split_parameter(
    param: nn.Parameter, dim: int, index: int, count: int, *, stride: int = 1, whole: torch.Size | None = None
) -> nn.Parameter:
    """A rank's part of a parameter, with the marks; other attributes are kept. ``whole``: its shape, if not param's."""
    part = nn.Parameter(block_of(param.detach(), dim, index, count, stride).clone())
    part.__dict__.update(param.__dict__)
    marks = dict(
        tensor_model_parallel=True,
        partition_dim=dim,
        partition_stride=stride,
        partition_index=index,
        partition_count=count,
        global_shape=tuple(whole or param.shape),
    )
    for name, value in marks.items():
        setattr(part, name, value)
    return part


def own_part(whole: Tensor, param: Tensor, *, dropped_dims: int = 0) -> Tensor:
    """The part of a whole weight that ``param`` is; ``dropped_dims`` leading dims of it are absent from ``whole``."""
    if not getattr(param, "tensor_model_parallel", False):
        return whole
    dim = param.partition_dim - dropped_dims  # type: ignore[attr-defined]
    index, count = param.partition_index, param.partition_count  # type: ignore[attr-defined]
    return block_of(whole, dim, index, count, param.partition_stride)  # type: ignore[attr-defined]


def whole_shape(param: Tensor) -> tuple[int, ...]:
    """Shape of the weight of which ``param`` is all or a part."""
    return getattr(param, "global_shape", tuple(param.shape))
