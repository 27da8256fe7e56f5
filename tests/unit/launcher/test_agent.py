"""Ranks of one node: they are bound to their cores."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def test_ranks_are_bound_to_their_cores(tmp_path: Path) -> None:
    """A new interpreter; that of a fork server is in tests/integration/test_agents.py."""
    from megatron.optimus.launcher.agent import LocalAgent

    core = max(os.sched_getaffinity(0))
    code = f"import os; open({str(tmp_path / 'core')!r}, 'w').write(str(os.sched_getaffinity(0)))"
    with LocalAgent([sys.executable, "-c", code], 1) as agent:
        agent.start([{**os.environ, "RANK": "0"}], [[core]])
        assert agent.ranks[0].wait(30) == 0
    assert (tmp_path / "core").read_text() == f"{{{core}}}"


def test_ranks_are_told_their_attempt(tmp_path: Path) -> None:
    from megatron.optimus.launcher.agent import LocalAgent

    code = f"import os; open({str(tmp_path / 'attempts')!r}, 'a').write(os.environ['OPTIMUS_ATTEMPT'] + ' ')"
    with LocalAgent([sys.executable, "-c", code], 1) as agent:
        assert [agent.run().code for _ in range(2)] == [0, 0]
    (name, first), (again, second) = (one.split(":") for one in (tmp_path / "attempts").read_text().split())
    assert name == again and (first, second) == ("1", "2")
