"""The nodes of a job: which of them run the next attempt, and which are known to be bad.

Evidence against a node, the strongest first: its agent is gone; the output names it as lost; without agents, it alone
was silent when the ranks of all other nodes reported that a peer had ended; a check of every node finds it bad. Without
evidence the nodes stay for another attempt, as most failures are not a node's. Where it fails again, the node is
exchanged whose ranks failed both times, or without agents one node after the other. One that was exchanged on suspicion
comes back only when no other spare is left.

A node with evidence against it is written to ``bad_nodes.json`` in the run's folder and not used by later jobs either.

With ``fit``, which ``optimus launch --min-nodes`` gives, the run goes on with fewer nodes where no spare is left. A
node comes back when its entry is deleted from that file, and a new one when the job's list of nodes names it.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.platform import files

logger = logging.getLogger("optimus")

FILE_NAME = "bad_nodes.json"
_NONE: Mapping[str, str] = {}
_STATE = ("hosts", "spares", "_suspects", "_known", "_unnamed", "_failed_on", "_num_active")

# What PALS, SLURM and Open MPI write when a node (not merely a process on it) is gone, and ranks about their node.
_LOST_NODE = (
    r"(?P<host>[\w.-]+): shepherd died from signal",
    r"ping failed on [\w.-]+: No reply from (?P<host>[\w.-]+)",
    r"error: Node failure on (?P<host>[\w.\[\],-]+)",
    r"lost communication with (?:a )?(?:daemon|host|node)[^\n]*?(?:host|node):?\s+(?P<host>[\w.-]+)",
    r"first on rank \d+ of node (?P<host>[\w.-]+)",  # values that are not finite: training/nonfinite.py
)


def lost_hosts(lines: Sequence[str], hosts: Sequence[str]) -> list[str]:
    """Returns those of ``hosts`` that the output names as lost, compared without their domains."""
    named = {_short(match["host"]) for line in lines for p in _LOST_NODE for match in re.finditer(p, line)}
    return [host for host in hosts if _short(host) in named]


def silent_hosts(survivors: Collection[int], hosts: Sequence[str]) -> list[str]:
    """Returns the nodes none of whose ranks reported the loss of a peer, where nearly all other nodes' ranks did.

    Args:
        survivors: numbers of the ranks that reported it.
        hosts: nodes in rank order, each with the same number of ranks as the highest survivor needs at least.
    """
    if len(hosts) < 3 or not survivors:
        return []
    spoke = set(survivors)
    silent = [host for number, host in enumerate(hosts) if number not in spoke]
    return silent if len(silent) <= max(1, len(hosts) // 8) else []


class NodePool:
    """The nodes in use, the spares, and the list of bad nodes.

    Args:
        hosts: the job's nodes in order.
        num_active: how many of them an attempt uses.
        ranks_per_node: to tell a rank's node.
        record: the list of bad nodes; None keeps none.
        check: returns the bad ones of the nodes given, each with a reason; None: there is no such check.
        fit: returns how many of so many nodes an attempt can use, 0 if they are too few; None: always ``num_active``.
        listed: returns the job's nodes as they are now, for ``grow``.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        num_active: int,
        ranks_per_node: int,
        record: Path | None = None,
        check: Callable[[Sequence[str]], Mapping[str, str]] | None = None,
        fit: Callable[[int], int] | None = None,
        listed: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._record, self._check, self._ranks_per_node = record, check, ranks_per_node
        self._num_active, self._fit, self._known, self._listed = num_active, fit, list(hosts), listed
        self._bad, self._version = _read(record) or {}, _version(record)
        good = [host for host in hosts if _short(host) not in self._bad]
        bad = [host for host in hosts if _short(host) in self._bad]
        active = [*good, *bad][:num_active]
        if fit is not None and len(good) < num_active and (count := fit(len(good))):
            active = good[:count]
        if bad:
            left_out = [host for host in bad if host not in active]
            logger.warning(
                "%s: bad nodes of earlier attempts: %s; %s (delete the file to use all again)",
                record,
                ", ".join(f"{host} ({self._bad[_short(host)].get('reason')})" for host in bad),
                f"not used: {', '.join(left_out)}" if left_out else "used all the same, as there are no others",
            )
        self.hosts, self.spares = active, good[len(active) :]
        self.problem = ""  # why no attempt can be made
        self._suspects: list[str] = []  # exchanged without evidence, oldest first
        self._unnamed = 0  # failures in a row without evidence
        self._failed_on = ""  # the node of the last of them

    def before_start(self) -> list[str]:
        """Checks all nodes and exchanges bad ones for spares; returns those for which there was no spare."""
        if self._check is None or not self.hosts:
            return []
        found = self._check([*self.hosts, *self.spares])
        self._quarantine({host: f"check: {reason}" for host, reason in found.items()})
        for host, reason in found.items():
            logger.warning("bad node %s (%s)%s", host, reason, "" if host in self.hosts else ": not used")
        return [host for host in self.hosts if host in found]

    def state(self) -> dict[str, Any]:
        """What another coordinator needs to go on; goes through JSON."""
        return {name: getattr(self, name) for name in _STATE}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over a ``state``, and the list of bad nodes as it is now."""
        for name in _STATE:
            setattr(self, name, state[name])
        self._read_again()

    def after_failure(
        self, lines: Sequence[str], survivors: Collection[int], lost: Mapping[str, str] = _NONE, where: str = ""
    ) -> str:
        """Exchanges nodes after a failed attempt; returns what was found, for the log.

        Args:
            lines: the output.
            survivors: ranks that reported the loss of a peer.
            lost: nodes that their agents' silence shows to be lost, each with the evidence.
            where: the node on which, as its agent says, a rank failed; "" where there are no agents.
        """
        if not self.hosts:
            return ""
        found = dict(lost) or dict.fromkeys(lost_hosts(lines, self.hosts), "named as lost")
        if not found and not where:
            nodes = {rank // self._ranks_per_node for rank in survivors}
            found = dict.fromkeys(silent_hosts(nodes, self.hosts), "silent when the others lost a peer")
        if not found and self._check is not None:
            try:
                found = {host: f"check: {reason}" for host, reason in self._check([*self.hosts, *self.spares]).items()}
            except ConfigError as error:
                logger.warning("%s", error)
        if found:
            self._unnamed = 0
            self._quarantine(found)
            smaller = f"; it goes on with {len(self.hosts)} of {self._num_active} nodes" if self.is_smaller else ""
            return f"lost nodes: {', '.join(found)} ({next(iter(found.values()))}){smaller}"
        self._unnamed += 1
        if where:
            is_same, self._failed_on = where == self._failed_on, where
            if not is_same or where not in self.hosts or not (self.spares or self._suspects):
                return f"on node {where}; the nodes stay"
            return f"again on node {where}: {self._exchange(self.hosts.index(where))}"
        if self._unnamed == 1 or not (self.spares or self._suspects):
            return "no node was named: the nodes stay"
        return f"no node was named: {self._exchange((self._unnamed - 2) % len(self.hosts))}"

    def after_progress(self) -> None:
        """Notes that the nodes in use have worked."""
        self._unnamed, self._failed_on = 0, ""

    @property
    def is_smaller(self) -> bool:
        """Whether attempts run on fewer nodes than the run was asked for."""
        return len(self.hosts) < self._num_active

    def can_grow(self) -> bool:
        """Looks for nodes that have come back or are new; returns whether an attempt could use more than now."""
        if self._fit is None or not self.is_smaller:
            return False
        self._read_again()
        self._known += [host for host in self._listed() if host not in self._known]
        used = {*self.hosts, *self.spares, *self._suspects}
        self.spares += [host for host in self._known if host not in used and _short(host) not in self._bad]
        others = len(self.spares) + len(self._suspects)
        return others > 0 and self._fit(len(self.hosts) + others) > len(self.hosts)

    def grow(self) -> None:
        """Uses as many nodes as it can, after ``can_grow``."""
        self._resize()
        try:
            self.before_start()
        except ConfigError as error:
            logger.warning("%s", error)

    def _resize(self) -> None:
        """Uses the good nodes, as many as fit; the others are spares."""
        assert self._fit is not None
        able = [host for host in [*self.hosts, *self.spares, *self._suspects] if _short(host) not in self._bad]
        count = self._fit(len(able))
        if count == 0:
            self.problem = f"{len(able)} good node{'s' * (len(able) != 1)} left, too few for --min-nodes"
            return
        left_out = _apart(self.hosts, able, len(able) - count)
        self.hosts = [host for host in able if host not in left_out]
        self.spares = [host for host in left_out if host not in self._suspects]
        self._suspects = [host for host in self._suspects if host in left_out]

    def _read_again(self) -> None:
        """Takes over what the user has changed in the list of bad nodes."""
        before, self._version = self._version, _version(self._record)
        if self._version != before and (found := _read(self._record)) is not None:
            self._bad = found

    def _quarantine(self, found: Mapping[str, str]) -> None:
        self._read_again()
        for host, reason in found.items():
            self._bad[_short(host)] = {"reason": reason, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            self.spares = [spare for spare in self.spares if spare != host]
            if host in self.hosts and (self.spares or self._suspects):
                self.hosts[self.hosts.index(host)] = (self.spares or self._suspects).pop(0)
        if self._record is not None:
            try:
                self._record.parent.mkdir(parents=True, exist_ok=True)
                files.write_atomically(self._record, json.dumps(self._bad, indent=1) + "\n", sync=False)
            except OSError as error:
                logger.warning("%s cannot be written: %s", self._record, error.strerror)
            self._version = _version(self._record)
        if self._fit is not None and any(_short(host) in self._bad for host in self.hosts):
            self._resize()

    def _exchange(self, number: int) -> str:
        host, spare = self.hosts[number], (self.spares or self._suspects).pop(0)
        self.hosts[number] = spare
        self._suspects.append(host)
        return f"{host} is exchanged for {spare} on suspicion"


def _apart(order: Sequence[str], able: Sequence[str], count: int) -> list[str]:
    """Chooses ``count`` of the nodes ``able`` to leave out; none of them beside another that has left, where possible.

    ``order``: of the last attempt, where each node has a copy of the state of the one before (checkpoint/memory.py).
    """
    left_out = [host for host in reversed(able) if host not in order][:count]  # new ones hold nothing
    gone = next((place for place, host in enumerate(order) if host not in able), -1)
    around = [(gone + 1 + step) % len(order) for step in range(len(order))]
    for is_apart in (True, False):
        for place in around:
            beside = (order[place - 1], order[(place + 1) % len(order)])
            stay = all(host in able and host not in left_out for host in beside)
            if len(left_out) < count and order[place] in able and order[place] not in left_out:
                left_out += [order[place]] if stay or not is_apart else []
    return left_out


def _version(path: Path | None) -> tuple[int, int] | None:
    """Changes when the file does; None where there is none."""
    try:
        found = path.stat() if path is not None else None
        return None if found is None else (found.st_mtime_ns, found.st_size)
    except OSError:
        return None


def _read(path: Path | None) -> dict[str, dict[str, Any]] | None:
    """The bad nodes by name without domain; None where the file cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
        return {host: dict(entry) for host, entry in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.warning("%s cannot be read and is left out: %s", path, error)
        return None


def _short(host: str) -> str:
    return host.split(".", maxsplit=1)[0]
