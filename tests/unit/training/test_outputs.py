"""What people look at: progress, TensorBoard, the loss curve."""

import io
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.training.loss_curve import plot_losses
from megatron.optimus.training.metrics import MetricsWriter
from megatron.optimus.training.progress import Progress, duration
from megatron.optimus.training.trackers import TensorBoardTracker, WandbTracker
from tests.unit.training.test_metrics import metrics


def run(progress: Progress, last: int) -> None:
    for step in range(1, last + 1):
        progress.update(metrics(step, valid_loss=3.25 if step == 5 else None))
    progress.close()


def test_plain_lines_where_output_is_not_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    run(Progress(total_steps=9, total_tokens=900, log_interval=4, num_devices=3), 9)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step=4", "step=5", "step=8", "step=9"]  # 5: validated, 9: the last
    assert lines[0] == "step=4 loss=2.0000 lr=1.000e-03 grad_norm=0.100 tokens/s=600 eta=0:01"
    assert "valid_loss=3.2500" in lines[1] and lines[-1].endswith("eta=0:00")


def test_eta_follows_the_time_of_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    """Steps of 100 tokens so far; those to come may be larger, which the tokens still to come know."""
    progress = Progress(total_steps=80, total_tokens=10_100)
    progress.update(metrics(1, tokens_per_second_per_device=10.0))  # the first step pays for warming up
    for step in range(2, 60):
        progress.update(metrics(step, tokens_per_second_per_device=100.0))
    eta = capsys.readouterr().out.splitlines()[-1].split("eta=")[1]
    assert eta in ("0:42", "0:43")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_live_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    run(Progress(total_steps=6, total_tokens=600, first_step=0), 6)
    text = terminal.getvalue()
    assert sys.stdout is terminal  # given back
    assert re.search(r"6/6", text) and "loss 1.3333" in text and "200 tokens/s" in text and "ETA 0:00" in text
    assert "step=" not in text


def test_a_terminal_without_rich_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    run(Progress(total_steps=2, total_tokens=200), 2)
    assert terminal.getvalue().startswith("step=1 loss=8.0000 ")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (12.4, "0:12"), (75, "1:15"), (3723, "1:02:03"), (86400 * 2 + 7 * 3600, "2d07h"), (-1, "0:00")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(str(tmp_path))
    tracker.write(metrics(1))
    tracker.write(metrics(2, valid_loss=3.5, valid_losses={"web": 2.5}))
    tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 8.0), (2, 4.0)]
    assert [event.step for event in events.Scalars("valid_loss")] == [2]
    assert [event.value for event in events.Scalars("valid_loss/web")] == [2.5]
    assert "mfu" not in events.Tags()["scalars"]  # unknown


def test_missing_packages_are_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"tensorboard_dir='tb'.*pip install tensorboard"):
        TensorBoardTracker("tb")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install matplotlib"):
        plot_losses(tmp_path / "metrics.jsonl", tmp_path / "loss.png", "run", 8.3)


def test_loss_curve(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 41):
            loss = math.nan if step == 3 else 4 + 4 * math.exp(-step / 9)
            writer.write(metrics(step, loss=loss, valid_loss=loss + 0.1 if step % 10 == 0 else None))
    picture = tmp_path / "pictures" / "loss.png"
    plot_losses(tmp_path / "metrics.jsonl", picture, "run", math.log(4096))
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000


def test_a_run_without_a_finite_loss_has_no_curve(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with MetricsWriter(tmp_path) as writer:
        writer.write(metrics(1, loss=math.nan))
    with pytest.raises(ValueError, match="no finite loss"):
        plot_losses(tmp_path / "metrics.jsonl", tmp_path / "loss.png", "run", 8.3)


class FakeWandb:
    """The three calls of wandb that are used; a run's id is made where none is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def init(self, **arguments: Any) -> Any:
        self.calls.append(("init", arguments))
        return SimpleNamespace(
            id=arguments["id"] or "made", log=lambda *a, **k: self.calls.append((*a, k)), finish=lambda: None
        )


def test_wandb_gets_every_number_and_a_resumed_run_goes_on_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):
        tracker = WandbTracker("moe", None, tmp_path / "first", {"model": {"num_layers": 2}})
        tracker.write(metrics(7, valid_loss=3.5, valid_losses={"web": 2.5}))
        tracker.close()
    (_, first), (numbers, keywords), (_, second), _ = fake.calls
    assert (first["project"], first["name"], first["config"]) == ("moe", "first", {"model": {"num_layers": 2}})
    assert (first["id"], second["id"], second["resume"]) == (None, "made", "allow")
    assert keywords == {"step": 7} and numbers["valid_loss"] == 3.5 and numbers["valid_loss/web"] == 2.5
    assert not {"step", "mfu"} & numbers.keys(), "what is not applicable is left out"


def test_wandb_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"wandb_project='moe' needs a package .*pip install wandb"):
        WandbTracker("moe", None, tmp_path, {})
