"""Saving beside training: the copy, the background writing, errors, and what a second save does."""

import os
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
    snapshot,
    writer,
)
from megatron.optimus.checkpoint.shards import ALIGNED
from megatron.optimus.platform import environment, files
from megatron.optimus.platform.ranks import Ranks
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
    write_at = files.write_at

    def slow(*args):
        assert event.wait(30)
        write_at(*args)

    monkeypatch.setattr(files, "write_at", slow)
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


def test_a_disk_of_the_node_that_cannot_be_used_is_named(tmp_path, monkeypatch):
    """Before the first step where that can be known; later it is told which disk is full."""
    (tmp_path / "file").touch()
    it = Saver(tmp_path / "root", local=tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"making .*/file/.* failed on rank 0: .*Not a directory"):
        it.prepare(owned(whole_state(1)), header(0))

    def full(*args):
        raise OSError(28, "No space left on device")

    it = Saver(tmp_path / "root", local=tmp_path / "local")
    it.prepare(owned(whole_state(1)), header(0))
    monkeypatch.setattr(files, "write_at", full)
    it.start(owned(whole_state(1)), header(1), retain=2)
    with pytest.raises(CheckpointError, match=r"saving step 1 to .*/root .*No space left on device: '.*/local/"):
        it.drain()


def test_a_save_by_way_of_the_disk_of_the_node_is_tried_again(tmp_path, monkeypatch):
    """What a copy that broke off has copied says nothing of what is to be copied."""
    monkeypatch.setattr(saver, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(writer, "BLOCK_BYTES", ALIGNED)
    state = {(name, "master"): torch.arange(4 * ALIGNED, dtype=torch.float32) for name in "ab"}
    root, said, write_at = tmp_path / "root", [], files.write_at
    monkeypatch.setattr(files, "write_at", lambda *args: full() if said == ["full"] else write_at(*args))

    def full():
        said.append("once")
        raise OSError(28, "No space left on device")

    def copy(job, folder):
        said.extend([] if said else ["full"])
        writer.copy(job, folder)

    monkeypatch.setattr(saver, "copy", copy)
    it = Saver(root, local=tmp_path / "local", retry_seconds=60.0, on_failure=lambda step, text: said.append(text))
    it.start(owned(state), header(1), retain=2)
    [saved] = it.drain()
    assert said[:2] == ["full", "once"] and "No space left on device" in said[2]
    requests = whole_requests(state)
    load(saved.path, requests)
    assert_holds(requests, state)
    monkeypatch.setattr(saver, "copy", writer.copy)
    directories = []

    def write(job, directory):
        directories.append(directory)
        if len(directories) == 1:
            full()
        writer.write(job, directory)

    monkeypatch.setattr(saver, "write", write)
    it.start(owned(state), header(2), retain=2)
    assert [saved.step for saved in it.drain()] == [2]
    first, second = directories
    assert first != second, "another rank may still be removing what the first attempt has written"
    assert [list(folder.iterdir()) for folder in (tmp_path / "local").iterdir()] == [[]]


def test_a_newer_save_takes_the_place_of_all_that_wait_behind_one_that_fails(tmp_path, monkeypatch, caplog):
    it, said = Saver(tmp_path, retry_seconds=60.0, on_failure=lambda step, text: said.append(text)), []

    def write(job, directory):
        if job.header.step == 1:
            raise OSError(28, "No space left on device")
        writer.write(job, directory)

    monkeypatch.setattr(saver, "write", write)
    weights = [piece for piece in owned(whole_state(1)) if piece.kind in ("weight", "buffer")]
    it.start(owned(whole_state(1)), header(1), retain=2)
    it.start(weights, header(1, "model"), retain=None)
    deadline = time.monotonic() + 30
    while not said and time.monotonic() < deadline:
        assert it.poll() == []
    assert "the next attempt is in 1 s" in said[0]
    it.start(owned(whole_state(2)), header(2), retain=2)
    assert [saved.path.name for saved in it.drain()] == ["step-00000002"]
    for kind in ("full", "model"):  # each that is lost is named
        assert f"step 1 could not be saved ({kind} checkpoint): step 2 is saved now" in caplog.text


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
        patch.setattr(files, "write_at", full)
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
    buffers = it._snapshots["full"]._buffers
    assert sum(len(buffer) for buffer in buffers) >= sum(piece.tensor.nbytes for piece in slices)
    it.start(slices, header(7), retain=1)
    [saved] = it.drain()
    assert all(a is b for a, b in zip(it._snapshots["full"]._buffers, buffers, strict=True))
    requests = whole_requests(whole_state(1))
    load(saved.path, requests)
    assert_holds(requests, whole_state(1))


def test_a_save_like_the_one_before_exchanges_one_number_before_the_copy(tmp_path, monkeypatch):
    """Each exchange waits for the device, and one begun after the copies would wait for those."""
    it, slices = Saver(tmp_path), owned(whole_state(1))
    it.prepare(slices, header(0))
    said = []
    for name in ("broadcast", "start_all_reduce_min", "all_gather_bytes"):
        call = getattr(Ranks, name)
        monkeypatch.setattr(
            Ranks, name, lambda self, given, name=name, call=call: said.append(name) or call(self, given)
        )
    monkeypatch.setattr(snapshot, "_copy", lambda *_: said.append("copy"))
    it.start(slices, header(1), retain=1)
    assert said == ["start_all_reduce_min", "copy"]
    monkeypatch.undo()
    it.drain()


def test_every_save_writes_into_a_directory_of_its_own(tmp_path, gate):
    it, other = Saver(tmp_path / "a"), Saver(tmp_path / "b")
    for saver_, kind in ((it, "full"), (it, "model"), (other, "full")):
        saver_.start(owned(whole_state(1)), header(1, kind), retain=2)
    temporary = {job.temporary for saver_ in (it, other) for job in saver_._jobs}
    assert len({path.name.rpartition("-")[2] for path in temporary}) == 3
    gate.set()
    it.drain()
    other.drain()


def test_a_copy_that_fails_is_an_error_at_the_next_boundary(tmp_path, monkeypatch):
    it = Saver(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(snapshot.Snapshot, "take", lambda *_: 1 // 0)
        it.start(owned(whole_state(1)), header(1), retain=2)
        with pytest.raises(CheckpointError, match=r"saving step 1 to .* failed on rank 0: .*division"):
            poll_until(it, 1)
    assert not names(tmp_path)
    it.start(owned(whole_state(2)), header(2), retain=2)
    assert [saved.step for saved in it.drain()] == [2]


def test_the_stall_counts_from_when_training_stood_still(tmp_path):
    it = Saver(tmp_path)
    it.start(owned(whole_state(1)), header(1), retain=2, began=time.perf_counter() - 100)
    assert it.take_stall() > 100
    [saved] = it.drain()
    assert saved.stall_s > 100 and saved.drain_s > saved.stall_s


def test_training_waits_for_the_whole_of_a_save_without_a_copy(tmp_path):
    [saved] = Saver(tmp_path, asynchronous=False).start(owned(whole_state(1)), header(1), retain=2)
    assert saved.stall_s == saved.drain_s > 0


def test_the_stall_counts_the_device_that_waits_for_the_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot.Snapshot, "device_stall_s", lambda _: 100.0)
    it = Saver(tmp_path)
    it.start(owned(whole_state(1)), header(1), retain=2)
    [saved] = it.drain()
    assert 100 < saved.stall_s < 130 and 100 < it.take_stall() < 130, "once"


def test_a_commit_is_known_without_another_exchange(tmp_path, monkeypatch):
    """The reduced number carries the name; a broadcast's result would come behind the step that has been queued."""
    it = Saver(tmp_path)
    it.start(owned(whole_state(1)), header(1), retain=2)
    it.drain()
    it.start(owned(whole_state(1)), header(1), retain=2)
    monkeypatch.setattr(Ranks, "broadcast", lambda *_: 1 // 0)
    [saved] = poll_until(it, 1)
    assert saved.path.name == "step-00000001.r1"


def test_a_lost_lock_stops_the_commit(tmp_path):
    def check():
        raise CheckpointError("no longer ours")

    it = Saver(tmp_path, asynchronous=False, check_lock=check)
    with pytest.raises(CheckpointError, match="failed on rank 0: no longer ours"):
        it.start(owned(whole_state(1)), header(1), retain=2)
    assert names(tmp_path) == []


def test_a_folder_that_vanishes_after_a_commit_is_no_failure(tmp_path, monkeypatch):
    """What was committed is safe; the next save finds out that the folder is gone."""
    root, prune = tmp_path / "root", commit.prune

    def vanish(*args):
        prune(*args)
        root.rename(tmp_path / "away")
        root.write_text("not a folder")

    monkeypatch.setattr(commit, "prune", vanish)
    it = Saver(root, asynchronous=False)
    [saved] = it.start(owned(whole_state(1)), header(1), retain=2)
    assert saved.path.name == "step-00000001" and find_loadable(tmp_path / "away") is not None


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
    monkeypatch.setattr(environment.socket, "gethostname", lambda: "localhost")
    here = environment.node_name()
    assert here == environment.node_name()
    monkeypatch.setattr(environment, "boot_id", lambda: "another")
    assert environment.node_name() != here


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
@pytest.mark.parametrize("asynchronous", [True, False])
def test_save_and_load_on_an_accelerator(tmp_path, asynchronous):
    device = torch.accelerator.current_accelerator()
    assert device is not None

    def on_device(pieces):
        return [TensorSlice(p.name, p.kind, p.global_shape, p.start, p.stop, p.tensor.to(device)) for p in pieces]

    it = Saver(tmp_path, ranks=Ranks(None, device), asynchronous=asynchronous)
    it.start(on_device(owned(whole_state(1))), header(1), retain=2)
    it.before_update()
    it.drain()
    requests = on_device(whole_requests(whole_state(1)))
    assert load_newest(tmp_path, lambda manifest: requests, ranks=Ranks(None, device)) is not None
    state = {key: tensor.to(device) for key, tensor in whole_state(1).items()}
    assert_holds(requests, state)
