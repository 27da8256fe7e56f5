"""Makes one HTML page of one or more runs, which needs no network and no other file."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from megatron.optimus.config.schema import RunConfig
from megatron.optimus.config.serialize import from_dict, to_dict
from megatron.optimus.models.parameters import count_parameters
from megatron.optimus.platform.files import naming_write_errors, write_atomically
from megatron.optimus.platform.log import printable
from megatron.optimus.report import curves
from megatron.optimus.report.read import METRICS, RunRecord, read_run
from megatron.optimus.version import __version__

FILE_NAME = "report.html"
_MOST_SAMPLES, _LONGEST_SAMPLE = 400, 4000
_LARGEST_AT_THE_END = 64 << 20  # bytes of metrics.jsonl: about 100,000 steps, and one to two seconds


def write_report(folders: Sequence[Path], out: Path) -> list[str]:
    """Writes the page of the runs in ``folders``.

    Returns:
        What could not be read, a line each.

    Raises:
        ConfigError: a folder is not that of a run, or the page cannot be written.
    """
    runs = [read_run(folder) for folder in folders]
    with naming_write_errors(out, "name a file in a folder that exists"):
        write_atomically(out, page(runs), sync=False)
    return [f"{run.folder}: {note}" for run in runs for note in run.notes]


def write_report_of_run(folder: Path) -> Path | None:
    """Writes ``report.html`` into the folder of a run that ends; None where its metrics are so large that it would
    hold up the end. Raises what ``write_report`` does."""
    if (folder / METRICS).stat().st_size > _LARGEST_AT_THE_END:
        return None
    write_report([folder], folder / FILE_NAME)
    return folder / FILE_NAME


def page(runs: Sequence[RunRecord]) -> str:
    """The page as text; to be written as UTF-8."""
    data: dict[str, Any] = {
        "made": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "version": __version__,
        "defaults": _flat_config(to_dict(RunConfig())),
        "runs": [describe(run, name) for run, name in zip(runs, _names(runs), strict=True)],
    }
    # "<" alone could end the script element: what is in a run's files may hold any text.
    as_json = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    title = html.escape(printable("Training report: " + ", ".join(run["name"] for run in data["runs"])))
    parts = {"TITLE": title, "CSS": _file("page.css"), "JS": _file("page.js"), "DATA": as_json}
    text = _file("page.html")
    before, *rest = text.split("@@")  # alternately a name and text: no part is searched for names of others
    return before + "".join(parts[name] + after for name, after in zip(rest[::2], rest[1::2], strict=True))


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _names(runs: Sequence[RunRecord]) -> list[str]:
    """A short name for each run, with as much of its path as tells it from the others."""
    names = [run.name for run in runs]
    for depth in range(2, 8):
        twice = {name for name in names if names.count(name) > 1}
        if not twice:
            return names
        for index, run in enumerate(runs):
            if names[index] in twice:
                names[index] = "/".join(run.folder.absolute().parts[-depth:])
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]


def describe(run: RunRecord, name: str) -> dict[str, Any]:
    """Everything that the page shows of a run, as JSON types."""
    return {
        "name": name,
        "folder": str(run.folder),  # as it was named: the page may leave this machine
        "notes": run.notes,
        "facts": facts(run),
        "curves": curves.curves(run.metrics),
        "marks": curves.marks(run.metrics),
        "time": curves.time_spent(run.metrics),
        "saves": _saves(run),
        "experts": curves.expert_maps(run.experts),
        "checkpoints": [vars(checkpoint) for checkpoint in run.checkpoints],
        "config": _flat_config(run.config),
        "samples": _samples(run),
        "evaluation": {key: value for key, value in run.evaluation.items() if _is_plain(value)},
        "profile": run.profile,
    }


def facts(run: RunRecord) -> dict[str, Any]:
    """The numbers that sum a run up; None for what is not known."""
    metrics, training = run.metrics, run.config.get("training", {})
    tokens, speed = metrics.column("consumed_tokens"), metrics.column("tokens_per_second_per_device")
    devices, per_token = curves.num_devices(metrics), curves.flops_per_token(metrics)
    seconds = np.nan_to_num(metrics.column("step_time_s")) + np.nan_to_num(metrics.column("pause_s"))
    found: dict[str, Any] = {
        "step": int(metrics.steps[-1]) if len(metrics.steps) else 0,
        "planned_steps": None if training.get("train_samples") else _whole(training.get("train_iters")),
        "tokens": _last(tokens),
        "flops": _times(_last(tokens), per_token),
        "training_s": float(seconds.sum()),
        "loss": _last(metrics.column("loss")),
        "valid_loss": _last(metrics.column("valid_loss")),
        "best_valid_loss": _finite(np.nanmin(metrics.column("valid_loss"), initial=math.inf)),
        "tokens_per_second": _times(_median(speed), devices),
        "step_time_s": _median(metrics.column("step_time_s")),
        "mfu": _median(metrics.column("mfu")),
        "tflops_per_device": _median(metrics.column("tflops_per_device")),
        "peak_memory_gib": _last(metrics.column("peak_memory_gib")),
        "devices": devices,
        "skipped": int((metrics.column("skipped") == 1).sum()),
        "nonfinite": int((metrics.column("nonfinite") == 1).sum()),
        "rollbacks": curves.rollbacks(metrics),
        "last_wall_time": _last(metrics.column("wall_time")),
    }
    return found | _parameters(run)


def _parameters(run: RunRecord) -> dict[str, int]:
    try:
        counts = count_parameters(from_dict({"model": run.config["model"]}).model)
    except Exception:  # no configuration, or one of another version: the page shows the rest
        return {}
    return {"parameters": counts.total, "active_parameters": counts.active}


def _saves(run: RunRecord) -> dict[str, Any]:
    drains = run.metrics.column("save_drain_s")
    drains = drains[np.isfinite(drains)]
    stalls = np.nan_to_num(run.metrics.column("save_stall_s"))
    return {"count": len(drains), "drain_s": _median(drains), "stall_s": float(stalls.sum())}


def _samples(run: RunRecord) -> list[dict[str, Any]]:
    """The texts that the page shows: those of first and last steps, and evenly spaced ones between."""
    kept = run.samples
    if len(kept) > _MOST_SAMPLES:
        steps = sorted({one["step"] for one in kept})
        count = max(2, len(steps) * _MOST_SAMPLES // len(kept))
        shown = {steps[index] for index in np.linspace(0, len(steps) - 1, count).astype(int)}
        kept = [one for one in kept if one["step"] in shown][:_MOST_SAMPLES]
    return [
        {key: str(one.get(key, ""))[:_LONGEST_SAMPLE] for key in ("prompt", "text")} | {"step": one["step"]}
        for one in kept
    ]


def _flat_config(config: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The options as "section.option" and text, as YAML's flow style would write them."""
    return {
        f"{section}.{name}": value if isinstance(value, str) else json.dumps(value, default=str)
        for section, options in config.items()
        for name, value in options.items()
    }


def _is_plain(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, int | float) for one in value.values())


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _last(values: np.ndarray) -> float | None:
    values = values[np.isfinite(values)]
    return float(values[-1]) if len(values) else None


def _median(values: np.ndarray) -> float | None:
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None


def _times(value: float | None, factor: float | None) -> float | None:
    return None if value is None or factor is None else value * factor


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
