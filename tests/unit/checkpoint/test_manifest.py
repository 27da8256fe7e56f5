import contextlib
import copy
import json
import random

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.manifest import Manifest, StoredPiece, TensorEntry, parse_manifest, read_manifest
from megatron.optimus.checkpoint.slices import Region

_HASH = "0" * 32


def manifest(**changes):
    entry = TensorEntry(
        "w",
        "master",
        "F32",
        (2, 3),
        (
            StoredPiece("w", "master", "F32", Region((2, 3), 0, 2), "w/0", "rank-00000.safetensors", _HASH),
            StoredPiece("w", "master", "F32", Region((2, 3), 2, 6), "w/2", "rank-00001.safetensors", _HASH),
        ),
    )
    values = dict(
        kind="full",
        step=7,
        consumed_samples=56,
        config={"model": {"num_layers": 2}},
        metadata={"optimizer_step": 7, "rate": 0.1},
        files={"rank-00000.safetensors": 100, "rank-00001.safetensors": 100},
        tensors={("w", "master"): entry},
    )
    return Manifest(**(values | changes))


def sealed(body) -> bytes:
    """Bytes with a right hash around a body that may be wrong."""
    text = body if isinstance(body, str) else json.dumps({k: v for k, v in body.items() if k != "xxh3_128"})
    rest = b'", ' + text[1:].encode()
    return b'{"xxh3_128": "' + xxhash.xxh3_128_hexdigest(rest).encode() + rest


def body():
    return json.loads(manifest().to_bytes())


def set_at(tree, path, value):
    *way, last = path
    for step in way:
        tree = tree[step]
    if value is ...:
        del tree[last]
    else:
        tree[last] = value


def test_round_trip(tmp_path):
    (tmp_path / "manifest.json").write_bytes(manifest().to_bytes())
    assert read_manifest(tmp_path) == manifest()
    assert parse_manifest(sealed(body()), "m") == manifest()  # the test's own sealing is right


_PIECE = ("tensors", 0, "pieces", 0)
_WRONG = [
    (("version",), 1, "version 1; this program reads .* version 2"),
    (("format",), "other", "format 'other'"),
    (("kind",), "half", "kind is 'half'"),
    (("step",), -1, "step is outside"),
    (("step",), True, "step must be an integer, is bool"),
    (("step",), 1.0, "step must be an integer, is float"),
    (("step",), 2**63, "step is outside"),
    (("step",), ..., "field step is missing"),
    (("extra",), 1, "unknown field 'extra'"),
    (("config",), [], "config must be dict"),
    (("metadata",), None, "metadata must be dict"),
    (("files",), {"../evil.safetensors": 5}, "not a plain .safetensors name"),
    (("files",), {"rank-00000.safetensors": 100}, "rank-00001.safetensors is not listed in files"),
    (("files", "rank-00001.safetensors"), 15, "its pieces need 16"),
    (("tensors",), {}, "tensors must be list"),
    (("tensors", 0), 5, r"tensors\[0\]: must be a JSON object"),
    (("tensors", 0, "name"), "", "not allowed"),
    (("tensors", 0, "kind"), "../x", "not allowed"),
    (("tensors", 0, "dtype"), "F128", "dtype 'F128' is not one of"),
    (("tensors", 0, "shape"), [2, -3], "shape is outside"),
    (("tensors", 0, "shape"), [2**40, 2**40], "too many elements"),
    (("tensors", 0, "shape"), [1] * 9, "9 dimensions"),
    (("tensors", 0, "shape"), [2, 4], r"elements \[6, 8\) are missing"),
    (("tensors", 0, "shape"), [5], "beyond its shape"),
    ((*_PIECE, "stop"), 3, r"elements \[2, 3\) are covered twice"),
    ((*_PIECE, "stop"), 1, r"elements \[1, 2\) are missing"),
    ((*_PIECE, "stop"), 0, "not below stop"),
    ((*_PIECE, "start"), 1, r"elements \[0, 1\) are missing"),
    ((*_PIECE, "file"), "/etc/x.safetensors", "not a plain .safetensors name"),
    ((*_PIECE, "file"), "a/../b.safetensors", "not a plain .safetensors name"),
    ((*_PIECE, "file"), "..safetensors", "not a plain .safetensors name"),
    ((*_PIECE, "xxh3_128"), "zz", "not 32 hex digits"),
    ((*_PIECE, "key"), "", "key has 0 characters"),
    ((*_PIECE, "key"), 5, "key must be str"),
    (("tensors", 0, "pieces", 1, "file"), "rank-00000.safetensors", None),
]


@pytest.mark.parametrize("path, value, message", _WRONG)
def test_every_wrong_field_is_named(path, value, message):
    wrong = body()
    set_at(wrong, path, value)
    if message is None:
        wrong["tensors"][0]["pieces"][1]["key"] = "w/0"
        message = "key 'w/0' of rank-00000.safetensors is used twice"
    with pytest.raises(CheckpointError, match=message):
        parse_manifest(sealed(wrong), "m")


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"step": NaN}', "NaN is not a JSON number"),
        ('{"step": 1e999}', "too large"),
        ('{"step": 1, "step": 2}', "same key twice"),
        ('{"config": ' + "[" * 100_000 + "}", "not valid JSON"),
        ('{"step": ' + "9" * 5000 + "}", "not valid JSON"),
        ("{", "not valid JSON"),
    ],
)
def test_hostile_json(text, message):
    with pytest.raises(CheckpointError, match=message):
        parse_manifest(sealed(text), "m")


def test_same_tensor_twice_is_refused():
    wrong = body()
    wrong["tensors"].append(copy.deepcopy(wrong["tensors"][0]))
    with pytest.raises(CheckpointError, match="listed twice"):
        parse_manifest(sealed(wrong), "m")


def test_every_single_bit_flip_is_detected():
    data = manifest().to_bytes()
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << random.Random(position).randrange(8)
        with pytest.raises(CheckpointError):
            parse_manifest(bytes(flipped), "m")
    for length in range(0, len(data), 7):
        with pytest.raises(CheckpointError):
            parse_manifest(data[:length], "m")


@pytest.mark.parametrize("value", [float("nan"), object(), {1, 2}])
def test_what_json_cannot_hold_is_refused_when_writing(value):
    with pytest.raises(CheckpointError, match="cannot be written as JSON"):
        manifest(metadata={"x": value}).to_bytes()


def test_links_and_directories_are_not_manifests(tmp_path):
    real = tmp_path / "real.json"
    real.write_bytes(manifest().to_bytes())
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "manifest.json").symlink_to(real)
    (tmp_path / "b" / "manifest.json").mkdir(parents=True)
    for name in "ab":
        with pytest.raises(CheckpointError, match="not a regular file"):
            read_manifest(tmp_path / name)
    with pytest.raises(CheckpointError, match="No such file"):
        read_manifest(tmp_path)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def _paths(tree, prefix=()):
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*prefix, key)
        yield from _paths(value, (*prefix, key))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(_paths(body()))), _JSON)
def test_any_value_in_any_field_gives_a_manifest_or_a_checkpoint_error(path, value):
    wrong = body()
    if path[0] == "xxh3_128":
        return
    set_at(wrong, path, value)
    with contextlib.suppress(CheckpointError):
        parse_manifest(sealed(wrong), "m")
