"""Conversion between our checkpoints and Hugging Face folders, both ways, streaming and bit-exact.

An export casts only when it must: full checkpoints hold fp32 masters, which become the dtype the run computed with.
Everything else is copied bytes. One tensor is in memory at a time; the result appears by one rename.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.optimus.checkpoint.commit import sync_directory, write_synced
from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.hf_files import (
    HFFolder,
    Tokenizer,
    read_json,
    split_by_size,
    token_ids_of,
    write_json,
    write_weights,
)
from megatron.optimus.checkpoint.manifest import MANIFEST_NAME, Manifest, Piece, TensorEntry
from megatron.optimus.checkpoint.shards import ShardItem, dtype_name, torch_dtype, write_shard
from megatron.optimus.checkpoint.slices import TensorSlice
from megatron.optimus.checkpoint.store import load, load_manifest, resolve
from megatron.optimus.config.schema import RunConfig, TokenizerType
from megatron.optimus.config.serialize import from_dict, to_dict
from megatron.optimus.models.hf_map import HFTensor, hf_config, model_config_from_hf, parameter_shapes, to_hf

DEFAULT_MAX_SHARD_BYTES = 5 * 10**9
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_TOKEN_IDS_FIELD = "hf_token_ids"  # in a manifest's metadata: what an imported model's config.json named

log = logging.getLogger("optimus")


@dataclass(frozen=True)
class Conversion:
    """What was, or would be, written."""

    source: Path
    source_format: str  # "hf" or "optimus"
    destination: Path
    tensors: list[tuple[str, torch.dtype, tuple[int, ...]]]  # name, dtype and shape as written

    @property
    def num_bytes(self) -> int:
        return sum(ShardItem(name, dtype, shape, _nothing).num_bytes for name, dtype, shape in self.tensors)


def convert(
    source: Path,
    destination: Path,
    *,
    to: str,
    dtype: str | None = None,
    tokenizer: Path | None = None,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    overwrite: bool = False,
    dry_run: bool = False,
) -> Conversion:
    """Converts one model. ``source``: a Hugging Face folder, one of our checkpoints, or a folder of them (the newest).

    ``to``: "hf" or "optimus" (a model-only checkpoint). ``dtype``: "fp32", "bf16" or "source"; default: as stored, and
    for a full checkpoint what the run computed with. ``tokenizer``: tokenizer.json or its folder, for exports; default:
    the one the run was trained with. ``overwrite``: replace an earlier conversion. ``dry_run``: only list the tensors.

    Raises CheckpointError or ConfigError; the destination is then as it was.
    """
    source, destination = Path(source), Path(destination)
    source_format, source = _recognise(source)
    if to not in ("hf", "optimus") or to == source_format:
        raise CheckpointError(f"--to {to}: {source} already is in {source_format!r} format; the other is wanted here")
    if dtype not in (None, "source", *_DTYPES):
        raise CheckpointError(f"--dtype {dtype}: must be one of {', '.join(_DTYPES)}, source")
    if max_shard_bytes < 1:
        raise CheckpointError(f"--max-shard-size: {max_shard_bytes} bytes must be at least 1")
    _check_destination(source, destination, overwrite)
    if to == "hf":
        items, write = _plan_export(source, dtype, tokenizer, max_shard_bytes)
        listed = [(item.key, item.dtype, item.shape) for item in items]
    else:
        listed, write = _plan_import(source, dtype, max_shard_bytes)
    if not dry_run:
        _write_atomically(destination, write)
    return Conversion(source, source_format, destination, listed)


def _recognise(source: Path) -> tuple[str, Path]:
    """("hf" or "optimus", folder)."""
    if not source.is_dir():
        raise CheckpointError(f"{source}: no such folder")
    if not (source / MANIFEST_NAME).exists() and (source / "config.json").exists():
        return "hf", source
    return "optimus", resolve(source)


def _plan_export(
    source: Path, dtype: str | None, tokenizer_path: Path | None, max_bytes: int
) -> tuple[list[ShardItem], Callable[[Path], None]]:
    """What goes into model.safetensors, and the function that writes the whole folder."""
    manifest = load_manifest(source)
    if "model" not in manifest.config:
        raise CheckpointError(f"{source / MANIFEST_NAME}: config has no section 'model'; the shape is unknown")
    run = from_dict(manifest.config, str(source / MANIFEST_NAME))
    kind = "master" if manifest.kind == "full" else "weight"
    shapes = parameter_shapes(run.model)
    stored = {name: entry for (name, entry_kind), entry in manifest.tensors.items() if entry_kind == kind}
    _same_names(source, set(stored), set(shapes))
    for name, entry in stored.items():
        if entry.shape != shapes[name]:
            raise CheckpointError(f"{source}: {name} has shape {entry.shape}, its config says {shapes[name]}")
    _refuse_buffers(source, manifest)
    tokenizer = _find_tokenizer(tokenizer_path, run)

    if dtype == "source" or (dtype is None and manifest.kind == "model"):
        target = None
    else:
        target = _DTYPES[dtype or run.training.params_dtype.value]
    reader = _TensorReader(source, manifest)
    items = []
    for name in shapes:
        out_dtype = target or torch_dtype(stored[name].dtype)
        for part in to_hf(run.model, name):
            items.append(
                ShardItem(part.name, out_dtype, part.shape, _export_read(reader, stored[name], part, out_dtype))
            )
    config = hf_config(run.model, str(items[0].dtype).removeprefix("torch."))
    imported = manifest.metadata.get(_TOKEN_IDS_FIELD)
    ids = token_ids_of(imported) if isinstance(imported, dict) else {}
    if not ids and tokenizer is not None:
        ids = tokenizer.token_ids()

    def write(directory: Path) -> None:
        write_json(directory / "config.json", config | ids)
        write_json(directory / "generation_config.json", {"_from_model_config": True, **ids})
        if tokenizer is not None:
            tokenizer.copy_to(directory)
        write_weights(directory, items, max_bytes)

    return items, write


def _plan_import(
    source: Path, dtype: str | None, max_bytes: int
) -> tuple[list[tuple[str, torch.dtype, tuple[int, ...]]], Callable[[Path], None]]:
    """Our tensors, and the function that writes the checkpoint.

    Every Hugging Face tensor becomes one piece of ours, so experts are never put together in memory.
    """
    hf = read_json(source / "config.json")
    model = model_config_from_hf(hf)
    folder = HFFolder(source)
    shapes = parameter_shapes(model)
    parts = {name: to_hf(model, name) for name in shapes}
    _same_names(source, folder.names, {part.name for group in parts.values() for part in group})
    listed = []
    placed: dict[str, tuple[str, HFTensor]] = {}  # key in our file -> our name, part
    items: list[ShardItem] = []
    for name, group in parts.items():
        dtypes = {folder.describe(part.name)[0] for part in group}
        if len(dtypes) > 1:
            raise CheckpointError(f"{source}: the parts of {name} have different dtypes: {sorted(map(str, dtypes))}")
        out_dtype = dtypes.pop() if dtype in (None, "source") else _DTYPES[dtype]
        listed.append((name, out_dtype, shapes[name]))
        for part in group:
            if folder.describe(part.name)[1] != part.shape:
                raise CheckpointError(
                    f"{source}: {part.name} has shape {folder.describe(part.name)[1]}, config.json says {part.shape}"
                )
            key = f"{name}/weight/{part.start}"
            placed[key] = (name, part)
            flat = (part.stop - part.start,)
            items.append(ShardItem(key, out_dtype, flat, _import_read(folder, part.name, out_dtype)))
    run = RunConfig(model=model)
    tokenizer = Tokenizer.find(source)
    if tokenizer is not None:
        run.data.tokenizer_type, run.data.tokenizer_model = TokenizerType.HF, str(source.resolve())
    config = {section: to_dict(run)[section] for section in ("model", "data")}

    def write(directory: Path) -> None:
        files: dict[str, int] = {}
        pieces: dict[str, list[Piece]] = {name: [] for name in shapes}
        groups = split_by_size(items, max_bytes)
        for number, group in enumerate(groups, start=1):
            file = f"weights-{number:05d}-of-{len(groups):05d}.safetensors"
            for key, digest in write_shard(directory / file, group).items():
                name, part = placed[key]
                pieces[name].append(Piece(file, key, part.start, part.stop, digest))
            files[file] = (directory / file).stat().st_size
        tensors = {
            (name, "weight"): TensorEntry(name, "weight", dtype_name(out_dtype), shape, tuple(pieces[name]))
            for name, out_dtype, shape in listed
        }
        manifest = Manifest("model", 0, 0, config, {_TOKEN_IDS_FIELD: token_ids_of(hf)}, files, tensors)
        write_synced(directory / MANIFEST_NAME, manifest.to_bytes())

    return listed, write


class _TensorReader:
    """Whole stored tensors, each verified once: the parts of one tensor are asked for one after the other."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path = path
        self._manifest = manifest
        self._name = ""
        self._tensor = torch.empty(0)

    def read(self, entry: TensorEntry) -> torch.Tensor:
        if entry.name != self._name:
            self._tensor = torch.empty(0)  # gone before the next one is made
            tensor = torch.empty(entry.numel, dtype=torch_dtype(entry.dtype))
            request = TensorSlice(entry.name, entry.kind, entry.shape, 0, entry.numel, tensor)
            load(self._path, [request], manifest=self._manifest)
            self._name, self._tensor = entry.name, tensor
        return self._tensor


def _export_read(
    reader: _TensorReader, entry: TensorEntry, part: HFTensor, dtype: torch.dtype
) -> Callable[[], torch.Tensor]:
    return lambda: reader.read(entry)[part.start : part.stop].to(dtype)


def _import_read(folder: HFFolder, name: str, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    return lambda: folder.read(name).to(dtype)


def _nothing() -> torch.Tensor:
    return torch.empty(0)


def _same_names(source: Path, found: set[str], expected: set[str]) -> None:
    for problem, names in (("lacks", expected - found), ("has unexpected", found - expected)):
        if names:
            some = ", ".join(sorted(names)[:5])
            raise CheckpointError(f"{source}: {problem} {len(names)} tensors for its configuration: {some}")


def _refuse_buffers(source: Path, manifest: Manifest) -> None:
    """Hugging Face's OLMoE selects experts without a bias, so only a bias of zeros can be left out."""
    reader = _TensorReader(source, manifest)
    for (name, kind), entry in manifest.tensors.items():
        if kind == "buffer" and (not name.endswith(".expert_bias") or bool(reader.read(entry).any())):
            raise CheckpointError(
                f"{source}: buffer {name} is not zero and has no place in a Hugging Face OLMoE model "
                "(moe_router_enable_expert_bias); its experts would be chosen differently"
            )


def _find_tokenizer(path: Path | None, run: RunConfig) -> Tokenizer | None:
    """The one asked for, else the run's own if it still is where the config says."""
    if path is not None:
        found = Tokenizer.find(Path(path))
        if found is None:
            raise CheckpointError(f"--tokenizer {path}: neither a tokenizer.json nor a folder that holds one")
        return found
    own = run.data.tokenizer_model
    if own is None or run.data.tokenizer_type is not TokenizerType.HF:
        return None
    found = Tokenizer.find(Path(own))
    if found is None:
        log.warning("tokenizer_model=%s is not there; the export has no tokenizer (name one with --tokenizer)", own)
    return found


def _check_destination(source: Path, destination: Path, overwrite: bool) -> None:
    """Raises CheckpointError unless ``destination`` can be created, or replaced without losing anything else."""
    inside = destination.resolve() in (source.resolve(), *source.resolve().parents)
    if inside:
        raise CheckpointError(f"{destination}: holds the source {source}; choose another destination")
    if not destination.exists() and not destination.is_symlink():
        return
    if not destination.is_dir() or destination.is_symlink():
        raise CheckpointError(f"{destination}: exists and is not a folder")
    content = {entry.name for entry in os.scandir(destination)}
    if content and not overwrite:
        raise CheckpointError(f"{destination}: not empty; choose another destination or add --overwrite")
    if content and not content & {"config.json", MANIFEST_NAME}:
        raise CheckpointError(f"{destination}: is no converted model, so --overwrite does not delete it")


def _write_atomically(destination: Path, write: Callable[[Path], None]) -> None:
    """Lets ``write`` fill a folder beside the destination, then renames it."""
    destination = destination.resolve()
    temporary = destination.with_name(f".{destination.name}.tmp-{secrets.token_hex(8)}")
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        sync_directory(temporary)
        if destination.exists() and any(destination.iterdir()):
            old = destination.with_name(f".{destination.name}.old-{secrets.token_hex(8)}")
            destination.rename(old)
            temporary.rename(destination)
            shutil.rmtree(old)
        else:
            temporary.rename(destination)
        sync_directory(destination.parent)
    except OSError as error:
        raise CheckpointError(f"writing {destination}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
