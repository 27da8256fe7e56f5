"""Profiles a window of steps with torch.profiler: a trace for a timeline viewer, and a table of where the time went.

Modules of the model appear by their names without the layer's number ("layers.attention"), so that the table adds up
the layers. The phases of a step appear as train_step names them. The backward has no modules; the trace shows
autograd's functions.
"""

from __future__ import annotations

import logging
import re
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from megatron.optimus.config.schema import LoggingConfig
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.files import write_atomically
from megatron.optimus.training.timing import StepClock

logger = logging.getLogger("optimus")

FOLDER = "profile"
PART = "part: "  # prefix of the ranges that Optimus marks
_NUM_ROWS = 40  # of the table of operations
_MODULES = re.compile(r"(embedding|layers\.\d+\.\w+|layers\.\d+\.moe\.\w+|final_norm|lm_head)$")


class StepProfiler:
    """Profiles the steps ``profile_step_start`` to ``profile_step_end`` of this process on the ranks asked for.

    A context manager around the training loop; local to each rank. A profile that cannot be written is logged as an
    error; to raise it would end this rank alone, and all others would wait.
    """

    def __init__(
        self,
        options: LoggingConfig,
        model: nn.Module,
        device: torch.device,
        clock: StepClock,
        *,
        rank: int,
        first_step: int,
    ) -> None:
        """``clock``: pauses while the profiler starts and writes, which takes seconds. ``first_step``: optimizer steps
        that were done before this process."""
        self._first, self._last = first_step + options.profile_step_start, first_step + options.profile_step_end
        self._is_on = options.profile and rank in options.profile_ranks
        self._folder, self._rank = Path(options.run_dir) / FOLDER, rank
        self._model, self._device, self._clock, self._handles = model, device, clock, list[Any]()
        self._profile: Any = None
        self._begin = max(first_step + 1, self._first - 1)  # one step early, to warm up; its figures are dropped

    def before(self, step: int) -> None:
        """Call before step number ``step`` (from 1) is queued; steps may be skipped."""
        if not self._is_on or self._profile is not None or not self._begin <= step <= self._last:
            return
        warmup, active = max(0, self._first - step), self._last - max(self._first, step) + 1
        with self._clock.pause(recurs=False):
            self._handles = _mark_modules(self._model)
            self._profile = profile(
                activities=activities(self._device),
                schedule=schedule(wait=0, warmup=warmup, active=active, repeat=1),
                on_trace_ready=self._write,
                acc_events=True,  # of the one window there is; without it torch warns that others would be lost
            )
            self._profile.start()

    def after(self, step: int) -> None:
        """Call after step number ``step`` has been queued; at the window's ends this waits for the device."""
        if self._profile is None:
            return
        is_last = step >= self._last
        is_edge = step + 1 == self._first or is_last
        with self._clock.pause(recurs=False) if is_edge else nullcontext():
            if is_edge:
                devices.synchronize(self._device)
            self._profile.step()
            if is_last:
                self._stop()

    def _stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._profile.stop()
        self._profile, self._is_on = None, False

    def _write(self, finished: Any) -> None:
        stem = f"steps-{self._first}-{self._last}-rank-{self._rank}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            trace = self._folder / f"{stem}.trace.json.gz"
            trace.unlink(missing_ok=True)  # torch would write through a link
            finished.export_chrome_trace(str(trace))
            table = _table(finished, self._last - self._first + 1)
            write_atomically(self._folder / f"{stem}.txt", table, sync=False)
            logger.info("profile of steps %d to %d: %s", self._first, self._last, self._folder / stem)
        except (OSError, RuntimeError) as error:
            logger.error("the profile cannot be written (%s); training goes on without it", error)

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops a profile that the end of the run has cut short, and drops it."""
        if self._profile is not None:
            self._profile.on_trace_ready = None
            self._stop()
            logger.warning("the run ended before step %d: no profile was written", self._last)


def activities(device: torch.device) -> list[ProfilerActivity]:
    """What torch.profiler records for a run on ``device``: the host, and the device's kernels."""
    own = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}.get(device.type)
    return [ProfilerActivity.CPU] + ([] if own is None else [own])


def _mark_modules(model: nn.Module) -> list[Any]:
    """Marks the forward of the model's parts as ranges of the profile, until the returned handles are removed."""
    handles: list[Any] = []
    for name, module in model.named_modules():
        if not _MODULES.search(name):
            continue
        label, open_ranges = PART + re.sub(r"layers\.\d+", "layers", name), list[Any]()

        def enter(_module: nn.Module, _args: Any, label: str = label, ranges: list[Any] = open_ranges) -> None:
            ranges.append(record_function(label))
            ranges[-1].__enter__()

        def leave(_module: nn.Module, _args: Any, _out: Any, ranges: list[Any] = open_ranges) -> None:
            ranges.pop().__exit__(None, None, None)

        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    return handles


def _table(finished: Any, num_steps: int) -> str:
    """Parts and phases, then the operations that took most; milliseconds a step, of host and device."""
    averages = list(finished.key_averages())

    def row(event: Any, name: str, host_us: float, device_us: float) -> str:
        host, device = (us / num_steps / 1e3 for us in (host_us, device_us))
        return f"{host:12.3f} {device:12.3f} {event.count / num_steps:9.1f}  {name}"

    title = f"{'host ms':>12} {'device ms':>12} {'calls':>9}  "
    parts = [event for event in averages if event.key.startswith(PART) and event.cpu_time_total > 0]
    parts.sort(key=lambda event: -event.cpu_time_total)
    lines = [f"a step, mean over {num_steps}; with what it calls (forward only for parts of the model)", title + "part"]
    lines += [row(e, e.key.removeprefix(PART), e.cpu_time_total, e.device_time_total) for e in parts]
    others = [event for event in averages if not event.key.startswith((PART, "ProfilerStep"))]
    others.sort(key=lambda event: (-event.self_device_time_total, -event.self_cpu_time_total))
    lines += ["", "without what it calls", title + "operation or kernel"]
    lines += [row(e, e.key, e.self_cpu_time_total, e.self_device_time_total) for e in others[:_NUM_ROWS]]
    return "\n".join(lines) + "\n"
