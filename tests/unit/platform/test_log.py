"""The logger: rank 0 speaks, the others complain."""

import logging
import re
from collections.abc import Iterator

import pytest

from megatron.optimus.platform.log import setup


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    logger = logging.getLogger("optimus")
    before = (logger.level, logger.propagate, logger.handlers[:])
    yield
    logger.level, logger.propagate, logger.handlers[:] = before


def test_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    setup(0)
    setup(0)  # again: still one line a message
    logging.getLogger("optimus").info("hello %d", 3)
    logging.getLogger("optimus").debug("detail")
    out = capsys.readouterr().out
    assert re.fullmatch(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] hello 3\n", out)


def test_other_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    logger = setup(5)
    logger.info("hello")
    logger.warning("careful")
    assert re.fullmatch(r"\[[^]]+\] rank 5: careful\n", capsys.readouterr().out)
