"""Random damage is noticed, named and survived; the campaign of ten thousand is tests/campaigns/corruption.py."""

import logging

from tests.campaigns.corruption import KINDS, Victim


def test_random_damage_is_noticed_named_and_survived(tmp_path):
    log = logging.getLogger("optimus")
    handlers = list(log.handlers)
    try:
        done = Victim(tmp_path / "root", seed=3).run(150)
    finally:
        log.handlers, log.propagate = handlers, True
    assert set(done) == set(KINDS) and all(done.values())
