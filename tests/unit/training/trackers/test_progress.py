"""The progress on standard output, with a terminal and without."""

import io
import re
import sys

import pytest

from megatron.optimus.platform.log import duration
from megatron.optimus.training.trackers.progress import ProgressLine
from tests.unit.training.test_metrics import metrics


def run(progress: ProgressLine, last: int) -> None:
    for step in range(1, last + 1):
        progress.log(metrics(step, valid_loss=3.25 if step == 5 else None))
    progress.close()


def test_plain_lines_where_output_is_not_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    run(ProgressLine(total_steps=9, total_tokens=900, log_interval=4, num_devices=3), 9)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step=4", "step=5", "step=8", "step=9"]  # 5: validated, 9: the last
    assert lines[0] == "step=4 loss=2.0000 lr=1.000e-03 grad_norm=0.100 tokens/s=600 eta=0:01"
    assert "valid_loss=3.2500" in lines[1] and lines[-1].endswith("eta=0:00")


def test_eta_follows_the_time_of_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    """Steps of 100 tokens so far; those to come may be larger, which the tokens still to come know."""
    progress = ProgressLine(total_steps=80, total_tokens=10_100)
    progress.log(metrics(1, tokens_per_second_per_device=10.0))  # the first step pays for warming up
    for step in range(2, 60):
        progress.log(metrics(step, tokens_per_second_per_device=100.0))
    eta = capsys.readouterr().out.splitlines()[-1].split("eta=")[1]
    assert eta in ("0:42", "0:43")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("columns", "last_line"),
    [
        (56, "step 6/6 ETA 0:00  loss 1.3333  valid_loss 3.2500"),
        (60, "step 6/6 \u2501{8} ETA 0:00  loss 1.3333  valid_loss 3.2500"),
        (80, "step 6/6 \u2501+ ETA 0:00  loss 1.3333  valid_loss 3.2500  200 tokens/s"),
        (140, "step 6/6 \u2501{24} ETA 0:00  loss 1.3333  valid_loss 3.2500  200 tokens/s"),
    ],
)
def test_a_live_line_on_a_terminal_below_the_log_lines(
    columns: int, last_line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any width the counter and the losses are there; earlier losses stay in the lines above."""
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("rich._console", None)  # the one of the process keeps its width
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    run(ProgressLine(total_steps=6, total_tokens=600, first_step=0, log_interval=2), 6)
    assert sys.stdout is terminal  # given back
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", terminal.getvalue()).replace("\r", "\n")
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    assert re.fullmatch(last_line, lines[-1]), lines[-1]
    printed = [line.split()[0] for line in lines if line.startswith("step=")]
    assert printed == ["step=2", "step=4", "step=5", "step=6"]
    assert max(map(len, lines)) <= columns


def test_a_terminal_without_rich_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    run(ProgressLine(total_steps=2, total_tokens=200), 2)
    assert terminal.getvalue().startswith("step=1 loss=8.0000 ")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (12.4, "0:12"), (75, "1:15"), (3723, "1:02:03"), (86400 * 2 + 7 * 3600, "2d07h"), (-1, "0:00")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
