"""Saving beside training: the copy, the background writing, errors, and what a second save does."""

import itertools
import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch

from megatron.optimus.checkpoint import (
    CheckpointError,
    Manifest,
    Saver,
    TensorSlice,
    commit,
    load,
    load_manifest,
    load_newest,
    saver,
)
from megatron.optimus.checkpoint.snapshot import Snapshot, place_in_blocks
from megatron.optimus.runtime import host
from tests.unit.checkpoint.helpers import (
    CONFIG,
    assert_holds,
    find_loadable,
    lose_acknowledgements,
    owned,
    whole_requests,
    whole_state,
)


def header(step, kind="full"):
    return Manifest(kind, step, 8 * step, CONFIG, {}, {}, {})


def names(root):
    return sorted(entry.name for entry in root.iterdir())


def poll_until(saver, count):
    deadline = time.monotonic() + 30
    found = []
    while len(found) < count and time.monotonic() < deadline:
        found += saver.poll()
        time.sleep(0.001)
    return found


@pytest.fixture
def gate(monkeypatch):
    """Writing waits until it is opened."""
    event = threading.Event()
    write_at = commit.write_at

    def slow(*args):
        assert event.wait(30)
        write_at(*args)

    monkeypatch.setattr(commit, "write_at", slow)
    yield event
    event.set()


def test_training_may_change_the_state_while_it_is_written(tmp_path, gate):
    state = whole_state(1)
    live = owned(state)
    saver = Saver(tmp_path)
    assert saver.start(live, header(1), retain=2) == []
    for piece in live:
        piece.tensor.zero_()  # the next update
    assert saver.poll() == [] and not list(tmp_path.glob("step-*"))
    gate.set()
    [saved] = poll_until(saver, 1)
    assert (saved.path, saved.step, saved.kind) == (tmp_path / "step-00000001", 1, "full")
    assert 0 < saved.stall_s < saved.drain_s
    requests = whole_requests(whole_state(1))
    load(saved.path, requests)
    assert_holds(requests, whole_state(1))
    assert saver.poll() == [] and saver.drain() == []


def test_the_next_save_waits_for_the_one_before_and_none_is_lost(tmp_path, gate, caplog):
    saver = Saver(tmp_path)
    saver.start(owned(whole_state(1)), header(1), retain=9)
    threading.Timer(0.2, gate.set).start()
    found = saver.start(owned(whole_state(2)), header(2), retain=9)
    assert "waiting for the checkpoint of step 1" in caplog.text
    first, second = found + saver.drain()
    assert (first.step, second.step) == (1, 2) and names(tmp_path) == ["step-00000001", "step-00000002"]
    for saved in (first, second):
        requests = whole_requests(whole_state(saved.step))
        load(saved.path, requests)
        assert_holds(requests, whole_state(saved.step))


def test_both_kinds_of_one_step_go_one_after_the_other_without_waiting(tmp_path, gate, caplog):
    saver = Saver(tmp_path)
    weights = [piece for piece in owned(whole_state(1)) if piece.kind in ("weight", "buffer")]
    assert saver.start(owned(whole_state(1)), header(1), retain=2) == []
    assert saver.start(weights, header(1, "model"), retain=None) == []
    assert "waiting" not in caplog.text
    gate.set()
    assert [saved.path.name for saved in saver.drain()] == ["step-00000001", "model-00000001"]
    assert {kind for _, kind in load_manifest(tmp_path / "model-00000001").tensors} == {"weight", "buffer"}


def test_a_disk_of_the_node_is_written_first_and_left_empty(tmp_path, monkeypatch, caplog):
    """The copy is slow: the next save need not wait for it, and what it brings is verified."""
    root, local = tmp_path / "root", tmp_path / "local"
    event = threading.Event()
    copy = saver.copy

    def slow(*args):
        assert event.wait(30)
        copy(*args)

    monkeypatch.setattr(saver, "copy", slow)
    it = Saver(root, local=local)
    it.start(owned(whole_state(1)), header(1), retain=9)
    deadline = time.monotonic() + 30
    while it._jobs[0].phase == 0 and time.monotonic() < deadline:
        assert it.poll() == []
    assert list(local.glob("*/.step-00000001.tmp-*/node-00000-0.safetensors")) and not root.exists()
    it.start(owned(whole_state(2)), header(2), retain=9)
    assert "waiting" not in caplog.text
    event.set()
    for saved, step in zip(it.drain(), (1, 2), strict=True):
        requests = whole_requests(whole_state(step))
        load(saved.path, requests)
        assert_holds(requests, whole_state(step))
    assert [list(folder.iterdir()) for folder in local.iterdir()] == [[]]

    def damage(job, folder):
        path = folder / job.plan.file.name
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        copy(job, folder)

    monkeypatch.setattr(saver, "copy", damage)
    it.start(owned(whole_state(3)), header(3), retain=9)
    with pytest.raises(CheckpointError, match="does not give back what was written"):
        it.drain()
    assert [list(folder.iterdir()) for folder in local.iterdir()] == [[]]
    assert names(root) == ["step-00000001", "step-00000002"]


def test_full_ones_roll_and_model_only_ones_stay(tmp_path):
    saver = Saver(tmp_path, asynchronous=False)
    for step in range(1, 6):
        saver.start(owned(whole_state(step)), header(step), retain=2)
        if step % 2 == 0:
            saver.start(owned(whole_state(step)), header(step, "model"), retain=None)
    assert names(tmp_path) == ["model-00000002", "model-00000004", "step-00000004", "step-00000005"]


def test_an_error_in_the_background_is_raised_at_a_boundary_and_the_saver_goes_on(tmp_path, monkeypatch):
    saver = Saver(tmp_path)
    saver.start(owned(whole_state(1)), header(1), retain=2)
    saver.drain()

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(commit, "write_at", full)
        saver.start(owned(whole_state(2)), header(2), retain=2)
        with pytest.raises(CheckpointError, match=r"saving step 2 to .* failed on rank 0: .*No space left"):
            poll_until(saver, 1)
    assert names(tmp_path) == ["step-00000001"]
    saver.start(owned(whole_state(3)), header(3), retain=2)
    assert [saved.step for saved in saver.drain()] == [3]


def test_a_torn_down_thread_is_an_error_not_a_success(tmp_path, monkeypatch):
    def end(*args):
        raise SystemExit

    monkeypatch.setattr(saver, "write", end)
    it = Saver(tmp_path)
    it.start(owned(whole_state(1)), header(1), retain=2)
    with pytest.raises(CheckpointError, match="thread ended"):
        it.drain()
    assert find_loadable(tmp_path) is None


def test_a_plan_serves_later_saves_until_the_slices_change(tmp_path, monkeypatch):
    plans = []
    make_plan = saver.make_plan
    monkeypatch.setattr(saver, "make_plan", lambda *args: plans.append(1) or make_plan(*args))
    it = Saver(tmp_path, asynchronous=False)
    for step in (1, 2):
        it.start(owned(whole_state(step)), header(step), retain=9)
    assert len(plans) == 1
    fewer = [piece for piece in owned(whole_state(3)) if piece.name != "seen"]
    [saved] = it.start(fewer, header(3), retain=9)
    assert len(plans) == 2 and ("seen", "buffer") not in load_manifest(saved.path).tensors


def test_what_is_prepared_is_not_made_again_by_the_first_save(tmp_path, monkeypatch):
    it, slices = Saver(tmp_path), owned(whole_state(1))
    it.prepare(slices, header(0))
    assert not names(tmp_path)  # nothing is written
    monkeypatch.setattr(saver, "make_plan", lambda *_: pytest.fail("planned again"))
    blocks = it._snapshots["full"]._blocks
    assert sum(len(block) for block in blocks) >= sum(piece.tensor.nbytes for piece in slices)
    it.start(slices, header(7), retain=1)
    [saved] = it.drain()
    assert all(a is b for a, b in zip(it._snapshots["full"]._blocks, blocks, strict=True))
    requests = whole_requests(whole_state(1))
    load(saved.path, requests)
    assert_holds(requests, whole_state(1))


def test_a_lost_claim_stops_the_commit(tmp_path):
    def check():
        raise CheckpointError("no longer ours")

    it = Saver(tmp_path, asynchronous=False, check_claim=check)
    with pytest.raises(CheckpointError, match="failed on rank 0: no longer ours"):
        it.start(owned(whole_state(1)), header(1), retain=2)
    assert names(tmp_path) == []


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch, gate):
    """A long name with spaces and letters of other alphabets; the program moves to another folder meanwhile."""
    name = "lauf 1 ü 模型 " + 200 * "x"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    it = Saver(Path(name), local="local")
    it.start(owned(whole_state(1)), header(1), retain=2)
    monkeypatch.chdir("elsewhere")
    gate.set()
    [saved] = it.drain()
    assert saved.path == tmp_path / name / "step-00000001"
    assert find_loadable(tmp_path / name) == saved.path
    assert not names(tmp_path / "elsewhere")


def test_machines_of_one_name_do_not_share_a_file(monkeypatch):
    """Parts of one page written by two machines would get lost on a network disk."""
    monkeypatch.setattr(host.socket, "gethostname", lambda: "localhost")
    here = host.node_name()
    assert here == host.node_name()
    monkeypatch.setattr(host, "boot_id", lambda: "another")
    assert host.node_name() != here


def test_a_rename_that_was_done_and_not_acknowledged(tmp_path, monkeypatch):
    """The second time there is nothing to rename."""
    lose_acknowledgements(monkeypatch, "rename")
    it = Saver(tmp_path, asynchronous=False)
    it.start(owned(whole_state(1)), header(1), retain=2)
    assert names(tmp_path) == ["step-00000001"]

    def lost(*paths):
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "rename", lost)
    with pytest.raises(CheckpointError, match="No such file"):
        it.start(owned(whole_state(2)), header(2), retain=2)
    assert find_loadable(tmp_path).name == "step-00000001"


def test_host_memory_of_a_snapshot_is_hardly_larger_than_the_state():
    """Pinned memory comes in powers of two, so blocks are filled up to one; views are aligned and do not overlap."""
    draw = random.Random(3)
    lengths = [draw.choice([4, 12, draw.randrange(1, 3000), draw.randrange(1, 90_000)]) for _ in range(1000)]
    lengths += [300_000, 7]  # longer than a block: has one of its own
    places, sizes = place_in_blocks(lengths, block_bytes=1 << 17)
    taken: dict[int, list[tuple[int, int]]] = {}
    for (block, start), length in zip(places, lengths, strict=True):
        assert start % 16 == 0
        assert start + length <= sizes[block]
        taken.setdefault(block, []).append((start, start + length))
    for ranges in map(sorted, taken.values()):
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))
    small = [size for size in sizes if size < 300_000]
    assert sorted(taken) == list(range(len(sizes)))
    assert len(small) == len(sizes) - 1
    assert max(small) <= 1 << 17
    assert pinned_bytes(small) <= 1.05 * sum(lengths[:-2]) + (1 << 15)


@pytest.mark.parametrize("share, limit", [(0.51, 1.25), (0.6, 1.15), (0.9, 1.15), (None, 1.15)])
def test_slices_a_little_larger_than_half_a_power_of_two_waste_little(share, limit):
    """Alone in a block, one of 0.51 would waste as much as it holds."""
    draw = random.Random(4)
    lengths = [int((share or draw.uniform(0.5, 1)) * (1 << 15)) for _ in range(40)]
    _, sizes = place_in_blocks(lengths, block_bytes=1 << 17)
    assert pinned_bytes(sizes) <= limit * sum(lengths)


def test_a_snapshot_holds_what_it_was_given_last():
    """Views are made once; slices of other lengths or types get others."""
    snapshot = Snapshot("cpu")

    def check(length, dtype):
        pieces = [torch.randn(length + i) for i in range(3)]
        slices = [TensorSlice(f"{i}", "m", (len(p),), 0, len(p), p, stored_dtype=dtype) for i, p in enumerate(pieces)]
        views = snapshot.take(slices)
        assert all(torch.equal(view, piece.to(dtype)) for view, piece in zip(views, pieces, strict=True))
        return views[0].data_ptr()

    first = check(100, torch.float32)
    assert check(100, torch.float32) == first
    for length, dtype in [(200, torch.float32), (200, torch.bfloat16), (100, torch.float32)]:
        check(length, dtype)


def pinned_bytes(sizes):
    return sum(1 << (size - 1).bit_length() for size in sizes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
def test_snapshot_on_an_accelerator_is_ordered_before_the_update():
    """The copy runs on its own stream: what is queued after before_update must not be seen by it."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    pieces = [piece for piece in owned(whole_state(1)) if piece.kind == "master"]
    large = torch.randn(64 << 20, device=device)

    expected = large.cpu()
    slices = [TensorSlice("large", "master", (len(large),), 0, len(large), large)]
    slices += [TensorSlice(p.name, p.kind, p.global_shape, p.start, p.stop, p.tensor.to(device)) for p in pieces]
    cast = TensorSlice("cast", "weight", (len(large),), 0, len(large), large, stored_dtype=torch.bfloat16)
    snapshot = Snapshot(device)
    for _ in range(3):
        large.copy_(expected)
        views = snapshot.take([*slices, cast])
        started = time.perf_counter()
        snapshot.before_update()
        large.zero_()
        assert time.perf_counter() - started < 0.1, "queuing the update must not wait for the copy"
        snapshot.wait()
        assert views[0].is_pinned()
        assert torch.equal(views[0], expected)
        assert torch.equal(views[-1], expected.bfloat16())
        for view, piece in zip(views[1:-1], pieces, strict=True):
            assert torch.equal(view, piece.tensor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
@pytest.mark.parametrize("asynchronous", [True, False])
def test_save_and_load_on_an_accelerator(tmp_path, asynchronous):
    device = torch.accelerator.current_accelerator()
    assert device is not None

    def on_device(pieces):
        return [TensorSlice(p.name, p.kind, p.global_shape, p.start, p.stop, p.tensor.to(device)) for p in pieces]

    it = Saver(tmp_path, device=device, asynchronous=asynchronous)
    it.start(on_device(owned(whole_state(1))), header(1), retain=2)
    it.before_update()
    it.drain()
    requests = on_device(whole_requests(whole_state(1)))
    assert load_newest(tmp_path, lambda manifest: requests, device=device) is not None
    state = {key: tensor.to(device) for key, tensor in whole_state(1).items()}
    assert_holds(requests, state)
