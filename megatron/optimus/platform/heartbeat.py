"""Tells the launcher of this machine which step and phase a rank is in, and ends a rank whose launcher is gone.

``optimus launch`` makes a folder and names it in OPTIMUS_AGENT_FOLDER:

    rank-3          128 bytes that rank 3 maps and rewrites at every phase (a microsecond; no system call)
    rank-3.stack    its Python stacks, which faulthandler writes at SIGUSR2, also while the rank hangs in a collective
    alive           locked by the launcher, for as long as it lives

Without the variable, as under torchrun or mpiexec, a beat does nothing.
"""

from __future__ import annotations

import faulthandler
import fcntl
import mmap
import os
import shutil
import signal
import struct
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from megatron.optimus.platform import environment

STACK_SIGNAL = signal.SIGUSR2
ALIVE = "alive"
_RECORD = struct.Struct("<qqdqd64s")  # beats, step, time, times the phase was seen, longest of them, phase
_SIZE = 128
_ORPHAN_SECONDS = 60.0  # without a beat, after which a rank without a launcher ends at once

_own: list[_OwnRecord] = []  # of this rank, once it is connected


@dataclass(frozen=True)
class Beat:
    """The last beat of a rank."""

    count: int  # beats since the start: the rank with the fewest is behind the others
    step: int  # the training step in hand; -1 before the first
    time: float  # time.monotonic(), which all processes of a machine share
    seen: int  # how often this phase has ended before, the first time not counted
    longest: float  # seconds, of those
    phase: str


class _OwnRecord:
    """The record of this rank."""

    def __init__(self, path: Path) -> None:
        with open(path, "w+b") as file:
            file.write(bytes(_SIZE))
            file.flush()
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._phases: dict[str, list[float]] = {}  # [times ended, longest seconds]
        self._phase, self.since, self._count, self._step = "start-up", time.monotonic(), 0, -1

    def beat(self, phase: str, step: int | None) -> None:
        now = time.monotonic()
        ended = self._phases.setdefault(self._phase, [-1.0, 0.0])
        ended[0] += 1
        if ended[0] > 0:  # the first time is not usual: kernels are compiled, connections made
            ended[1] = max(ended[1], now - self.since)
        self._phase, self.since, self._count = phase, now, self._count + 1
        self._step = self._step if step is None else step
        seen, longest = self._phases.get(phase, (0.0, 0.0))
        name = phase.encode()[:64]
        _RECORD.pack_into(self._map, 0, self._count, self._step, now, max(0, int(seen)), longest, name)


def connect(rank: int) -> None:
    """Starts the heartbeats of this rank if a launcher reads them. Call from the main thread."""
    folder = environment.agent_folder()
    if folder is None or _own:
        return
    try:
        record = _OwnRecord(folder / f"rank-{rank}")
        stacks = open(folder / f"rank-{rank}.stack", "wb")  # noqa: SIM115 - open for as long as the process lives
        alive = os.open(folder / ALIVE, os.O_RDONLY)
    except OSError as error:
        sys.stderr.write(f"the launcher's folder {folder} cannot be used: {error.strerror}; it will not notice hangs\n")
        return
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    record.beat("start-up", None)
    _own.append(record)
    words = (alive, folder, record)
    threading.Thread(target=_outlive_no_launcher, args=words, name="launcher watch", daemon=True).start()


def beat(phase: str, step: int | None = None) -> None:
    """Records that this rank begins a phase.

    Args:
        phase: what it does now, for a person; a few fixed texts, as their usual times are learned.
        step: the training step in hand; None keeps the last one.
    """
    for record in _own:
        record.beat(phase, step)


def read(path: Path) -> Beat | None:
    """Reads a rank's record; None before its first beat."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < _RECORD.size:
        return None
    count, step, when, seen, longest, phase = _RECORD.unpack_from(data)
    text = phase.rstrip(b"\0").decode(errors="replace")
    return Beat(count, step, when, seen, longest, text) if count else None


def _outlive_no_launcher(alive: int, folder: Path, record: _OwnRecord) -> None:
    """Waits for the end of the launcher; then asks this rank to save and leave, and ends it where it hangs."""
    fcntl.flock(alive, fcntl.LOCK_SH)  # the kernel drops the launcher's lock however it dies
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    asked = time.monotonic()
    while time.monotonic() - max(asked, record.since) < _ORPHAN_SECONDS:
        time.sleep(1.0)
    os._exit(128 + signal.SIGTERM)
