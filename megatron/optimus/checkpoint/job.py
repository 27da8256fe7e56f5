"""One save in flight: its thread, its state, and what each rank writes. No collectives here."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.file_layout import HASH_BYTES, OwnPiece, SavePlan
from megatron.optimus.checkpoint.manifest import Manifest
from megatron.optimus.checkpoint.shards import tensor_bytes, torch_dtype
from megatron.optimus.checkpoint.snapshot import Snapshot
from megatron.optimus.checkpoint.writer import PieceWriter
from megatron.optimus.platform import files

_COPY_BYTES = 16 << 20


class Task:
    """A function in a thread; its result or its error."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._action()
        except Exception as error:
            self.error = error
        except BaseException as error:  # else a thread that was torn down would look like one that is done
            self.error = CheckpointError(f"the writing thread ended: {error!r}")

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()


@dataclass
class Job:
    """One save in flight."""

    header: Manifest
    plan: SavePlan
    tensors: list[torch.Tensor]
    snapshot: Snapshot | None  # None: ``tensors`` are the live ones
    temporary: Path
    retain: int | None
    started: float
    stall_s: float = 0.0
    local: Path | None = None  # this node's own directory, where it is written first
    digests: list[bytes] = field(default_factory=list)  # of this rank's pieces, once written
    hash_wait_s: float = 0.0
    phases: list[Callable[[], None] | None] = field(default_factory=list)  # one after the other, agreed on between
    phase: int = 0
    task: Task | None = None
    revision: int = 0


def write(job: Job, directory: Path) -> None:
    """This rank's pieces into its file, and in the end their hashes beside it."""
    if job.snapshot is not None:
        job.snapshot.wait()
    tensors = iter(job.tensors)

    def data(piece: OwnPiece, offset: int) -> Iterator[memoryview]:
        yield tensor_bytes(next(tensors).to(torch_dtype(piece.dtype)))

    _write_own(job, directory, data)


def copy(job: Job, local: Path) -> None:
    """This rank's pieces from the node's own disk to the folder of all, checked on the way."""
    expected = job.digests
    descriptor = os.open(local / job.plan.file.name, os.O_RDONLY)

    def data(piece: OwnPiece, offset: int) -> Iterator[memoryview]:
        for start in range(0, piece.num_bytes, _COPY_BYTES):
            yield memoryview(os.pread(descriptor, min(_COPY_BYTES, piece.num_bytes - start), offset + start))

    try:
        _write_own(job, job.temporary, data)
    finally:
        os.close(descriptor)
    if job.digests != expected:
        raise CheckpointError(f"{local / job.plan.file.name} does not give back what was written to it")


def _write_own(job: Job, directory: Path, data: Callable[[OwnPiece, int], Iterator[memoryview]]) -> None:
    plan = job.plan
    files.make_directory(directory)  # every rank: on a network disk rank 0's may not be visible yet
    job.digests = []
    writer = PieceWriter(directory / plan.file.name)
    try:
        if plan.writes_header:
            writer.write(memoryview(plan.file.header), 0)
            writer.end_piece()  # nobody asks for the header's hash
        for piece, offset in plan.own():
            position = offset
            for block in data(piece, offset):
                writer.write(block, position)
                position += len(block)
            job.digests.append(writer.end_piece())
        writer.finish()
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(directory)) from error  # which of the disks is full
    finally:
        writer.close()
    job.hash_wait_s += writer.hash_wait_s
    if not job.digests or directory != job.temporary:
        return
    descriptor = os.open(directory / plan.file.hashes, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        files.write_at(descriptor, memoryview(b"".join(job.digests)), plan.first * HASH_BYTES)
    finally:
        os.close(descriptor)
