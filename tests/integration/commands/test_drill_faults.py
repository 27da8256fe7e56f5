"""The processes that a drill's faults are for."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from megatron.optimus.commands.drill_faults import children, ranks_of


@pytest.mark.parametrize("is_forked", [True, False])
def test_ranks_are_found_forked_or_not(is_forked: bool) -> None:
    """A launcher on GPUs has ranks of its own, and a fork server that has refused and is not waited for."""
    sleep = "import time; time.sleep(60)"
    rank = [sys.executable, "-c", sleep, "megatron.optimus.pretrain"]
    fork = f"import os; (os.fork() and os.fork()); {sleep}"  # two children
    server = [sys.executable, "-c", fork if is_forked else "", "megatron.optimus.launcher.forkserver"]
    program = f"import subprocess as s; a = [s.Popen(one) for one in {[server] if is_forked else [server, rank, rank]}]"
    launcher = subprocess.Popen([sys.executable, "-c", f"{program}; {sleep}"])
    try:
        deadline = time.monotonic() + 30
        while len(ranks_of(launcher.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        own = children(launcher.pid)
        assert ranks_of(launcher.pid) == (children(own[0]) if is_forked else own[1:])
    finally:
        for pid in [*ranks_of(launcher.pid), *children(launcher.pid)]:
            subprocess.run(["kill", "-9", str(pid)], check=False)
        launcher.kill()
        launcher.wait()
