"""Starts the ranks of this machine, watches their heartbeats, and ends them together.

One agent lives as long as the launcher and starts every attempt, so a restart finds everything imported
(forkserver.py). Ranks share this terminal. When one fails the others are stopped, and its exit code becomes the
launcher's. A signal to the launcher goes to all ranks, which save and leave; they do not outlive the launcher either.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from megatron.optimus.launcher.forkserver import ForkServer
from megatron.optimus.launcher.hangs import HangWatch
from megatron.optimus.platform import environment, heartbeat, parent_death
from megatron.optimus.platform.exit_codes import EXPLAINED, STALLED
from megatron.optimus.platform.memory_slots import AnonymousSlots
from megatron.optimus.platform.signals import STOP_SIGNALS, handle_stop_signals

POLL_SECONDS = 0.05
RANK_GRACE_SECONDS = 10.0  # for the other ranks to leave by themselves, where all received the signal
FAILED_GRACE_SECONDS = 0.5  # for ranks that fail together with the first one to print their message
_SHARED_MEMORY = "/dev/shm"  # heartbeats never wait for a disk there


class RankProcess(Protocol):
    """A rank's process, forked or a new interpreter."""

    @property
    def pid(self) -> int:
        """Process id."""

    def poll(self) -> int | None:
        """Returns the exit code, negative for a signal; None while it runs."""

    def send_signal(self, number: int, /) -> None:
        """Sends a signal, unless the process has ended."""

    def kill(self) -> None:
        """Sends SIGKILL."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end and returns the exit code. ``timeout``: seconds; None: without limit."""


@dataclass(frozen=True)
class LocalResult:
    """How the ranks of this machine ended."""

    code: int  # 0, or the launcher's exit code for the first rank that failed; STALLED where a rank hung
    interrupted: bool = False  # the launcher received a stop signal
    was_asked: bool = False  # a rank received one and all ranks saved and left
    hang: str = ""  # which rank hung, where and since when


class LocalAgent:
    """The ranks of this machine; a context manager.

    Args:
        command: command line of a rank.
        num_ranks: how many to start.
        fork_server: forks them where it can; ``argv`` are its words for a rank. None: every rank is a new interpreter.
        argv: the command line of pretrain, for the fork server.
        hangs: finds a rank that hangs, given the folder of heartbeats; None: none is looked for.
        memory: hold memory for the ranks' state, which the next attempt goes on from.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_ranks: int,
        *,
        fork_server: ForkServer | None = None,
        argv: Sequence[str] = (),
        hangs: Callable[[Path], HangWatch] | None = None,
        memory: bool = False,
    ) -> None:
        self.command, self.argv = list(command), argv
        self._num_ranks, self._server = num_ranks, fork_server
        base = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="optimus-launch-", dir=base))
        self._alive = os.open(self.folder / heartbeat.ALIVE, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._alive, fcntl.LOCK_EX)
        self._memory = AnonymousSlots(self.folder / "memory", num_ranks) if memory else None
        self._hangs = None if hangs is None else hangs(self.folder)
        self.ranks: list[RankProcess] = []  # of the last start
        self._received: list[int] = []
        self._attempts = 0

    def __enter__(self) -> LocalAgent:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.ranks:
            process.kill()
        if self._server is not None:
            self._server.close()
        os.close(self._alive)
        if self._memory is not None:
            self._memory.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def memory_folder(self) -> Path | None:
        """Where the ranks' state is kept between attempts."""
        return None if self._memory is None else self._memory.folder

    def run(self, on_poll: Callable[[], None] = lambda: None) -> LocalResult:
        """Runs the ranks once, all of them to their end. ``on_poll`` is called many times a second meanwhile."""
        self.ranks, self._received = [], []
        previous = handle_stop_signals(self._forward)
        try:
            self._start()
            return self._watch(on_poll)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)
        for process in self.ranks:
            if process.poll() is None:
                process.send_signal(number)

    def _start(self) -> None:
        if self._server is not None:
            self._server.is_ready()  # seconds of imports, in which another program could take the port
        port, token = environment.rendezvous_port(), secrets.token_hex(16)
        envs = [environment.for_local_rank(rank, self._num_ranks, port, token) for rank in range(self._num_ranks)]
        self._attempts += 1
        envs = [env | {environment.ATTEMPT: f"{self.folder.name}:{self._attempts}"} for env in envs]
        if self._memory is not None:
            envs = [env | {environment.MEMORY_FOLDER: str(self._memory.folder)} for env in envs]
        self.start(envs)

    def is_importing(self) -> bool:
        """Whether ``start`` would wait for the fork server's imports."""
        return self._server is not None and self._server.is_importing()

    def start(self, envs: Sequence[dict[str, str]], cores: Sequence[Sequence[int]] = ()) -> None:
        """Starts a rank in each of these environments; none once a stop signal has come.

        Args:
            envs: torchrun's variables among them.
            cores: to which each rank is bound; none: as this process.
        """
        for path in self.folder.glob("rank-*"):  # of the attempt before
            path.unlink()
        self.ranks = []
        for place, env in enumerate(envs):
            if self._received:
                break
            rank, env[environment.AGENT_FOLDER] = int(env["RANK"]), str(self.folder)
            own = cores[place] if cores else ()
            forked = None if self._server is None else self._server.start(rank, env, self.argv, own)
            self.ranks.append(forked or self._new_interpreter(env, own))

    def _new_interpreter(self, env: dict[str, str], cores: Sequence[int]) -> RankProcess:
        end_with_parent = parent_death.signal_setter(signal.SIGTERM)

        def before_exec() -> None:  # C calls alone: no lock that another thread may hold at the fork
            if end_with_parent is not None:
                end_with_parent()
            if cores:
                os.sched_setaffinity(0, cores)

        return subprocess.Popen(self.command, env=env, preexec_fn=before_exec)  # noqa: PLW1509 - as it says

    def _watch(self, on_poll: Callable[[], None]) -> LocalResult:
        while True:
            on_poll()
            codes = [process.poll() for process in self.ranks]
            failed = [(code, rank) for rank, code in enumerate(codes) if code]
            if failed:
                return self._after_failure(failed)
            if all(code == 0 for code in codes):
                if len(self.ranks) == self._num_ranks:
                    return LocalResult(0)
                return LocalResult(signal_exit_code(self._received[0]), interrupted=True)
            if self._hangs is not None and (found := self._hangs.poll([process.pid for process in self.ranks])):
                for process in self.ranks:
                    process.kill()
                stop_ranks(self.ranks, 5.0)
                return LocalResult(STALLED, interrupted=bool(self._received), hang=found)
            time.sleep(POLL_SECONDS)

    def _after_failure(self, failed: list[tuple[int, int]]) -> LocalResult:
        # A rank that ends by this code has handled the signal: all ranks have saved the step, or are about to.
        was_asked = {code - 128 for code, _ in failed} & set(STOP_SIGNALS)
        stop_ranks(self.ranks, RANK_GRACE_SECONDS if self._received or was_asked else FAILED_GRACE_SECONDS)
        code, rank = min(failed)  # a killed rank (negative code) before those that lost it
        if self._received and code not in EXPLAINED:
            return LocalResult(signal_exit_code(self._received[0]), interrupted=True)
        if was_asked and code > 0:
            return LocalResult(signal_exit_code(code - 128), was_asked=True)
        return LocalResult(failed_exit_code(code, rank), interrupted=bool(self._received))


def run_local_ranks(command: list[str], num_ranks: int) -> int:
    """Runs ``command`` once per rank on this machine; returns 0, or the exit code of the first rank that failed."""
    with LocalAgent(command, num_ranks) as agent:
        return agent.run().code


def failed_exit_code(code: int, rank: int, node: str = "") -> int:
    """Prints which rank ended the run unless it has printed its error; returns the launcher's exit code."""
    if code in EXPLAINED:
        return code
    how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
    sys.stderr.write(
        f"error: rank {rank}{node and ' on node ' + node} ended with {how} and the other ranks were stopped; "
        "the same command resumes from the newest checkpoint\n"
    )
    return code if code > 0 else 128 - code  # as shells report signals


def signal_exit_code(number: int) -> int:
    """Prints which signal ended the run; returns the exit code that shells give a signal."""
    name = signal.Signals(number).name
    sys.stderr.write(f"stopped by {name}; the same command resumes from the newest checkpoint\n")
    return 128 + number


def stop_ranks(ranks: Sequence[RankProcess], grace_seconds: float) -> None:
    """Kills the ranks that still run after ``grace_seconds``: one that lost its peers would wait for a time-out.

    The grace is for ranks that fail together with the first one to print their message. SIGTERM would be useless: a
    rank handles it at the end of a step, which will not come.
    """
    deadline = time.monotonic() + grace_seconds
    for process in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for process in ranks:
        process.kill()
    for process in ranks:
        process.wait()
