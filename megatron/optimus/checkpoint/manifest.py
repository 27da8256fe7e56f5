"""The manifest: what a checkpoint holds, where every element lies, and the hash of every piece.

It is the only file that gives a checkpoint its meaning, so the reader trusts nothing: types, ranges, names, duplicate
keys, NaN, and that the pieces of every tensor cover it exactly once. The file protects itself with a hash in its first
bytes (docs/checkpoint_format.md). JSON only: reading a manifest can run no code.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.shards import DTYPE_BYTES, read_small_file

MANIFEST_NAME = "manifest.json"
FORMAT_NAME = "optimus-checkpoint"
FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 1 << 30  # about seven million pieces
_MAX_INT = (1 << 63) - 1
_MAX_DIMS = 8
_MAX_NAME = 1024
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,200}\.safetensors")  # no separator, no leading dot, no ".."
_KIND = re.compile(r"[a-z][a-z0-9_]{0,63}")
_HASH = re.compile(r"[0-9a-f]{32}")
_PREFIX = b'{"xxh3_128": "'


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a flattened tensor: a 1-D tensor ``key`` in safetensors file ``file``."""

    file: str
    key: str
    start: int
    stop: int
    xxh3_128: str  # of the piece's bytes as stored, 32 hex digits


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

    def to_bytes(self) -> bytes:
        """The file's bytes. Raises CheckpointError when config or metadata are not plain JSON (NaN is not)."""
        body = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "kind": self.kind,
            "step": self.step,
            "consumed_samples": self.consumed_samples,
            "config": self.config,
            "metadata": self.metadata,
            "files": self.files,
            "tensors": [tensor_to_json(entry) for entry in self.tensors.values()],
        }
        try:
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
    _exact_fields(body, Manifest.__dataclass_fields__.keys() | {"xxh3_128", "format", "version"}, source)
    if body["format"] != FORMAT_NAME or body["version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"{source}: format {body['format']!r} version {body['version']!r}; "
            f"this program reads {FORMAT_NAME!r} version {FORMAT_VERSION}"
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
    )
    _check_files(manifest, source)
    for entry in manifest.tensors.values():
        _check_coverage(entry, source)
    return manifest


def parse_json(data: bytes, source: str) -> dict[str, Any]:
    """A JSON object without duplicate keys, NaN or infinities."""
    try:
        body = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: not valid JSON: {str(error)[:300]}") from error
    if not isinstance(body, dict):
        raise CheckpointError(f"{source}: must be a JSON object, is {type(body).__name__}")
    return body


def parse_tensors(items: list[Any], source: str) -> dict[tuple[str, str], TensorEntry]:
    """Validates a list of tensors field by field (their coverage is the manifest's business)."""
    tensors: dict[tuple[str, str], TensorEntry] = {}
    for index, item in enumerate(items):
        where = f"{source}: tensors[{index}]"
        _exact_fields(item, TensorEntry.__dataclass_fields__.keys(), where)
        name = _typed(item, "name", str, where)
        kind = _typed(item, "kind", str, where)
        if not 0 < len(name) <= _MAX_NAME or not _KIND.fullmatch(kind):
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
        pieces = [_parse_piece(piece, where) for piece in _typed(item, "pieces", list, where)]
        pieces.sort(key=lambda piece: piece.start)
        tensors[name, kind] = TensorEntry(name, kind, item["dtype"], sizes, tuple(pieces))
    return tensors


def _parse_piece(item: Any, where: str) -> Piece:
    where = f"{where}: pieces"
    _exact_fields(item, Piece.__dataclass_fields__.keys(), where)
    piece = Piece(
        file=_typed(item, "file", str, where),
        key=_typed(item, "key", str, where),
        start=_count(item, "start", where),
        stop=_count(item, "stop", where),
        xxh3_128=_typed(item, "xxh3_128", str, where),
    )
    if not _FILE_NAME.fullmatch(piece.file):
        raise CheckpointError(f"{where}: file {piece.file[:200]!r} is not a plain .safetensors name")
    if not 0 < len(piece.key) <= 2 * _MAX_NAME:
        raise CheckpointError(f"{where}: key has {len(piece.key)} characters, limit {2 * _MAX_NAME}")
    if not _HASH.fullmatch(piece.xxh3_128):
        raise CheckpointError(f"{where}: xxh3_128 {piece.xxh3_128[:100]!r} is not 32 hex digits")
    if piece.start >= piece.stop:
        raise CheckpointError(f"{where}: start {piece.start} is not below stop {piece.stop}")
    return piece


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


def _check_coverage(entry: TensorEntry, source: str) -> None:
    where = f"{source}: tensor {entry.name} ({entry.kind})"
    position = 0
    for piece in entry.pieces:
        if piece.start != position:
            problem = "covered twice" if piece.start < position else "missing"
            low, high = sorted((piece.start, position))
            raise CheckpointError(f"{where}: pieces: elements [{low}, {high}) are {problem}")
        position = piece.stop
    if position != entry.numel:
        problem = "missing" if position < entry.numel else f"beyond its shape {entry.shape}"
        low, high = sorted((position, entry.numel))
        raise CheckpointError(f"{where}: pieces: elements [{low}, {high}) are {problem}")


def _exact_fields(item: Any, expected: set[str] | Any, where: str) -> None:
    if not isinstance(item, dict):
        raise CheckpointError(f"{where}: must be a JSON object, is {type(item).__name__}")
    for name in expected:
        if name not in item:
            raise CheckpointError(f"{where}: field {name} is missing")
    for name in item:
        if name not in expected:
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


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("an object has the same key twice")
    return result


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large for a double")
    return value
