"""Save, rename and prune stopped after every single call to the file system, by a kill and by a loss of power."""

import random
import shutil

import pytest

from megatron.optimus.checkpoint import CheckpointError, Manifest, Saver, load_manifest, load_newest, store
from tests.unit.checkpoint.crash import Recorder, killed, materialise, power_lost, replay
from tests.unit.checkpoint.helpers import CONFIG, assert_holds, owned, whole_state

# What is saved: (step, kind). The third full one prunes the first, the last supersedes a step that is there already.
SAVES = [(1, "full"), (2, "full"), (2, "model"), (3, "full"), (3, "full")]


def content(step, kind):
    slices = owned(whole_state(step))
    return slices if kind == "full" else [piece for piece in slices if piece.kind in ("weight", "buffer")]


def record(root):
    recorder = Recorder(root)
    saver = Saver(root)
    with recorder.recording():
        for step, kind in SAVES:
            saver.start(content(step, kind), Manifest(kind, step, step, CONFIG, {}, {}, {}), retain=2)
            saver.drain()
            if kind == "full":
                recorder.mark(step)
    return recorder


@pytest.fixture(scope="module")
def recorder(tmp_path_factory):
    root = tmp_path_factory.mktemp("crash") / "root"
    root.mkdir()
    return record(root)


def recovered_step(state, folder):
    """The step that a run resumes from, every byte of which is right; 0: it would start anew."""
    shutil.rmtree(folder, ignore_errors=True)
    materialise(state, folder)
    loaded = {}

    def requests(manifest):
        loaded[manifest.step] = store.everything(manifest)
        return loaded[manifest.step]

    found = load_newest(folder, requests)
    if found is None:
        return 0
    step = found[1].step
    assert_holds(loaded[step], whole_state(step))
    assert {(piece.name, piece.kind) for piece in loaded[step]} == whole_state(step).keys()
    return step


def states(root, calls, seeds):
    top = replay(root, calls)
    yield "killed", killed(top)
    yield "power lost", power_lost(top, None)
    for seed in seeds:
        yield f"power lost, seed {seed}", power_lost(top, random.Random(seed))


def check_all_prefixes(recorder, folder, seeds):
    """Number of states checked. Each must give the newest step that was reported as saved, or a later one."""
    checked = 0
    for count in range(len(recorder.calls) + 1):
        must = max((step for position, step in recorder.marks if position <= count), default=0)
        for name, state in states(recorder.root, recorder.calls[:count], (1000 * count + s for s in seeds)):
            step = recovered_step(state, folder)
            last = recorder.calls[count - 1][:2] if count else "nothing"
            assert step >= must, f"{name} after call {count} ({last}): step {step}, but {must} was saved"
            checked += 1
    return checked


def test_the_recording_is_whole(recorder):
    """The model after all calls is what is on the disk, so no call was missed."""

    def tree(path):
        return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}

    copy = recorder.root.parent / "copy"
    materialise(killed(replay(recorder.root, recorder.calls)), copy)
    assert tree(copy) == tree(recorder.root)
    assert sorted(path.name for path in copy.iterdir()) == ["model-00000002", "step-00000002", "step-00000003.r1"]
    assert {call[0] for call in recorder.calls} == {"create", "write", "sync", "mkdir", "rename", "unlink", "rmdir"}
    assert len(recorder.calls) > 100


def test_every_prefix_recovers_the_newest_committed_step(recorder, tmp_path):
    assert check_all_prefixes(recorder, tmp_path / "state", range(2)) == 4 * (len(recorder.calls) + 1)


def test_a_run_goes_on_after_any_loss_of_power(recorder, tmp_path):
    """Leftovers of any kind do not keep the next save from committing and clearing up."""
    for count in range(0, len(recorder.calls) + 1, 7):
        folder = tmp_path / str(count)
        materialise(power_lost(replay(recorder.root, recorder.calls[:count]), random.Random(count)), folder)
        saver = Saver(folder, asynchronous=False)
        saver.start(content(9, "full"), Manifest("full", 9, 9, CONFIG, {}, {}, {}), retain=1)
        assert [path.name for path in folder.glob("*") if not path.name.startswith("model-")] == ["step-00000009"]
        assert load_manifest(folder / "step-00000009").step == 9


@pytest.mark.parametrize("missing", ["file", "directory"])
def test_the_model_would_show_a_missing_sync(recorder, tmp_path, missing):
    """Without the syncs of files, or of directories, some loss of power costs a saved step."""
    broken = Recorder(recorder.root)
    kept = [
        (call, number)
        for number, call in enumerate(recorder.calls)
        if call[0] != "sync" or (call[1].suffix == "") == (missing == "file")
    ]
    broken.calls = [call for call, _ in kept]
    broken.marks = [(sum(number < position for _, number in kept), step) for position, step in recorder.marks]
    with pytest.raises((AssertionError, CheckpointError)):
        check_all_prefixes(broken, tmp_path / "state", range(2))
