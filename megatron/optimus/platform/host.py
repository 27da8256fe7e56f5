"""Which machine a process is on."""

from __future__ import annotations

import socket
from pathlib import Path


def node_name() -> str:
    """What the ranks of one machine share and no other machine has: some clusters call every node ``localhost``."""
    return f"{socket.gethostname()} {boot_id()}"


def boot_id() -> str:
    """Of the running kernel; empty where it tells none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
