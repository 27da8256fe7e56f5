"""Foreign tensors as stacks of submatrices of ours: assembled from ranges and read back, element by element."""

import pytest
import torch

from megatron.optimus.checkpoint import CheckpointError
from megatron.optimus.convert.tensor_map import ForeignTensor, RangeReader, Submatrix, assemble, rows_of, stack_rows

OURS = {
    "q": torch.arange(24.0).view(6, 4),
    "k": torch.arange(100.0, 112.0).view(3, 4),
    "bias": torch.arange(200.0, 206.0),
    "experts": torch.arange(300.0, 324.0).view(2, 3, 4),
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in OURS.items()}
# Two ranks: fused rows of q and k in turn, a bias that both need, experts cut into columns, padding below.
FOREIGN = [
    ForeignTensor("qk.0", (5, 4), (Submatrix("q", 0, 3, 0, 4), Submatrix("k", 0, 2, 0, 4))),
    ForeignTensor("qk.1", (6, 4), (Submatrix("q", 3, 3, 0, 4), Submatrix("k", 2, 1, 0, 4)), padding=2),
    rows_of("bias", "bias", (6,)),
    ForeignTensor("bias.again", (6,), (Submatrix("bias", 0, 6, 0, 1),), copy=True),
    ForeignTensor("experts.left", (6, 2), (Submatrix("experts", 0, 6, 0, 2),)),
    ForeignTensor("experts.right", (6, 2), (Submatrix("experts", 0, 6, 2, 2),)),
]
EXPECTED = {
    "qk.0": torch.cat([OURS["q"][:3], OURS["k"][:2]]),
    "qk.1": torch.cat([OURS["q"][3:], OURS["k"][2:], torch.zeros(2, 4)]),
    "bias": OURS["bias"],
    "bias.again": OURS["bias"],
    "experts.left": OURS["experts"].view(6, 4)[:, :2],
    "experts.right": OURS["experts"].view(6, 4)[:, 2:],
}


def read(name: str, start: int, stop: int) -> torch.Tensor:
    return OURS[name].flatten()[start:stop]


@pytest.mark.parametrize("tensor", FOREIGN, ids=lambda tensor: tensor.key)
def test_a_foreign_tensor_is_assembled_from_ours(tensor: ForeignTensor) -> None:
    found = assemble(tensor, SHAPES, read, torch.float64)
    assert found.dtype is torch.float64 and found.shape == tensor.shape
    assert torch.equal(found, EXPECTED[tensor.key].double())


@pytest.mark.parametrize("name", OURS)
def test_every_range_of_rows_is_read_from_foreign_tensors(name: str) -> None:
    reader = RangeReader(FOREIGN, SHAPES, "here")
    width = OURS[name].shape[-1] if OURS[name].dim() > 1 else 1
    rows = OURS[name].numel() // width
    for first in range(rows):
        for last in range(first + 1, rows + 1):
            found = reader.read(name, first * width, last * width, EXPECTED.__getitem__)
            assert torch.equal(found, read(name, first * width, last * width)), (first, last)


def test_tensors_that_hold_too_little_are_refused() -> None:
    with pytest.raises(CheckpointError, match="here: experts needs 24 elements, the tensors found for it hold 12"):
        RangeReader(FOREIGN[:-1], SHAPES, "here")


def test_rows_are_stacked_where_they_are_equally_wide() -> None:
    both = stack_rows(rows_of("gate_up", "q", (2, 4)), rows_of("up", "q", (3, 4), start=12))
    assert (both.key, both.shape) == ("gate_up", (5, 4))
    assert torch.equal(assemble(both, SHAPES, read, torch.float32), OURS["q"][[0, 1, 3, 4, 5]])
    with pytest.raises(ValueError, match="gate: rows of 1 columns below rows of 4"):
        stack_rows(rows_of("gate", "q", (2, 4)), rows_of("bias", "bias", (6,)))
