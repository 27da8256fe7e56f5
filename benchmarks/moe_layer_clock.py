"""How moe_layer.py times one call."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from held import Held


class Clock:
    """Milliseconds of one call: time on the device, the level-2 cache overwritten before.

    The device is first kept busy for about two milliseconds, so that the time in which Python launches kernels is not
    counted: in training the device is behind, too. A call that waits for the device itself still pays its launches.
    With ``held`` another kernel holds some of its multiprocessors meanwhile.
    """

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.flush = torch.empty(256 * 2**20 if self.cuda else 1, dtype=torch.uint8, device=device)

    def __call__(self, fn: Callable[[], object], held: Held | None = None) -> float:
        if not self.cuda:
            start = time.perf_counter()
            fn()
            return (time.perf_counter() - start) * 1e3
        self.flush.zero_()
        if held:
            held.start()
        torch.cuda._sleep(4_000_000)  # clock cycles
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        fn()
        end.record()
        if held:
            held.release()
        end.synchronize()
        return begin.elapsed_time(end)


def print_kernels(call: Callable[[], object], cuda: bool) -> None:
    """Time of every kernel of a call, on a CPU of every operator: back to back as a training step runs them."""
    activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as trace:
        for _ in range(5):
            call()
        if cuda:
            torch.cuda.synchronize()
    times = [(e.device_time_total if cuda else e.self_cpu_time_total, e) for e in trace.key_averages()]
    for microseconds, event in sorted(times, key=lambda pair: -pair[0])[:30]:
        print(f"{microseconds / 5e3:8.3f} ms  {event.count // 5:3d} calls  {event.key[:90]}", flush=True)


def most_held(device: str) -> int:
    """Multiprocessors that may be held: with fewer than half of them left something might never start."""
    return torch.cuda.get_device_properties(device).multi_processor_count // 2 if device == "cuda" else 0


def make_held(counts: list[int]) -> list[Held]:
    """Needs Triton, so only where it is asked for."""
    return [importlib.import_module("held").Held(count) for count in counts]
