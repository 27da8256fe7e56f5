"""Conversion of whole models between formats, streaming and bit-exact (docs/converters.md).

A source gives any range of our model's tensors; a destination asks for the ranges it needs and writes them. One matrix
is in memory at a time, and the result appears by one rename. Read formats.py next: it has the interface. To add a
format, follow its recipe and list the result below, in ``_FORMATS`` (for ``--to``) and ``_RECOGNISED`` (for sources).
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.convert import deepspeed, hf, megatron, optimus, optimus_lm
from megatron.optimus.convert.formats import (
    DEFAULT_MAX_SHARD_BYTES,
    WEIGHT,
    Options,
    OutputTensor,
    Source,
    matrices,
)
from megatron.optimus.convert.torch_files import check_bytes
from megatron.optimus.platform.files import sync_directory
from megatron.optimus.platform.hub import local_folder

__all__ = ["DEFAULT_MAX_SHARD_BYTES", "FORMATS", "Conversion", "Options", "OutputTensor", "convert", "open_source"]

_FORMATS = {one.name: one for one in (hf.FORMAT, optimus.FORMAT, megatron.FORMAT, deepspeed.ZERO, deepspeed.UNIVERSAL)}
FORMATS = tuple(_FORMATS)
# In this order, since a universal checkpoint may stand beside the ZeRO checkpoint that it was made from.
_RECOGNISED = (optimus.FORMAT, hf.FORMAT, deepspeed.UNIVERSAL, deepspeed.ZERO, megatron.FORMAT, optimus_lm.FORMAT)


@dataclass(frozen=True)
class Conversion:
    """What was, or would be, written."""

    source: Path
    destination: Path
    tensors: list[OutputTensor]
    files: tuple[str, ...] = ()  # their names, where the format knows them beforehand
    compared: int = 0  # tensors that were read back and found equal

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, without headers."""
        return sum(tensor.num_bytes for tensor in self.tensors)


def convert(
    source: Path,
    destination: Path,
    *,
    to: str,
    options: Options = Options(),  # noqa: B008 - frozen
    model_config: Path | None = None,
    averaged: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    verify: bool = False,
    show_progress: Callable[[float], None] | None = None,
) -> Conversion:
    """Converts a model to another format.

    Args:
        source: a folder in any of ``FORMATS``, recognised by what it holds, or hf://OWNER/NAME.
        destination: a folder; it appears in one step.
        to: one of ``FORMATS``.
        options: how the destination is written.
        model_config: a Hugging Face config.json or one of our configuration files, for sources that do not say what the
            model looks like.
        averaged: the moving average of the weights (``ema_decay``) instead of the trained ones.
        overwrite: replace an earlier conversion.
        dry_run: only list the tensors.
        verify: read the result back before it appears and compare every tensor bit for bit.
        show_progress: called with the fraction of the work that is done, whenever a range of a tensor is read.

    Returns:
        What was, or would be, written.

    Raises:
        CheckpointError: the source is damaged or cannot be converted; the destination is then as it was.
        ConfigError: the model's configuration has no equivalent; the destination is then as it was.
    """
    source, destination = Path(source), Path(destination)
    if to not in FORMATS:
        raise CheckpointError(f"--to {to}: must be one of {', '.join(FORMATS)}")
    opened = open_source(source, model_config)
    try:
        if averaged:
            opened.use_average()
        flags = {"overwrite": overwrite, "dry_run": dry_run, "verify": verify}
        return convert_source(opened, destination, to, options, show_progress=show_progress, **flags)
    finally:
        opened.close()


def convert_source(
    source: Source,
    destination: Path,
    to: str,
    options: Options,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    verify: bool = False,
    show_progress: Callable[[float], None] | None = None,
) -> Conversion:
    """Writes an opened source in another format; arguments and errors are those of ``convert``."""
    if to == source.format and to != "megatron":  # Megatron to Megatron changes the parallel sizes
        raise CheckpointError(f"--to {to}: {source.path} already is in {to!r} format; another is wanted here")
    check_destination(source.path, destination, overwrite)
    prepared = _FORMATS[to].destination(source, options)
    compared = 0
    if show_progress is not None:
        passes = 2 if verify else 1
        _count_reads(source, passes * sum(math.prod(tensor.shape) for tensor in prepared.tensors), show_progress)

    def write(directory: Path) -> None:
        nonlocal compared
        prepared.write(directory)
        source.finish()
        if verify:
            written = prepared.open(directory)
            try:
                compared = _compare(source, written, options.dtype)
            finally:
                written.close()

    if not dry_run:
        for file in source.files_to_check():
            check_bytes(file)
        _write_directory(destination, write)
    return Conversion(source.path, destination, prepared.tensors, prepared.files, compared)


def _count_reads(source: Source, total: int, show_progress: Callable[[float], None]) -> None:
    """Lets a source report, with each range that is read of it, the fraction of ``total`` elements read so far."""
    read, done = source.read, 0

    def counted(name: str, kind: str, start: int, stop: int) -> torch.Tensor:
        nonlocal done
        done += stop - start
        show_progress(min(1.0, done / max(1, total)))
        return read(name, kind, start, stop)

    source.read = counted  # type: ignore[method-assign]  # every format's reads go through this one method


def open_source(path: Path, model_config: Path | None = None) -> Source:
    """Recognises and opens a checkpoint; hf://OWNER/NAME is downloaded. Raises CheckpointError or ConfigError."""
    path = local_folder(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    # What no format recognises may be a run or a folder of our checkpoints; otherwise the error says what is expected.
    found = next((one for one in _RECOGNISED if one.recognise(path)), optimus.FORMAT)
    return found.open(path, model_config)


def _compare(source: Source, written: Source, dtype: str | None) -> int:
    """Compares what was written with the source; returns how many tensors. Raises CheckpointError for a difference."""
    compared = set()
    for name, buffer in written.buffers.items():
        if name not in source.buffers or not torch.equal(buffer, source.buffers[name]):
            raise CheckpointError(f"--verify: buffer {name} read back differs from the source")
    for kind in sorted(written.kinds):
        if kind == WEIGHT:
            from_kind = source.weight_kind(dtype)
        else:
            from_kind = kind if kind in source.kinds else source.weight_kind("fp32")
        for name, start, stop in matrices(written.model):
            found = written.read(name, kind, start, stop)
            expected = source.read(name, from_kind, start, stop).to(found.dtype)
            if not torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8)):
                raise CheckpointError(
                    f"--verify: {name} ({kind}) elements [{start}, {stop}) read back differ from the source"
                )
            compared.add((name, kind))
    written.finish()
    return len(compared)


def check_destination(source: Path, destination: Path, overwrite: bool) -> None:
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
    if content and not content & {one.mark for one in _FORMATS.values()}:
        raise CheckpointError(f"{destination}: is no converted model, so --overwrite does not delete it")


def _write_directory(destination: Path, write: Callable[[Path], None]) -> None:
    """Lets ``write`` fill a folder beside the destination, then renames that folder."""
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
