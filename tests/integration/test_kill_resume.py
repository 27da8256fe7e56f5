"""Twenty kills or more of a random rank of four; the campaign of a thousand is tests/campaigns/kill_resume.py."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.campaigns.kill_resume import TRIGGERS, Campaign


def test_killed_ranks_cost_nothing_but_time(tmp_path: Path) -> None:
    """Every start resumes from the newest committed step, and every run ends as the unbroken one, bit for bit."""
    campaign = Campaign(tmp_path, ranks=4, steps=40, seed=20)
    # Saves are short: more kills where none of the first twenty has met one.
    while len(campaign.kills) < 20 or (len(campaign.kills) < 80 and not any(one.was_saving for one in campaign.kills)):
        campaign.broken_run(max(5, 20 - len(campaign.kills)))
    assert any(kill.was_saving for kill in campaign.kills), "no kill met a save: the test shows nothing"
    assert {kill.trigger for kill in campaign.kills} == set(TRIGGERS)
    assert all(kill.exitcode == -signal.SIGKILL for kill in campaign.kills)
