"""One rank of the training program in a process of its own, which leaves a mark of what it is doing.

The marks are two bytes a rank in a shared file: what the training thread does, and what the thread that writes
checkpoints does. A process killed by SIGKILL leaves them as they were at that instant, so who killed it can tell what
it hit. Nothing else differs from ``python -m megatron.optimus.pretrain``.

A rank is forked from a server process that has imported the program (no threads, no process group, no state of a run),
or is a new interpreter that imports everything itself. Both are processes with a number of their own, files of their
own and connections of their own; only the former is cheap enough for thousands.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, Protocol

from tests.helpers import _CONTEXT, free_port, rank_variables

ROOT = Path(__file__).resolve().parents[2]


class StartMethod(str, Enum):
    FORK = "fork"  # from a server that has imported the program
    EXEC = "exec"  # a new interpreter


class Phase(IntEnum):
    """What a thread of a rank is doing. START is what a file of zeros says."""

    START = 0  # until the checkpoint is looked for
    LOAD = 1
    STEP = 2  # and everything between steps that is not below
    SNAPSHOT = 3
    IDLE = 4  # the writing thread: nothing to write
    WRITE = 5
    COMMIT = 6  # manifest, sync, rename
    PRUNE = 7


class Process(Protocol):
    pid: int | None

    @property
    def exitcode(self) -> int | None: ...
    def kill(self) -> None: ...
    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...


class Marks:
    """The shared file. ``ranks`` makes it anew."""

    def __init__(self, path: Path, ranks: int | None = None) -> None:
        if ranks is not None:
            path.write_bytes(bytes([Phase.START, Phase.IDLE] * ranks))
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), 0)

    def of(self, rank: int) -> tuple[Phase, Phase]:
        """(training thread, writing thread)."""
        return Phase(self._bytes[2 * rank]), Phase(self._bytes[2 * rank + 1])

    @contextlib.contextmanager
    def during(self, rank: int, phase: Phase, *, writing: bool, after: Phase | None = None) -> Iterator[None]:
        """Marks ``phase``; in the end ``after``, or what was there before."""
        index = 2 * rank + writing
        before = self._bytes[index]
        self._bytes[index] = phase
        try:
            yield
        finally:
            self._bytes[index] = before if after is None else after


def start(method: StartMethod, ranks: int, folder: Path, argv: list[str]) -> tuple[list[Process], Marks]:
    """Starts all ranks of ``python -m megatron.optimus.pretrain`` with ``argv``; output goes to folder/out.log.RANK."""
    marks, port = Marks(folder / "marks", ranks), free_port()
    if method is StartMethod.FORK:
        processes: list[Process] = []
        for rank in range(ranks):
            process = _CONTEXT.Process(target=run_rank, args=(rank, ranks, port, str(folder), argv), daemon=True)
            process.start()
            processes.append(process)
        return processes, marks
    return [_Exec(rank, ranks, port, folder, argv) for rank in range(ranks)], marks


def run_rank(rank: int, ranks: int, port: int, folder: str, argv: list[str]) -> None:
    """The process of one rank. Does not return."""
    os.environ.update(rank_variables(rank, ranks, port))
    descriptor = os.open(Path(folder) / f"out.log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    leave_marks(Marks(Path(folder) / "marks"), rank)
    from megatron.optimus.platform.process_exit import run_program
    from megatron.optimus.pretrain import main

    run_program(lambda: main(argv))


def leave_marks(marks: Marks, rank: int) -> None:
    """Wraps the functions in which the phases are spent."""
    from megatron.optimus.checkpoint import commit, saver, snapshot
    from megatron.optimus.training import checkpointing as checkpoints

    def wrap(owner: Any, name: str, phase: Phase, *, writing: bool, after: Phase | None = None) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with marks.during(rank, phase, writing=writing, after=after):
                return function(*args, **kwargs)

        setattr(owner, name, marked)

    wrap(checkpoints.Checkpoints, "resume", Phase.LOAD, writing=False, after=Phase.STEP)
    wrap(snapshot.Snapshot, "take", Phase.SNAPSHOT, writing=False)
    wrap(saver, "write", Phase.WRITE, writing=True)
    wrap(saver.Saver, "_commit", Phase.COMMIT, writing=True)
    wrap(commit, "prune", Phase.PRUNE, writing=True)


class _Exec:
    """A new interpreter, with the few methods of a multiprocessing process that are needed."""

    def __init__(self, rank: int, ranks: int, port: int, folder: Path, argv: list[str]) -> None:
        call = f"run_rank({rank}, {ranks}, {port}, {str(folder)!r}, {argv!r})"
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", f"from tests.campaigns.rank_process import run_rank; {call}"]
        self._process = subprocess.Popen(command, env=environment, cwd=ROOT)
        self.pid: int | None = self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()

    def join(self, timeout: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def is_alive(self) -> bool:
        return self._process.poll() is None
