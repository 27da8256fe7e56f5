"""Conversion of whole models between formats, streaming and bit-exact (docs/converters.md).

A source format says which tensors of our model it holds and reads any range of them; a destination format says what it
will write and asks for the ranges it needs. One tensor is in memory at a time; the result appears by one rename.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.manifest import MANIFEST_NAME
from megatron.optimus.convert import hf, megatron, optimus, universal, zero
from megatron.optimus.convert.request import DEFAULT_MAX_SHARD_BYTES, Options, Plan, Written
from megatron.optimus.convert.source import WEIGHT, Source, units
from megatron.optimus.convert.torch_files import check_bytes
from megatron.optimus.platform.files import sync_directory

__all__ = ["DEFAULT_MAX_SHARD_BYTES", "FORMATS", "Conversion", "Options", "Written", "convert", "open_source"]

FORMATS = ("hf", "optimus", "megatron", "zero", "universal")
_PLANS: dict[str, Callable[[Source, Options], Plan]] = {
    "hf": hf.plan,
    "optimus": optimus.plan,
    "megatron": megatron.plan,
    "zero": zero.plan,
    "universal": universal.plan,
}
# What a folder written here has at its top, so that --overwrite never deletes anything else.
_OUR_MARKS = {"config.json", MANIFEST_NAME, "latest", "latest_universal", "latest_checkpointed_iteration.txt"}


@dataclass(frozen=True)
class Conversion:
    """What was, or would be, written."""

    source: Path
    destination: Path
    tensors: list[Written]
    compared: int = 0  # tensors that were read back and found equal

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


def convert(
    source: Path,
    destination: Path,
    *,
    to: str,
    options: Options = Options(),  # noqa: B008 - frozen
    model_config: Path | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    verify: bool = False,
) -> Conversion:
    """Converts one model. ``source``: a folder in any of ``FORMATS``, recognised by what it holds.

    ``options``: how the destination is written. ``model_config``: a Hugging Face config.json or one of our
    configuration files, for sources that do not say what the model looks like. ``overwrite``: replace an earlier
    conversion. ``dry_run``: only list the tensors. ``verify``: read the result back before it appears and compare every
    tensor bit for bit.

    Raises CheckpointError or ConfigError; the destination is then as it was.
    """
    source, destination = Path(source), Path(destination)
    if to not in FORMATS:
        raise CheckpointError(f"--to {to}: must be one of {', '.join(FORMATS)}")
    opened = open_source(source, model_config)
    try:
        return _convert(opened, destination, to, options, overwrite=overwrite, dry_run=dry_run, verify=verify)
    finally:
        opened.close()


def _convert(
    source: Source, destination: Path, to: str, options: Options, *, overwrite: bool, dry_run: bool, verify: bool
) -> Conversion:
    if to == source.format and to != "megatron":  # which can be laid out anew
        raise CheckpointError(f"--to {to}: {source.path} already is in {to!r} format; another is wanted here")
    _check_destination(source.path, destination, overwrite)
    plan = _PLANS[to](source, options)
    compared = 0

    def write(directory: Path) -> None:
        nonlocal compared
        plan.write(directory)
        source.finish()
        if verify:
            written = plan.open(directory)
            try:
                compared = _compare(source, written, options.dtype)
            finally:
                written.close()

    if not dry_run:
        for file in source.files_to_check():
            check_bytes(file)
        _write_atomically(destination, write)
    return Conversion(source.path, destination, plan.tensors, compared)


def open_source(path: Path, model_config: Path | None = None) -> Source:
    """Recognises and opens a checkpoint. Raises CheckpointError or ConfigError saying what is wrong with it."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    if not (path / MANIFEST_NAME).exists():
        if hf.recognise(path):
            return hf.HFSource(path)
        if universal.recognise(path):
            return universal.UniversalSource(path, model_config)
        if zero.recognise(path):
            return zero.ZeroSource(path, model_config)
        if megatron.recognise(path):
            return megatron.MegatronSource(path, model_config)
    return optimus.OptimusSource(path)


def _compare(source: Source, written: Source, dtype: str | None) -> int:
    """Reads everything back; returns how many tensors. Raises CheckpointError naming the first that differs."""
    compared = set()
    for name, buffer in written.buffers.items():
        if name not in source.buffers or not torch.equal(buffer, source.buffers[name]):
            raise CheckpointError(f"--verify: buffer {name} read back differs from the source")
    for kind in sorted(written.kinds):
        if kind == WEIGHT:
            from_kind = source.weight_kind(dtype)
        else:
            from_kind = kind if kind in source.kinds else source.weight_kind("fp32")
        for name, start, stop in units(written.model):
            found = written.read(name, kind, start, stop)
            expected = source.read(name, from_kind, start, stop).to(found.dtype)
            if not torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8)):
                raise CheckpointError(
                    f"--verify: {name} ({kind}) elements [{start}, {stop}) read back differ from the source"
                )
            compared.add((name, kind))
    written.finish()
    return len(compared)


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
    if content and not content & _OUR_MARKS:
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
