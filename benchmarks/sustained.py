"""Speed of calls that follow each other for long, as in training: a GPU is then at its power limit and lowers its
clock, so that the energy of a call decides, which single calls after a pause do not show."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

import torch

AHEAD = 8  # calls that the host may be ahead of the device


def sustained(call: Callable[[], object], seconds: float, cuda: bool) -> dict[str, float | None]:
    """Calls one after another for so long. Of the last two thirds of the time: mean milliseconds of a call and, where
    the GPU tells (nvidia-ml-py), medians of its clock in MHz and its power in watts, and the joules of a call."""
    if not cuda:
        return {"ms": _calls_on_cpu(call, seconds), "mhz": None, "watts": None, "joules": None}
    samples: list[tuple[float, float]] = []
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(samples, ended))
    torch.cuda.synchronize()
    watcher.start()
    events = [_event()]
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        call()
        events.append(_event())
        if len(events) > AHEAD:
            events[-AHEAD].synchronize()
    torch.cuda.synchronize()
    ended.set()
    watcher.join()
    first = len(events) // 3
    ms = events[first].elapsed_time(events[-1]) / (len(events) - 1 - first)
    late = samples[len(samples) // 3 :]
    if not late:
        return {"ms": ms, "mhz": None, "watts": None, "joules": None}
    mhz, watts = (statistics.median(column) for column in zip(*late, strict=True))
    return {"ms": ms, "mhz": mhz, "watts": watts, "joules": watts * ms / 1e3}


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _watch(samples: list[tuple[float, float]], ended: threading.Event) -> None:
    while not ended.wait(0.02):
        try:
            samples.append((torch.cuda.clock_rate(), torch.cuda.power_draw() / 1e3))
        except (ImportError, RuntimeError):  # no nvidia-ml-py, or a GPU that does not tell
            return


def _calls_on_cpu(call: Callable[[], object], seconds: float) -> float:
    call()
    begin, calls = time.monotonic(), 0
    while calls == 0 or time.monotonic() - begin < seconds:
        call()
        calls += 1
    return (time.monotonic() - begin) * 1e3 / calls
