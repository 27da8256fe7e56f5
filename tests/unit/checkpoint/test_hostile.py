"""Checkpoints made to do harm: a clear error, nothing executed, no more memory than the limits say."""

import json
import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash

from megatron.optimus.checkpoint import CheckpointError, load_manifest, load_newest, save, store, verify
from tests.unit.checkpoint.helpers import CONFIG, owned, whole_state
from tests.unit.checkpoint.test_manifest import sealed

_ROOT = Path(__file__).parents[3]


class Bomb:
    """Unpickling it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def good(tmp_path):
    return save(
        tmp_path / "root", 1, owned(whole_state(1)), kind="full", consumed_samples=8, config=CONFIG, metadata={}
    )


def body_of(path):
    return json.loads((path / "manifest.json").read_text())


def fields(tree, prefix=()):
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*prefix, key)
        yield from fields(value, (*prefix, key))


def put(tree, path, value):
    *way, last = path
    for step in way:
        tree = tree[step]
    tree[last] = value


def refused(path):
    with pytest.raises(CheckpointError) as caught:
        verify(path)
    with pytest.raises(CheckpointError):
        load_newest(path.parent, store.everything)
    return str(caught.value)


def test_pickles_everywhere_are_never_opened(good, tmp_path):
    """In every field of the manifest, sealed with a right hash, and as every file."""
    fuse = tmp_path / "fuse"
    for protocol in (0, 4):
        bomb = pickle.dumps(Bomb(fuse), protocol)
        pickle.loads(bomb)
        fuse.rmdir()  # the bomb works
        original = body_of(good)
        seen = set()
        for field in fields(original):
            kind = tuple("#" if isinstance(step, int) else step for step in field)
            if kind in seen or field[0] in ("xxh3_128", "metadata", "packages", "layout"):
                continue  # one of each sort of field; the last three are free-form and unused
            seen.add(kind)
            wrong = json.loads(json.dumps(original))
            put(wrong, field, bomb.decode("latin1"))
            (good / "manifest.json").write_bytes(sealed(wrong))
            refused(good)
        assert len(seen) > 20
        (good / "manifest.json").write_bytes(sealed(original))
        for name in ("manifest.json", "node-00000-0.safetensors"):
            data = (good / name).read_bytes()
            (good / name).write_bytes(bomb.ljust(len(data), b"."))
            assert name in refused(good)
            (good / name).write_bytes(data)
        verify(good)
    assert not fuse.exists()


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "x\0.safetensors"])
def test_no_path_leads_out(good, name):
    wrong = body_of(good)
    size = wrong["files"].pop("node-00000-0.safetensors")
    wrong["files"][name] = size
    for tensor in wrong["tensors"]:
        for piece in tensor["pieces"]:
            piece["file"] = name
    (good / "manifest.json").write_bytes(sealed(wrong))
    assert "not a plain .safetensors name" in refused(good)


def test_links_pipes_and_directories_are_not_files(good, tmp_path):
    shard = good / "node-00000-0.safetensors"
    data = shard.read_bytes()
    (tmp_path / "elsewhere").write_bytes(data)

    def make_link():
        shard.symlink_to(tmp_path / "elsewhere")

    for make in (make_link, shard.mkdir, lambda: os.mkfifo(shard)):
        shard.unlink() if shard.is_symlink() or not shard.is_dir() else shard.rmdir()
        make()
        assert "not a regular file" in refused(good)


def test_a_checkpoint_directory_that_is_a_link_is_not_one(good):
    good.rename(good.parent.parent / "moved")
    good.symlink_to(good.parent.parent / "moved")
    assert load_newest(good.parent, store.everything) is None


_HUGE = [
    ("header length", lambda header: (1 << 62).to_bytes(8, "little") + header[8:]),
    ("header as long as the file", lambda header: len(header).to_bytes(8, "little") + header[8:]),
    ("offsets", lambda header: header.replace(b'"data_offsets":[0,', b'"data_offsets":[9,')),
    ("negative", lambda header: header.replace(b'"data_offsets":[0,', b'"data_offsets":[-1,')),
    ("nan", lambda header: header.replace(b'"shape":[3]', b'"shape":NaN')),
    ("deep", lambda header: header.replace(b'"shape":[3]', b'"shape":[[')),
]


@pytest.mark.parametrize("make", [make for _, make in _HUGE], ids=[name for name, _ in _HUGE])
def test_headers_that_lie(good, make):
    shard = good / "node-00000-0.safetensors"
    data = shard.read_bytes()
    changed = make(data)
    assert changed != data
    shard.write_bytes(changed[: len(data)].ljust(len(data), b"\0"))
    assert "damaged" in refused(good)


@pytest.mark.parametrize(
    "field, value, message",
    [
        (("tensors", 0, "shape"), [2**62, 4], "too many elements"),
        (("tensors", 0, "shape"), [2**64], "outside 0"),
        (("tensors", 0, "shape"), [-7, -5], "outside 0"),
        (("tensors", 0, "pieces", 0, "stop"), 2**63 - 1, "beyond|files"),
        (("consumed_samples",), 2**63, "outside"),
        (("consumed_samples",), 1e308, "must be an integer"),
        (("files", "node-00000-0.safetensors"), 2**62, "the manifest says"),
        (("tensors", 0, "pieces", 0, "box"), [[0, 2**62], [0, 5]], "not inside shape"),
        (("tensors", 0, "pieces", 0, "box"), [[0, 7]] * 100_000, "not inside shape"),
        (("tensors", 0, "pieces", 0, "box"), [[0, 7], [5, 0]], "not inside shape"),
        (("tensors", 0, "pieces", 0, "box"), "x", "must be a list"),
        (("tensors", 0, "pieces", 0, "box"), [[0, 1], [0, 1]], "beyond the 1 elements of its box"),
        (("config", "model", "num_layers"), 2, "config_xxh3_128 does not match"),
        (("tokenizer_xxh3_128",), "../..", "neither null nor"),
    ],
)
def test_numbers_that_lie(good, field, value, message):
    wrong = body_of(good)
    put(wrong, field, value)
    (good / "manifest.json").write_bytes(sealed(wrong))
    with pytest.raises(CheckpointError, match=message):
        verify(good)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(good, number):
    text = (good / "manifest.json").read_text()[len('{"xxh3_128": "') + 32 + 3 :]
    for field in ('"metadata": {', '"config": {', '"layout": {'):
        changed = "{" + text.replace(field, f'{field}"x": {number}, ')
        rest = b'", ' + changed[1:].replace(", }", "}").encode()
        data = b'{"xxh3_128": "' + xxhash.xxh3_128_hexdigest(rest).encode() + rest
        (good / "manifest.json").write_bytes(data)
        assert "not valid JSON" in refused(good)


_LIMITED = """
import resource, sys
from pathlib import Path
from megatron.optimus.checkpoint import CheckpointError, load_newest, store, verify
path = Path(sys.argv[1])
now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (256 << 20), now + (256 << 20)))
for action in (lambda: verify(path), lambda: load_newest(path.parent, store.everything)):
    try:
        action()
    except CheckpointError as error:
        print("refused:", str(error)[:200])
"""


@pytest.mark.parametrize("what", ["manifest", "header", "sparse"])
def test_memory_is_bounded(good, what):
    """Files of a terabyte that claim to be manifests, headers or shards, with 256 MiB of memory."""
    manifest, shard = good / "manifest.json", good / "node-00000-0.safetensors"
    if what == "manifest":
        os.truncate(manifest, 1 << 40)
    elif what == "header":
        data = bytearray(shard.read_bytes())
        data[:8] = (1 << 39).to_bytes(8, "little")
        shard.write_bytes(data)
        os.truncate(shard, 1 << 40)
        wrong = body_of(good)
        wrong["files"][shard.name] = 1 << 40
        manifest.write_bytes(sealed(wrong))
    else:
        os.truncate(shard, 1 << 40)
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(good)], check=False, capture_output=True, text=True, cwd=_ROOT
    )
    assert done.returncode == 0 and done.stdout.count("refused:") == 2, done.stdout + done.stderr[-2000:]


def test_the_limits_are_the_documented_ones(good):
    text = (_ROOT / "docs/checkpoint_format.md").read_text()
    assert "8 KiB per piece, a manifest 256 MiB" in text
    assert load_manifest(good).step == 1 and resource.getpagesize() > 0
