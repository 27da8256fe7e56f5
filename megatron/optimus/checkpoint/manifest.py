"""The manifest: what a checkpoint holds, where every element lies, and the hash of every piece.

Only this file gives a checkpoint its meaning, so its reader trusts nothing: it checks types, numbers, names, duplicate
keys, NaN, and that the pieces of every tensor cover it exactly once. A hash in its first bytes protects the file itself
(docs/checkpoint_format.md). It is JSON, so reading it can run no code.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from megatron.optimus.checkpoint.errors import CheckpointError, UnknownVersionError
from megatron.optimus.checkpoint.shards import DTYPE_BYTES
from megatron.optimus.checkpoint.slices import Box, Region, box_fits, box_numel, check_coverage
from megatron.optimus.checkpoint.untrusted import parse_json, read_small_file

MANIFEST_NAME = "manifest.json"
FORMAT_NAME = "optimus-checkpoint"
FORMAT_VERSION = 2
MAX_MANIFEST_BYTES = 1 << 28  # about a million pieces; parsed, some ten times as much memory
_MAX_INT = (1 << 63) - 1
_MAX_DIMS = 8
_MAX_KEY = 2048
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,200}\.safetensors")  # no separator, no leading dot, no ".."
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,1024}")
_KIND = re.compile(r"[a-z][a-z0-9_]{0,63}")
_HASH = re.compile(r"[0-9a-f]{32}")
_PIECE_FIELDS = ("file", "key", "start", "stop", "xxh3_128")
_PREFIX = b'{"xxh3_128": "'


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A region of a named tensor as a file holds it: the one-dimensional tensor ``key`` of a safetensors file.

        name, kind    layers.3.attention.qkv.weight, exp_avg     which tensor
        dtype         F32                                        safetensors' name
        region        shape, start, stop, box                    which elements of it (slices.py has a picture)
        file, key     node-00000-1.safetensors, ...              where they are
        xxh3_128      32 hex digits                              hash of their bytes

    While a save is planned, ``file`` and then ``xxh3_128`` are still empty.
    """

    name: str
    kind: str
    dtype: str
    region: Region
    key: str
    file: str = ""
    xxh3_128: str = ""

    @property
    def numel(self) -> int:
        """Number of elements in the piece."""
        return self.region.numel

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements in the file."""
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the whole model and the pieces that cover it. ``dtype`` is safetensors' name ("F32", "BF16", ...)."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]  # sorted by start

    @property
    def numel(self) -> int:
        """Number of elements in the whole tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but the tensors' data. ``kind`` is "full" (training resumes from it) or "model"."""

    kind: str
    step: int
    consumed_samples: int
    config: dict[str, Any]
    metadata: dict[str, Any]
    files: dict[str, int]  # file name -> bytes
    tensors: dict[tuple[str, str], TensorEntry] = field(repr=False)  # (name, kind) -> entry
    layout: dict[str, Any] = field(default_factory=dict)  # sizes of the saving ranks' axes; no reader needs it
    packages: dict[str, Any] = field(default_factory=dict)  # package -> version, "python" included
    tokenizer_xxh3_128: str | None = None  # of the tokenizer's file

    @property
    def config_xxh3_128(self) -> str:
        """The hash of ``config`` as canonical JSON: two runs with equal hashes were configured alike."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self.config, sort_keys=True, separators=(",", ":")).encode())

    def contents_of(self, file: str) -> str:
        """Names the tensors that a file holds, for the message about its loss."""
        entries = [entry for entry in self.tensors.values() if any(piece.file == file for piece in entry.pieces)]
        names = list(dict.fromkeys(entry.name for entry in entries))
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")

    def to_bytes(self) -> bytes:
        """Builds the file's bytes. Raises CheckpointError when config or metadata are not plain JSON (NaN is not)."""
        body = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "kind": self.kind,
            "step": self.step,
            "consumed_samples": self.consumed_samples,
            "config": self.config,
            "config_xxh3_128": "",
            "layout": self.layout,
            "packages": self.packages,
            "tokenizer_xxh3_128": self.tokenizer_xxh3_128,
            "metadata": self.metadata,
            "files": self.files,
            "tensors": [tensor_to_json(entry) for entry in self.tensors.values()],
        }
        try:
            body["config_xxh3_128"] = self.config_xxh3_128
            text = json.dumps(body, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"config or metadata cannot be written as JSON: {error}") from error
        rest = b'", ' + text[1:].encode()
        data = _PREFIX + xxhash.xxh3_128_hexdigest(rest).encode() + rest
        parse_manifest(data, "the new manifest")  # what is written can be read, and covers every tensor
        return data


def tensor_to_json(entry: TensorEntry) -> dict[str, Any]:
    """Returns a tensor's entry of the manifest's JSON."""
    return {
        "name": entry.name,
        "kind": entry.kind,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "pieces": [
            {"file": p.file, "key": p.key, "start": p.region.start, "stop": p.region.stop, "xxh3_128": p.xxh3_128}
            | ({} if p.region.box is None else {"box": p.region.box})
            for p in entry.pieces
        ],
    }


def read_manifest(directory: Path) -> Manifest:
    """Reads and validates ``directory/manifest.json``. Raises CheckpointError naming the offending field."""
    path = directory / MANIFEST_NAME
    return parse_manifest(read_small_file(path, MAX_MANIFEST_BYTES), str(path))


def parse_manifest(data: bytes, source: str) -> Manifest:
    """Parses and validates the bytes of a manifest.

    Args:
        data: the whole file.
        source: opens every error's message.

    Raises:
        UnknownVersionError: another format or version.
        CheckpointError: damaged, or a field is wrong; the message names it.
    """
    hash_end = len(_PREFIX) + 32
    claimed = data[len(_PREFIX) : hash_end]
    if not data.startswith(_PREFIX) or xxhash.xxh3_128_hexdigest(data[hash_end:]).encode() != claimed:
        raise CheckpointError(f"{source}: damaged: field xxh3_128 does not match the file's bytes")
    body = parse_json(data, source)
    found = body.get("format"), body.get("version")
    if found != (FORMAT_NAME, FORMAT_VERSION):
        raise UnknownVersionError(
            f"{source}: format {str(found[0])[:100]!r} version {str(found[1])[:100]}; this program reads "
            f"{FORMAT_NAME!r} version {FORMAT_VERSION}. Load it with the release that wrote it, or move it away to go "
            "on from the one before"
        )
    _exact_fields(
        body, Manifest.__dataclass_fields__.keys() | {"xxh3_128", "format", "version", "config_xxh3_128"}, source
    )
    if body["kind"] not in ("full", "model"):
        raise CheckpointError(f"{source}: kind is {body['kind']!r}; must be 'full' or 'model'")
    files = _typed(body, "files", dict, source)
    for name, size in files.items():
        if not _FILE_NAME.fullmatch(name):
            raise CheckpointError(f"{source}: files: {name[:200]!r} is not a plain .safetensors name")
        _count(size, name, f"{source}: files")
    manifest = Manifest(
        kind=body["kind"],
        step=_count(body["step"], "step", source),
        consumed_samples=_count(body["consumed_samples"], "consumed_samples", source),
        config=_typed(body, "config", dict, source),
        metadata=_typed(body, "metadata", dict, source),
        files=files,
        tensors=parse_tensors(_typed(body, "tensors", list, source), source),
        layout=_typed(body, "layout", dict, source),
        packages=_typed(body, "packages", dict, source),
        tokenizer_xxh3_128=body["tokenizer_xxh3_128"],
    )
    if manifest.tokenizer_xxh3_128 is not None and not _is_hash(manifest.tokenizer_xxh3_128):
        raise CheckpointError(f"{source}: tokenizer_xxh3_128 is neither null nor 32 hex digits")
    if body["config_xxh3_128"] != manifest.config_xxh3_128:
        raise CheckpointError(f"{source}: config_xxh3_128 does not match config")
    for name, section in manifest.config.items():
        if not isinstance(section, dict):
            raise CheckpointError(f"{source}: config.{name} must be a JSON object, is {type(section).__name__}")
    _check_files(manifest, source)
    for entry in manifest.tensors.values():
        where = f"{source}: tensor {entry.name} ({entry.kind})"
        check_coverage(where, entry.shape, [piece.region for piece in entry.pieces])
    return manifest


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and _HASH.fullmatch(value) is not None


def parse_tensors(items: list[Any], source: str) -> dict[tuple[str, str], TensorEntry]:
    """Validates a list of tensors field by field. The caller checks that their pieces cover them."""
    tensors: dict[tuple[str, str], TensorEntry] = {}
    for index, item in enumerate(items):
        where = f"{source}: tensors[{index}]"
        _exact_fields(item, TensorEntry.__dataclass_fields__.keys(), where)
        name = _typed(item, "name", str, where)
        kind = _typed(item, "kind", str, where)
        if not _NAME.fullmatch(name) or not _KIND.fullmatch(kind):
            raise CheckpointError(f"{where}: name {name[:100]!r} or kind {kind[:100]!r} is not allowed")
        where = f"{source}: tensor {name} ({kind})"
        if (name, kind) in tensors:
            raise CheckpointError(f"{where}: listed twice")
        if _typed(item, "dtype", str, where) not in DTYPE_BYTES:
            raise CheckpointError(f"{where}: dtype {item['dtype'][:100]!r} is not one of {', '.join(DTYPE_BYTES)}")
        shape = _typed(item, "shape", list, where)
        if len(shape) > _MAX_DIMS:
            raise CheckpointError(f"{where}: shape has {len(shape)} dimensions, limit {_MAX_DIMS}")
        sizes = tuple(_count(size, "shape", where) for size in shape)
        if math.prod(sizes) > _MAX_INT:
            raise CheckpointError(f"{where}: shape {sizes} has too many elements")
        entry = TensorEntry(name, kind, item["dtype"], sizes, ())
        pieces = [_parse_piece(piece, entry, where) for piece in _typed(item, "pieces", list, where)]
        pieces.sort(key=lambda piece: piece.region.start)
        tensors[name, kind] = replace(entry, pieces=tuple(pieces))
    return tensors


def _parse_piece(item: Any, entry: TensorEntry, where: str) -> StoredPiece:
    where = f"{where}: pieces"
    _exact_fields(item, _PIECE_FIELDS, where, optional="box")
    start, stop = _count(item["start"], "start", where), _count(item["stop"], "stop", where)
    box = _parse_box(item["box"], entry.shape, where) if "box" in item else None
    piece = StoredPiece(
        entry.name,
        entry.kind,
        entry.dtype,
        Region(entry.shape, start, stop, box),
        key=_typed(item, "key", str, where),
        file=_typed(item, "file", str, where),
        xxh3_128=_typed(item, "xxh3_128", str, where),
    )
    if not _FILE_NAME.fullmatch(piece.file):
        raise CheckpointError(f"{where}: file {piece.file[:200]!r} is not a plain .safetensors name")
    if not 0 < len(piece.key) <= _MAX_KEY:
        raise CheckpointError(f"{where}: key has {len(piece.key)} characters, limit {_MAX_KEY}")
    if not _is_hash(piece.xxh3_128):
        raise CheckpointError(f"{where}: xxh3_128 {piece.xxh3_128[:100]!r} is not 32 hex digits")
    if start >= stop:
        raise CheckpointError(f"{where}: start {start} is not below stop {stop}")
    if box is not None and stop > box_numel(box):
        raise CheckpointError(f"{where}: stop {stop} is beyond the {box_numel(box)} elements of its box")
    return piece


def _parse_box(value: Any, shape: tuple[int, ...], where: str) -> Box:
    pairs = value if isinstance(value, list) else [value]
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise CheckpointError(f"{where}: box must be a list of [start, stop]")
    box = tuple((_count(a, "box", where), _count(b, "box", where)) for a, b in pairs)
    if not box_fits(box, shape):
        raise CheckpointError(f"{where}: box {box} is not inside shape {shape}")
    return box


def _check_files(manifest: Manifest, source: str) -> None:
    """Checks that every piece is in a listed file, no two share a key, and no file is smaller than its pieces."""
    held = dict.fromkeys(manifest.files, 0)
    seen: set[tuple[str, str]] = set()
    for entry in manifest.tensors.values():
        for piece in entry.pieces:
            where = f"{source}: tensor {entry.name} ({entry.kind})"
            if piece.file not in held:
                raise CheckpointError(f"{where}: file {piece.file} is not listed in files")
            if (piece.file, piece.key) in seen:
                raise CheckpointError(f"{where}: key {piece.key!r} of {piece.file} is used twice")
            seen.add((piece.file, piece.key))
            held[piece.file] += piece.num_bytes
    for name, size in held.items():
        if size > manifest.files[name]:
            raise CheckpointError(f"{source}: files: {name} has {manifest.files[name]} bytes, its pieces need {size}")


def _exact_fields(item: Any, expected: Collection[str], where: str, optional: str | None = None) -> None:
    if not isinstance(item, dict):
        raise CheckpointError(f"{where}: must be a JSON object, is {type(item).__name__}")
    for name in expected:
        if name not in item:
            raise CheckpointError(f"{where}: field {name} is missing")
    for name in item:
        if name not in expected and name != optional:
            raise CheckpointError(f"{where}: unknown field {name[:100]!r}")


def _typed(item: dict[str, Any], name: str, kind: type, where: str) -> Any:
    if not isinstance(item[name], kind):
        raise CheckpointError(f"{where}: {name} must be {kind.__name__}, is {type(item[name]).__name__}")
    return item[name]


def _count(value: Any, name: str, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"{where}: {name} must be an integer, is {type(value).__name__}")
    if not 0 <= value <= _MAX_INT:
        raise CheckpointError(f"{where}: {name} is outside 0 ... 2^63-1")
    return value
