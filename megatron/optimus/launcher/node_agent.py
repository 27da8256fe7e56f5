"""The agent of a node: starts its ranks when the job's coordinator says so, watches them, and tells it what happens.

    python -m megatron.optimus.launcher.node_agent cpu

mpiexec or srun start one on every node of a job, spares too, once. It lives as long as the job: a restart finds
everything imported (forkserver.py). After the challenge (wire.py) it speaks with the coordinator in these messages:

    agent       -> {"place": {"starter": 0, "number": 3, "name": "x3"}}     first: on which node it is
                -> {"attempt": 4, "codes": [null, -9], "memory_step": 80, "was_asked": false}
                                                            how its ranks ended, null while one runs; whether somebody
                                                            else, such as mpiexec, has asked this agent to stop
                -> {"attempt": 4, "fewest": 812, "late": false, "stopped": false}     a heartbeat (hangs.Look)
                -> {"attempt": 4, "facts": [...]}           answer to "stacks": hangs.RankFacts of its ranks
    coordinator -> {"start": {"attempt": 4, "first_rank": 8, ...}}      RanksOfNode
                -> {"signal": 15} or {"signal": 9}          to all its ranks
                -> {"stacks": folder}
                -> {"leave": true}                          the job is over

While the coordinator is gone the ranks go on, and the agent looks for another one at the same address. Where none comes
it asks the ranks to save and leave, as at a stop signal, and ends with them.
"""

from __future__ import annotations

import logging
import select
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.launcher import wire
from megatron.optimus.launcher.agent import POLL_SECONDS, LocalAgent
from megatron.optimus.launcher.command import PROGRAM
from megatron.optimus.launcher.forkserver import ForkServer
from megatron.optimus.launcher.hangs import HangWatch, Look
from megatron.optimus.platform import environment, memory_slots, signals
from megatron.optimus.platform.log import print_error

logger = logging.getLogger("optimus")

BEAT_SECONDS = 1.0
_CONNECT_AGAIN_SECONDS = 0.2
_REFUSED_SECONDS = 5.0  # without a coordinator where its port is closed: the launcher has ended
_UNREACHABLE_SECONDS = 30.0  # where it does not answer
_ECHO_SECONDS = 5.0  # in which a request to stop comes by mpiexec, the coordinator and the scheduler
_LEAVE_SECONDS = 60.0  # for ranks that were asked to save and leave


@dataclass(frozen=True)
class RanksOfNode:
    """What an agent needs to start its ranks of an attempt."""

    attempt: int
    first_rank: int
    num_ranks: int  # of this node
    variables: dict[str, str]  # of all ranks: where they meet, and their number
    argv: list[str]  # the command line of pretrain
    cores: list[list[int]]  # to which each rank of a node is bound; none: as the agent
    stacks: str  # folder for stacks of ranks that hang; "" looks for no hang
    unseen_seconds: float  # limits of HangWatch
    fixed_seconds: float | None


class NodeAgent:
    """The agent of this node.

    Args:
        device: the option ``device``, for the fork server.
    """

    def __init__(self, device: str) -> None:
        self._host, self._port, self._token = environment.coordinator()
        self._local = LocalAgent([], 0, fork_server=ForkServer(device))
        self._link: wire.AgentLink | None = None
        self._parted = time.monotonic()  # since when there is no coordinator
        self._was_refused, self._next_try = False, 0.0
        self._asked, self._ready_to_start = RanksOfNode(0, 0, 0, {}, [], [], "", 0.0, None), False
        self._watch: HangWatch | None = None
        self._look = Look()
        self._codes: list[int | None] = []
        self._next_beat = 0.0
        self._received: list[int] = []
        self._asked_to_stop = float("-inf")  # when the ranks were
        self._was_asked = False  # by a signal
        self._leaves_at: float | None = None
        self._own_memory: Path | None = None

    def run(self) -> int:
        """Serves the coordinator until the job is over; returns the exit code."""
        for number in signals.STOP_SIGNALS:
            signal.signal(number, self._note_signal)
        with self._local:
            try:
                while not self._is_over():
                    self._take_messages()
                    self._forward_signals()
                    self._start_ranks()
                    self._watch_ranks()
            finally:
                if self._own_memory is not None:
                    shutil.rmtree(self._own_memory, ignore_errors=True)
        return 0

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)

    def _is_over(self) -> bool:
        """Whether the job is over, or nobody is left who would say so."""
        now, running = time.monotonic(), any(process.poll() is None for process in self._local.ranks)
        if self._leaves_at is None and self._link is None:
            limit = _REFUSED_SECONDS if self._was_refused else _UNREACHABLE_SECONDS
            if now - self._parted > limit:
                logger.warning("no coordinator at %s:%d: the ranks save and leave", self._host, self._port)
                self._signal_ranks(signal.SIGTERM)
                self._leaves_at = now + _LEAVE_SECONDS
        return self._leaves_at is not None and (not running or now > self._leaves_at)

    def _take_messages(self) -> None:
        """Waits for a moment, and does what the coordinator says."""
        if self._link is None:
            time.sleep(POLL_SECONDS)
            self._connect()
            return
        try:
            if select.select([self._link], [], [], POLL_SECONDS)[0]:
                for message in self._link.receive():
                    self._obey(message)
        except OSError as error:
            self._part(error)

    def _connect(self) -> None:
        now = time.monotonic()
        if now < self._next_try or self._leaves_at is not None:
            return
        self._next_try = now + _CONNECT_AGAIN_SECONDS
        try:
            self._link = wire.connect(self._host, self._port, self._token)
        except OSError as error:
            self._was_refused = isinstance(error, ConnectionRefusedError)
            return
        self._send({"place": environment.agent_place()})
        self._tell_codes()

    def _part(self, error: OSError) -> None:
        assert self._link is not None
        self._link.close()
        self._link, self._parted, self._was_refused = None, time.monotonic(), False

    def _send(self, message: dict[str, Any]) -> None:
        if self._link is not None:
            try:
                self._link.send(message)
            except OSError as error:
                self._part(error)

    def _obey(self, message: dict[str, Any]) -> None:
        if "start" in message and message["start"]["attempt"] != self._asked.attempt:
            self._signal_ranks(signal.SIGKILL)  # of an older attempt, if any live
            self._asked_to_stop = float("-inf")
            self._asked, self._ready_to_start = RanksOfNode(**message["start"]), True
            self._codes = [None] * self._asked.num_ranks
        elif "signal" in message:
            self._signal_ranks(message["signal"])
        elif "stacks" in message and self._watch is not None:
            pids = [process.pid for process in self._local.ranks]
            facts = self._watch.facts(pids, Path(message["stacks"]))
            self._signal_ranks(signal.SIGSTOP)  # they will be killed, and shall not go on with those of other nodes
            self._send({"attempt": self._asked.attempt, "facts": [asdict(one) for one in facts]})
        elif "leave" in message:
            self._signal_ranks(signal.SIGKILL)
            self._leaves_at = time.monotonic() + _LEAVE_SECONDS

    def _forward_signals(self) -> None:
        while self._received:
            number, self._was_asked = self._received.pop(), True
            self._signal_ranks(number)
            if self._link is None and not self._local.ranks:  # a spare of a launch that has ended
                self._leaves_at = time.monotonic()

    def _signal_ranks(self, number: int) -> None:
        """Sends a signal to the ranks. A second stop signal would end them before they have saved."""
        now = time.monotonic()
        if number in signals.STOP_SIGNALS and now < self._asked_to_stop + _ECHO_SECONDS:
            return
        self._asked_to_stop = now if number in signals.STOP_SIGNALS else self._asked_to_stop
        if self._ready_to_start:  # they wait for the imports
            self._ready_to_start, self._codes = False, [-number] * self._asked.num_ranks
            self._local.ranks = []
            self._tell_codes()
        for process in self._local.ranks:
            process.send_signal(number)

    def _start_ranks(self) -> None:
        """Starts the ranks of the attempt asked for, once everything is imported and the old ones have ended."""
        if not self._ready_to_start or self._local.is_importing():
            return
        if any(process.poll() is None for process in self._local.ranks):
            return
        self._ready_to_start, asked = False, self._asked
        if asked.stacks:
            self._watch = HangWatch(
                self._local.folder, Path(asked.stacks), asked.unseen_seconds, fixed_seconds=asked.fixed_seconds
            )
        envs = [
            environment.for_agents_rank(asked.first_rank + place, place, asked.num_ranks, asked.variables)
            for place in range(asked.num_ranks)
        ]
        for env, cores in zip(envs, asked.cores, strict=False):
            env.setdefault("OMP_NUM_THREADS", str(len(cores)))
        memory = asked.variables.get(environment.MEMORY_FOLDER)
        if memory is not None and (own := environment.memory_folder()) is not None:
            envs = [env | {environment.MEMORY_FOLDER: str(own)} for env in envs]
        elif memory is not None:
            self._own_memory = Path(memory)
        self._local.command, self._local.argv = [sys.executable, "-m", PROGRAM, *asked.argv], asked.argv
        self._local.start(envs, asked.cores)

    def _watch_ranks(self) -> None:
        """Tells the coordinator how ranks end, and a few times a minute that all is well."""
        codes = [process.poll() for process in self._local.ranks]
        if not self._ready_to_start and codes and codes != self._codes:
            self._codes = codes
            self._tell_codes()
        running = [process.pid for process in self._local.ranks if process.poll() is None]
        if self._watch is not None and len(running) == self._asked.num_ranks:
            self._look = self._watch.look(running, self._asked.first_rank) or self._look
        else:
            self._look = Look()
        if (now := time.monotonic()) >= self._next_beat:
            self._next_beat = now + BEAT_SECONDS
            late = {"fewest": self._look.fewest, "late": bool(self._look.late), "stopped": bool(self._look.stopped)}
            self._send({"attempt": self._asked.attempt, **late})

    def _tell_codes(self) -> None:
        memory = environment.memory_folder() or self._own_memory
        newest = memory_slots.newest_step(memory) if None not in self._codes else -1
        told = {"codes": self._codes, "memory_step": newest, "was_asked": self._was_asked}
        self._send({"attempt": self._asked.attempt, **told})


def main(argv: Sequence[str]) -> int:
    """Runs the agent of this node. ``argv``: the option ``device``."""
    logging.basicConfig(format="[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    try:
        agent = NodeAgent(*argv)
    except ConfigError as error:
        print_error(error)
        return 2
    return agent.run()


if __name__ == "__main__":
    signals.raise_on_sigint()
    sys.exit(main(sys.argv[1:]))
