"""What commands on several ranks say where a collective fails."""

from __future__ import annotations

import argparse

import pytest

from megatron.optimus.commands.model_options import run_on_ranks
from megatron.optimus.config.load import Parser


def failing_with(text: str) -> int:
    """The exit code of a command whose ranks cannot meet."""

    def prepare(args: argparse.Namespace) -> None:
        raise RuntimeError(text)

    return run_on_ranks(Parser("generate", "Generates."), [], prepare)  # type: ignore[arg-type]


def test_a_lost_peer_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert failing_with("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:29500") == 1
    error = capsys.readouterr().err
    assert error.startswith("error on rank 0: another rank has ended (Connection closed by peer); ")
    assert error.count("another rank") == error.count("\n") == 1


def test_an_error_of_this_rank_is_raised() -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        failing_with("mat1 and mat2 shapes cannot be multiplied")
