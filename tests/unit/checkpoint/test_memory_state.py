"""The file of one rank's state in host memory: what comes back from it, and what it says of itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megatron.optimus.checkpoint.manifest import Manifest
from megatron.optimus.checkpoint.memory_state import MemoryState, StateFile, describe, digests_of, layout_of
from megatron.optimus.checkpoint.slices import TensorSlice, tensors_to_copy
from megatron.optimus.platform.memory_slots import DATA_START


def slices_of(value: float) -> list[TensorSlice]:
    """Parts of two tensors, of which one is cut into boxes, and one without elements."""
    box = ((0, 4), (3, 6))
    return [
        TensorSlice("w", "master", (4, 6), 0, 6, torch.arange(6, dtype=torch.float32) + value, box),
        TensorSlice("none", "buffer", (5,), 2, 2, torch.empty(0)),
        TensorSlice("v", "weight", (3000,), 0, 3000, torch.full((3000,), value, dtype=torch.bfloat16)),
    ]


def written(file: StateFile, step: int) -> MemoryState:
    """A state of this step, of which a checkpoint on disk has ``w`` alone."""
    slices = slices_of(step)
    file.clear()
    views = file.snapshot.take(tensors_to_copy(slices))
    file.snapshot.wait()
    base = file.data(file.num_bytes)
    index = {
        "layout": layout_of(slices),
        "start": 11,
        "rank": 2,
        "ranks": 4,
        "pieces": [describe(one, is_on_disk=one.name == "w") for one in slices if one.start < one.stop],
        "sizes": file.sizes,
        "offsets": [view.data_ptr() - base.data_ptr() for view in views],
        "manifest": Manifest("full", step, 8 * step, {}, {}, {}, {}).to_bytes().decode(),
        "digests": digests_of(base)[0],
    }
    file.commit(step, file.num_bytes, index)
    state = file.state()
    assert state is not None
    return state


@pytest.fixture
def file(tmp_path: Path) -> StateFile:
    return StateFile(tmp_path / "rank-2.0", torch.device("cpu"))


def test_a_state_comes_back_from_its_file(file: StateFile) -> None:
    assert file.state() is None
    written(file, 7)
    again = StateFile(file.path, torch.device("cpu"))  # another process
    state = again.state()
    assert state is not None and state.is_good()
    assert (state.version, state.owner, state.manifest.consumed_samples) == ((7, 11), 2, 56)
    found = slices_of(0)
    again.fill(found, state)
    for one, expected in zip(found, slices_of(7), strict=True):
        assert torch.equal(one.tensor, expected.tensor)
    file.clear()
    assert again.state() is None


def test_one_wrong_bit_and_a_file_that_was_cut_are_found(file: StateFile, monkeypatch: pytest.MonkeyPatch) -> None:
    state = written(file, 3)
    descriptor = os.open(file.path, os.O_RDWR)
    [byte] = os.pread(descriptor, 1, DATA_START + 4200)
    os.pwrite(descriptor, bytes([byte ^ 4]), DATA_START + 4200)
    os.close(descriptor)
    assert file.state() == state and not state.is_good()

    def full(*args: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    os.truncate(file.path, DATA_START)
    cut = MemoryState(StateFile(file.path, torch.device("cpu")), state.generation)
    assert not cut.is_good(), "the other ranks wait for what this one says"


def test_ranks_of_another_layout_read_what_belongs_to_a_checkpoint_on_disk(file: StateFile) -> None:
    [piece] = written(file, 5).slices_on_disk({})
    expected = slices_of(5)[0]
    assert (piece.name, piece.kind, piece.region, piece.dtype) == ("w", "master", expected.region, torch.float32)
    assert torch.equal(piece.tensor, expected.tensor)


def test_layouts_are_equal_where_one_copy_can_be_the_other(file: StateFile) -> None:
    assert layout_of(slices_of(1)) == layout_of(slices_of(2)) != layout_of(slices_of(1)[:2])
