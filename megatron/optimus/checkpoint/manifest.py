"""The manifest: what a checkpoint holds, where every element lies, and the hash of every piece.

It is the only file that gives a checkpoint its meaning, so the reader trusts nothing: types, ranges, names, duplicate
keys, NaN, and that the pieces of every tensor cover it exactly once. The file protects itself with a hash in its first
bytes (docs/checkpoint_format.md). JSON only: reading a manifest can run no code.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from megatron.optimus.checkpoint.coverage import check_coverage
from megatron.optimus.checkpoint.errors import CheckpointError, UnknownVersionError
from megatron.optimus.checkpoint.shards import DTYPE_BYTES, parse_json, read_small_file
from megatron.optimus.checkpoint.slices import Box, Place, box_fits, box_numel

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


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a flattened ``box`` (None: the whole tensor): 1-D tensor ``key`` in ``file``."""

    file: str
    key: str
    start: int
    stop: int
    xxh3_128: str  # of the piece's bytes as stored, 32 hex digits
    box: Box | None = None

    def place(self, shape: tuple[int, ...]) -> Place:
        return Place(shape, self.start, self.stop, self.box)


@dataclass(frozen=True)
class TensorEntry:
    """One global tensor. ``dtype`` is safetensors' name ("F32", "BF16", ...)."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]  # sorted by start

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Manifest:
    """A whole checkpoint. ``kind``: "full" (can be resumed from) or "model" (weights only)."""

    kind: str
    step: int
    consumed_samples: int
    config: dict[str, Any]
    metadata: dict[str, Any]
    files: dict[str, int]  # file name -> bytes
    tensors: dict[tuple[str, str], TensorEntry] = field(repr=False)  # (name, kind) -> entry
    layout: dict[str, Any] = field(default_factory=dict)  # of the ranks that saved: for people, no reader needs it
    packages: dict[str, Any] = field(default_factory=dict)  # package -> version, "python" included
    tokenizer_xxh3_128: str | None = None  # of the tokenizer's file

    @property
    def config_xxh3_128(self) -> str:
        """The hash of ``config`` as canonical JSON: two runs with equal hashes were configured alike."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self.config, sort_keys=True, separators=(",", ":")).encode())

    def to_bytes(self) -> bytes:
        """The file's bytes. Raises CheckpointError when config or metadata are not plain JSON (NaN is not)."""
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
    return {
        "name": entry.name,
        "kind": entry.kind,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "pieces": [
            {"file": p.file, "key": p.key, "start": p.start, "stop": p.stop, "xxh3_128": p.xxh3_128}
            | ({} if p.box is None else {"box": p.box})
            for p in entry.pieces
        ],
    }


def read_manifest(directory: Path) -> Manifest:
    """Reads and validates ``directory/manifest.json``. Raises CheckpointError naming the offending field."""
    path = directory / MANIFEST_NAME
    return parse_manifest(read_small_file(path, MAX_MANIFEST_BYTES), str(path))


def parse_manifest(data: bytes, source: str) -> Manifest:
    """Validates a manifest's bytes; ``source`` opens every error message."""
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
    for name in files:
        if not _FILE_NAME.fullmatch(name):
            raise CheckpointError(f"{source}: files: {name[:200]!r} is not a plain .safetensors name")
        _count(files, name, f"{source}: files")
    manifest = Manifest(
        kind=body["kind"],
        step=_count(body, "step", source),
        consumed_samples=_count(body, "consumed_samples", source),
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
    _check_files(manifest, source)
    for entry in manifest.tensors.values():
        where = f"{source}: tensor {entry.name} ({entry.kind})"
        check_coverage(where, entry.shape, [piece.place(entry.shape) for piece in entry.pieces])
    return manifest


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and _HASH.fullmatch(value) is not None


def parse_tensors(items: list[Any], source: str) -> dict[tuple[str, str], TensorEntry]:
    """Validates a list of tensors field by field (their coverage is the manifest's business)."""
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
        sizes = tuple(_count({"shape": size}, "shape", where) for size in shape)
        if math.prod(sizes) > _MAX_INT:
            raise CheckpointError(f"{where}: shape {sizes} has too many elements")
        pieces = [_parse_piece(piece, sizes, where) for piece in _typed(item, "pieces", list, where)]
        pieces.sort(key=lambda piece: piece.start)
        tensors[name, kind] = TensorEntry(name, kind, item["dtype"], sizes, tuple(pieces))
    return tensors


def _parse_piece(item: Any, shape: tuple[int, ...], where: str) -> Piece:
    where = f"{where}: pieces"
    _exact_fields(item, _PIECE_FIELDS, where, optional="box")
    piece = Piece(
        file=_typed(item, "file", str, where),
        key=_typed(item, "key", str, where),
        start=_count(item, "start", where),
        stop=_count(item, "stop", where),
        xxh3_128=_typed(item, "xxh3_128", str, where),
        box=_parse_box(item["box"], shape, where) if "box" in item else None,
    )
    if not _FILE_NAME.fullmatch(piece.file):
        raise CheckpointError(f"{where}: file {piece.file[:200]!r} is not a plain .safetensors name")
    if not 0 < len(piece.key) <= _MAX_KEY:
        raise CheckpointError(f"{where}: key has {len(piece.key)} characters, limit {_MAX_KEY}")
    if not _is_hash(piece.xxh3_128):
        raise CheckpointError(f"{where}: xxh3_128 {piece.xxh3_128[:100]!r} is not 32 hex digits")
    if piece.start >= piece.stop:
        raise CheckpointError(f"{where}: start {piece.start} is not below stop {piece.stop}")
    if piece.box is not None and piece.stop > box_numel(piece.box):
        raise CheckpointError(f"{where}: stop {piece.stop} is beyond the {box_numel(piece.box)} elements of its box")
    return piece


def _parse_box(value: Any, shape: tuple[int, ...], where: str) -> Box:
    pairs = value if isinstance(value, list) else [value]
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise CheckpointError(f"{where}: box must be a list of [start, stop]")
    box = tuple((_count({"box": a}, "box", where), _count({"box": b}, "box", where)) for a, b in pairs)
    if not box_fits(box, shape):
        raise CheckpointError(f"{where}: box {box} is not inside shape {shape}")
    return box


def _check_files(manifest: Manifest, source: str) -> None:
    """Every piece is in a listed file, no two share a key, and no file is smaller than what it should hold."""
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
            held[piece.file] += (piece.stop - piece.start) * DTYPE_BYTES[entry.dtype]
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


def _count(item: dict[str, Any], name: str, where: str) -> int:
    value = item[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"{where}: {name} must be an integer, is {type(value).__name__}")
    if not 0 <= value <= _MAX_INT:
        raise CheckpointError(f"{where}: {name} is outside 0 ... 2^63-1")
    return value
