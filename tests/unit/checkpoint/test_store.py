import contextlib
import errno
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from megatron.optimus.checkpoint import (
    CheckpointError,
    TensorSlice,
    latest,
    load,
    load_manifest,
    resolve,
    save,
    store,
    verify,
)
from megatron.optimus.platform import files
from tests.helpers import _CONTEXT
from tests.unit.checkpoint.helpers import CONFIG, assert_holds, find_loadable, owned, whole_requests, whole_state


def save_step(root, step, *, seed=None, slices=None, **options):
    values = dict(kind="full", consumed_samples=8 * step, config=CONFIG, metadata={"seed": seed}, retain=2) | options
    return save(root, step, owned(whole_state(step if seed is None else seed)) if slices is None else slices, **values)


def assert_step(path, seed):
    requests = whole_requests(whole_state(seed))
    load(path, requests)
    assert_holds(requests, whole_state(seed))


def names(root):
    return sorted(entry.name for entry in root.iterdir())


def test_round_trip_and_manifest(tmp_path):
    path = save_step(tmp_path / "new" / "root", 3)
    assert path == tmp_path / "new" / "root" / "step-00000003" == latest(tmp_path / "new" / "root")
    assert names(path) == ["manifest.json", "node-00000-0.safetensors"]
    assert_step(path, 3)
    manifest = load_manifest(path)
    assert (manifest.step, manifest.consumed_samples, manifest.kind, manifest.config) == (3, 24, "full", CONFIG)
    verify(path)
    # any safetensors reader reads the shard; the manifest is plain JSON
    shard = load_file(path / "node-00000-0.safetensors")
    assert torch.equal(shard["dense.weight/master/0"], whole_state(3)["dense.weight", "master"].flatten())
    assert json.loads((path / "manifest.json").read_text())["step"] == 3


def test_partial_requests_and_cast(tmp_path):
    path = save_step(tmp_path, 1)
    whole = whole_state(1)["experts.weight", "master"]
    part = TensorSlice("experts.weight", "master", tuple(whole.shape), 7, 23, torch.zeros(16))
    load(path, [part])
    assert torch.equal(part.tensor, whole.flatten()[7:23])
    half = TensorSlice("experts.weight", "master", tuple(whole.shape), 7, 23, torch.zeros(16, dtype=torch.bfloat16))
    load(path, [half], cast=True)
    assert torch.equal(half.tensor, whole.flatten()[7:23].bfloat16())
    with pytest.raises(CheckpointError, match=r"experts.weight \(master\): dtype is F32 in the checkpoint, BF16"):
        load(path, [half])


def test_what_is_not_there_is_named(tmp_path):
    path = save_step(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"other \(master\): not in the checkpoint \(no tensor of that name\)"):
        load(path, [TensorSlice("other", "master", (2,), 0, 2, torch.zeros(2))])
    with pytest.raises(CheckpointError, match="'full' checkpoint has it as exp_avg, master, weight"):
        load(path, [TensorSlice("dense.weight", "exp_avg_sq", (7, 5), 0, 2, torch.zeros(2))])
    with pytest.raises(CheckpointError, match=r"shape is \(7, 5\) in the checkpoint, \(5, 7\) in this run"):
        load(path, [TensorSlice("dense.weight", "master", (5, 7), 0, 2, torch.zeros(2))])
    with pytest.raises(CheckpointError, match="No such file"):
        load(tmp_path / "step-00000009", [])


def test_incomplete_or_doubled_slices_are_never_committed(tmp_path):
    save_step(tmp_path, 1)
    everything = owned(whole_state())
    for slices, message in [
        ([TensorSlice("w", "master", (4,), 0, 2, torch.zeros(2))], r"w \(master\): pieces: elements \[2, 4\) are miss"),
        ([*everything, everything[0]], "two tensors have the key"),
        ([TensorSlice("w", "Bad", (2,), 0, 2, torch.zeros(2))], "not allowed"),
        ([TensorSlice("w", "master", (2,), 0, 2, torch.zeros(2, dtype=torch.complex64))], "cannot be stored"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            save_step(tmp_path, 2, slices=slices)
        assert names(tmp_path) == ["step-00000001"]
    for options, message in [
        ({"metadata": {"x": float("nan")}}, "written as JSON"),
        ({"kind": "half"}, "kind='half'"),
        ({"retain": 0}, "save_retain=0"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            save_step(tmp_path, 2, **options)
    assert names(tmp_path) == ["step-00000001"]


def test_pruning_keeps_the_newest_and_clears_leftovers(tmp_path):
    (tmp_path / ".step-00000001.tmp-0123456789abcdef").mkdir()
    (tmp_path / "notes").mkdir()
    for step in (1, 2, 3):
        save_step(tmp_path, step, retain=5)
    save_step(tmp_path, 4, retain=2)
    assert names(tmp_path) == ["notes", "step-00000003", "step-00000004"]


def test_an_older_step_saved_again_does_not_cost_newer_ones(tmp_path, caplog):
    for step in (1, 2, 3):
        save_step(tmp_path, step, retain=3)
    with caplog.at_level(logging.WARNING, "optimus"):
        path = save_step(tmp_path, 2, seed=20, retain=1)
    assert names(tmp_path) == ["step-00000002.r1", "step-00000003"] and path.name == "step-00000002.r1"
    assert "also holds the newer step-00000003" in caplog.text
    assert_step(path, 20)


def test_same_step_again_supersedes(tmp_path):
    save_step(tmp_path, 1)
    for seed in (10, 11):
        path = save_step(tmp_path, 1, seed=seed)
        assert latest(tmp_path) == path and len(names(tmp_path)) == 1
        assert_step(path, seed)


def test_pruning_failure_does_not_fail_the_save(tmp_path, monkeypatch, caplog):
    save_step(tmp_path, 1)

    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(os, "rmdir", refuse)
    with caplog.at_level(logging.WARNING, "optimus"):
        path = save_step(tmp_path, 2, retain=1)
    assert "could not all be deleted" in caplog.text
    assert_step(path, 2)
    monkeypatch.undo()
    save_step(tmp_path, 3, retain=1)
    assert names(tmp_path) == ["step-00000003"]


@pytest.mark.parametrize("target", ["write_at", "write_new"])
def test_full_disk_leaves_everything_as_it_was(tmp_path, monkeypatch, target):
    save_step(tmp_path, 1)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, target, full)
    with pytest.raises(CheckpointError, match=r"saving step 2 .* failed on rank 0: .*No space left on device"):
        save_step(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001"]
    assert_step(latest(tmp_path), 1)


_ROOT = Path(__file__).parents[3]
_LIMITED = """
import resource, sys
from pathlib import Path
from tests.unit.checkpoint.test_store import save_step
root = Path(sys.argv[1])
save_step(root, 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))
try:
    save_step(root, 2)
except ValueError as error:
    print(error)
"""


def test_a_real_write_error_of_the_operating_system(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(tmp_path)], capture_output=True, text=True, check=True, cwd=_ROOT
    )
    assert "failed on rank 0: [Errno 27] File too large" in done.stdout
    assert names(tmp_path) == ["step-00000001"]
    assert_step(find_loadable(tmp_path), 1)


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return save_step(tmp_path_factory.mktemp("good"), 1)


def _tensor_at(path: Path, position: int) -> str | None:
    """Whose data the byte at ``position`` of the shard is; None for the header."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    for key, entry in json.loads(data[8 : 8 + size]).items():
        start, stop = entry["data_offsets"]
        if start <= position - 8 - size < stop:
            return key.split("/")[0]
    return None


def test_bit_flips_are_detected_and_the_tensor_named(good, tmp_path):
    generator = random.Random(1)
    copy = tmp_path / "copy"
    shutil.copytree(good, copy)
    shard = copy / "node-00000-0.safetensors"
    data = shard.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    positions = [*range(8), *generator.sample(range(8, header), 60), *generator.sample(range(header, len(data)), 100)]
    for position in positions:
        flipped = bytearray(data)
        flipped[position] ^= 1 << generator.randrange(8)
        shard.write_bytes(flipped)
        with pytest.raises(CheckpointError) as caught:
            verify(copy)
        name = _tensor_at(good / shard.name, position)
        held = {name} if name else {name for name, _ in whole_state()}  # a damaged header can name any of them
        assert any(name in str(caught.value) for name in held) and shard.name in str(caught.value)
        with pytest.raises(CheckpointError):
            load(copy, whole_requests(whole_state(1)))
    shard.write_bytes(data)
    verify(copy)


def test_truncated_deleted_swapped_and_linked_shards(good, tmp_path):
    shard = "node-00000-0.safetensors"
    data = (good / shard).read_bytes()

    def spoiled(name, spoil):
        copy = tmp_path / name
        shutil.copytree(good, copy)
        spoil(copy / shard)
        with pytest.raises(CheckpointError) as caught:
            verify(copy)
        assert shard in str(caught.value)
        return str(caught.value)

    for length in (0, 7, 100, len(data) - 1):
        assert "dense.weight" in spoiled(f"cut{length}", lambda path, n=length: path.write_bytes(data[:n]))
    assert "dense.weight" in spoiled("longer", lambda path: path.write_bytes(data + b"x"))
    assert "No such file" in spoiled("deleted", lambda path: path.unlink())
    other = save_step(tmp_path / "other", 2, seed=2) / shard
    assert "xxh3_128" in spoiled("swapped", lambda path: path.write_bytes(other.read_bytes()))

    def link(path):
        path.unlink()
        path.symlink_to(good / shard)

    assert "not a regular file" in spoiled("linked", link)

    def huge_header(path):
        path.write_bytes((1 << 62).to_bytes(8, "little") + data[8:])

    assert "header is damaged" in spoiled("huge", huge_header)


def test_fallback_to_the_previous_good_one(tmp_path, caplog):
    for step in (1, 2, 3, 4):
        save_step(tmp_path, step, retain=4)
    shard = tmp_path / "step-00000004" / "node-00000-0.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    (tmp_path / "step-00000003" / "node-00000-0.safetensors").unlink()
    assert latest(tmp_path).name == "step-00000004"  # complete by its looks: hashes are find_loadable's
    with caplog.at_level(logging.WARNING, "optimus"):
        found = find_loadable(tmp_path)
    assert found.name == "step-00000002"
    assert "tensor flag (buffer)" in caplog.text and "step-00000003" in caplog.text
    assert_step(found, 2)
    for step in (1, 2):
        (tmp_path / f"step-{step:08d}" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="none of its 4 checkpoints can be loaded"):
        find_loadable(tmp_path)
    assert find_loadable(tmp_path / "none") is None and latest(tmp_path / "none") is None


def test_resolve(tmp_path):
    run = tmp_path / "run"
    newest = [save_step(run / "checkpoints", step) for step in (1, 2)][-1]
    assert resolve(run) == resolve(run / "checkpoints") == resolve(newest) == newest
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        resolve(tmp_path)
    with pytest.raises(CheckpointError, match="nope: no such folder; name a checkpoint"):
        resolve(tmp_path / "nope")


def test_the_manifest_that_a_run_probably_goes_on_from_is_read_without_an_error(tmp_path, monkeypatch):
    own, other = save_step(tmp_path / "own", 1), save_step(tmp_path / "other", 2)
    read = store.newest_manifest
    assert (read(own.parent, other).step, read(tmp_path / "none", other).step) == (1, 2)
    assert read(tmp_path / "none", None) is None and read(tmp_path / "none", tmp_path / "nope") is None

    def failing_scan(root, kind="full"):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(store.commit, "list_committed", failing_scan)
    assert read(own.parent, other).step == 2 and read(own.parent, None) is None


# -- kill -9 -----------------------------------------------------------------------------------------------------------


def _save_forever(root, step, pipe):
    torch.set_num_threads(1)
    while True:
        step += 1
        pipe.send(("saving", step))
        save_step(root, step)
        pipe.send(("saved", step))


def test_kill_at_random_instants_leaves_the_last_committed_one(tmp_path):
    generator = random.Random(7)
    last = interrupted = 0
    for _ in range(20):
        pipe, child = _CONTEXT.Pipe(duplex=False)
        saver = _CONTEXT.Process(target=_save_forever, args=(tmp_path, last, child), daemon=True)
        saver.start()
        child.close()
        saved = last
        for _ in range(generator.choice((1, 3, 5))):  # "saving" of the first, second or third one
            event, step = pipe.recv()
            saved = step if event == "saved" else saved
        time.sleep(generator.uniform(0.0, 0.01))
        saver.kill()
        saver.join()
        with contextlib.suppress(EOFError):
            while True:
                event, step = pipe.recv()
                saved = step if event == "saved" else saved
        interrupted += any(".tmp-" in name for name in names(tmp_path))
        found = find_loadable(tmp_path)
        if found is None:
            assert saved == 0
            continue
        step = load_manifest(found).step
        assert saved <= step <= saved + 1  # one more may be committed and not yet reported
        assert_step(found, step)
        last = step
    assert last >= 5 and interrupted >= 3, "the kills met no save: the test shows nothing"


# -- documentation -----------------------------------------------------------------------------------------------------


def test_the_reader_printed_in_the_documentation_works(tmp_path):
    text = (_ROOT / "docs" / "checkpoint_format.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    script = f"{code}\nimport sys\ntensor = read(pathlib.Path(sys.argv[1]), 'experts.weight', 'master')\n"
    script += "print(json.dumps(tensor.double().flatten().tolist()))\n"
    path = save_step(tmp_path, 1)
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == whole_state(1)["experts.weight", "master"].double().flatten().tolist()


def test_a_checkpoint_of_a_later_version_is_not_passed_over(tmp_path):
    """It is no damage: going on from the one before would silently give up what was trained since."""
    for step in (1, 2):
        save_step(tmp_path, step)
    path = tmp_path / "step-00000002" / "manifest.json"
    body = path.read_bytes()[46:].replace(b'"version": 2', b'"version": 3')
    path.write_bytes(b'{"xxh3_128": "' + xxhash.xxh3_128_hexdigest(body).encode() + body)
    for find in (find_loadable, latest, store.resolve):
        with pytest.raises(CheckpointError, match=r"version 3; .* reads .* version 2.*move it away"):
            find(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])  # damaged, it is
    assert find_loadable(tmp_path).name == "step-00000001"
