"""The coordinator of a job: has the agents of the nodes start the ranks, and hears from them how it goes.

One process, forked by job_keeper.py, in which nothing waits for a single agent. Another one takes over when it dies: it
finds the journal of the attempt in hand, and the agents connect again and tell how their ranks are.

A node is lost when the connection to its agent breaks and does not come back within a second, or when its agent is
silent. A rank that ends is named by its agent. Where ranks hang, all agents tell what theirs do, and hangs.py compares.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from megatron.optimus.launcher import wire
from megatron.optimus.launcher.agent import (
    FAILED_GRACE_SECONDS,
    POLL_SECONDS,
    RANK_GRACE_SECONDS,
    failed_exit_code,
    signal_exit_code,
)
from megatron.optimus.launcher.hangs import RankFacts, describe, new_stacks_folder
from megatron.optimus.launcher.job_keeper import JobState
from megatron.optimus.launcher.node_agent import RanksOfNode
from megatron.optimus.launcher.supervisor import GROWTH_SECONDS, KEPT_LINES, AttemptResult, StepMonitor
from megatron.optimus.platform.exit_codes import EXPLAINED, STALLED
from megatron.optimus.platform.signals import STOP_SIGNALS, handle_stop_signals

logger = logging.getLogger("optimus")

SILENT_SECONDS = 6.0  # of an agent, which speaks every second
_RECONNECT_SECONDS, _TAKE_OVER_SECONDS = 1.0, 5.0  # for an agent to come back; to another coordinator
_SUSPENDED_SECONDS = 2.0  # between two looks: this process was stopped, or waited for a check of the nodes
_STRANGER_SECONDS = 10.0  # to answer the challenge
_START_SECONDS = 600.0  # for the first agent: thousands of interpreters read a shared file system
_LATER_SECONDS = 120.0  # for the next one, once some are there
_STARTER_SECONDS = 3.0  # until an mpiexec that takes all its agents with it has ended
_STACKS_SECONDS = 8.0
_END_SECONDS = 20.0  # for ranks that were killed
_LAST_LINES_SECONDS = 0.5  # for the line that says what was wrong to arrive through mpiexec


@dataclass
class Agent:
    """What is known of a node's agent."""

    host: str
    link: wire.AgentLink | None
    heard: float  # time of its last message
    attempt: int = -1  # that it runs or ran last; -1: it has not told
    codes: list[int | None] = field(default_factory=list)  # of its ranks; None while one runs
    memory_step: int = -1
    was_asked: bool = False  # to stop, by mpiexec or the scheduler
    has_looked: bool = False  # at its ranks, in this attempt: the next three are known
    fewest: int | None = None  # hangs.Look
    is_late: bool = False
    is_stopped: bool = False
    facts: list[RankFacts] | None = None
    gone: float = 0.0  # since when there is no link
    why: str = ""  # there is none, where that is certain

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; what becomes of a broken link is found when it is read."""
        if self.link is not None:
            with contextlib.suppress(OSError):
                self.link.send(message)


class Coordinator:
    """The coordinator's end of all connections, and the attempts that it runs by them.

    Args:
        job: what the keeper holds.
        ranks: what the agent of the first of these nodes needs for the attempt of this number.
        metrics: the file to which the run appends a line for each step.
        by_name: agents are known by SLURM's names of their nodes, else by their number in the list of nodes.
    """

    def __init__(
        self,
        job: JobState,
        ranks: Callable[[Sequence[str], int], RanksOfNode],
        metrics: Path,
        *,
        by_name: bool,
    ) -> None:
        self._job, self._ranks, self._metrics, self._by_name = job, ranks, metrics, by_name
        self._inherited, self._last_attempt = job.journal, 0
        self._agents: dict[str, Agent] = {}  # by node
        self._strangers: dict[wire.AgentLink, float] = {}  # connections whose node is not known yet, since when
        self._refused = 0
        self.received: list[int] = []  # stop signals
        self.memory_step = -1  # newest step that all ranks of the last attempt left in host memory; -1: none
        self._lines: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._output, self._orders = b"", b""
        self._turned = self._arrived = self._began = time.monotonic()
        self._starters = [(one.hosts, one.code) for one in job.starters]
        self._from_keeper: list[Any] = [job.control, job.output]
        os.set_blocking(job.output, False)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # a connection for each of thousands of nodes
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        handle_stop_signals(self._note_signal)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)

    def start_agents(self, hosts: Sequence[str]) -> None:
        """Has the keeper start agents on these nodes."""
        self._starters.append((list(hosts), None))
        for host in hosts:
            self._agents.pop(host, None)  # that was lost there
        self._order({"start": list(hosts)})

    def _order(self, request: dict[str, Any]) -> None:
        self._job.control.sendall(json.dumps(request).encode() + b"\n")

    def pause_for(self, seconds: float) -> None:
        """Waits; a stop signal ends the pause."""
        self._wait(lambda: bool(self.received), seconds)

    def close(self) -> None:
        """Asks all agents to leave, and prints what has no end of a line."""
        sys.stdout.write(self._output.decode(errors="replace"))
        for agent in self._agents.values():
            agent.send({"leave": True})

    # ---- connections

    def _turn(self) -> None:
        """Waits for a moment and takes whatever has come."""
        owners = {agent.link: agent for agent in self._agents.values() if agent.link is not None}
        sources: list[Any] = [self._job.listener, *self._from_keeper, *self._strangers, *owners]
        ready = select.poll()
        by_number = {(one if isinstance(one, int) else one.fileno()): one for one in sources}
        for number in by_number:
            ready.register(number, select.POLLIN)
        for number, _ in ready.poll(1000 * POLL_SECONDS):
            source = by_number[number]
            if source is self._job.listener:
                self._accept()
            elif source is self._job.control:
                self._take_orders()
            elif source is self._job.output:
                self._print_output()
            else:
                self._read(source, owners.get(source))
        now = time.monotonic()
        if now - self._turned > _SUSPENDED_SECONDS:
            for agent in self._agents.values():
                agent.heard = now
        self._turned = now
        for link, since in list(self._strangers.items()):
            if now - since > _STRANGER_SECONDS:
                self._refuse(link, "it did not answer")
        for agent in self._agents.values():
            if agent.link is not None and now - agent.heard > SILENT_SECONDS:
                self._part(agent, f"no heartbeat of its agent for {SILENT_SECONDS:.0f} s")

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            link = wire.AgentLink(self._job.listener.accept()[0], self._job.token)
            link.challenge()
            self._strangers[link] = time.monotonic()

    def _refuse(self, link: wire.AgentLink, why: object) -> None:
        self._refused += 1
        if self._refused <= 5:  # who tries on does not fill the log
            logger.warning("a connection to the coordinator was refused: %s", why)
        del self._strangers[link]
        link.close()

    def _read(self, link: wire.AgentLink, agent: Agent | None) -> None:
        try:
            for message in link.receive():
                agent = self._meet(link, message["place"]) if agent is None else agent
                self._hear(agent, message)
        except (OSError, LookupError, TypeError) as error:
            if link in self._strangers:
                self._refuse(link, error)
            elif agent is not None and agent.link is link:
                self._part(agent)

    def _meet(self, link: wire.AgentLink, place: dict[str, Any]) -> Agent:
        """Learns on which node an agent is."""
        hosts, _ = self._starters[place["starter"]]
        host = place["name"] if self._by_name else hosts[place["number"]]
        if host not in hosts:
            raise LookupError(f"node {host} is not one of those with agents")
        del self._strangers[link]
        if (known := self._agents.get(host)) is not None and known.link is not None:
            known.link.close()
        agent = self._agents[host] = Agent(host, link, time.monotonic())
        self._arrived = time.monotonic()
        return agent

    def _part(self, agent: Agent, why: str = "") -> None:
        assert agent.link is not None
        agent.link.close()
        agent.link, agent.gone, agent.why = None, time.monotonic(), why

    def _hear(self, agent: Agent, message: dict[str, Any]) -> None:
        agent.heard = time.monotonic()
        if "codes" in message and message["attempt"] >= agent.attempt:
            agent.attempt, agent.codes, agent.memory_step = message["attempt"], message["codes"], message["memory_step"]
            agent.was_asked = message["was_asked"]
        if message.get("attempt") != agent.attempt:
            return  # of an attempt that is over
        if "fewest" in message:
            agent.fewest, agent.is_late, agent.is_stopped = message["fewest"], message["late"], message["stopped"]
            agent.has_looked = True
        if "facts" in message:
            agent.facts = [RankFacts(**{**one, "node": agent.host}) for one in message["facts"]]

    def _take_orders(self) -> None:
        """The keeper tells which of the starts of agents has ended."""
        if not (data := self._job.control.recv(1 << 16)):
            self._from_keeper.remove(self._job.control)  # it was killed: so is the launch
            self.received.append(signal.SIGTERM)
        self._orders += data
        *lines, self._orders = self._orders.split(b"\n")
        for order in map(json.loads, lines):
            hosts, _ = self._starters[order["starter"]]
            self._starters[order["starter"]] = hosts, order["code"]

    def _print_output(self) -> None:
        """Prints what all ranks have printed, line by line."""
        with contextlib.suppress(BlockingIOError):
            if not (data := os.read(self._job.output, 1 << 16)):
                self._from_keeper.remove(self._job.output)
            self._output += data
        *lines, self._output = self._output.split(b"\n")
        for line in lines:
            text = line.decode(errors="replace") + "\n"
            self._lines.append(text)
            sys.stdout.write(text)
        sys.stdout.flush()

    # ---- attempts

    def run(
        self, hosts: Sequence[str], to_keep: dict[str, Any], can_grow: Callable[[], bool] = lambda: False
    ) -> AttemptResult:
        """Runs one attempt, all ranks of it to their end; or goes on with that of the coordinator before.

        Args:
            hosts: its nodes in rank order.
            to_keep: what the next coordinator needs beside the attempt, in ``JobState.journal``.
            can_grow: whether more nodes could be used; then the ranks are asked to save and leave.
        """
        before, self._inherited = self._inherited, {}
        start = before.get("start") or asdict(self._ranks(hosts, self._last_attempt + 1))
        self._last_attempt = start["attempt"]
        steps, has_begun = StepMonitor(self._metrics, before.get("metrics_size")), before.get("has_begun", False)
        journal = {**to_keep, "start": start, "metrics_size": steps.size, "has_begun": has_begun}
        self._order({"journal": journal})
        self._lines.clear()
        attempt = _Attempt(list(hosts), start)
        if not has_begun and (failed := self._wait_for_agents(attempt)) is not None:
            return failed
        self._order({"journal": {**journal, "has_begun": True}})
        next_look = time.monotonic() + GROWTH_SECONDS
        while True:
            self._start_ranks(attempt)
            self._turn()
            steps.update()
            codes = self._codes(attempt)
            lost = self._lost(attempt)
            if len(codes) == attempt.num_ranks and not any(code for code, _ in codes):
                return AttemptResult(0, tuple(self._lines), has_trained=steps.has_trained)
            if lost or any(code for code, _ in codes):
                break
            if self.received:
                attempt.signals.append(self.received.pop(0))
                self._signal_ranks(attempt, attempt.signals[-1])
            if steps.has_trained and not attempt.grows and time.monotonic() > next_look:
                next_look = time.monotonic() + GROWTH_SECONDS
                if can_grow():
                    attempt.grows = True
                    logger.warning("more nodes can be used: the ranks are asked to save")
                    self._signal_ranks(attempt, signal.SIGTERM)
            if self._hangs(attempt):
                attempt.hang, hung = self._describe_hang(attempt)
                logger.error("%s; all ranks are ended", attempt.hang)
                attempt.where = attempt.host_of(hung)
                break
        return self._end(attempt, steps)

    def _wait_for_agents(self, attempt: _Attempt) -> AttemptResult | None:
        """Waits until all nodes have an agent, which is started where there is none; what became of it otherwise."""
        began, asked = time.monotonic(), set[str]()
        while missing := [host for host in attempt.hosts if not self._has_agent(host)]:
            if self.received:
                return AttemptResult(signal_exit_code(self.received[0]), interrupted=True)
            gone = {
                host: "no agent can be started there" for host in missing if host in asked and not self._starts(host)
            }
            now = time.monotonic()
            if now > max(began + _START_SECONDS, self._arrived + _LATER_SECONDS):
                gone = dict.fromkeys(missing, f"no agent after {now - began:.0f} s")
            if gone:
                for code in [code for hosts, code in self._starters if code and not set(hosts).isdisjoint(gone)]:
                    logger.error("the program that starts agents ended with code %d", code)
                # Where none has come at all it is not the nodes.
                return AttemptResult(1, tuple(self._lines), lost=gone if len(gone) < len(attempt.hosts) else {})
            if new := [host for host in missing if host not in asked and not self._starts(host)]:
                self.start_agents(new)
            asked.update(missing)
            self._turn()
        return None

    def _has_agent(self, host: str) -> bool:
        agent = self._agents.get(host)
        return agent is not None and agent.link is not None and agent.attempt >= 0

    def _starts(self, host: str) -> bool:
        """Whether an agent may still come, as one is started there that was not lost."""
        number, code = next(
            ((n, code) for n, (hosts, code) in reversed(list(enumerate(self._starters))) if host in hosts), (-1, 0)
        )
        agent = self._agents.get(host)
        return number >= 0 and code is None and (agent is None or agent.link is not None)

    def _start_ranks(self, attempt: _Attempt) -> None:
        for place, host in enumerate(attempt.hosts):
            agent = self._agents.get(host)
            if agent is None or agent.link is None or agent.attempt in (-1, attempt.number):
                continue
            agent.attempt, agent.codes = attempt.number, [None] * attempt.per_node
            agent.has_looked, agent.is_late, agent.is_stopped = False, False, False
            if host in attempt.started:  # another agent came there, or this one never heard of it
                agent.codes = [-signal.SIGKILL] * attempt.per_node
            else:
                agent.send({"start": {**attempt.start, "first_rank": place * attempt.per_node}})
            attempt.started.add(host)

    def _codes(self, attempt: _Attempt) -> list[tuple[int, int]]:
        """Exit code and rank of those that have ended."""
        found = []
        for place, host in enumerate(attempt.hosts):
            agent = self._agents.get(host)
            if agent is not None and agent.attempt == attempt.number:
                attempt.started.add(host)
                first = place * attempt.per_node
                found += [(code, first + number) for number, code in enumerate(agent.codes) if code is not None]
        return found

    def _lost(self, attempt: _Attempt) -> dict[str, str]:
        """Nodes whose agent is gone, each with the reason."""
        now, lost = time.monotonic(), {}
        for host in attempt.hosts:
            agent = self._agents.get(host)
            if agent is None and now - self._began > _TAKE_OVER_SECONDS:
                lost[host] = "its agent did not come back"
            elif agent is not None and agent.link is None and (agent.why or now - agent.gone > _RECONNECT_SECONDS):
                lost[host] = agent.why or "its agent is gone"
        return lost

    def _signal_ranks(self, attempt: _Attempt, number: int) -> None:
        for host in attempt.hosts:
            if (agent := self._agents.get(host)) is not None:
                agent.send({"signal": number})

    def _hangs(self, attempt: _Attempt) -> bool:
        """Whether a rank is stopped, or all that have done the least are late; the others wait for them."""
        agents = [self._agents[host] for host in attempt.hosts if host in self._agents]
        if len(agents) < len(attempt.hosts) or not all(agent.has_looked for agent in agents):
            return any(agent.is_stopped for agent in agents)  # who is behind is not known
        counts = [agent.fewest for agent in agents if agent.fewest is not None]
        behind = [agent for agent in agents if counts and agent.fewest == min(counts)]
        return any(agent.is_stopped for agent in agents) or bool(behind and all(agent.is_late for agent in behind))

    def _describe_hang(self, attempt: _Attempt) -> tuple[str, int]:
        """Asks all agents what their ranks do; returns a line about the one that hangs, and its number."""
        folder = new_stacks_folder(Path(attempt.start["stacks"]))
        agents = [self._agents[host] for host in attempt.hosts if host in self._agents]
        for agent in agents:
            agent.facts = None
        for is_stopped in (False, True):  # a stopped rank writes its stack when it goes on, and then the others do too
            asked = [agent for agent in agents if agent.is_stopped == is_stopped]
            for agent in asked:
                agent.heard = time.monotonic() + _STACKS_SECONDS  # it says nothing else meanwhile
                agent.send({"stacks": str(folder)})
            self._wait(partial(_have_answered, asked), _STACKS_SECONDS)
        facts = [one for agent in agents for one in agent.facts or []]
        if not facts:
            return "ranks hang, and no agent tells what they do", 0
        rank, text = describe(facts, folder)
        return text, rank

    def _end(self, attempt: _Attempt, steps: StepMonitor) -> AttemptResult:
        """Ends all ranks, and says how the attempt has ended."""

        def all_ended() -> bool:
            return len(self._codes(attempt)) + attempt.per_node * len(self._lost(attempt)) >= attempt.num_ranks

        was_asked = {code - 128 for code, _ in self._codes(attempt)} & set(STOP_SIGNALS)
        if not attempt.hang:
            self._wait(
                all_ended, RANK_GRACE_SECONDS if attempt.signals or attempt.grows or was_asked else FAILED_GRACE_SECONDS
            )
        failed = sorted((code, rank) for code, rank in self._codes(attempt) if code)  # a killed one, negative, first
        self._signal_ranks(attempt, signal.SIGKILL)
        self._wait(all_ended, _END_SECONDS)
        lost = self._lost(attempt)
        if not all_ended():
            for host in attempt.hosts:
                if host not in lost and None in self._agents[host].codes:
                    lost[host] = "its ranks cannot be ended"
        if lost and self._starter_has_ended(lost):
            lost = {}
        steps.update()
        left = [self._agents[host].memory_step for host in attempt.hosts if host not in lost and host in self._agents]
        self.memory_step = min(left, default=-1)
        code, rank = failed[0] if failed else (-signal.SIGKILL, -1)
        if code in EXPLAINED:
            self._wait(lambda: False, _LAST_LINES_SECONDS)
        done: dict[str, Any] = {"last_lines": tuple(self._lines), "has_trained": steps.has_trained}
        all_left = code > 0 and code not in EXPLAINED and bool(was_asked) and not lost
        if attempt.signals and code not in EXPLAINED:
            return AttemptResult(signal_exit_code(attempt.signals[0]), interrupted=True, **done)
        if attempt.grows and code not in EXPLAINED and not lost:
            return AttemptResult(128 + signal.SIGTERM, grows=True, **done)
        if attempt.hang:
            return AttemptResult(STALLED, where=attempt.where, lost=lost, **done)
        if all_left and not self._starter_has_ended(attempt.hosts):
            return AttemptResult(signal_exit_code(code - 128), interrupted=True, **done)
        if lost and code not in EXPLAINED:
            text = ", ".join(f"{host} ({why})" for host, why in lost.items())
            sys.stderr.write(f"error: lost {text}; the ranks of all nodes were stopped\n")
            return AttemptResult(128 + signal.SIGKILL, lost=lost, **done)
        where = attempt.host_of(rank) if rank >= 0 else ""
        return AttemptResult(failed_exit_code(code, max(rank, 0), where), lost=lost, where=where, **done)

    def _starter_has_ended(self, hosts: Sequence[str] | dict[str, str]) -> bool:
        """Whether mpiexec or srun has ended and taken all its agents with it: that is no evidence against a node."""

        def concerned() -> list[tuple[list[str], int | None]]:
            return [(all_, code) for all_, code in self._starters if not set(all_).isdisjoint(hosts)]

        there = [self._agents[host] for all_, _ in concerned() for host in all_ if self._has_agent(host)]
        if not there or any(agent.was_asked for agent in there):
            self._wait(lambda: all(code is not None for _, code in concerned()), _STARTER_SECONDS)
        ended = [code for _, code in concerned() if code is not None]
        if ended and len(ended) == len(concerned()):
            logger.warning("the program that starts agents ended with code %d, and its agents with it", ended[-1])
            return True
        return False

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            self._turn()


def _have_answered(agents: Sequence[Agent]) -> bool:
    return all(agent.facts is not None for agent in agents)


@dataclass
class _Attempt:
    """One attempt."""

    hosts: list[str]
    start: dict[str, Any]
    started: set[str] = field(default_factory=set)  # nodes whose agent was told to start it
    signals: list[int] = field(default_factory=list)  # that the launcher received
    grows: bool = False  # the ranks were asked to leave as more nodes can be used
    hang: str = ""
    where: str = ""

    @property
    def number(self) -> int:
        return int(self.start["attempt"])

    @property
    def per_node(self) -> int:
        return int(self.start["num_ranks"])

    @property
    def num_ranks(self) -> int:
        return self.per_node * len(self.hosts)

    def host_of(self, rank: int) -> str:
        return self.hosts[rank // self.per_node]
