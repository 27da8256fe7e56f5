"""Saves and loads by real gloo ranks: any layout to any other, and a failure on one rank known to all."""

import errno
import logging
import os
from pathlib import Path

import pytest

from megatron.optimus.checkpoint import CheckpointError, commit, latest, load, save
from tests.helpers import run_distributed
from tests.unit.checkpoint.helpers import (
    CONFIG,
    assert_holds,
    find_loadable,
    layout_slices,
    whole_requests,
    whole_state,
)


def _save(root, step, rank, world, ep, interleaved=False):
    slices = layout_slices(whole_state(step), rank, world, ep, interleaved=interleaved, loading=False)
    return save(root, step, slices, kind="full", consumed_samples=step, config=CONFIG, metadata={}, retain=2)


def _load(path, step, rank, world, ep, interleaved=False):
    slices = layout_slices(whole_state(step), rank, world, ep, interleaved=interleaved, loading=True)
    load(path, slices)
    assert_holds([s for s in slices if s.start < s.stop], whole_state(step))


def _save_all(rank, world, root, ep, interleaved):
    return [_save(root, step, rank, world, ep, interleaved) for step in (1, 2, 3)]


def _load_and_save_again(rank, world, root, path, again):
    for ep in (1, 2, 4):
        if world % ep == 0:
            for interleaved in (False, True):
                _load(path, 3, rank, world, ep, interleaved)
    found = find_loadable(root)
    _save(again, 3, rank, world, world)
    return found


@pytest.mark.parametrize("ep, interleaved", [(1, False), (2, False), (2, True), (4, True)])
def test_four_ranks_to_any_other_layout_and_back(tmp_path, ep, interleaved):
    root = tmp_path / "a"
    paths = run_distributed(_save_all, 4, root, ep, interleaved)
    expected = [root / f"step-{step:08d}" for step in (1, 2, 3)]
    assert paths == [expected] * 4
    assert sorted(root.iterdir()) == expected[1:]
    requests = whole_requests(whole_state(3))
    load(expected[2], requests)
    assert_holds(requests, whole_state(3))
    found = run_distributed(_load_and_save_again, 2, root, expected[2], tmp_path / "b")
    assert found == [expected[2]] * 2
    requests = whole_requests(whole_state(3))
    load(latest(tmp_path / "b"), requests)
    assert_holds(requests, whole_state(3))


def _save_with_full_disk(rank, world, root, failing, function):
    _save(root, 1, rank, world, 2)
    if rank == failing:

        def full(*args, **kwargs):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        setattr(commit, function, full)
    try:
        _save(root, 2, rank, world, 2)
    except CheckpointError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("failing, function", [(3, "write_at"), (0, "write_at"), (0, "write_synced")])
def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path, failing, function):
    answers = run_distributed(_save_with_full_disk, 4, tmp_path, failing, function)
    for answer in answers:
        assert f"failed on rank {failing}" in answer and "No space left on device" in answer
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    requests = whole_requests(whole_state(1))
    load(find_loadable(tmp_path), requests)
    assert_holds(requests, whole_state(1))


def _save_with_bad_slices(rank, world, root):
    slices = layout_slices(whole_state(1), rank, world, 1, interleaved=False, loading=False)
    if rank == 2:
        slices = slices[1:]
    try:
        save(root, 1, slices, kind="full", consumed_samples=1, config=CONFIG, metadata={})
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_part_that_nobody_writes_is_an_error_on_all(tmp_path):
    answers = run_distributed(_save_with_bad_slices, 4, tmp_path)
    assert "tensor dense.weight (master): pieces: elements" in answers[0] and "missing" in answers[0]
    assert all("failed on rank 0" in answer for answer in answers)
    assert list(tmp_path.iterdir()) == []


def _find(rank, world, root):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("optimus").addHandler(handler)
    try:
        return find_loadable(root), messages
    except CheckpointError as error:
        return str(error), messages


def test_ranks_share_the_verification_and_agree_on_the_fallback(tmp_path):
    run_distributed(_save_all, 4, tmp_path, 2, False)
    for shard in sorted((tmp_path / "step-00000003").glob("node-*.safetensors")):
        data = shard.read_bytes()
        shard.write_bytes(data[:-1] + bytes([data[-1] ^ 4]))
        answers = run_distributed(_find, 2, tmp_path)
        assert [path for path, _ in answers] == [tmp_path / "step-00000002"] * 2
        assert any("damaged" in m and "tensor " in m and shard.name in m for _, messages in answers for m in messages)
        shard.write_bytes(data)
    Path(tmp_path / "step-00000003" / "manifest.json").unlink()
    Path(tmp_path / "step-00000002" / "manifest.json").unlink()
    answers = run_distributed(_find, 2, tmp_path)
    assert all("none of its 2 checkpoints" in text for text, _ in answers)
