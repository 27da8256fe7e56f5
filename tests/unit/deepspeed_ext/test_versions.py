"""Versions of DeepSpeed outside the range are one line that names it."""

from __future__ import annotations

import logging

import pytest

from deepspeed_ext import versions

RANGE = "deepspeed_ext works with 0.17.6 to 0.19.8; pip install deepspeed==0.19.8"


@pytest.mark.parametrize("version", ["0.17.6", "0.18.0", "0.19.8", "0.19.8+cu128"])
def test_versions_of_the_range_are_taken(version: str, caplog: pytest.LogCaptureFixture) -> None:
    versions.check(version)
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.16.9", "0.17.5", "0.17.5+unknown"])
def test_an_older_version_is_refused_with_the_range(version: str) -> None:
    with pytest.raises(ImportError) as error:
        versions.check(version)
    assert str(error.value) == f"deepspeed {version}: {RANGE}"


def test_a_newer_version_is_a_warning_with_the_range(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="deepspeed_ext"):
        versions.check("0.20.1")
    assert [record.getMessage() for record in caplog.records] == [f"deepspeed 0.20.1: {RANGE}"]
