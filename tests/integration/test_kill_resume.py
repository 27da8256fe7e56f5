"""A dozen kills or more of a random rank of four; the campaign of a thousand is tests/campaigns/kill_resume.py."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.campaigns.kill_resume import TRIGGERS, Campaign

FEWEST, MOST = 12, 80


def test_killed_ranks_cost_nothing_but_time(tmp_path: Path) -> None:
    """Every start resumes from the newest committed step, and every run ends as the unbroken one, bit for bit."""
    campaign = Campaign(tmp_path, ranks=4, steps=40, seed=20)

    def shows_all() -> bool:  # saves are short, so that a dozen kills may miss them
        met_save = any(kill.was_saving for kill in campaign.kills)
        return met_save and {kill.trigger for kill in campaign.kills} == set(TRIGGERS)

    while len(campaign.kills) < FEWEST or (len(campaign.kills) < MOST and not shows_all()):
        campaign.broken_run(max(4, FEWEST - len(campaign.kills)))
    assert shows_all(), f"{len(campaign.kills)} kills met no save, or lack a trigger: the test shows nothing"
    assert all(kill.exitcode == -signal.SIGKILL for kill in campaign.kills)
