"""Finds ranks that hang, from the heartbeats of all ranks of this machine, and says which one and where.

A phase of a step may last five times the longest that its rank has seen, and 20 seconds at least, or two minutes where
it reads or writes files; six times that where the rank computes meanwhile, as a compiler does. A phase that has not
been seen a few times, such as a first step, and saves and evaluations have the collectives' time-out. Start-up has no
limit: its collectives have. A process that a signal has stopped counts as hanging after ten seconds, in any phase.

All ranks wait for the one that hangs, so all are late together. That one is stopped, or its stack is outside of any
collective while the others are in one, or it is behind in phases. Where one is behind, its own limit counts: the others
may wait for it as long as it may take.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from megatron.optimus.platform import heartbeat
from megatron.optimus.platform.heartbeat import Beat

logger = logging.getLogger("optimus")

FACTOR, LEAST_SECONDS, BUSY_FACTOR = 5.0, 20.0, 6.0
FILE_PHASES, FILE_SECONDS = ("reading the batches", "reading ahead", "logging"), 120.0  # a file system may be slow
LONG_PHASES = ("saving a checkpoint", "evaluation", "the end of the run")  # which may last long, each time anew
FEWEST_SEEN = 3  # times that a phase has to be seen before its time is known
STOPPED_SECONDS = 10.0
_POLL_SECONDS = 0.5
_STACK_SECONDS = 3.0  # for faulthandler to write all stacks
_SUSPENDED_SECONDS = 5.0  # between two polls: this launcher was stopped too, as by Ctrl-Z
_BUSY = 0.5  # share of a CPU core from which on a rank computes
# Frames in which a rank waits for others or for its device, as faulthandler prints them.
_WAITS = re.compile(
    r'File ".*(?:distributed_c10d|deepspeed/comm/\w+|platform/device)\.py", line \d+ in (\w+)'
    r'|File "(?!.*threading\.py).*", line \d+ in (wait|barrier)$'
)
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


@dataclass
class _Seen:
    """What is known of a rank since its last beat."""

    count: int = -1
    since: float = 0.0  # when that beat was first seen
    cpu: float = 0.0  # its CPU seconds then
    stopped_since: float | None = None


class HangWatch:
    """Looks for a rank that hangs.

    Args:
        folder: the heartbeats.
        stacks: folder for the stacks of all ranks, made when one hangs.
        unseen_seconds: limit of a phase whose usual time is not known.
        fixed_seconds: limit of every phase of a step instead of the learned one.
    """

    def __init__(self, folder: Path, stacks: Path, unseen_seconds: float, fixed_seconds: float | None = None) -> None:
        self._folder, self._stacks = folder, stacks
        self._unseen_seconds, self._fixed_seconds = unseen_seconds, fixed_seconds
        self._seen: dict[int, _Seen] = {}
        self._polled = self._resumed = time.monotonic()

    def poll(self, pids: Sequence[int]) -> str:
        """Returns a line about the rank that hangs, "" if none does. ``pids``: the ranks' processes in rank order.

        The stacks of all ranks are then in the folder ``stacks``; the ranks still live.
        """
        now = time.monotonic()
        if now - self._polled < _POLL_SECONDS:
            return ""
        if now - self._polled > _SUSPENDED_SECONDS:
            self._resumed = now
        self._polled = now
        beats = [heartbeat.read(self._folder / f"rank-{rank}") for rank in range(len(pids))]
        stopped = [rank for rank, pid in enumerate(pids) if self._is_stopped(rank, pid, now)]
        late = [
            rank for rank, beat in enumerate(beats) if beat is not None and self._is_late(rank, beat, pids[rank], now)
        ]
        fewest = min((beat.count for beat in beats if beat), default=0)
        if any(beat and beat.count == fewest and rank not in late for rank, beat in enumerate(beats)):
            late = []  # the others wait for a rank that has time left
        return self._describe(stopped, late, beats, pids, now) if stopped or late else ""

    def limit(self, beat: Beat) -> float:
        """Seconds that the phase of this beat may last."""
        if beat.step < 0:
            return float("inf")
        if self._fixed_seconds is not None:
            return self._fixed_seconds
        if beat.seen < FEWEST_SEEN or beat.phase in LONG_PHASES:
            return self._unseen_seconds
        return max(FILE_SECONDS if beat.phase in FILE_PHASES else LEAST_SECONDS, FACTOR * beat.longest)

    def _is_late(self, rank: int, beat: Beat, pid: int, now: float) -> bool:
        seen = self._seen.setdefault(rank, _Seen())
        if seen.count != beat.count:
            seen.count, seen.since, seen.cpu = beat.count, now, _cpu_seconds(pid)
            return False  # how much it computes is known from the next look on
        age, limit = now - max(beat.time, self._resumed), self.limit(beat)
        if age <= limit:
            return False
        is_busy = _cpu_seconds(pid) - seen.cpu > _BUSY * (now - seen.since)
        return not (is_busy and self._fixed_seconds is None) or age > BUSY_FACTOR * limit

    def _is_stopped(self, rank: int, pid: int, now: float) -> bool:
        seen = self._seen.setdefault(rank, _Seen())
        if _state(pid) != "T":
            seen.stopped_since = None
            return False
        seen.stopped_since = max(seen.stopped_since or now, self._resumed)
        return now - seen.stopped_since > STOPPED_SECONDS

    def _describe(
        self, stopped: list[int], late: list[int], beats: list[Beat | None], pids: Sequence[int], now: float
    ) -> str:
        dumped = self._dump(pids)
        waits = {rank: _waits_in(text) for rank, text in dumped.items() if text}
        outside = [rank for rank in waits if waits[rank] is None]
        counts = [beat.count if beat is not None else 0 for beat in beats]
        behind = [rank for rank, count in enumerate(counts) if count == min(counts)]
        named = stopped or (outside if 0 < len(outside) < len(pids) else [])
        named = named or (behind if len(behind) < len(pids) else late)
        first, is_certain = named[0], len(named) < len(pids) or len(pids) == 1
        beat = beats[first]
        what = f"rank {first} (process {pids[first]})" if is_certain else f"all {len(pids)} ranks"
        how = "stopped by a signal (SIGSTOP)" if first in stopped else "without progress"
        text = f"{what}: {how}"
        if beat is not None:
            text += f" for {now - max(beat.time, self._resumed):.0f} s in {_where(beat)}"
            if first not in stopped and beat.seen >= FEWEST_SEEN and self._fixed_seconds is None:
                text += f", which takes {beat.longest:.2g} s at most"
        if len(named) > 1 and is_certain:
            text += f"; ranks {', '.join(map(str, named[1:9]))} too"
        if frames := _frames(dumped.get(first, "")):
            text += f"; at {frames}"
        others = {waits[rank] for rank in waits if rank not in named and waits[rank]}
        if others:
            text += f"; the other ranks wait in {', '.join(sorted(filter(None, others)))}"
        return f"{text}; stacks of all ranks: {self._save(dumped)}"

    def _dump(self, pids: Sequence[int]) -> dict[int, str]:
        """Has every rank write its stacks; returns them by rank, "" where it did not answer."""
        paths = [self._folder / f"rank-{rank}.stack" for rank in range(len(pids))]
        asked = [rank for rank, path in enumerate(paths) if path.exists()]  # the others would die of the signal
        stopped = [rank for rank in asked if _state(pids[rank]) == "T"]
        running = [rank for rank in asked if rank not in stopped]
        for rank in running:
            _signal(pids[rank], heartbeat.STACK_SIGNAL)
        _wait_until_written([paths[rank] for rank in running])
        # A stopped process writes nothing before it goes on. The others stop meanwhile, or the run would go on too.
        for rank in running if stopped else []:
            _signal(pids[rank], signal.SIGSTOP)
        for rank in stopped:
            _signal(pids[rank], heartbeat.STACK_SIGNAL)
            _signal(pids[rank], signal.SIGCONT)
        _wait_until_written([paths[rank] for rank in stopped])
        return {rank: _text(paths[rank]) if rank in asked else "" for rank in range(len(pids))}

    def _save(self, dumped: dict[int, str]) -> Path:
        folder = self._stacks / datetime.now().strftime("%Y-%m-%d-%H%M%S")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for rank, text in dumped.items():
                (folder / f"rank-{rank}.txt").write_text(text or "this rank did not answer\n", encoding="utf-8")
        except OSError as error:
            logger.warning("%s: stacks cannot be written: %s", folder, error.strerror)
        return folder


def _wait_until_written(paths: list[Path]) -> None:
    """Waits until every rank has written its stacks, which have no mark at their end, or for some seconds."""
    deadline, before = time.monotonic() + _STACK_SECONDS, [""] * len(paths)
    while time.monotonic() < deadline:
        time.sleep(0.1)
        texts = [_text(path) for path in paths]
        if all("hread 0x" in text for text in texts) and texts == before:
            return
        before = texts


def _where(beat: Beat) -> str:
    return beat.phase if beat.step < 0 else f"step {beat.step}, {beat.phase}"


def _main_thread(text: str) -> str:
    """The stack of the main thread, which faulthandler writes last."""
    return text.rsplit("hread 0x", 1)[-1]


def _waits_in(text: str) -> str | None:
    """The collective in which the main thread waits for other ranks; None where it does something else."""
    for line in _main_thread(text).splitlines():
        if match := _WAITS.search(line):
            return match[1] or match[2]
    return None


def _frames(text: str) -> str:
    """ "step (model.py:12) < train_step (trainer.py:110)": the innermost frames, libraries left out after the first."""
    found = [(Path(m[1]), m[2], m[3]) for m in map(_FRAME.search, _main_thread(text).splitlines()) if m]
    own = [each for number, each in enumerate(found) if number == 0 or "site-packages" not in each[0].parts]
    return " < ".join(f"{name} ({path.name}:{line})" for path, line, name in own[:3])


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _state(pid: int) -> str:
    """The kernel's letter: T is stopped by a signal, which a debugger (t) is not."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def _cpu_seconds(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0
