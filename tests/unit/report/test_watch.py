"""The view of a run in a terminal, which grows, stalls, is cut and ends."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from megatron.optimus.report.watch import View

from .conftest import START, line, write_lines


def picture(view: View, width: int = 80, height: int = 24) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(view.render(width, height), height=height)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = text.splitlines()
    assert len(lines) == height and {len(line) for line in lines} == {width}, text
    return text


@pytest.fixture
def run(make_run: Callable[..., Path]) -> Path:
    """A run whose last step was at START + 160."""
    folder = make_run()
    os.utime(folder / "metrics.jsonl", (START, START))
    return folder


def test_what_a_picture_says(run: Path) -> None:
    lock = {"host": "node7", "pid": 4242}
    (run / "checkpoints" / ".claim").write_text(json.dumps(lock))
    os.utime(run / "checkpoints" / ".claim", (START + 160, START + 160))
    (run / "train.log").write_text("step=1 loss=2\n[..] rank 3: host node9 is \x1b[31mslow\nall fine\n")
    view = View(run, clock=lambda: START + 163)
    view.update()
    text = picture(view)
    for said in ("step 12 of 20", "60.0%", "ETA 16 s", "running, last step 3 s ago", "process 4242 on node7"):
        assert said in text, said
    for said in ("newest checkpoint: step 8", "1 restart, 1 update left out", "rank 3: host node9 is \\x1b[31m"):
        assert said in text, said
    assert "loss            2.667" in text and "tokens/s          500" in text and "4 devices" in text
    assert "  0 ███▃▃▃▃▃▃▁▁▁ 2.93x" in text, "an expert has 11 of 15 slots, the mean of four is 3.75"
    wide = picture(view, 200, 60)
    assert "gradient norm  1" in wide and "validation loss  4.5" in wide and "learning rate" in wide
    picture(view, 20, 6)


def test_a_run_that_stands_still_and_one_that_is_done(run: Path) -> None:
    late = View(run, clock=lambda: START + 160 + 3600)
    late.update()
    assert "no step for 1:00:00" in picture(late)
    (run / "config.yaml").write_text("training: {train_iters: 12}\n")
    late.update()
    assert "100.0%  finished" in picture(late)
    (run / "config.yaml").write_text("training: {train_samples: 240, seq_length: 100}\n")
    view = View(run, clock=lambda: START + 161)
    view.update()
    assert "50.0%" in picture(view) and view.seconds_left() == pytest.approx(24.0)


def test_files_that_come_grow_and_are_cut(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    (tmp_path / "config.yaml").write_text("training: {train_iters: 9}\n")
    view = View(tmp_path, clock=lambda: START)
    view.update()
    assert "no step yet" in picture(view) and "nothing to draw yet" in picture(view)
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [line(1), line(2)])
    view.update()
    assert "step 2 of 9" in picture(view)
    os.truncate(path, 0)
    view.update()
    assert "no step yet" in picture(view)
    path.write_text("damaged\n" + json.dumps(line(5)) + "\n" + '{"step": 6, "lo')
    (tmp_path / "expert_load_history.jsonl").write_text('{"slots": [[1, 3]]}\n{"slots": "x"}\n{"slo')
    view.update()
    assert "step 5 of 9" in picture(view) and "1.50x" in picture(view)
    path.unlink()
    path.mkdir()
    view.update()
    assert "metrics.jsonl cannot be read" in picture(view)
