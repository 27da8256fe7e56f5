"""Our own checkpoints as source and destination."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import xxhash

from megatron.optimus.checkpoint.chunks import CHUNK_BYTES, Chunk, ShardFiles
from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.manifest import MANIFEST_NAME, Manifest, Piece, TensorEntry
from megatron.optimus.checkpoint.shards import ShardItem, dtype_name, torch_dtype, write_shard
from megatron.optimus.checkpoint.slices import Place, common_parts
from megatron.optimus.checkpoint.store import load_manifest, resolve
from megatron.optimus.config.serialize import from_dict, to_dict
from megatron.optimus.convert.hf_files import split_by_size, token_ids_of
from megatron.optimus.convert.request import DTYPES, Options, Plan, Written
from megatron.optimus.convert.source import MASTER, MOMENTS, WEIGHT, Source, same_names, units
from megatron.optimus.models.hf_map import parameter_shapes
from megatron.optimus.platform.files import write_new

TOKEN_IDS_FIELD = "hf_token_ids"  # in a manifest's metadata: what an imported model's config.json named
GENERATION_FIELD = "hf_generation_config"  # and its generation_config.json
OPTIMIZER_STEPS_FIELD = "optimizer_step_count"  # the trainer's: bias correction of the moments goes on from it
BUFFER = "buffer"


@dataclass
class _Hashed:
    """How far a piece has been hashed: its first ``count`` elements."""

    entry: TensorEntry
    count: int = 0
    digest: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)


class OptimusSource(Source):
    """A full or model-only checkpoint.

    A piece is verified when its last byte has been read, in ``finish`` at the latest: what was made of it must not be
    used before.
    """

    def __init__(self, path: Path) -> None:
        path = resolve(path)
        manifest = load_manifest(path)
        where = str(path / MANIFEST_NAME)
        if "model" not in manifest.config:
            raise CheckpointError(f"{where}: config has no section 'model'; the shape is unknown")
        ids = manifest.metadata.get(TOKEN_IDS_FIELD)
        generation = manifest.metadata.get(GENERATION_FIELD)
        steps = manifest.metadata.get(OPTIMIZER_STEPS_FIELD)
        super().__init__(
            path,
            "optimus",
            from_dict(manifest.config, where),
            step=manifest.step,
            consumed_samples=manifest.consumed_samples,
            optimizer_steps=steps if isinstance(steps, int) else None,
            token_ids=token_ids_of(ids) if isinstance(ids, dict) else {},
            generation=generation if isinstance(generation, dict) else {},
        )
        self._manifest = manifest
        self._files = ShardFiles(path, manifest)
        self.resources.append(self._files)
        self._buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        self._verified: set[Piece] = set()
        self._hashed: dict[Piece, _Hashed] = {}  # of which a beginning has been read
        shapes = parameter_shapes(self.model)
        for kind in (MASTER, *MOMENTS) if manifest.kind == "full" else (WEIGHT,):
            stored = {name: entry for (name, entry_kind), entry in manifest.tensors.items() if entry_kind == kind}
            if not stored and kind in MOMENTS:
                continue
            same_names(path, set(stored), set(shapes))
            for name, entry in stored.items():
                if entry.shape != shapes[name]:
                    raise CheckpointError(f"{path}: {name} has shape {entry.shape}, its config says {shapes[name]}")
                self.dtypes[name, kind] = torch_dtype(entry.dtype)
        for (name, kind), entry in manifest.tensors.items():
            if kind == BUFFER:
                if not name.endswith(".expert_bias"):
                    raise CheckpointError(f"{path}: buffer {name} is not known; a newer version wrote it")
                self.buffers[name] = self._load(entry, 0, entry.numel).view(entry.shape)

    def read(self, name: str, kind: str, start: int, stop: int) -> torch.Tensor:
        return self._load(self._manifest.tensors[name, kind], start, stop)

    def finish(self) -> None:
        for piece in list(self._hashed):
            self._hash_rest(piece)

    def _load(self, entry: TensorEntry, start: int, stop: int) -> torch.Tensor:
        """Reads what is wanted of each piece and hashes it on the way, as long as one range follows the other.

        A piece of which another part is wanted first is hashed whole before.
        """
        tensor = torch.empty(stop - start, dtype=torch_dtype(entry.dtype))
        wanted = Place(entry.shape, start, stop)
        for piece in self._touching(entry, wanted):
            low, high = 0, piece.stop - piece.start  # of the piece; what a box has of a range is not one range
            if piece.box is None:
                low, high = max(start, piece.start) - piece.start, min(stop, piece.stop) - piece.start
            if piece not in self._verified and low != self._hashed.setdefault(piece, _Hashed(entry)).count:
                self._hash_rest(piece)
            for chunk in _ranges(entry, piece, low, high):
                parts = list(common_parts(chunk.place, wanted))
                if not parts and piece in self._verified:
                    continue
                data = self._read(chunk)
                for source, target in parts:
                    target.view(tensor).copy_(source.view(data.view(tensor.dtype)))
        return tensor

    def _hash_rest(self, piece: Piece) -> None:
        """Raises DamagedError naming the tensor."""
        progress = self._hashed[piece]
        for chunk in _ranges(progress.entry, piece, progress.count, piece.stop - piece.start):
            self._read(chunk)

    def _read(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's bytes; those of a piece that is being hashed follow what has been hashed of it."""
        data, piece = self._files.read(chunk, self._buffer), chunk.piece
        progress = self._hashed.get(piece)
        if progress is not None:
            progress.digest.update(data.numpy().data)
            progress.count = chunk.stop
            if chunk.is_last:
                self._files.check(chunk, progress.digest.hexdigest())
                self._verified.add(piece)
                del self._hashed[piece]
        return data

    def _touching(self, entry: TensorEntry, wanted: Place) -> Iterator[Piece]:
        if any(piece.box is not None for piece in entry.pieces):
            yield from (p for p in entry.pieces if any(common_parts(p.place(entry.shape), wanted)))
            return
        first = bisect_right(entry.pieces, wanted.start, key=lambda piece: piece.start) - 1
        yield from takewhile(lambda piece: piece.start < wanted.stop, entry.pieces[max(0, first) :])


def _ranges(entry: TensorEntry, piece: Piece, low: int, high: int) -> Iterator[Chunk]:
    """Elements [low, high) of a piece in chunks of what is read in one go."""
    size = CHUNK_BYTES // torch_dtype(entry.dtype).itemsize
    for first in range(low, high, size):
        yield Chunk(entry, piece, first, min(first + size, high))


def plan(source: Source, options: Options) -> Plan:
    """A checkpoint that training goes on from, if the source has masters and moments; else a model-only one.

    One piece per matrix, so the experts of a layer are never put together in memory.
    """
    full = source.is_full and options.dtype is None
    kinds = (MASTER, *MOMENTS) if full else (source.weight_kind(options.dtype),)
    shapes = parameter_shapes(source.model)
    listed: dict[tuple[str, str], Written] = {}
    items: list[ShardItem] = []
    placed: dict[str, tuple[str, str, int, int]] = {}  # key in our file -> name, kind, range

    def add(name: str, kind: str, start: int, stop: int, dtype: torch.dtype, read: Any) -> None:
        key = f"{name}/{kind}/{start}"
        placed[key] = (name, kind, start, stop)
        items.append(ShardItem(key, dtype, (stop - start,), read))

    for kind in kinds:
        for name, start, stop in units(source.model):
            dtype = source.dtypes[name, kind]
            if options.dtype in DTYPES:
                dtype = DTYPES[options.dtype]
            out = kind if full else WEIGHT
            listed.setdefault((name, out), Written(name if out == WEIGHT else f"{name} ({out})", dtype, shapes[name]))
            read = lambda name=name, kind=kind, start=start, stop=stop, dtype=dtype: (  # noqa: E731
                source.read(name, kind, start, stop).to(dtype)
            )
            add(name, out, start, stop, dtype, read)
    for name, buffer in source.buffers.items():
        listed[name, BUFFER] = Written(f"{name} ({BUFFER})", buffer.dtype, tuple(buffer.shape))
        add(name, BUFFER, 0, buffer.numel(), buffer.dtype, lambda buffer=buffer: buffer.reshape(-1))

    def write(directory: Path) -> None:
        files: dict[str, int] = {}
        pieces: dict[tuple[str, str], list[Piece]] = {key: [] for key in listed}
        groups = split_by_size(items, options.max_shard_bytes)
        for number, group in enumerate(groups, start=1):
            file = f"weights-{number:05d}-of-{len(groups):05d}.safetensors"
            for key, digest in write_shard(directory / file, group).items():
                name, kind, start, stop = placed[key]
                pieces[name, kind].append(Piece(file, key, start, stop, digest))
            files[file] = (directory / file).stat().st_size
        tensors = {
            key: TensorEntry(*key, dtype_name(written.dtype), written.shape, tuple(pieces[key]))
            for key, written in listed.items()
        }
        write_new(directory / MANIFEST_NAME, _manifest(source, files, tensors, full=full).to_bytes())

    return Plan(list(listed.values()), write, OptimusSource)


def _manifest(
    source: Source, files: dict[str, int], tensors: dict[tuple[str, str], TensorEntry], *, full: bool
) -> Manifest:
    run = to_dict(source.run)
    metadata: dict[str, Any] = {TOKEN_IDS_FIELD: source.token_ids, GENERATION_FIELD: source.generation}
    if not full:
        return Manifest("model", 0, 0, {part: run[part] for part in ("model", "data")}, metadata, files, tensors)
    metadata[OPTIMIZER_STEPS_FIELD] = source.step if source.optimizer_steps is None else source.optimizer_steps
    return Manifest("full", source.step, source.consumed_samples, run, metadata, files, tensors)
