"""Splits a whole weight into ranks' parts, and marks a parameter with the part that it is.

Megatron's marks: ``tensor_model_parallel`` (True: other tensor-parallel ranks have other values), ``partition_dim``,
``partition_stride``. Ours: ``partition_index`` of ``partition_count``, ``global_shape`` of the whole weight, and
``global_boxes``, the boxes of the whole weight that, flattened and concatenated, are the parameter's elements. A
parameter that every rank has whole carries no marks. The initial weights, checkpoints and the gradient norm read them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


def block_of(whole: Tensor, dim: int, index: int, count: int, stride: int = 1) -> Tensor:
    """Takes part ``index`` of ``count`` equal parts along ``dim``, as a view where torch can give one.

    ``stride`` matrices lie one after the other along ``dim`` and each of them is cut: 2 for gate and up in one weight.
    """
    return whole.unflatten(dim, (stride, count, -1)).select(dim + 1, index).flatten(dim, dim + 1)


Box = tuple[tuple[int, int], ...]  # [start, stop) in every dimension


def block_boxes(
    shape: Sequence[int], dim: int, index: int, count: int, stride: int = 1, rows: Sequence[int] | None = None
) -> tuple[Box, ...]:
    """Lists the boxes of a tensor of ``shape`` that ``block_of`` it is made of, in the order of its elements.

    ``rows``: of dim 0 these only.
    """
    size = shape[dim] // stride  # of one of the matrices
    part = size // count
    whole = [(0, length) for length in shape]
    boxes = []
    for row in range(1) if rows is None else rows:
        for matrix in range(stride):
            box = list(whole)
            if rows is not None:
                box[0] = (row, row + 1)
            box[dim] = (matrix * size + index * part, matrix * size + (index + 1) * part)
            boxes.append(tuple(box))
    return tuple(boxes)


def split_parameter(
    param: nn.Parameter,
    dim: int,
    index: int,
    count: int,
    *,
    stride: int = 1,
    whole: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
) -> nn.Parameter:
    """Makes a rank's part of a parameter, with the marks; other attributes are kept.

    ``whole``, ``rows``: where param is ``rows`` of dim 0 of a weight of shape ``whole``.
    """
    shape = tuple(param.shape if whole is None else whole)
    part = nn.Parameter(block_of(param.detach(), dim, index, count, stride).clone())
    part.__dict__.update(param.__dict__)
    marks = dict(
        tensor_model_parallel=True,
        partition_dim=dim,
        partition_stride=stride,
        partition_index=index,
        partition_count=count,
        global_shape=shape,
        global_boxes=block_boxes(shape, dim, index, count, stride, rows),
    )
    for name, value in marks.items():
        setattr(part, name, value)
    return part


def local_shard_of(whole: Tensor, param: Tensor, *, dropped_dims: int = 0) -> Tensor:
    """Takes the part of a whole weight that ``param`` is.

    ``dropped_dims``: so many leading dims of ``param`` are absent from ``whole``.
    """
    if not hasattr(param, "partition_dim"):
        return whole
    dim = param.partition_dim - dropped_dims
    index, count = param.partition_index, param.partition_count  # type: ignore[attr-defined]
    return block_of(whole, dim, index, count, param.partition_stride)  # type: ignore[attr-defined]


def whole_shape(param: Tensor) -> tuple[int, ...]:
    """Shape of the whole weight of which ``param`` is all or a part."""
    return getattr(param, "global_shape", tuple(param.shape))
