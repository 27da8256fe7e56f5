"""Our own checkpoints as a source, read and hashed once, and as a destination."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import xxhash

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.manifest import MANIFEST_NAME, Manifest, StoredPiece, TensorEntry
from megatron.optimus.checkpoint.reader import CHUNK_BYTES, ReadChunk, ShardFiles, chunks_of
from megatron.optimus.checkpoint.shards import WriteItem, dtype_name, torch_dtype, write_shard
from megatron.optimus.checkpoint.slices import Region, overlaps
from megatron.optimus.checkpoint.store import load_manifest, log_warnings, resolve
from megatron.optimus.checkpoint.tokenizer_files import (
    FOLDER,
    HASHES_FIELD,
    IDENTITY_FIELD,
    CopyGuard,
    files_of,
    hash_files,
)
from megatron.optimus.config.schema import OptimizerName, TokenizerType
from megatron.optimus.config.serialize import from_dict, to_dict
from megatron.optimus.convert.formats import (
    DTYPES,
    MASTER,
    MOMENTS,
    WEIGHT,
    Destination,
    Format,
    Options,
    OutputTensor,
    Source,
    check_names,
    matrices,
    split_by_size,
)
from megatron.optimus.convert.sidecar import token_ids_of
from megatron.optimus.models.parameters import parameter_shapes
from megatron.optimus.platform.files import make_directory, write_new

TOKEN_IDS_FIELD = "hf_token_ids"  # in a manifest's metadata: what an imported model's config.json named
GENERATION_FIELD = "hf_generation_config"  # and its generation_config.json
OPTIMIZER_STEPS_FIELD = "optimizer_step_count"  # the trainer's: bias correction of the moments goes on from it
BUFFER = "buffer"


@dataclass
class _Hashed:
    """How far a piece has been hashed: its first ``count`` elements."""

    count: int = 0
    digest: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)


class OptimusSource(Source):
    """A full or model-only checkpoint.

    A piece is verified when its last byte has been read, in ``finish`` at the latest; what was made of it must not be
    used before.
    """

    def __init__(self, path: Path) -> None:
        path = resolve(path)
        manifest = load_manifest(path)
        log_warnings(path, manifest)
        where = str(path / MANIFEST_NAME)
        if "model" not in manifest.config:
            raise CheckpointError(f"{where}: config has no section 'model'; the shape is unknown")
        ids = manifest.metadata.get(TOKEN_IDS_FIELD)
        generation = manifest.metadata.get(GENERATION_FIELD)
        steps = manifest.metadata.get(OPTIMIZER_STEPS_FIELD)
        hashes = manifest.metadata.get(HASHES_FIELD)
        super().__init__(
            path,
            "optimus",
            from_dict(manifest.config, where),
            step=manifest.step,
            consumed_samples=manifest.consumed_samples,
            optimizer_steps=steps if isinstance(steps, int) else None,
            token_ids=token_ids_of(ids) if isinstance(ids, dict) else {},
            generation=generation if isinstance(generation, dict) else {},
            tokenizer_identity=manifest.metadata.get(IDENTITY_FIELD),
            tokenizer=path / FOLDER if (path / FOLDER).is_dir() else None,
            layout=manifest.layout,
            packages=manifest.packages,
            tokenizer_hashes=(*(hashes.values() if isinstance(hashes, dict) else ()), manifest.tokenizer_xxh3_128),
        )
        self._manifest = manifest
        self._files = ShardFiles(path, manifest)
        self.resources.append(self._files)
        self._buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        self._verified: set[StoredPiece] = set()
        self._hashed: dict[StoredPiece, _Hashed] = {}  # of which a beginning has been read
        shapes = parameter_shapes(self.model)
        for kind in (MASTER, *MOMENTS) if manifest.kind == "full" else (WEIGHT,):
            stored = {name: entry for (name, entry_kind), entry in manifest.tensors.items() if entry_kind == kind}
            # An optimizer of matrices may have such moments of some parameters, or by matrix: no format carries these.
            is_alike = {name: entry.shape for name, entry in stored.items()} == dict(shapes)
            is_other = not is_alike and self.run.optimizer.optimizer is not OptimizerName.ADAM
            if kind in MOMENTS and (not stored or is_other):
                continue
            check_names(path, set(stored), set(shapes))
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

        Where a later range of a piece is wanted first, the piece is hashed whole before and then read again.
        """
        tensor = torch.empty(stop - start, dtype=torch_dtype(entry.dtype))
        wanted = Region(entry.shape, start, stop)
        for piece in self._touching(entry, wanted):
            low, high = 0, piece.numel  # of the piece; what a box has of a range is not one range
            if piece.region.box is None:
                first = piece.region.start
                low, high = max(start, first) - first, min(stop, piece.region.stop) - first
            if piece not in self._verified and low != self._hashed.setdefault(piece, _Hashed()).count:
                self._hash_rest(piece)
            for chunk in chunks_of(piece, low, high):
                found = list(overlaps(chunk.region, wanted))
                if not found and piece in self._verified:
                    continue
                data = self._read(chunk).view(tensor.dtype)
                for overlap in found:
                    overlap.in_second(tensor).copy_(overlap.in_first(data))
        return tensor

    def _hash_rest(self, piece: StoredPiece) -> None:
        """Reads and hashes what has not been read of a piece. Raises DamagedError naming the tensor."""
        for chunk in chunks_of(piece, self._hashed[piece].count):
            self._read(chunk)

    def _read(self, chunk: ReadChunk) -> torch.Tensor:
        """Reads a chunk's bytes. Those of a piece that is being hashed follow what has been hashed of it."""
        data, piece = self._files.read(chunk, self._buffer), chunk.piece
        progress = self._hashed.get(piece)
        if progress is not None:
            progress.digest.update(data.numpy().data)
            progress.count = chunk.stop
            if chunk.is_last:
                self._files.check(piece, progress.digest.hexdigest())
                self._verified.add(piece)
                del self._hashed[piece]
        return data

    def _touching(self, entry: TensorEntry, wanted: Region) -> Iterator[StoredPiece]:
        if any(piece.region.box is not None for piece in entry.pieces):
            yield from (piece for piece in entry.pieces if any(overlaps(piece.region, wanted)))
            return
        first = bisect_right(entry.pieces, wanted.start, key=lambda piece: piece.region.start) - 1
        yield from takewhile(lambda piece: piece.region.start < wanted.stop, entry.pieces[max(0, first) :])


def _destination(source: Source, options: Options) -> Destination:
    """Prepares a checkpoint that training goes on from, if the source has masters and moments; else a model-only one.

    Every matrix is a piece of its own, so the experts of a layer are never put together in memory.
    """
    full = source.is_full and options.dtype is None
    kinds = (MASTER, *MOMENTS) if full else (source.weight_kind(options.dtype),)
    shapes = parameter_shapes(source.model)
    outputs: dict[tuple[str, str], OutputTensor] = {}
    items: list[WriteItem] = []
    pieces: dict[str, StoredPiece] = {}  # by key in the file; which file and which hash is not known yet

    def add(
        output: OutputTensor, name: str, kind: str, start: int, stop: int, read: Callable[[], torch.Tensor]
    ) -> None:
        outputs.setdefault((name, kind), output)
        key = f"{name}/{kind}/{start}"
        pieces[key] = StoredPiece(name, kind, dtype_name(output.dtype), Region(output.shape, start, stop), key)
        items.append(WriteItem(key, output.dtype, (stop - start,), read))

    for kind in kinds:
        for name, start, stop in matrices(source.model):
            dtype = DTYPES.get(options.dtype or "", source.dtypes[name, kind])
            output = OutputTensor(f"{name} ({kind})" if full else name, dtype, shapes[name])
            read = partial(_read_as, source, name, kind, start, stop, dtype)
            add(output, name, kind if full else WEIGHT, start, stop, read)
    for name, buffer in source.buffers.items():
        output = OutputTensor(f"{name} ({BUFFER})", buffer.dtype, tuple(buffer.shape))
        add(output, name, BUFFER, 0, buffer.numel(), partial(buffer.reshape, -1))

    guard, files = (
        CopyGuard(source.path),
        files_of(source.run.data.tokenizer_type or TokenizerType.HF, source.tokenizer),
    )
    tokenizer = {name: guard.read(file) for name, file in files.items()}

    def write(directory: Path) -> None:
        sizes: dict[str, int] = {}
        written: dict[tuple[str, str], list[StoredPiece]] = {key: [] for key in outputs}
        groups = split_by_size(items, options.max_shard_bytes)
        for number, group in enumerate(groups, start=1):
            file = f"weights-{number:05d}-of-{len(groups):05d}.safetensors"
            for key, digest in write_shard(directory / file, group).items():
                piece = replace(pieces[key], file=file, xxh3_128=digest)
                written[piece.name, piece.kind].append(piece)
            sizes[file] = (directory / file).stat().st_size
        if tokenizer:
            make_directory(directory / FOLDER)
        for name, content in tokenizer.items():
            write_new(directory / FOLDER / name, content)
        tensors = {
            key: TensorEntry(*key, dtype_name(output.dtype), output.shape, tuple(written[key]))
            for key, output in outputs.items()
        }
        write_new(directory / MANIFEST_NAME, _manifest(source, sizes, tensors, full=full).to_bytes())

    return Destination(list(outputs.values()), write, OptimusSource)


def _read_as(source: Source, name: str, kind: str, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    return source.read(name, kind, start, stop).to(dtype)


def _manifest(
    source: Source, files: dict[str, int], tensors: dict[tuple[str, str], TensorEntry], *, full: bool
) -> Manifest:
    run = to_dict(source.run)
    metadata: dict[str, Any] = {TOKEN_IDS_FIELD: source.token_ids, GENERATION_FIELD: source.generation}
    metadata[HASHES_FIELD] = hash_files(source.tokenizer)
    if not full:
        return Manifest("model", 0, 0, {part: run[part] for part in ("model", "data")}, metadata, files, tensors)
    metadata[OPTIMIZER_STEPS_FIELD] = source.step if source.optimizer_steps is None else source.optimizer_steps
    return Manifest("full", source.step, source.consumed_samples, run, metadata, files, tensors)


def _recognise(path: Path) -> bool:
    return (path / MANIFEST_NAME).exists()


FORMAT = Format("optimus", MANIFEST_NAME, _recognise, lambda path, _: OptimusSource(path), _destination)
