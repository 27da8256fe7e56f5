"""The faults that ``optimus drill`` injects: what each does to a run, how the run tells of it, and what is promised."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megatron.optimus.checkpoint import commit
from megatron.optimus.launcher.command import AGENT, FORK_SERVER, PROGRAM
from megatron.optimus.platform import environment, heartbeat, memory_slots

_POLL_SECONDS = 0.002
_LATE_SECONDS = 3.0  # of messages; a rank that is stopped for 10 s is replaced


class LaunchEnded(Exception):
    """The launcher has ended while a fault waited for its moment."""


@dataclass
class Target:
    """A run under ``optimus launch`` on this machine, as a fault sees it."""

    launcher: int  # process id
    num_ranks: int
    ranks_per_node: int  # of a simulated node
    run_dir: Path
    log: Path  # of the launcher and its ranks
    data: Path  # the token file
    hooks: Path  # OPTIMUS_DRILL_FOLDER
    rng: random.Random
    is_alive: Callable[[], bool]
    victims: list[int] = field(default_factory=list)  # ranks that are to be named
    begun: float = 0.0  # time.time() of the fault
    log_size: int = 0  # bytes of the log before the fault

    def wait(self, condition: Callable[[], bool]) -> None:
        """Waits for a moment. Raises LaunchEnded where it does not come any more."""
        while not condition():
            if not self.is_alive():
                raise LaunchEnded
            time.sleep(_POLL_SECONDS)

    def ranks(self) -> list[int]:
        """Process ids; in rank order where the launcher has no agents."""
        return ranks_of(self.launcher)

    def fork_server(self) -> int | None:
        """The process that the ranks are forked from; None where they are new interpreters."""
        return next((pid for pid in _fork_servers(self.launcher) if children(pid)), None)

    def agent_folders(self) -> list[Path]:
        """The folders of heartbeats: the launcher's, or those of its agents."""
        opened = set()
        for pid in (self.launcher, *agents_of(self.launcher)):
            with contextlib.suppress(OSError):
                opened |= {Path(os.path.realpath(link)) for link in Path(f"/proc/{pid}/fd").iterdir()}
        return [path.parent for path in opened if path.name == heartbeat.ALIVE]

    def coordinator(self) -> int:
        """The process that the launcher has forked to coordinate its agents."""
        found = [pid for pid in children(self.launcher) if _words(pid) == _words(self.launcher)]
        if not found:
            raise LaunchEnded
        return found[0]

    def is_starting(self, before: list[int]) -> bool:
        """Whether all ranks are other processes than ``before`` and none has begun a step."""
        pids = self.ranks()
        if len(pids) < self.num_ranks or set(pids) & set(before):
            return False
        paths = [folder / f"rank-{rank}" for folder in self.agent_folders() for rank in range(self.num_ranks)]
        beats = [heartbeat.read(path) for path in paths if path.exists()]
        return len(beats) == self.num_ranks and all(beat is not None and beat.step < 0 for beat in beats)

    def is_writing(self) -> bool:
        """Whether a checkpoint is being written to disk."""
        with contextlib.suppress(OSError):
            return any(".tmp-" in name for name in os.listdir(self.run_dir / "checkpoints"))
        return False

    def newest_save(self) -> int:
        """The step of the newest checkpoint on disk; -1 without one."""
        with contextlib.suppress(OSError):
            return max((one.step for one in commit.list_committed(self.run_dir / "checkpoints")), default=-1)
        return -1

    def begin(self, victims: list[int]) -> None:
        """Call right before the fault; of two in turn the last one counts."""
        self.victims, self.begun, self.log_size = victims, time.time(), self.log.stat().st_size

    def send(self, number: int, victims: list[int]) -> None:
        """Sends a signal to these ranks."""
        pids = self.ranks()
        self.begin(victims)
        for rank in victims:
            os.kill(pids[rank], number)


def children(pid: int) -> list[int]:
    """Processes that this one has started."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def agents_of(launcher: int) -> list[int]:
    """The agents of the nodes, which a launcher's mpiexec has started; none on one machine."""
    return [agent for pid in children(launcher) for agent in children(pid) if AGENT in _words(agent)]


def _fork_servers(launcher: int) -> list[int]:
    """The processes of a launcher that fork its ranks: one a node, none where it has ended."""
    return [pid for one in (launcher, *agents_of(launcher)) for pid in children(one) if FORK_SERVER in _words(pid)]


def ranks_of(launcher: int) -> list[int]:
    """The ranks in order: children of the fork servers, or the launcher's own where they are new interpreters."""
    forked = [rank for server in _fork_servers(launcher) for rank in children(server)]
    starters = (launcher, *agents_of(launcher))
    return forked or [pid for one in starters for pid in children(one) if PROGRAM in _words(pid)]


def _words(pid: int) -> list[str]:
    """A process's command line; none once it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    return []


@dataclass(frozen=True)
class Fault:
    """A kind of fault."""

    name: str
    what: str
    promise: str
    strike: Callable[[Target], Callable[[], None] | None]  # returns what undoes it, once it was noticed
    notice: str  # pattern of the line that tells of it; its first group is the rank; "": none has to
    restarts: bool = True  # the ranks are started again
    names: bool = True  # the line names the rank
    at_start: bool = False  # needs a run that has just been started
    by_command: bool = False  # the same command has to be given again
    alone: bool = False  # in a run of its own
    needs_tcp: bool = False  # between the ranks, as gloo has it; NCCL uses NVLink or shared memory inside a host
    needs_agents: bool = False  # a launch with an agent on each simulated node (drill_nodes.py)


def _signal(target: Target, number: int, count: int = 1) -> None:
    target.send(number, target.rng.sample(range(target.num_ranks), count))


def _kill_at_start(target: Target) -> None:
    target.wait(partial(target.is_starting, []))
    time.sleep(target.rng.uniform(0.0, 0.3))
    _signal(target, signal.SIGKILL)


def _kill_in_save(target: Target) -> None:
    target.wait(target.is_writing)
    _signal(target, signal.SIGKILL)


def _kill_in_recovery(target: Target) -> None:
    before = target.ranks()
    _signal(target, signal.SIGKILL)
    target.wait(partial(target.is_starting, before))
    time.sleep(target.rng.uniform(0.0, 0.3))
    _signal(target, signal.SIGKILL)


def _kill_launcher(target: Target) -> None:
    target.begin([])
    os.kill(target.launcher, signal.SIGKILL)


def _kill_fork_server(target: Target) -> None:
    target.wait(lambda: target.fork_server() is not None)
    if (server := target.fork_server()) is None:
        raise LaunchEnded
    target.begin([])
    os.kill(server, signal.SIGKILL)


def _kill_agent(target: Target) -> None:
    """SIGKILL for the agent of a node with ranks, which die with it. The victim is the number of the node."""
    working = [pid for pid in agents_of(target.launcher) if ranks_of(pid)]
    if not working:
        raise LaunchEnded
    agent = target.rng.choice(working)
    memory = re.search(rf"{environment.MEMORY_FOLDER}=[^\0]*-n(\d+)", Path(f"/proc/{agent}/environ").read_text())
    target.begin([int(memory[1])] if memory else [])
    os.kill(agent, signal.SIGKILL)


def _signal_coordinator(target: Target, number: int = signal.SIGKILL) -> None:
    target.begin([])
    os.kill(target.coordinator(), number)


def _kill_coordinator(target: Target, *, kills_rank: bool) -> None:
    """SIGKILL while the ranks start: for the first time, or again after a rank was killed."""
    before = target.ranks() if kills_rank else []
    if kills_rank:
        _signal(target, signal.SIGKILL)
    target.wait(partial(target.is_starting, before))
    time.sleep(target.rng.uniform(0.0, 0.3))
    _signal_coordinator(target)


def _lose_nodes(target: Target, count: int = 1) -> None:
    """SIGKILL for the ranks of simulated nodes, and clears their memory. The launcher lives on."""
    size = target.ranks_per_node
    nodes = target.rng.sample(range(target.num_ranks // size), count)
    ranks = [node * size + place for node in sorted(nodes) for place in range(size)]
    folders = target.agent_folders()
    target.send(signal.SIGKILL, ranks)
    for path in [path for of in folders for rank in ranks for path in sorted(of.glob(f"memory/rank-{rank}.*"))]:
        memory_slots.MemorySlot(path).clear()


def _hook(target: Target, words: str) -> None:
    """Asks a rank for a fault (training/drill.py)."""
    rank = target.rng.randrange(target.num_ranks)
    target.begin([rank])
    _ask(target, rank, words)


def _ask(target: Target, rank: int, words: str) -> None:
    fresh = target.hooks / f"new-{rank}"
    fresh.write_text(words, encoding="utf-8")
    os.replace(fresh, target.hooks / f"rank-{rank}")


def _fail_writes(target: Target, number: int) -> Callable[[], None]:
    """A rank's writes to checkpoints raise this OSError until the run has noticed it."""
    _hook(target, f"disk {number}")
    [rank] = target.victims
    return partial(_ask, target, rank, "disk 0")


def _pause(target: Target) -> None:
    """SIGSTOP for less than what is taken for a hang: all messages from and to a rank are late."""
    _signal(target, signal.SIGSTOP)
    time.sleep(_LATE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.kill(target.ranks()[target.victims[0]], signal.SIGCONT)


def _flip(target: Target) -> None:
    _hook(target, f"flip {target.rng.randrange(1 << 30)} {target.rng.randrange(31)}")


def _vanish(target: Target) -> Callable[[], None]:
    """A file is in the place of the folder of checkpoints until the run has noticed it."""
    folder = target.run_dir / "checkpoints"
    away = folder.with_name("checkpoints.away")
    target.begin([])
    os.replace(folder, away)
    folder.write_text("not a folder\n", encoding="utf-8")

    def undo() -> None:
        folder.unlink()
        os.replace(away, folder)

    return undo


def _forbid(target: Target) -> Callable[[], None]:
    if os.geteuid() == 0:  # root writes there too
        return _fail_writes(target, errno.EROFS)
    folder = target.run_dir / "checkpoints"
    target.begin([])
    folder.chmod(0o500)
    return partial(folder.chmod, 0o700)


def _cut(target: Target) -> Callable[[], None]:
    """The second half of the token file is gone until the run has ended."""
    content = target.data.read_bytes()
    target.begin([])
    os.truncate(target.data, len(content) // 2)

    def undo() -> None:
        target.data.write_bytes(content)

    return undo


# Faults whose rank is not to be named; the harmless ones do not even restart the run.
_unnamed, _harmless = partial(Fault, names=False), partial(Fault, names=False, restarts=False)
_KILLED, _SAVE_FAILED = r"error: rank (\d+) ended with signal SIG(?:KILL|SEGV)", r"training goes on"
_AGAIN = "restart from memory or disk, bit-identical, the rank is named"
_ANOTHER, _TAKES_OVER = r"another one takes over", "another one takes over, nothing is restarted"
_GOES_ON = "another coordinator goes on with the restart, bit-identical"
FAULTS = {
    one.name: one
    for one in (
        Fault("kill", "SIGKILL of a rank in a step", _AGAIN, partial(_signal, number=signal.SIGKILL), _KILLED),
        Fault("kill-start", "SIGKILL of a rank before the first step", _AGAIN, _kill_at_start, _KILLED, at_start=True),
        Fault("kill-save", "SIGKILL of a rank while a checkpoint is written", _AGAIN, _kill_in_save, _KILLED),
        Fault("kill-recovery", "SIGKILL, and again while the ranks start", _AGAIN, _kill_in_recovery, _KILLED),
        Fault("kill-two", "SIGKILL of two ranks", _AGAIN, partial(_signal, number=signal.SIGKILL, count=2), _KILLED),
        Fault("segv", "SIGSEGV of a rank", _AGAIN, partial(_signal, number=signal.SIGSEGV), _KILLED),
        Fault(
            *("stop", "SIGSTOP of a rank", _AGAIN, partial(_signal, number=signal.SIGSTOP)),
            notice=r"rank (\d+) \(process \d+\): stopped by a signal",
        ),
        _unnamed(
            *(
                "launcher",
                "SIGKILL of the launcher",
                "its ranks save and leave; the same command goes on, bit-identical",
            ),
            *(_kill_launcher, r"asked to stop: saving step"),
            by_command=True,
        ),
        Fault("node", "SIGKILL of a node's ranks, its memory lost", _AGAIN, _lose_nodes, _KILLED),
        _unnamed(
            *("fork-server", "SIGKILL of the process that ranks are forked from", _AGAIN.rpartition(",")[0]),
            *(_kill_fork_server, r"error[^\n]*"),
            alone=True,  # what is started then has other parents
        ),
        Fault(
            *(
                "two-nodes",
                "SIGKILL of two nodes' ranks, their memory lost",
                "restart from disk, bit-identical, a rank is named",
            ),
            *(partial(_lose_nodes, count=2), _KILLED),
        ),
        Fault(
            *("agent", "SIGKILL of a node's agent", "a spare takes over, bit-identical, the node is named"),
            *(_kill_agent, r"error: lost n(\d+) "),
            needs_agents=True,
        ),
        _harmless(
            *("coordinator", "SIGKILL of the coordinator", _TAKES_OVER, _signal_coordinator, _ANOTHER),
            needs_agents=True,
        ),
        _harmless(
            *("coordinator-stop", "SIGSTOP of the coordinator", _TAKES_OVER),
            *(partial(_signal_coordinator, number=signal.SIGSTOP), _ANOTHER),
            needs_agents=True,
        ),
        _harmless(
            *("coordinator-start", "SIGKILL of the coordinator before the first step", _TAKES_OVER),
            *(partial(_kill_coordinator, kills_rank=False), _ANOTHER),
            at_start=True,
            needs_agents=True,
        ),
        _unnamed(
            *("coordinator-recovery", "SIGKILL of a rank, and of the coordinator while the ranks start", _GOES_ON),
            *(partial(_kill_coordinator, kills_rank=True), _ANOTHER),
            needs_agents=True,
        ),
        Fault(
            *("flip", "a bit of a master weight flips", "exit code 5, the rank is named, restart from before it"),
            *(_flip, r"silent data corruption[^\n]*?rank (\d+)"),
        ),
        Fault(
            *("nan", "a rank computes NaN until its process ends", "exit code 4, the rank is named, restart"),
            *(partial(_hook, words="nan"), r"error[^\n]*?on rank (\d+)"),
            alone=True,
        ),
        Fault(
            *("slow", "a rank sleeps 0.3 s in each of 25 steps", "the rank is named, nothing is restarted"),
            *(partial(_hook, words="slow 0.3 25"), r"rank (\d+) on \S+ is a straggler"),
            restarts=False,
        ),
        _harmless(
            *("disk-vanished", "no folder of checkpoints for some time", "training goes on, and saves when it is back"),
            *(_vanish, _SAVE_FAILED),
        ),
        _harmless(
            *("disk-read-only", "a read-only folder for some time", "training goes on, and saves when it is writable"),
            *(_forbid, _SAVE_FAILED),
        ),
        _harmless(
            *("disk-full", "no space for a rank's checkpoints", "training goes on, and saves when there is space"),
            *(partial(_fail_writes, number=errno.ENOSPC), _SAVE_FAILED),
        ),
        _unnamed(
            *("link-cut", "all TCP connections of a rank are cut", "restart from memory or disk, bit-identical"),
            *(partial(_hook, words="cut"), r"error[^\n]*?rank (\d+)"),
            needs_tcp=True,
        ),
        _harmless(
            *("link-late", f"all messages of a rank are {_LATE_SECONDS:g} s late", "nothing is restarted"),
            *(_pause, ""),
        ),
        _harmless(
            *("clock", "a rank's time of day jumps by an hour", "nothing is restarted"),
            *(partial(_hook, words="clock 3600"), ""),
        ),
        _unnamed(
            *("data-cut", "the token file is cut", "the file is named, exit code 2; mended, the same command goes on"),
            *(_cut, r"error[^\n]*tokens"),
            by_command=True,
            alone=True,
        ),
    )
}


def named(text: str, fault: Fault) -> tuple[bool, int | None]:
    """Whether the log tells of the fault, and the rank that it names."""
    match = re.search(fault.notice, text)
    if match is None:
        return False, None
    return True, int(match[1]) if match.re.groups else None
