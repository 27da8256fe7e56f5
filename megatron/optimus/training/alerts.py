"""Sends the alerts of a run: what somebody should look at while the run goes on.

Health (health.py), the check of devices, the load of experts and the watch for stalls feed it. Rank 0 alone sends: a
line of the log and of ``<run>/alerts.jsonl``, every tracker, and the command of ``alert_command``, which gets the alert
as JSON on its standard input. Nothing of it delays a step, and no error of it ends the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megatron.optimus.context import RunContext
from megatron.optimus.platform.files import open_regular
from megatron.optimus.training.background import Background

logger = logging.getLogger("optimus")

FILE_NAME = "alerts.jsonl"
# Kinds, besides NAME_spike of loss, grad_norm and z_loss. The file and the command have these names.
NOT_FINITE, UNHEALTHY, ROLLBACK = "not_finite", "unhealthy", "rollback"
STALL, SLOW_RANK, EXPERT_COLLAPSE = "stall", "slow_rank", "expert_collapse"
SAVE_FAILED, UPLOAD_FAILED = "save_failed", "upload_failed"

MOST_COMMANDS, PER_SECONDS = 10, 60.0  # runs of the command
_COMMAND_SECONDS = 30.0
_QUIET_SECONDS = 60.0  # an alert of a kind is followed by another of that kind after so long at the earliest
_CLOSING_SECONDS = 10.0

# Experts have collapsed where a layer uses hardly more than the fewest that there can be, top-k, for a while.
_COLLAPSED, _COLLAPSED_STEPS = 0.1, 20


@dataclass(frozen=True)
class Alert:
    """One alert: its kind, the step and a line of text."""

    kind: str
    step: int  # steps done
    text: str  # one line
    run_dir: str
    host: str = field(default_factory=socket.gethostname)
    time: float = field(default_factory=time.time)  # seconds since 1970 (UTC)

    def to_json(self) -> str:
        """The fields as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))


class Alerts:
    """Sends the alerts of a run from rank 0; does nothing on other ranks and without a folder."""

    def __init__(self, run_dir: str | None, command: str | None = None, stall_seconds: float = 0.0) -> None:
        """Makes the sender; its threads start with the first alert and the first step.

        Args:
            run_dir: folder of the run; None: nothing is sent.
            command: a line for the shell; None: there is none.
            stall_seconds: without a step for so long, the run has stalled; 0: that is not watched.
        """
        self._run_dir, self._command, self._stall_seconds = run_dir, command, stall_seconds
        self._sinks: list[Callable[[Alert], None]] = []
        self._last: dict[str, float] = {}  # by kind, when it was sent
        self._starts: deque[float] = deque()  # of the command
        self._thread: Background | None = None
        self._lock = threading.Lock()  # the watch for stalls sends from its own thread
        self._step, self._stepped_at, self._is_stalled = 0, math.inf, False
        self._ends = threading.Event()
        self._watch: threading.Thread | None = None
        self._collapsed: dict[int, int] = {}  # steps in a row, by layer

    def add_sink(self, sink: Callable[[Alert], None]) -> None:
        """Adds a receiver of alerts, such as a tracker. ``sink`` is called in the training loop and must not wait."""
        self._sinks.append(sink)

    def send(self, kind: str, step: int, text: str, *, is_logged: bool = False) -> None:
        """Sends an alert, unless one of its kind was sent less than a minute ago.

        Args:
            kind: one of this module's names.
            step: steps done.
            text: one line.
            is_logged: whether the log has it already.
        """
        if self._run_dir is None:
            return
        with self._lock:
            now = time.monotonic()
            if now - self._last.get(kind, -math.inf) < _QUIET_SECONDS:
                return
            self._last[kind] = now
            alert = Alert(kind, step, text, self._run_dir)
            if not is_logged:
                logger.warning("step %d: %s: %s", step, kind.replace("_", " "), text)
            self._thread = self._thread or Background("alerts")
            self._thread.put(lambda: self._write(alert))
            if self._command is not None:
                self._thread.put(partial(self._run, self._command, alert))
            for sink in self._sinks:
                sink(alert)

    def _write(self, alert: Alert) -> None:
        assert self._run_dir is not None
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with open(open_regular(Path(self._run_dir) / FILE_NAME, flags), "a", encoding="utf-8") as file:
            file.write(alert.to_json() + "\n")

    def _run(self, command: str, alert: Alert) -> None:
        """Runs the command, and kills it with all it has started when its time is over."""
        now = time.monotonic()
        while self._starts and now - self._starts[0] > PER_SECONDS:
            self._starts.popleft()
        if len(self._starts) >= MOST_COMMANDS:
            logger.warning("alert_command has run %d times in a minute: not for %s", MOST_COMMANDS, alert.kind)
            return
        self._starts.append(now)
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:  # a pipe can be held open for ever
            given.write(alert.to_json().encode() + b"\n")
            given.seek(0)
            outputs = {"stdout": subprocess.DEVNULL, "stderr": said}
            words = ["/bin/sh", "-c", command]  # the user's own line, from the options of this run
            process = subprocess.Popen(words, stdin=given, start_new_session=True, **outputs)  # type: ignore[call-overload]
            try:
                code = process.wait(_COMMAND_SECONDS)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise RuntimeError(f"alert_command was killed after {_COMMAND_SECONDS:g} s") from None
            if code != 0:
                said.seek(0)
                last = (said.read(4096).decode(errors="replace").strip().splitlines() or ["no message"])[-1]
                raise RuntimeError(f"alert_command ended with exit code {code}: {last}")

    def step_done(self, step: int, expert_load_LE: Sequence[Sequence[int]] = (), topk: int = 0) -> None:
        """Records a finished step: ends a stall, and alerts where a layer's router uses few of its experts.

        Args:
            step: steps done.
            expert_load_LE: slots of each expert in each MoE layer.
            topk: experts of a token.
        """
        if self._run_dir is None:
            return
        if self._is_stalled:
            logger.warning(
                "step %d: the run goes on after a stall of %.0f s", step, time.monotonic() - self._stepped_at
            )
        self._step, self._stepped_at, self._is_stalled = step, time.monotonic(), False
        if self._watch is None and self._stall_seconds > 0:
            self._watch = threading.Thread(target=self._watch_for_stalls, name="stalls", daemon=True)
            self._watch.start()
        for layer, load_E in enumerate(expert_load_LE):
            share = used_share(load_E, topk)
            self._collapsed[layer] = self._collapsed.get(layer, 0) + 1 if share < _COLLAPSED else 0
            if self._collapsed[layer] == _COLLAPSED_STEPS:
                busiest = max(range(len(load_E)), key=load_E.__getitem__)
                self.send(
                    *(EXPERT_COLLAPSE, step),
                    f"the router of MoE layer {layer + 1} uses few of its {len(load_E)} experts for {_COLLAPSED_STEPS} "
                    f"steps; expert {busiest} has {load_E[busiest] / max(sum(load_E), 1):.0%} of the slots",
                )

    def _watch_for_stalls(self) -> None:
        while not self._ends.wait(min(10.0, self._stall_seconds / 4)):
            waited = time.monotonic() - self._stepped_at
            if waited > self._stall_seconds and not self._is_stalled:
                self._is_stalled = True
                self.send(STALL, self._step, f"no step has ended for {waited:.0f} s")

    def close(self) -> None:
        """Ends; waits for alerts that are under way, for seconds at most."""
        self._ends.set()
        if self._thread is not None:
            self._thread.close(_CLOSING_SECONDS)
            self._thread = None


def alerts_of(run: RunContext) -> Alerts:
    """The alerts of a run, as its options say; those of ranks other than 0 do nothing."""
    options = run.config.logging
    folder = options.run_dir if run.mesh.rank == 0 else None
    return Alerts(folder, options.alert_command, 60 * options.alert_stall_minutes)


def used_share(load_E: Sequence[int], topk: int) -> float:
    """How many experts a layer uses, from 0 (the fewest that top-k allows) to 1 (all equally).

    The number of experts in use is the exponential of the entropy of their load.
    """
    total, num_experts = sum(load_E), len(load_E)
    if not total or num_experts <= topk:
        return 1.0
    entropy = -sum(slots / total * math.log(slots / total) for slots in load_E if slots)
    return max(0.0, math.exp(entropy) - topk) / (num_experts - topk)


NO_ALERTS = Alerts(None)
