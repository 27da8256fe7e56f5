"""What overlap.py traces: kernels of consecutive steps, how much communication nothing hides, and their picture."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Event:
    """A kernel (CPU: an operation): microseconds from the start of the trace."""

    start: float
    stop: float
    is_communication: bool


def trace(action: Callable[[], None], calls: int, finish: Callable[[], None], device: torch.device) -> list[Event]:
    """The kernels of consecutive calls, which start and end with an idle device.

    ``finish`` waits for gathers: gloo crashes on work that starts inside a profiler's session and ends outside.
    """
    from megatron.optimus.platform.device import synchronize

    on_cpu = device.type == "cpu"
    activity = torch.profiler.ProfilerActivity.CPU if on_cpu else torch.profiler.ProfilerActivity.CUDA
    finish()
    synchronize(device)
    dist.barrier()
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(calls):
            action()
        finish()
        synchronize(device)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        recorded = json.loads(Path(file.name).read_text())["traceEvents"]
    kinds = ("cpu_op",) if on_cpu else ("kernel", "gpu_memcpy", "gpu_memset")
    events = []
    for entry in recorded:
        if entry.get("cat") in kinds and "dur" in entry:
            name = entry["name"].lower()
            events.append(Event(entry["ts"], entry["ts"] + entry["dur"], "nccl" in name or name.startswith("gloo:")))
    first = min(event.start for event in events)
    return [Event(e.start - first, e.stop - first, e.is_communication) for e in events]


def merged(events: list[Event]) -> list[tuple[float, float]]:
    """The union of the events' intervals."""
    union: list[tuple[float, float]] = []
    for event in sorted(events, key=lambda event: event.start):
        if union and event.start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], event.stop))
        else:
            union.append((event.start, event.stop))
    return union


def covered(intervals: list[tuple[float, float]]) -> float:
    return sum(stop - start for start, stop in intervals)


def exposure(events: list[Event]) -> dict[str, float]:
    """Milliseconds of a traced step: all of it, computing, communicating, communicating while nothing computes."""
    compute = merged([event for event in events if not event.is_communication])
    communication = merged([event for event in events if event.is_communication])
    both = covered(merged(events))
    total = max(event.stop for event in events)
    exposed = both - covered(compute)
    return {
        "step_ms": total / 1e3,
        "compute_ms": covered(compute) / 1e3,
        "communication_ms": covered(communication) / 1e3,
        "exposed_ms": exposed / 1e3,
        "idle_ms": (total - both) / 1e3,
    }


def steady(one: dict[str, float], several: dict[str, float], calls: int) -> dict[str, float]:
    """Figures of a step among others."""
    figures = {key: (several[key] - one[key]) / (calls - 1) for key in one}
    return {**figures, "exposed_percent": 100 * figures["exposed_ms"] / figures["step_ms"]}


def draw(traces: dict[str, list[Event]], results: dict[str, Any], args: argparse.Namespace) -> None:
    """Two lanes a system: computing and communicating."""
    if not traces:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(traces), 1, figsize=(14, 1.3 + 1.5 * len(traces)), squeeze=False, sharex=True)
    for axis, (system, events) in zip(axes[:, 0], traces.items(), strict=True):
        for lane, (is_communication, colour) in enumerate(((True, "tab:orange"), (False, "tab:blue"))):
            spans = merged([event for event in events if event.is_communication is is_communication])
            axis.broken_barh([(a / 1e3, (b - a) / 1e3) for a, b in spans], (lane - 0.4, 0.8), color=colour, linewidth=0)
        figures = results[system]["trace"]
        axis.set_yticks([0, 1], ["communication", "compute"])
        axis.set_title(
            f"{system}: {figures['step_ms']:.1f} ms a step, communication {figures['communication_ms']:.1f} ms, "
            f"exposed {figures['exposed_ms']:.1f} ms ({figures['exposed_percent']:.1f}%)",
            fontsize=10,
            loc="left",
        )
    axes[-1, 0].set_xlabel("ms")
    figure.suptitle(f"{args.preset}, {args.ranks} ranks, EP={args.expert_parallel}, consecutive steps of rank 0")
    figure.tight_layout()
    figure.savefig(f"{args.out}.png", dpi=110)
    plt.close(figure)
