"""The server's numbers in the text format of Prometheus."""

from __future__ import annotations

import threading
from collections import Counter

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class _Histogram:
    """Cumulative counts by upper limits in seconds."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[next((i for i, limit in enumerate(_SECONDS) if seconds <= limit), len(_SECONDS))] += 1
        self._sum += seconds

    def lines(self) -> list[str]:
        lines, count = _head(self._name, self._text, "histogram"), 0
        for limit, own in zip([*map(str, _SECONDS), "+Inf"], self._counts, strict=True):
            count += own
            lines.append(f'{self._name}_bucket{{le="{limit}"}} {count}')
        return [*lines, f"{self._name}_sum {self._sum:.6f}", f"{self._name}_count {count}"]


class Metrics:
    """Counters and histograms of the server; all methods are thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._finished: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        first = _Histogram("optimus_time_to_first_token_seconds", "From the arrival of a prompt to its first token.")
        between = _Histogram("optimus_time_per_output_token_seconds", "Between two tokens of a completion.")
        whole = _Histogram("optimus_request_seconds", "From the arrival of a prompt to the end of its completion.")
        step = _Histogram("optimus_step_seconds", "Of one step of the whole batch.")
        self._first, self._between, self._whole, self._step = first, between, whole, step

    def answered(self, endpoint: str, status: int) -> None:
        """Counts a response by endpoint and status."""
        with self._lock:
            self._requests[endpoint, status] += 1

    def tokens(self, prompt: int, generated: int) -> None:
        """Counts tokens of prompts that were computed, and tokens that were generated."""
        with self._lock:
            self._counts["prompt"] += prompt
            self._counts["generated"] += generated

    def token_after(self, seconds: float, *, is_first: bool) -> None:
        """Adds the seconds until a token: from the arrival for the first one, else from the token before."""
        with self._lock:
            (self._first if is_first else self._between).add(seconds)

    def step(self, seconds: float, tokens: int) -> None:
        """Adds the seconds of a step and the number of tokens that it computed."""
        with self._lock:
            self._step.add(seconds)
            self._counts["step"] += tokens

    def finished(self, reason: str, seconds: float) -> None:
        """Counts a completion that has ended, by the reason."""
        with self._lock:
            self._finished[reason] += 1
            self._whole.add(seconds)

    def text(self, running: int, waiting: int, pages: int, all_pages: int) -> str:
        """Returns all metrics in Prometheus' format; the arguments are the gauges of this moment."""
        with self._lock:
            lines = _head("optimus_http_requests_total", "Answers by endpoint and status.", "counter")
            for (endpoint, status), count in sorted(self._requests.items()):
                lines.append(f'optimus_http_requests_total{{endpoint="{endpoint}",status="{status}"}} {count}')
            lines += _head("optimus_completions_total", "Completions that have ended, by reason.", "counter")
            lines += [f'optimus_completions_total{{reason="{name}"}} {n}' for name, n in sorted(self._finished.items())]
            for name, text in (
                ("prompt", "Tokens of prompts that were computed."),
                ("generated", "Tokens that were generated."),
                ("step", "Tokens that steps computed."),
            ):
                full = f"optimus_{name}_tokens_total"
                lines += [*_head(full, text, "counter"), f"{full} {self._counts[name]}"]
            for name, text, value in (
                ("requests_running", "Prompts in the batch.", running),
                ("requests_waiting", "Prompts that wait.", waiting),
                ("cache_pages_used", "Pages of keys and values in use.", pages),
                ("cache_pages", "Pages of keys and values in all.", all_pages),
            ):
                lines += [*_head(f"optimus_{name}", text, "gauge"), f"optimus_{name} {value}"]
            for histogram in (self._first, self._between, self._whole, self._step):
                lines += histogram.lines()
        return "\n".join(lines) + "\n"


def _head(name: str, text: str, kind: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
