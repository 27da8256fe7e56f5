"""One writer per folder: live owners are respected, dead ones replaced, here and on other machines."""

import json
import os
import threading
import time

import pytest

from megatron.optimus.checkpoint import run_lock
from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.run_lock import LOCK_NAME, RunLock
from tests.helpers import _CONTEXT
from tests.unit.checkpoint.helpers import lose_acknowledgements

_QUICK = {"heartbeat_s": 0.05, "timeout_s": 0.6}


def _hold(root, pipe):
    RunLock(root, **_QUICK)
    pipe.send("held")
    pipe.recv()


def held_by_another(root):
    parent, child = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_hold, args=(root, child), daemon=True)
    process.start()
    assert parent.recv() == "held"
    return process, parent


def test_take_check_release(tmp_path):
    root = tmp_path / "new" / "folder"
    lock = RunLock(root, **_QUICK)
    lock.check()
    with pytest.raises(CheckpointError, match=rf"process {os.getpid()} on .* --save.*delete .*{LOCK_NAME}"):
        RunLock(root, **_QUICK)
    lock.release()
    assert list(root.iterdir()) == []
    RunLock(root, **_QUICK).release()


def test_a_live_process_is_refused_and_a_killed_one_replaced(tmp_path):
    process, _pipe = held_by_another(tmp_path)
    with pytest.raises(CheckpointError, match=f"process {process.pid} on"):
        RunLock(tmp_path, **_QUICK)
    process.kill()
    process.join()
    started = time.monotonic()
    lock = RunLock(tmp_path, heartbeat_s=0.05, timeout_s=60)
    assert time.monotonic() - started < 5, "on the same machine nobody waits for a heartbeat"
    lock.check()
    lock.release()


def test_a_lock_whose_acknowledgement_was_lost_is_ones_own(tmp_path, monkeypatch):
    lose_acknowledgements(monkeypatch, "link")
    lock = RunLock(tmp_path, **_QUICK)
    lock.check()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def foreign(root, **changes):
    owner = {"host": "elsewhere", "boot": "b", "space": "s", "pid": 1, "process": "9", "nonce": "n"} | changes
    (root / LOCK_NAME).write_text(json.dumps(owner))


def test_another_machines_lock_without_a_heartbeat_is_taken_after_the_timeout(tmp_path, caplog):
    foreign(tmp_path)
    started = time.monotonic()
    lock = RunLock(tmp_path, **_QUICK)
    assert time.monotonic() - started >= _QUICK["timeout_s"]
    assert "taking over from process 1 on elsewhere" in caplog.text
    lock.release()


@pytest.mark.parametrize(
    ("attempt", "is_taken"),
    [(["L", 2], True), (["L", 3], False), (["K", 2], False), (["L"], False), (["L", "2"], False), ("L2", False)],
)
def test_the_lock_of_an_earlier_attempt_of_this_launch_is_not_watched(tmp_path, monkeypatch, attempt, is_taken):
    """Its node was lost, and the launcher has started the ranks again elsewhere."""

    def watch(seconds):
        raise TimeoutError

    monkeypatch.setenv("OPTIMUS_ATTEMPT", "L:3")
    monkeypatch.setattr(run_lock.time, "sleep", watch)
    foreign(tmp_path, attempt=attempt)
    if not is_taken:
        with pytest.raises(TimeoutError):
            RunLock(tmp_path, heartbeat_s=0.05, timeout_s=30)
        return
    lock = RunLock(tmp_path, **_QUICK)
    assert json.loads((tmp_path / LOCK_NAME).read_text())["attempt"] == ["L", 3]
    lock.release()


def test_another_machines_lock_with_a_heartbeat_is_refused(tmp_path):
    foreign(tmp_path)
    stop = threading.Event()

    def beat():
        while not stop.wait(0.05):
            os.utime(tmp_path / LOCK_NAME)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match="process 1 on elsewhere is writing"):
            RunLock(tmp_path, heartbeat_s=0.05, timeout_s=30)
    finally:
        stop.set()
        thread.join()


def test_the_owner_notices_a_takeover_and_does_not_remove_it(tmp_path):
    lock = RunLock(tmp_path, **_QUICK)
    foreign(tmp_path)
    with pytest.raises(CheckpointError, match="no longer owns the folder"):
        lock.check()
    lock.release()
    assert (tmp_path / LOCK_NAME).exists()


def test_the_heartbeat_goes_on(tmp_path):
    lock = RunLock(tmp_path, heartbeat_s=0.02, timeout_s=1)
    first = (tmp_path / LOCK_NAME).stat().st_mtime_ns
    deadline = time.monotonic() + 10
    while (tmp_path / LOCK_NAME).stat().st_mtime_ns == first and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (tmp_path / LOCK_NAME).stat().st_mtime_ns > first
    lock.release()


@pytest.mark.parametrize("content", ["", "{", '{"pid": "x; rm -rf /"}', '{"pid": 10e300}', "[]", "\x00" * 100])
def test_nonsense_in_the_lock_is_a_dead_owner(tmp_path, content):
    (tmp_path / LOCK_NAME).write_text(content)
    lock = RunLock(tmp_path, **_QUICK)
    lock.check()
    lock.release()


def _race(root, pipe):
    try:
        RunLock(root, **_QUICK)
        pipe.send("got it")
        pipe.recv()
    except CheckpointError as error:
        pipe.send(str(error))


def test_of_many_that_find_a_dead_owner_one_gets_the_folder(tmp_path):
    process, _ = held_by_another(tmp_path)
    process.kill()
    process.join()
    racers = []
    for _ in range(4):
        parent, child = _CONTEXT.Pipe()
        racer = _CONTEXT.Process(target=_race, args=(tmp_path, child), daemon=True)
        racer.start()
        racers.append((racer, parent))
    answers = [pipe.recv() for _, pipe in racers]
    assert answers.count("got it") == 1, answers
    for racer, _ in racers:
        racer.kill()
        racer.join()


def test_a_pipe_in_place_of_the_lock_is_no_owner(tmp_path):
    os.mkfifo(tmp_path / LOCK_NAME)
    lock = RunLock(tmp_path, timeout_s=0.2)  # opening the pipe would wait for a writer
    lock.check()
    lock.release()
    assert os.listdir(tmp_path) == []
