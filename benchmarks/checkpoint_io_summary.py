"""The figures of checkpoint_io.py: medians over rounds of the ratios to the disk's own speed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any


def summary(rounds: list[dict[str, list[float]]], num_bytes: int, plain_bytes: int) -> dict[str, Any]:
    """Figures for which there are measurements; of one round, the mean of a part that it has twice."""
    result: dict[str, Any] = {"bytes": num_bytes, "plain_bytes": plain_bytes}
    whole = num_bytes / plain_bytes  # a plain access of as many bytes would take so many times as long

    def put(name: str, value: Callable[..., float], *keys: str) -> None:
        values = [value(*(statistics.mean(r[key]) for key in keys)) for r in rounds if all(key in r for key in keys)]
        if values:
            result[name] = round(statistics.median(values), 4)

    def put_fastest(name: str, plain: str, ours: str) -> None:
        plains, own = ([value for r in rounds for value in r.get(key, [])] for key in (plain, ours))
        if plains and own:
            result[name] = round(whole * min(plains) / min(own), 4)

    put("write_over_disk", lambda disk, save: whole * disk / save, "disk_write_s", "save_s")
    put("drain_over_disk", lambda disk, drain: whole * disk / drain, "disk_write_s", "drain_s")
    put("load_over_disk", lambda disk, load: whole * disk / load, "disk_read_s", "load_s")
    put_fastest("write_over_disk_of_fastest", "disk_write_s", "save_s")
    put_fastest("load_over_disk_of_fastest", "disk_read_s", "load_s")
    put("load_over_memory_read", lambda memory, load: whole * memory / load, "memory_read_s", "load_s")
    for name in (f"disk_{what}{way}" for what in ("write", "read") for way in ("", "_buffered", "_direct")):
        put(f"{name}_gb_s", lambda seconds: plain_bytes / seconds / 1e9, f"{name}_s")
    for name in ("save", "drain", "load"):
        put(f"{name}_gb_s", lambda seconds: num_bytes / seconds / 1e9, f"{name}_s")
    for key in ("stall_s", "copied_s", "drain_s", "read_beside_s", "read_alone_s"):
        put(key, lambda seconds: seconds, key)
    put("hash_wait_over_save", lambda wait, save: wait / save, "hash_wait_s", "save_s")
    put("hash_wait_over_drain", lambda wait, drain: wait / drain, "async_hash_wait_s", "drain_s")
    put("hash_work_over_save", lambda work, save: work / save, "hash_s", "save_s")
    put("step_ratio", lambda beside, alone: beside / alone, "step_beside_s", "step_alone_s")
    return result
