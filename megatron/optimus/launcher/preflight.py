"""Runs ``optimus preflight`` on the nodes of a job and says which of them are bad."""

from __future__ import annotations

import logging
import re
import subprocess
from collections.abc import Mapping, Sequence

from megatron.optimus.config.schema import ConfigError

logger = logging.getLogger("optimus")

# As commands/preflight.py prints them.
_LINE = re.compile(r"preflight: (?:rank (\d+) on \S+: )?(FAILED: )?(.*)")
TIMEOUT_SECONDS = 600  # the checks take 30 s; thousands of ranks that import from a parallel file system take minutes


def bad_nodes(
    command: Sequence[str], env: Mapping[str, str], hosts: Sequence[str], ranks_per_node: int
) -> dict[str, str]:
    """Runs the checks; returns the bad nodes, each with its first problem.

    Args:
        command: starts ``optimus preflight`` on all ``hosts``, ranks in their order.
        env: of the command.
        hosts: nodes.
        ranks_per_node: ranks on each.

    Raises:
        ConfigError: a problem that no exchange of nodes mends, such as too little space.
    """
    try:
        done = subprocess.run(
            command,
            env=dict(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        output, code = error.stdout or b"", -1
    lines = output.decode(errors="replace").splitlines()
    found: dict[str, str] = {}
    answered: set[int] = set()
    of_run = []
    for match in filter(None, map(_LINE.search, lines)):
        rank, is_failure, text = match[1], match[2], match[3]
        if rank is not None:
            answered.add(int(rank) // ranks_per_node)
        if is_failure and rank is not None and int(rank) // ranks_per_node < len(hosts):
            found.setdefault(hosts[int(rank) // ranks_per_node], text)
        elif is_failure:
            of_run.append(text)
        if is_failure or rank is None:
            logger.warning("%s", match[0])
    if of_run:
        raise ConfigError(f"preflight: {of_run[0]}")
    if code and not found:
        silent = {host: "no rank answered" for number, host in enumerate(hosts) if number not in answered}
        if silent and len(silent) < len(hosts):
            return silent
        end = lines[-1].strip() if lines else "no output"
        raise ConfigError(f"preflight ended with code {code} and names no node: {end}")
    return found
