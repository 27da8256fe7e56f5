"""A program's own flags among the options that it passes on."""

from __future__ import annotations

import pytest

from megatron.optimus.config.own_flags import split_flags, whole_number
from megatron.optimus.config.schema import ConfigError

FLAGS = {"with_value": ("--nodes", "--top"), "switches": ("--json",)}


def test_own_flags_are_taken_out_and_the_rest_keeps_its_order() -> None:
    words = ["--lr", "1", "--nodes", "2", "--json", "--data-path", "a", "b", "--nodes=3", "--lr=2"]
    assert split_flags(words, **FLAGS) == (
        {"--nodes": "3", "--json": ""},
        ["--lr", "1", "--data-path", "a", "b", "--lr=2"],
    )
    assert split_flags(["--top", "-1"], **FLAGS) == ({"--top": "-1"}, [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--json=1"], "--json takes no value, got '1'"),
        (["--nodes"], "--nodes needs a value"),
        (["--nodes", "--json"], "--nodes needs a value"),
    ],
)
def test_what_cannot_be_split(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_flags(words, **FLAGS)


def test_whole_numbers() -> None:
    assert whole_number({"--nodes": "12"}, "--nodes") == 12
    assert whole_number({"--top": "0"}, "--top", least=0) == 0
    assert whole_number({}, "--nodes") is None
    for text in ("0", "-1", "1.5", "x", ""):
        with pytest.raises(ConfigError, match=f"--nodes='{text}' must be a whole number of 1 or more"):
            whole_number({"--nodes": text}, "--nodes")
