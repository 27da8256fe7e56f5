"""Makes of a run's steps curves that are small enough for a page, and says where the run's time went."""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.optimus.report.read import ExpertRow, MetricsTail

MOST_POINTS = 2000  # of a curve: more than a wide screen has pixels for
_MOST_MARKS = 200
_MOST_CELLS, _MOST_COLUMNS = 400_000, 120  # of the heat maps of experts

# Keys that are no curve of their own: axes, or parts of the accounting of time.
_NO_CURVE = {"step", "consumed_tokens", "wall_time", "nonfinite", "skipped", "dropped_tokens", "pause_s"}
_NO_CURVE |= {"save_stall_s", "save_drain_s", "lost_steps", "lost_s", "data_wait_s"}


def flops_per_token(metrics: MetricsTail) -> float | None:
    """Model FLOPs of a token, forward and backward; None where the run's lines do not say it."""
    rate, speed = metrics.column("tflops_per_device"), metrics.column("tokens_per_second_per_device")
    is_known = (rate > 0) & (speed > 0)
    return float(np.median(rate[is_known] / speed[is_known])) * 1e12 if is_known.any() else None


def axes(metrics: MetricsTail) -> dict[str, np.ndarray]:
    """The x axes of curves: step, tokens and, where they are known, FLOPs and hours of steps and pauses."""
    found = {"step": metrics.steps.astype(np.float64)}
    tokens = metrics.column("consumed_tokens")
    if np.isfinite(tokens).all():
        found["tokens"] = tokens
        if (flops := flops_per_token(metrics)) is not None:
            found["flops"] = tokens * flops
    seconds = np.nan_to_num(metrics.column("step_time_s")) + np.nan_to_num(metrics.column("pause_s"))
    if seconds.any():
        found["hours"] = np.cumsum(seconds) / 3600
    return found


def curves(metrics: MetricsTail) -> dict[str, Any]:
    """The curves of a run as JSON types.

    A long run's steps are put together in MOST_POINTS groups of neighbours. A curve has each group's mean, and with
    them its lowest and highest value, so that no spike is lost. A key of few steps, such as a validation loss, keeps
    each of its values, up to MOST_POINTS.

    Returns:
        ``axes``: by name, the value at the end of each group. ``lines``: by key, ``mean`` and, where a group has
        several steps, ``low`` and ``high``; None where no step has a number. ``points``: by key, ``value`` and the
        axes at each.
    """
    count = len(metrics.steps)
    if count == 0:
        return {"axes": {}, "lines": {}, "points": {}}
    at = axes(metrics)
    starts = np.unique(np.linspace(0, count, min(count, MOST_POINTS), endpoint=False).astype(np.int64))
    ends = np.append(starts[1:], count) - 1
    lines, points = {}, {}
    columns = {key: values for key, values in metrics.columns.items() if _is_curve(key)}
    columns["data_wait_share"] = _share(metrics.column("data_wait_s"), metrics.column("step_time_s"))
    for key, values in columns.items():
        has = np.isfinite(values)
        if not has.any():
            continue
        if 2 * has.sum() <= count or key.startswith(("valid_loss", "task/")):
            where = np.flatnonzero(has)
            where = where[np.unique(np.linspace(0, len(where) - 1, min(len(where), MOST_POINTS)).astype(np.int64))]
            points[key] = {"value": rounded(values[where])} | {name: rounded(x[where]) for name, x in at.items()}
        else:
            lines[key] = _line(values, has, starts)
    return {"axes": {name: rounded(x[ends], 9) for name, x in at.items()}, "lines": lines, "points": points}


def _is_curve(key: str) -> bool:
    return key not in _NO_CURVE and not key.startswith(("startup_s/", "rollback/"))


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.full(len(part), math.nan), where=whole > 0)


def _line(values: np.ndarray, has: np.ndarray, starts: np.ndarray) -> dict[str, list[float | None]]:
    sums, counts = np.add.reduceat(np.where(has, values, 0.0), starts), np.add.reduceat(has.astype(np.float64), starts)
    line = {"mean": rounded(_share(sums, counts))}
    if len(starts) < len(values):
        line["low"] = rounded(np.fmin.reduceat(values, starts))
        line["high"] = rounded(np.fmax.reduceat(values, starts))
    return line


def rounded(values: np.ndarray, digits: int = 5) -> list[float | None]:
    """The values with some significant digits, as short JSON; None for what is no number."""
    return [_short(value, digits) for value in values.tolist()]


def _short(value: float, digits: int) -> float | None:
    if not math.isfinite(value):
        return None
    value = float(f"{value:.{digits}g}")
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def marks(metrics: MetricsTail) -> list[dict[str, Any]]:
    """Steps at which something happened: starts of a process, updates left out, numbers that were not finite."""
    at = axes(metrics)
    kinds = {
        "restart": np.isfinite(metrics.column("startup_s/total")),
        "skipped": metrics.column("skipped") == 1,
        "nonfinite": metrics.column("nonfinite") == 1,
        "rollback": np.isfinite(metrics.column("rollback/to_step")),
    }
    if len(metrics.steps):
        kinds["restart"][0] = False
    found = []
    for kind, is_there in kinds.items():
        where = np.flatnonzero(is_there)[:_MOST_MARKS]
        found += [{"kind": kind} | {name: float(x[index]) for name, x in at.items()} for index in where]
    return found


def rollbacks(metrics: MetricsTail) -> list[dict[str, float]]:
    """What each rollback of the run was and why: the numbers of the first line after it, by name."""
    columns = {key.removeprefix("rollback/"): values for key, values in metrics.columns.items() if "rollback/" in key}
    where = np.flatnonzero(np.isfinite(metrics.column("rollback/to_step")))[:_MOST_MARKS]
    return [
        {name: float(values[i]) for name, values in columns.items() if math.isfinite(values[i])} for i in where.tolist()
    ]


def time_spent(metrics: MetricsTail) -> dict[str, Any] | None:
    """Where the wall-clock time of a run went, from the start of its first process to its last line.

    The line of a process's first step says how long the start took, and how long steps had taken that an earlier
    process had done after its last checkpoint (``lost_s``). The rest of the time between the lines of two processes
    was waiting: for the failure to be noticed, a queue, or somebody.

    Returns:
        ``seconds`` by what they went to, ``ettr`` (effective training time ratio: steps / all), and ``starts``, a
        mapping for each process; None for a run whose lines have no times of day (before version 0.6).
    """
    wall, step_s = metrics.column("wall_time"), metrics.column("step_time_s")
    if not len(wall) or not np.isfinite(wall[[0, -1]]).all():
        return None
    pause_s, total_s = np.nan_to_num(metrics.column("pause_s")), metrics.column("startup_s/total")
    first_s, lost_s = np.nan_to_num(metrics.column("startup_s/first_step")), np.nan_to_num(metrics.column("lost_s"))
    lost_steps, steps_s = np.nan_to_num(metrics.column("lost_steps")), np.nan_to_num(step_s)
    waits_s = np.minimum(np.nan_to_num(metrics.column("data_wait_s")), steps_s)
    starts = []
    for index in sorted({0, *np.flatnonzero(np.isfinite(total_s)).tolist()}):
        start_s = max(0.0, float(np.nan_to_num(total_s[index]) - first_s[index]))
        one = {"step": int(metrics.steps[index]), "time": float(wall[index]), "start_s": start_s, "lost_s": 0.0}
        one |= {"lost_steps": 0, "stopped_s": 0.0}
        if index:
            between = float(wall[index] - wall[index - 1] - steps_s[index])
            lost = min(float(lost_s[index]), max(0.0, between - start_s))
            one |= {"lost_s": lost, "lost_steps": int(lost_steps[index])}
            one["stopped_s"] = max(0.0, between - start_s - lost) if math.isfinite(between) else 0.0
        starts.append(one)
    begin = float(wall[0]) - starts[0]["start_s"] - float(steps_s[0])
    seconds = {
        "steps": float((steps_s - waits_s).sum()),
        "waiting for data": float(waits_s.sum()),
        "validation, checkpoints, checks": float(pause_s.sum()),
        "starts": sum(one["start_s"] for one in starts),
        "lost work": sum(one["lost_s"] for one in starts) + float(lost_s[~np.isfinite(total_s)].sum()),
        "stopped": sum(one["stopped_s"] for one in starts),
    }
    whole = max(float(wall[-1]) - begin, sum(seconds.values()))
    seconds["other"] = whole - sum(seconds.values())
    ettr = (seconds["steps"] + seconds["waiting for data"]) / whole if whole > 0 else None
    return {"seconds": seconds, "whole_s": whole, "begin": begin, "ettr": ettr, "starts": starts}


def num_devices(metrics: MetricsTail) -> int | None:
    """Devices of the last steps, from their tokens and speed."""
    tokens, speed = np.diff(metrics.column("consumed_tokens")), metrics.column("tokens_per_second_per_device")[1:]
    devices = _share(tokens, speed * metrics.column("step_time_s")[1:])[-50:]
    devices = devices[np.isfinite(devices)]
    return max(1, round(float(np.median(devices)))) if len(devices) else None


def expert_maps(rows: Sequence[ExpertRow]) -> dict[str, Any] | None:
    """The load of experts over time: for each layer the busiest one, and every expert, as multiples of the mean.

    Returns:
        ``steps`` (the last one of each column of the maps), ``busiest`` [layer][column], ``load`` [layer] with a text
        of one byte (base64) for each [expert][column], on a logarithmic scale (``_as_bytes``); None without rows.
    """
    if not rows:
        return None
    num_layers, num_experts = rows[0].slots_LE.shape
    most = max(1, min(_MOST_COLUMNS, _MOST_CELLS // (num_layers * num_experts), len(rows)))
    edges = np.unique(np.linspace(0, len(rows), most + 1).astype(np.int64))
    groups = [rows[a:b] for a, b in itertools.pairwise(edges)]
    slots_CLE = np.stack([np.sum([row.slots_LE for row in group], axis=0) for group in groups])
    load_CLE = slots_CLE / np.maximum(slots_CLE.mean(axis=2, keepdims=True), 1e-30)
    return {
        "first_step": rows[0].first_step,
        "steps": [group[-1].step for group in groups],
        "num_experts": num_experts,
        "busiest": [rounded(load_CLE[:, layer].max(axis=1), 4) for layer in range(num_layers)],
        "load": [_as_bytes(load_CLE[:, layer].T) for layer in range(num_layers)],
    }


def _as_bytes(load: np.ndarray) -> str:
    """One byte a value, in base64: 0 is no load, 128 the mean, and 24 more are a factor of two."""
    steps = 128 + 24 * np.log2(np.maximum(load, 1e-9))
    quantized = np.where(load > 0, np.clip(np.round(steps), 1, 255), 0).astype(np.uint8)
    return base64.b64encode(quantized.tobytes()).decode()
