"""A run under a launcher that is a process of its own, watched by its files."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path


class LaunchedRun:
    """The launcher's process, where its run writes, and the file with its output.

    Args:
        run_dir: of the run.
        log: output and errors of the launcher.
    """

    process: subprocess.Popen[bytes]

    def __init__(self, run_dir: Path, log: Path) -> None:
        self.run_dir, self.log = run_dir, log

    def steps(self) -> list[dict[str, float]]:
        """The whole lines of metrics.jsonl so far."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_until(self, condition: Callable[[], bool], seconds: float = 90.0) -> None:
        """Waits; fails with the end of the log where the time is over."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.005)
