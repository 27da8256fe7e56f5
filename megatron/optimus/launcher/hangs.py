"""Finds ranks that hang, from the heartbeats of all ranks of this machine, and says which one and where.

A phase of a step may last five times the longest that its rank has seen, and 20 seconds at least, or two minutes where
it reads or writes files; six times that where the rank computes meanwhile, as a compiler does. A phase that has not
been seen a few times, such as a first step, and saves and evaluations have the collectives' time-out. Start-up has no
limit: its collectives have. A process that a signal has stopped counts as hanging after ten seconds, in any phase.

All ranks wait for the one that hangs, so all are late together. That one is stopped, or its stack is outside of any
collective while the others are in one, or it is behind in phases. Where one is behind, its own limit counts: the others
may wait for it as long as it may take. On several nodes each agent looks at its ranks, and the coordinator compares.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
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


@dataclass
class Look:
    """What one look at the ranks of a machine found."""

    beats: dict[int, Beat | None] = field(default_factory=dict)  # by rank
    stopped: list[int] = field(default_factory=list)  # for too long
    late: list[int] = field(default_factory=list)  # all that have the fewest beats among them, else none
    fewest: int | None = None  # beats; None where no rank has one

    @property
    def hangs(self) -> bool:
        """Whether a rank of this machine hangs, as far as this machine can tell."""
        return bool(self.stopped or self.late)


@dataclass(frozen=True)
class RankFacts:
    """A rank of a run that hangs; agents send it as JSON."""

    rank: int
    pid: int
    is_stopped: bool
    is_late: bool
    count: int  # beats
    lasts: str  # since when it is in which phase
    has_stack: bool
    waits: str | None  # the collective in which it waits for others
    frames: str  # where it is
    node: str = ""


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
        self._last = Look()

    def poll(self, pids: Sequence[int]) -> str:
        """Returns a line about the rank that hangs, "" if none does. ``pids``: the ranks' processes in rank order.

        The stacks of all ranks are then in the folder ``stacks``; the ranks still live.
        """
        look = self.look(pids)
        if look is None or not look.hangs:
            return ""
        folder = new_stacks_folder(self._stacks)
        return describe(self.facts(pids, folder), folder)[1]

    def look(self, pids: Sequence[int], first_rank: int = 0) -> Look | None:
        """Looks at the ranks of this machine; None where the last look was a moment ago.

        Args:
            pids: the ranks' processes in rank order.
            first_rank: number of the first of them.
        """
        now = time.monotonic()
        if now - self._polled < _POLL_SECONDS:
            return None
        if now - self._polled > _SUSPENDED_SECONDS:
            self._resumed = now
        self._polled = now
        ranks = {first_rank + place: pid for place, pid in enumerate(pids)}
        beats = {rank: heartbeat.read(self._folder / f"rank-{rank}") for rank in ranks}
        stopped = [rank for rank, pid in ranks.items() if self._is_stopped(rank, pid, now)]
        late = [
            rank for rank, beat in beats.items() if beat is not None and self._is_late(rank, beat, ranks[rank], now)
        ]
        fewest = min((beat.count for beat in beats.values() if beat), default=None)
        if any(beat and beat.count == fewest and rank not in late for rank, beat in beats.items()):
            late = []  # the others wait for a rank that has time left
        self._last = Look(beats, stopped, late, fewest)
        return self._last

    def facts(self, pids: Sequence[int], folder: Path) -> list[RankFacts]:
        """Returns what the last look found of each rank, with its stack, which is written to ``folder`` too."""
        look, now = self._last, time.monotonic()
        dumped = self._dump({rank: pid for rank, pid in zip(look.beats, pids, strict=True)})
        _save(dumped, folder)
        return [
            RankFacts(
                *(rank, pid, rank in look.stopped, rank in look.late, 0 if beat is None else beat.count),
                lasts="" if beat is None else self._lasts(beat, now, rank in look.stopped),
                has_stack=bool(dumped[rank]),
                waits=_waits_in(dumped[rank]),
                frames=_frames(dumped[rank]),
            )
            for (rank, beat), pid in zip(look.beats.items(), pids, strict=True)
        ]

    def _lasts(self, beat: Beat, now: float, is_stopped: bool) -> str:
        text = f" for {now - max(beat.time, self._resumed):.0f} s in {_where(beat)}"
        if not is_stopped and beat.seen >= FEWEST_SEEN and self._fixed_seconds is None:
            text += f", which takes {beat.longest:.2g} s at most"
        return text

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

    def _dump(self, ranks: dict[int, int]) -> dict[int, str]:
        """Has every rank write its stacks; returns them by rank, "" where it did not answer. ``ranks``: processes."""
        paths = {rank: self._folder / f"rank-{rank}.stack" for rank in ranks}
        asked = [rank for rank, path in paths.items() if path.exists()]  # the others would die of the signal
        stopped = [rank for rank in asked if _state(ranks[rank]) == "T"]
        running = [rank for rank in asked if rank not in stopped]
        for rank in running:
            _signal(ranks[rank], heartbeat.STACK_SIGNAL)
        _wait_until_written([paths[rank] for rank in running])
        # A stopped process writes nothing before it goes on. The others stop meanwhile, or the run would go on too.
        for rank in running if stopped else []:
            _signal(ranks[rank], signal.SIGSTOP)
        for rank in stopped:
            _signal(ranks[rank], heartbeat.STACK_SIGNAL)
            _signal(ranks[rank], signal.SIGCONT)
        _wait_until_written([paths[rank] for rank in stopped])
        for rank in stopped:  # ranks of other nodes are not stopped
            _signal(ranks[rank], signal.SIGSTOP)
        return {rank: _text(paths[rank]) if rank in asked else "" for rank in ranks}


def describe(ranks: Sequence[RankFacts], stacks: Path) -> tuple[int, str]:
    """Returns the rank for which the others wait, and a line about it.

    Args:
        ranks: of all nodes.
        stacks: the folder with their stacks, for the line.
    """
    stopped = [one for one in ranks if one.is_stopped]
    outside = [one for one in ranks if one.has_stack and one.waits is None]
    behind = [one for one in ranks if one.count == min(other.count for other in ranks)]
    named = stopped or (outside if 0 < len(outside) < len(ranks) else [])
    named = named or (behind if len(behind) < len(ranks) else [one for one in ranks if one.is_late] or list(ranks))
    first, is_certain = named[0], len(named) < len(ranks) or len(ranks) == 1
    place = f"process {first.pid}{first.node and ' on node ' + first.node}"
    text = f"rank {first.rank} ({place})" if is_certain else f"all {len(ranks)} ranks"
    text += f": {'stopped by a signal (SIGSTOP)' if first.is_stopped else 'without progress'}{first.lasts}"
    if len(named) > 1 and is_certain:
        text += f"; ranks {', '.join(str(one.rank) for one in named[1:9])} too"
    if first.frames:
        text += f"; at {first.frames}"
    others = {one.waits for one in ranks if one not in named and one.waits}
    if others:
        text += f"; the other ranks wait in {', '.join(sorted(others))}"
    return first.rank, f"{text}; stacks of all ranks: {stacks}"


def new_stacks_folder(stacks: Path) -> Path:
    """Returns the name of a folder for the stacks of a hang found now."""
    return stacks / datetime.now().strftime("%Y-%m-%d-%H%M%S")


def _save(dumped: dict[int, str], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rank, text in dumped.items():
            (folder / f"rank-{rank}.txt").write_text(text or "this rank did not answer\n", encoding="utf-8")
    except OSError as error:
        logger.warning("%s: stacks cannot be written: %s", folder, error.strerror)


def _wait_until_written(paths: list[Path]) -> None:
    """Waits until every rank has written its stacks, which have no mark at their end, or for some seconds."""
    deadline, before = time.monotonic() + _STACK_SECONDS, [""] * len(paths)
    while time.monotonic() < deadline:
        time.sleep(0.03)
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
