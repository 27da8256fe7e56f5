"""The process that outlives coordinators: it ends where they die again and again."""

from __future__ import annotations

import os
from typing import Any

from megatron.optimus.launcher import coordinator as coordinators
from megatron.optimus.launcher import wire
from megatron.optimus.launcher.job_keeper import JobKeeper

TOKEN = "secret"


def test_a_keeper_whose_coordinator_dies_again_and_again_ends(caplog: Any) -> None:
    listener = wire.listen("127.0.0.1", "")
    keeper = JobKeeper(listener, TOKEN, lambda hosts, number: ([], {}), lambda state: os.kill(os.getpid(), 9) or 0)
    before = {number: coordinators.signal.getsignal(number) for number in coordinators.STOP_SIGNALS}
    try:
        assert keeper.run() == 137
    finally:
        for number, handler in before.items():
            coordinators.signal.signal(number, handler)
        listener.close()
    assert "the coordinator ended 6 times in a minute, now with SIGKILL" in caplog.text
