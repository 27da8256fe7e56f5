"""The logger: rank 0 speaks, the others complain."""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megatron.optimus import cli
from megatron.optimus.platform import log
from megatron.optimus.platform.exit_codes import USER_ERROR
from megatron.optimus.platform.log import first_line, prints_errors, setup


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    logger = logging.getLogger("optimus")
    before = (logger.level, logger.propagate, logger.handlers[:])
    yield
    logger.level, logger.propagate, logger.handlers[:] = before


def test_the_first_line_of_an_error_says_something() -> None:
    assert first_line(ValueError("\n one\ntwo")) == "one"
    assert first_line(TimeoutError()) == "TimeoutError"


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


ESCAPE = "\x1b[31mred\x07\r\x9b2J"
SHOWN = r"\x1b[31mred\x07\r\x9b2J"


def test_what_a_terminal_would_obey_is_escaped() -> None:
    assert log.printable(ESCAPE) == SHOWN
    assert log.printable(Path("a\u202eb")) == r"a\u202eb"
    assert log.printable(os.fsdecode(b"\xff")) == r"\udcff"
    assert log.printable("Grüße, 世界\t👩‍💻\n") == "Grüße, 世界\t👩‍💻\n"


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.print_error(ValueError(f"{ESCAPE}\nerror: a second one"))
    assert capsys.readouterr().err == f"error: {SHOWN}\\nerror: a second one\n"


def test_log_messages_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    logger = log.setup(0)
    logger.info("%s is %d\n", ESCAPE, 3)
    logger.info("100% plain")
    out = capsys.readouterr().out
    assert f"{SHOWN} is 3\n" in out and "100% plain" in out


COMMANDS = [
    ["pretrain", f"--{ESCAPE}", "1"],
    ["pretrain", "--preset", ESCAPE],
    ["pretrain", "--config", f"{ESCAPE}.yaml"],
    ["pretrain", "--config", "CONFIG"],
    ["launch", f"--{ESCAPE}"],
    ["launch", "--dry-run", "--nproc-per-node", "1", "--preset", "mula-tiny", "--run-dir", ESCAPE],
    ["convert", ESCAPE, "out", "--to", "hf"],
    ["verify", ESCAPE],
    ["generate", ESCAPE, "--prompt", "a", "--device", "cpu"],
    ["generate", "x", "--prompts", ESCAPE, "--device", "cpu"],
    ["inspect-data", "stats", ESCAPE],
    ["preprocess", "--input", ESCAPE, "--output-prefix", "x", "--tokenizer-type", "ByteLevelTokenizer"],
    ["train-tokenizer", "--input", ESCAPE, "--vocab-size", "300", "--output", "x"],
    ["plan", f"--{ESCAPE}"],
    ["expert-balance", ESCAPE],
    ["report", ESCAPE],
    ["watch", ESCAPE],
    [ESCAPE],
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0].partition(ESCAPE)[0] or "command")
def test_no_command_echoes_escapes(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text('model: {"a\\e[31mred": "\\e[2J"}\n')
    code = cli.main([word.replace("CONFIG", "config.yaml") for word in words])
    printed = capfd.readouterr()
    assert (code == 0) is ("--dry-run" in words), printed
    assert "31mred" in printed.out + printed.err
    assert not log._UNPRINTABLE.search(printed.out + printed.err)


@prints_errors(KeyError, code=7)
@prints_errors(FileNotFoundError, ValueError)
def command(argv: Sequence[str] | None = None) -> int:
    """Fails as its word says."""
    errors = {"value": ValueError("not\na number"), "key": KeyError("name"), "bug": TypeError("a bug")}
    for word in argv or ():
        raise errors[word]
    return 3


def test_errors_of_the_named_kinds_are_one_line_and_the_exit_code_of_their_kind(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(["value"]) == USER_ERROR
    assert capsys.readouterr().err == "error: not\\na number\n"
    assert command(["key"]) == 7
    assert capsys.readouterr().err == "error: 'name'\n"
    assert command() == 3 and not capsys.readouterr().err


def test_an_error_of_another_kind_is_raised() -> None:
    with pytest.raises(TypeError, match="a bug"):
        command(["bug"])


def test_durations_are_in_words_that_fit_their_length() -> None:
    given = (-1, 12.4, 59.6, 3599, 3723, 86399, 86399.6, 200000)
    expected = ["0:00", "0:12", "1:00", "59:59", "1:02:03", "23:59:59", "1d00h", "2d07h"]
    assert [log.duration(seconds) for seconds in given] == expected
