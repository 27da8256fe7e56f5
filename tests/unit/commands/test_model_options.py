"""What commands that load a model share: their options, the ranks, and the errors of users in one line."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest
import torch

from megatron.optimus.commands.model_options import add_model_options, load_model, run_on_ranks
from megatron.optimus.config.load import Parser
from megatron.optimus.config.schema import ConfigError, TokenizerType
from megatron.optimus.platform.environment import RankEnvironment
from megatron.optimus.platform.ranks import Ranks

Work = Callable[[RankEnvironment, Ranks], None]


@pytest.fixture
def parser() -> Parser:
    parser = Parser("score", "Gives scores.")
    parser.add_argument("checkpoint")
    add_model_options(parser, batch_size=5)
    return parser


def test_one_process_is_all_ranks(parser: Parser) -> None:
    seen = []

    def prepare(args: argparse.Namespace) -> Work:
        seen.append((args.batch_size, args.expert_model_parallel_size))
        return lambda launch, ranks: seen.append((launch.world_size, ranks.device))

    words = "here --expert-model-parallel-size 2 --device cpu".split()
    assert run_on_ranks(parser, words, prepare) == 0
    assert seen == [(5, 2), (1, torch.device("cpu"))]


def test_what_a_user_did_wrong_is_one_line(parser: Parser, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(args: argparse.Namespace) -> Work:
        raise ConfigError(f"{args.checkpoint} is a file")

    def refuse_later(args: argparse.Namespace) -> Work:
        def work(launch: RankEnvironment, ranks: Ranks) -> None:
            raise ConfigError("the weights are those of another model")

        return work

    for words, prepare, message in (
        (["here", "--dtype", "fp17"], refuse, "--dtype"),
        (["here", "--batch-size", "0"], refuse, "--batch-size"),
        (["here", "--device", "cpu"], refuse, "here is a file"),
        (["here", "--device", "cpu"], refuse_later, "of another model"),
    ):
        assert run_on_ranks(parser, words, prepare) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("error: ") and message in printed and printed.count("\n") == 1, printed

    def break_down(args: argparse.Namespace) -> Work:
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):  # of ours, with its traceback
        run_on_ranks(parser, ["here"], break_down)


def test_options_reach_the_loader(parser: Parser, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        "megatron.optimus.commands.model_options.load_text_model", lambda *args, **more: seen.append((args, more))
    )
    words = "here --device cpu --dtype bf16 --tensor-model-parallel-size 1 --tokenizer-type ByteLevelTokenizer".split()

    def prepare(args: argparse.Namespace) -> Work:
        return lambda launch, ranks: load_model(args, launch, ranks)

    assert run_on_ranks(parser, words, prepare) == 0
    [((checkpoint, parallel, _), more)] = seen
    assert checkpoint == "here" and parallel.device.value == "cpu"
    assert more["dtype"] is torch.bfloat16 and more["tokenizer_type"] is TokenizerType.BYTE
    assert more["tokenizer_model"] is None and more["local_world_size"] == 1


def failing_with(text: str) -> int:
    """The exit code of a command whose ranks cannot meet."""

    def prepare(args: argparse.Namespace) -> Work:
        raise RuntimeError(text)

    return run_on_ranks(Parser("generate", "Generates."), [], prepare)


def test_a_lost_peer_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert failing_with("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:29500") == 1
    error = capsys.readouterr().err
    assert error.startswith("error on rank 0: another rank has ended (Connection closed by peer); ")
    assert error.count("another rank") == error.count("\n") == 1


def test_an_error_of_this_rank_is_raised() -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        failing_with("mat1 and mat2 shapes cannot be multiplied")
