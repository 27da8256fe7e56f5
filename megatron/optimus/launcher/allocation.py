"""Which nodes the batch system has given this job: PBS and SLURM, read from their own variables."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from megatron.optimus.config.schema import ConfigError

MAX_NODES = 100_000


class Scheduler(str, Enum):
    PBS = "pbs"
    SLURM = "slurm"
    NONE = "none"  # this machine alone


@dataclass(frozen=True)
class Allocation:
    """The job's nodes in the scheduler's order; none outside of a job."""

    scheduler: Scheduler
    hosts: tuple[str, ...]
    devices_per_node: int | None = None  # where the scheduler says it


def detect(env: Mapping[str, str]) -> Allocation:
    """The allocation that the variables describe. Raises ConfigError where they are unreadable."""
    if env.get("PBS_NODEFILE"):
        return Allocation(Scheduler.PBS, _hosts_of_file(env["PBS_NODEFILE"]))
    nodes = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if nodes:
        devices = env.get("SLURM_GPUS_ON_NODE", "")
        return Allocation(Scheduler.SLURM, expand_slurm(nodes), int(devices) if devices.isdecimal() else None)
    return Allocation(Scheduler.NONE, ())


def _hosts_of_file(path: str) -> tuple[str, ...]:
    """PBS writes a node once for each of its chunks; each counts once here."""
    try:
        with open(path, encoding="utf-8") as lines:
            hosts = tuple(dict.fromkeys(line.strip() for line in lines if line.strip()))
    except OSError as error:
        raise ConfigError(f"PBS_NODEFILE={path} cannot be read: {error.strerror}") from error
    if not hosts:
        raise ConfigError(f"PBS_NODEFILE={path} names no node")
    return hosts


def expand_slurm(nodes: str) -> tuple[str, ...]:
    """Host names of SLURM's short form: "gpu[003-005,9],r[1-2]n[1-2]" -> gpu003, gpu004, gpu005, gpu9, r1n1, r1n2, ...

    Raises ConfigError for text of another form, and for more than MAX_NODES nodes.
    """
    hosts: list[str] = []
    for entry in map(str.strip, re.split(r",(?![^\[]*\])", nodes)):  # commas outside of brackets
        if re.fullmatch(r"[^\[\]]*(?:\[[^\[\]]+\][^\[\]]*)*", entry) is None or not entry:
            raise ConfigError(f"SLURM_JOB_NODELIST={nodes!r}: {entry!r} is not of the form prefix[003-005,9]")
        texts = re.split(r"\[([^\[\]]*)\]", entry)  # text, ranges, text, ranges, ..., text
        choices = [_numbers(text, nodes) if place % 2 else [text] for place, text in enumerate(texts)]
        if len(hosts) + math.prod(map(len, choices)) > MAX_NODES:
            raise ConfigError(f"SLURM_JOB_NODELIST={nodes[:200]!r} names more than {MAX_NODES:,} nodes")
        hosts += ["".join(parts) for parts in itertools.product(*choices)]
    return tuple(hosts)


def _numbers(ranges: str, nodes: str) -> list[str]:
    """ "003-005,9" -> 003, 004, 005, 9."""
    numbers: list[str] = []
    for part in ranges.split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        first, last = (bounds[1], bounds[2] or bounds[1]) if bounds else ("1", "0")
        if not 0 <= int(last) - int(first) < MAX_NODES:
            raise ConfigError(f"SLURM_JOB_NODELIST={nodes!r}: {part!r} is not a number or a range such as 003-005")
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    return numbers
