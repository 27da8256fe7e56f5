"""Keeps a job's coordinator and agents running: the process of ``optimus launch`` itself, on several nodes.

    optimus launch (JobKeeper)
      coordinator.py, a fork of it: decides what runs where; another one takes over when it dies or is stopped
      mpiexec or srun: one agent a node (node_agent.py)

The keeper holds what has to outlive a coordinator: the socket at which agents look for it, the pipe with the output of
all ranks, the processes of mpiexec and srun, and the coordinator's journal. It does nothing else that could fail. The
journal is in its memory: where the keeper dies the launch is over, and the ranks save and leave.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from megatron.optimus.platform import parent_death
from megatron.optimus.platform.signals import handle_stop_signals

logger = logging.getLogger("optimus")

_POLL_SECONDS = 0.1
_MOST_DEATHS, _DEATHS_SECONDS = 5, 60.0  # of coordinators in this time, before the launch ends
_STOPPED_SECONDS = 3.0  # of a coordinator (SIGSTOP), before it is killed and another one takes over
_AGENTS_LEAVE_SECONDS = 15.0


@dataclass
class Starter:
    """An mpiexec or srun that starts agents."""

    hosts: list[str]  # its processes are on these, in this order
    process: subprocess.Popen[bytes] | None
    code: int | None = None


@dataclass
class JobState:
    """What a coordinator gets from the keeper, by the fork."""

    listener: socket.socket  # for agents
    output: int  # descriptor: what all ranks print
    control: socket.socket  # to the keeper, and from it
    token: str
    starters: list[Starter] = field(default_factory=list)
    journal: dict[str, Any] = field(default_factory=dict)  # as the coordinator before wrote it; {}: there was none


class JobKeeper:
    """Runs a job.

    Args:
        listener: the socket for agents.
        token: of the job.
        start: command line and environment for agents on these nodes; its second argument numbers them.
        coordinate: the coordinator: returns the exit code of the launch.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        start: Callable[[Sequence[str], int], tuple[list[str], dict[str, str]]],
        coordinate: Callable[[JobState], int],
    ) -> None:
        self._start, self._coordinate = start, coordinate
        self._control, theirs = socket.socketpair()
        output, self._output = os.pipe()
        self._state = JobState(listener, output, theirs, token)
        self._unread = b""
        self._received: list[int] = []
        self._told: set[int] = set()  # starters whose end the coordinator knows

    def run(self) -> int:
        """Runs the job to its end; returns the exit code."""
        handle_stop_signals(self._note_signal)
        deaths: list[float] = []
        try:
            while True:
                status = self._watch(self._fork())
                if not os.WIFSIGNALED(status):
                    return os.waitstatus_to_exitcode(status)
                now, name = time.monotonic(), signal.Signals(os.WTERMSIG(status)).name
                deaths = [*(when for when in deaths if now - when < _DEATHS_SECONDS), now]
                if len(deaths) > _MOST_DEATHS:
                    logger.error("the coordinator ended %d times in a minute, now with %s", len(deaths), name)
                    return 128 + os.WTERMSIG(status)
                logger.warning("the coordinator ended with %s; another one takes over, the ranks go on", name)
        finally:
            self._end_starters()

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)

    def _fork(self) -> int:
        """Forks a coordinator; returns its process id. This process has no other thread."""
        sys.stdout.flush()
        set_signal = parent_death.signal_setter(signal.SIGTERM)
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            if set_signal is not None:
                set_signal()
            code = self._coordinate(self._state)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def _watch(self, coordinator: int) -> int:
        """Serves a coordinator until it ends; returns its status. One that stays stopped is killed.

        So it can do nothing any more when the next one takes over.
        """
        stopped_since = float("inf")
        while True:
            changed, status = os.waitpid(coordinator, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            has_ended = changed and (os.WIFEXITED(status) or os.WIFSIGNALED(status))
            self._take_requests(_POLL_SECONDS if not has_ended else 0.0)
            if has_ended:
                self._unread = b""  # half a request
                return status
            if changed:
                stopped_since = time.monotonic() if os.WIFSTOPPED(status) else float("inf")
            if time.monotonic() - stopped_since > _STOPPED_SECONDS:
                logger.warning("the coordinator has been stopped (SIGSTOP) for %.0f s: it is killed", _STOPPED_SECONDS)
                os.kill(coordinator, signal.SIGKILL)
                stopped_since = float("inf")
            while self._received:
                os.kill(coordinator, self._received.pop(0))
            for number, starter in enumerate(self._state.starters):
                if starter.process is not None and starter.code is None:
                    starter.code = starter.process.poll()
                if starter.code is not None and number not in self._told:
                    self._told.add(number)
                    self._control.sendall(json.dumps({"starter": number, "code": starter.code}).encode() + b"\n")

    def _take_requests(self, seconds: float) -> None:
        while select.select([self._control], [], [], seconds)[0]:
            self._unread += self._control.recv(1 << 16)
            *lines, self._unread = self._unread.split(b"\n")
            for line in lines:
                request = json.loads(line)
                if "start" in request:
                    self._start_agents(request["start"])
                else:
                    self._state.journal = request["journal"]
            seconds = 0.0

    def _start_agents(self, hosts: list[str]) -> None:
        command, env = self._start(hosts, len(self._state.starters))
        before_exec = parent_death.signal_setter(signal.SIGTERM)  # mpiexec and srun pass it on to the agents
        try:
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's signals come by the coordinator
                preexec_fn=before_exec,  # noqa: PLW1509 - C calls, no lock
            )
        except OSError as error:
            logger.error("%s cannot be started: %s", command[0], error.strerror)
            self._state.starters.append(Starter(hosts, None, 127))
        else:
            self._state.starters.append(Starter(hosts, process))

    def _end_starters(self) -> None:
        """Waits for the agents, which the coordinator has asked to leave, and ends those that do not."""
        processes = [starter.process for starter in self._state.starters if starter.process is not None]
        deadline = time.monotonic() + _AGENTS_LEAVE_SECONDS
        for end in (None, subprocess.Popen.terminate, subprocess.Popen.kill):
            for process in processes:
                if end is not None and process.poll() is None:
                    end(process)
            while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
                self._pass_output()
            deadline = time.monotonic() + _AGENTS_LEAVE_SECONDS / 3
        self._pass_output()

    def _pass_output(self) -> None:
        """Prints what ranks and agents print after the coordinator's end: a full pipe would hold them up."""
        if select.select([self._state.output], [], [], _POLL_SECONDS)[0]:
            sys.stdout.write(os.read(self._state.output, 1 << 16).decode(errors="replace"))
            sys.stdout.flush()
