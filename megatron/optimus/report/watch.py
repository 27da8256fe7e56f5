"""The live view of a run in a terminal. It reads the files of the run's folder alone, so the run may be anywhere."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron.optimus.platform.files import open_regular
from megatron.optimus.platform.log import counted, duration, printable
from megatron.optimus.report import curves, plot
from megatron.optimus.report.read import (
    EXPERT_HISTORY,
    EXPERT_LOAD,
    METRICS,
    MetricsTail,
    check_run,
    read_checkpoints,
    read_config,
)

_RECENT = 100  # steps behind the pace
_TAIL_BYTES = 1 << 18  # of a log or a file of JSON lines
_STALLED_S, _STALLED_STEPS = 60.0, 10  # without a step for this long, and for as many steps, a run is said to stand
_LOGS = ("*.log", "*.out", "*.err", "*.o[0-9]*", "logs/*")
_TELLING = re.compile(
    r"warning|error|traceback|rank \d+: |attempt \d+ ended|lost nodes|look at this run", re.IGNORECASE
)


def watch(folder: Path, log: Path | None, interval: float, *, once: bool) -> None:
    """Shows a run until it is interrupted.

    Args:
        folder: the run's folder.
        log: its log; None takes the newest one in the folder.
        interval: seconds between looks at the files.
        once: show one picture and return; so it is where standard output is no terminal.

    Raises:
        ConfigError: ``folder`` is not the folder of a run.
    """
    view, console = View(folder, log), Console()
    view.update()
    if once or not console.is_terminal:
        height = console.height - 1  # the prompt's line
        console.print(view.render(console.width, height), height=height)
        console.print()
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(view.render(console.width, console.height), refresh=True)
            time.sleep(interval)
            view.update()


class View:
    """The state of a run as its files show it, and the picture drawn of it."""

    def __init__(self, folder: Path, log: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        """Raises ConfigError where ``folder`` is not the folder of a run."""
        check_run(folder)
        self._folder, self._log, self._clock = folder, log, clock
        self.metrics = MetricsTail(folder / METRICS)
        self._stamps: dict[str, Any] = {}
        self._config: dict[str, dict[str, Any]] = {}
        self._load_LE = np.zeros((0, 0))
        self._checkpoints: list[Any] = []
        self.trouble: list[str] = []  # files that cannot be read
        self.said: list[str] = []  # telling lines of the log

    def update(self) -> None:
        """Reads the files of the run that have changed since the last call."""
        self.trouble = []
        try:
            self.metrics.poll()
        except FileNotFoundError:
            pass  # no step yet, or the file is being replaced
        except OSError as error:
            self.trouble.append(f"{METRICS} cannot be read: {error.strerror}")
        if self._has_changed(self._folder / "config.yaml"):
            self._config = read_config(self._folder, self.trouble)
        if self._has_changed(self._folder / EXPERT_HISTORY) or self._has_changed(self._folder / EXPERT_LOAD):
            self._load_LE = self._last_load()
        if self._has_changed(self._folder / "checkpoints") or self._has_changed(self._folder / "last_checkpoint.json"):
            self._checkpoints = read_checkpoints(self._folder)
        log = self._log or self._newest_log()
        if log is not None and self._has_changed(log):
            lines = _last_lines(log)
            self.said = [printable(line.strip()) for line in lines if _TELLING.search(line)][-50:]

    def _has_changed(self, path: Path) -> bool:
        try:
            status = path.stat()
            stamp: Any = (status.st_mtime_ns, status.st_size, status.st_ino)
        except OSError:
            stamp = None
        before = self._stamps.get(str(path))
        self._stamps[str(path)] = stamp
        return stamp is not None and stamp != before

    def _newest_log(self) -> Path | None:
        found = [path for pattern in _LOGS for path in self._folder.glob(pattern) if path.is_file()]
        return max(found, key=lambda path: path.stat().st_mtime, default=None)

    def _last_load(self) -> np.ndarray:
        """Slots of the last steps by layer and expert."""
        candidates = [(line, "slots") for line in reversed(_last_lines(self._folder / EXPERT_HISTORY, 1 << 20))]
        candidates += [("".join(_last_lines(self._folder / EXPERT_LOAD, 1 << 24)), "slots_per_layer_and_expert")]
        for text, key in candidates:
            try:
                load_LE = np.array(json.loads(text)[key], np.float64)
            except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
                continue
            if load_LE.ndim == 2 and load_LE.size and np.isfinite(load_LE).all():
                return load_LE
        return np.zeros((0, 0))

    # ---- numbers

    @property
    def step(self) -> int:
        """The last step; 0 before the first."""
        return int(self.metrics.steps[-1]) if len(self.metrics.steps) else 0

    def last(self, key: str) -> float | None:
        """The last number of a key; None without one."""
        values = self.metrics.column(key)
        values = values[np.isfinite(values)]
        return float(values[-1]) if len(values) else None

    def done(self) -> tuple[float, str]:
        """The share of the run that is done, and the step in words."""
        training = self._config.get("training", {})
        keys = ("train_samples", "seq_length", "train_iters")
        samples, length, steps = (_count(training.get(key)) for key in keys)
        tokens = self.last("consumed_tokens") or 0.0
        if samples and length:
            return min(1.0, tokens / (samples * length)), f"step {self.step:,}, {plot.number(tokens)} tokens"
        if steps:
            return min(1.0, self.step / steps), f"step {self.step:,} of {steps:,}"
        return math.nan, f"step {self.step:,}"

    def seconds_left(self) -> float | None:
        """Time left at the pace of the last steps, pauses included; None where the end is not known."""
        share, _ = self.done()
        seconds = np.nan_to_num(self.metrics.column("step_time_s")) + np.nan_to_num(self.metrics.column("pause_s"))
        tokens = self.metrics.column("consumed_tokens")
        recent = slice(max(1, len(seconds) - _RECENT), None)
        if not 0 < share <= 1 or len(seconds) < 2 or not seconds[recent].sum() > 0:
            return None
        # Of tokens, not steps: while the batch grows, later steps take longer.
        pace = (tokens[-1] - tokens[recent.start - 1]) / seconds[recent].sum()
        return float((tokens[-1] / share - tokens[-1]) / pace) if pace > 0 else None

    def state(self) -> tuple[str, str]:
        """Returns whether the run goes on, in words, and their style for the terminal."""
        share, _ = self.done()
        if share == 1:
            return "finished", "bold green"
        age, steps_s = self.age(), self.metrics.column("step_time_s")[-_RECENT:]
        steps_s = steps_s[np.isfinite(steps_s)]
        usual = float(np.median(steps_s)) if len(steps_s) else 0.0
        if age is None:
            return "no step yet", "yellow"
        if age > max(_STALLED_S, _STALLED_STEPS * usual):
            return f"no step for {_duration(age)}", "bold red"
        return "running", "green"

    def age(self) -> float | None:
        """Seconds since the last step; None without one. The clock of the run's host may be another one."""
        try:
            written = (self._folder / METRICS).stat().st_mtime
        except OSError:
            return None
        return max(0.0, self._clock() - max(written, self.last("wall_time") or 0.0)) if self.step else None

    # ---- the picture

    def render(self, width: int, height: int) -> RenderableType:
        """The picture for a terminal of ``width`` times ``height`` characters."""
        root = Layout()
        is_high, is_wide = height >= 40, width >= 120
        bottom = max(7, min(height // 3, len(self._load_LE) + 2 if len(self._load_LE) > 6 else 9))
        rows = [Layout(self._header(width), size=3), Layout(name="top")]
        if is_high:
            rows.append(Layout(name="middle", size=max(10, height // 4)))
        rows.append(Layout(name="bottom", size=bottom))
        root.split_column(*rows)
        side = 58 if is_wide else 31
        top_height = height - 3 - bottom - (max(10, height // 4) if is_high else 0)
        root["top"].split_row(
            Layout(self._curve("loss", "loss, nats a token", width - side, top_height)),
            Layout(self._numbers(side, top_height), size=side),
        )
        if is_high:
            keys = [("valid_loss", "validation loss"), ("grad_norm", "gradient norm")]
            keys += [("tokens_per_second_per_device", "tokens/s a device"), ("lr", "learning rate")][
                : 2 if is_wide else 0
            ]
            share = width // len(keys)
            root["middle"].split_row(*(Layout(self._curve(*key, share, max(10, height // 4))) for key in keys))
        half = width // 2
        root["bottom"].split_row(
            Layout(self._experts(half, bottom), size=half), Layout(self._health(width - half, bottom))
        )
        return root

    def _header(self, width: int) -> Panel:
        share, words = self.done()
        left, (state, style) = self.seconds_left(), self.state()
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        name = Text(printable(self._folder.absolute().name)[: max(8, width // 3)], style="bold")
        bar = ProgressBar(total=1.0, completed=0.0 if math.isnan(share) else share)
        percent = "" if math.isnan(share) else f"{100 * share:.1f}%  "
        eta = f"ETA {_duration(left)}  " if left and share < 1 else ""
        row.add_row(Text.assemble(name, "  ", words), bar, Text.assemble(percent, eta, (state, style)))
        return _panel(row, "")

    def _curve(self, key: str, title: str, width: int, height: int) -> Panel:
        lines = plot.curve(self.metrics.steps.astype(np.float64), self.metrics.column(key), width - 4, height - 2)
        last = self.last(key)
        return _panel(Text("\n".join(lines), style="cyan", no_wrap=True), f"{title}  {plot.number(last)}")

    def _numbers(self, width: int, height: int) -> Panel:
        metrics, devices = self.metrics, curves.num_devices(self.metrics)
        speed = metrics.column("tokens_per_second_per_device") * (devices or 1)
        mfu = ("MFU", metrics.column("mfu") * 100, "%")
        if self.last("mfu") is None:
            mfu = ("TFLOP/s", metrics.column("tflops_per_device"), "")
        shown = [
            ("loss", metrics.column("loss"), ""),
            ("valid loss", metrics.column("valid_loss"), ""),
            ("tokens/s", speed, ""),
            mfu,
            ("step time", metrics.column("step_time_s"), "s"),
            ("grad norm", metrics.column("grad_norm"), ""),
            ("lr", metrics.column("lr"), ""),
            ("expert max", metrics.column("expert_load_max_over_mean"), "x"),
            ("entropy", metrics.column("router_entropy"), ""),
            ("memory", metrics.column("peak_memory_gib"), "GiB"),
            ("data wait", metrics.column("data_wait_s") / metrics.column("step_time_s") * 100, "%"),
        ]
        shown += [
            (key, values, "") for key, values in metrics.columns.items() if key.startswith(("valid_loss/", "task/"))
        ]
        table, label = Table.grid(padding=(0, 1)), min(24, max(10, width // 3))
        for name, values, unit in shown:
            there = values[np.isfinite(values)]
            if len(there) and table.row_count < height - 2:
                value = plot.number(float(there[-1])) + unit
                spark = plot.sparkline(there[-400:], max(1, width - label - 16))
                table.add_row(Text(printable(name)[:label], "dim"), Text(value.rjust(10)), Text(spark, "cyan"))
        return _panel(table, "last step" + (f", {devices} devices" if devices else ""))

    def _experts(self, width: int, height: int) -> Panel:
        load_LE = self._load_LE
        if not load_LE.size:
            return _panel(Text("no load of experts yet; a dense model has none", style="dim"), "experts")
        multiple_LE = load_LE / np.maximum(load_LE.mean(axis=1, keepdims=True), 1e-30)
        worst = multiple_LE.max(axis=1)
        rows, title = height - 2, "experts by layer: load as a multiple of the mean"
        layers = list(range(len(worst)))
        if len(worst) > rows:
            layers = sorted(np.argsort(-worst)[:rows].tolist())
            title = f"experts of the {rows} least balanced of {len(worst)} layers"
        text, room = Text(no_wrap=True), max(1, width - 16)
        repeat = max(1, min(3, room // multiple_LE.shape[1]))
        for layer in layers:
            text.append(f"{layer:>3} ", style="dim")
            for block, value in plot.load_blocks(multiple_LE[layer], room):
                style = "red" if value > 2 else "yellow" if value > 1.5 else "blue" if value < 0.5 else ""
                text.append(block * repeat, style=style)
            text.append(f" {worst[layer]:.2f}x\n")
        return _panel(text, title if width > 60 else "experts by layer")

    def _health(self, width: int, height: int) -> Panel:
        state, style = self.state()
        text, age = Text(no_wrap=True, overflow="ellipsis"), self.age()
        text.append(state, style=style)
        text.append("" if age is None else f", last step {_duration(age)} ago")
        text.append(f"\n{self._owner()}")
        if self._checkpoints:
            newest = self._checkpoints[-1]
            text.append(f"\nnewest checkpoint: step {newest.step:,}")
            marks = [f"{newest.name} is marked: {mark}" for mark in newest.warnings]
        else:
            text.append("\nno checkpoint yet")
            marks = []
        counts = [(int(np.isfinite(self.metrics.column("startup_s/total")).sum()) - 1, "restart", "")]
        counts += [(int((self.metrics.column(key) == 1).sum()), noun, more) for key, noun, more in _COUNTED]
        told = [counted(number, noun) + more for number, noun, more in counts if number > 0]
        text.append("\n" + (", ".join(told) or "no restart, no update left out"), style="yellow" if told else "")
        warnings = [*self.trouble, *marks, *self.said]
        for line in warnings[max(0, len(warnings) - max(1, height - 6)) :]:
            text.append(f"\n{line[: width - 4]}", style="yellow")
        return _panel(
            text, "health" + ("" if self.said or not (self._log or self._newest_log()) else ", no warning in the log")
        )

    def _owner(self) -> str:
        """Who writes the run's checkpoints, by the lock file that it renews every ten seconds."""
        path = self._folder / "checkpoints" / ".claim"
        try:
            owner, age = json.loads(_last_lines(path)[0]), max(0.0, self._clock() - path.stat().st_mtime)
            return printable(f"rank 0: process {owner['pid']} on {owner['host']}, alive {_duration(age)} ago")[:200]
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return "no process holds the run's checkpoints"


_COUNTED = (("skipped", "update", " left out"), ("nonfinite", "step", " with a number that is not finite"))


def _panel(content: RenderableType, title: str) -> Panel:
    return Panel(
        content,
        title=Text(title, style="bold") if title else None,
        title_align="left",
        box=box.ROUNDED,
        border_style="dim",
    )


def _count(value: Any) -> int:
    """A number of a configuration file; 0 for what is none."""
    return value if isinstance(value, int) and value > 0 else 0


def _last_lines(path: Path, limit: int = _TAIL_BYTES) -> list[str]:
    """The last lines of a file; [] where it cannot be read."""
    try:
        with open(open_regular(path, os.O_RDONLY), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
            return file.read(limit).decode(errors="replace").splitlines()
    except OSError:
        return []


def _duration(seconds: float) -> str:
    return f"{round(seconds)} s" if round(seconds) < 100 else duration(seconds)
