"""Autotuning: times the candidates of tiles.py on a device and picks the fastest. No operation calls it by itself.

For each problem the candidates are compiled side by side in threads, run once, compared with the default's result, and
timed in rotation on the device's own events. The default stays unless another is faster by more than what timings
scatter. What does not compile, asks for more than the device has, or gives another result is left out with its reason.

Bits: a result is a sum over the depth in fp32, cut into tiles of ``depth``; other sizes do not enter an element's sum.
``Entry.matches_default_bits`` says whether the winner gave the default's very bits on random data of that shape.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.optimus.ops.triton import grouped_gemm, permute, row_order, tile_cache
from megatron.optimus.ops.triton.candidates import Entry, Table, Tiles
from megatron.optimus.ops.triton.tiles import Problem, bucket, fitting, hardware, table

logger = logging.getLogger("optimus")
_GAIN = 0.02  # by how much a candidate must beat the default: medians of one kernel scatter by about a percent
_WARM_UP, _LEAST, _MOST, _SECONDS = 2, 5, 25, 0.03  # runs of a candidate, and what its timed ones may take
_FLUSHED = 256 * 2**20  # bytes, more than a cache holds
_COMPILE_TOKENS = 8  # sizes of rows are no part of what is compiled

# Microseconds of each of the functions on a device: the median of several runs.
Clock = Callable[[Sequence[Callable[[], object]], torch.device], list[float]]


class Work(NamedTuple):
    """Inputs of a problem, with everything that a candidate needs to run on them."""

    run: Callable[[Tiles], tuple[Tensor, ...]]  # the results
    reset: Callable[[], object]  # of inputs that ``run`` writes to
    num_used: int | None  # rows of the results that are defined; None: all


class TuningResult(NamedTuple):
    """The result of tuning one problem."""

    problem: Problem
    default: Tiles
    entry: Entry | None  # None: nothing ran, or there was no time
    microseconds: dict[Tiles, float]  # of the candidates that were timed
    left_out: dict[Tiles, str]  # the others, with the reason


def time_runs(runs: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """See ``Clock``. In rotation, each round beginning with another: a GPU slows down as it gets warm."""
    if device.type == "cpu":  # Triton's interpreter: times mean nothing, but a test may want some
        return [_seconds(run) * 1e6 for run in runs]
    module = torch.get_device_module(device)
    for run in runs:
        for _ in range(_WARM_UP):
            run()
    module.synchronize(device)
    once = _seconds(lambda: (runs[0](), module.synchronize(device)))
    rounds = max(_LEAST, min(_MOST, int(_SECONDS / once)))
    # Written before each run: empties the caches, and keeps the device busy until the host has launched what is timed.
    other = torch.empty(_FLUSHED, dtype=torch.uint8, device=device)
    spans: list[list[tuple[torch.Event, torch.Event]]] = [[] for _ in runs]
    for number in range(rounds):
        for place in range(len(runs)):
            candidate = (place + number) % len(runs)
            span = module.Event(enable_timing=True), module.Event(enable_timing=True)
            other.zero_()
            span[0].record()
            runs[candidate]()
            span[1].record()
            spans[candidate].append(span)
    module.synchronize(device)
    return [1e3 * statistics.median(begin.elapsed_time(end) for begin, end in own) for own in spans]


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def tune(
    problems: Iterable[Problem],
    device: torch.device,
    *,
    local_share: float = 1.0,
    exact_only: bool = False,
    seconds: float = float("inf"),
    clock: Clock = time_runs,
) -> list[TuningResult]:
    """Tunes problems one after the other; those not begun after ``seconds`` have no entry. Leaves the device's random
    numbers alone.

    ``local_share``: of the slots, those whose expert is on this device. ``exact_only``: only tiles that give the
    default's bits.
    """
    deadline = time.monotonic() + seconds
    outcomes = []
    for problem in dict.fromkeys(problems):
        default, *others = fitting(problem, hardware(device))
        if time.monotonic() > deadline:
            reason = f"not tried: tuning took longer than {seconds:.0f} s"
            outcomes.append(TuningResult(problem, default, None, {}, dict.fromkeys([default, *others], reason)))
            continue
        try:
            outcomes.append(_tune_one(problem, [default, *others], device, local_share, exact_only, clock))
        except torch.OutOfMemoryError as error:
            reason = f"out of memory: {_first_line(error)}"
            outcomes.append(TuningResult(problem, default, None, {}, dict.fromkeys([default, *others], reason)))
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()
    return outcomes


def _tune_one(
    problem: Problem, candidates: list[Tiles], device: torch.device, share: float, exact_only: bool, clock: Clock
) -> TuningResult:
    small = problem._replace(slots=bucket(_COMPILE_TOKENS * topk_of(problem)))
    left_out = _compile(make_work(small, device, 1.0), candidates, device)
    work = make_work(problem, device, share)
    good: dict[Tiles, bool] = {}  # whether the bits are the default's
    want: tuple[Tensor, ...] | None = None
    for tiles in candidates:
        if tiles in left_out:
            continue
        try:
            work.reset()
            got = tuple(result[: work.num_used].clone() for result in work.run(tiles))
        except Exception as error:  # whatever a compiler or a driver raises
            left_out[tiles] = f"{type(error).__name__}: {_first_line(error)}"
            continue
        if want is None:
            want, good[tiles] = got, True
            continue
        exact = all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        if not exact and (difference := _difference(got, want)):
            left_out[tiles] = difference
        elif not exact and exact_only:
            left_out[tiles] = "other bits than the default's"
        else:
            good[tiles] = exact
    if not good:
        return TuningResult(problem, candidates[0], None, {}, left_out)
    del want
    times = clock([lambda tiles=tiles: work.run(tiles) for tiles in good], device)  # type: ignore[misc]
    microseconds = dict(zip(good, times, strict=True))
    return TuningResult(problem, candidates[0], choose(microseconds, good), microseconds, left_out)


def choose(microseconds: dict[Tiles, float], matches_default_bits: dict[Tiles, bool]) -> Entry:
    """Chooses the fastest tiles; the default (the first) unless another is faster by more than timings scatter."""
    default = next(iter(microseconds))
    best = min(microseconds, key=lambda tiles: microseconds[tiles])
    if microseconds[best] > (1 - _GAIN) * microseconds[default]:
        best = default
    return Entry(best, round(microseconds[best], 2), round(microseconds[default], 2), matches_default_bits[best])


def _compile(work: Work, candidates: list[Tiles], device: torch.device) -> dict[Tiles, str]:
    """Compiles all candidates, several at once; those that failed, with the reason."""
    if device.type == "cpu":  # the interpreter compiles nothing, and is not made for threads
        return {}

    def attempt(tiles: Tiles) -> str | None:
        try:
            with torch.get_device_module(device).device(device):  # a thread begins with device 0
                work.run(tiles)
        except Exception as error:
            return f"{type(error).__name__}: {_first_line(error)}"
        return None

    first, *others = candidates
    reasons = [attempt(first)]  # alone, as the first launch of a process sets up what all share
    with ThreadPoolExecutor(max_workers=max(1, min(len(others), (os.cpu_count() or 1) // 2))) as pool:
        reasons += pool.map(attempt, others)
    torch.get_device_module(device).synchronize(device)
    return {tiles: reason for tiles, reason in zip(candidates, reasons, strict=True) if reason is not None}


def _difference(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> str | None:
    """How results differ by more than the rounding of two orders of summation; None where they do not."""
    for a, b in zip(got, want, strict=True):
        scale = float(b.abs().max()) if b.numel() else 0.0
        error = float((a.float() - b.float()).abs().max()) if b.numel() else 0.0
        # Each is rounded once to its dtype; a wrong tile is off by as much as the values are large.
        limit = (2 * torch.finfo(b.dtype).eps if b.dtype != torch.float32 else 1e-4) * scale
        if not error <= limit:
            return f"another result than the default's: off by {error:.3g}, at most {limit:.3g}"
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def topk_of(problem: Problem) -> int:
    """Slots of one token: K for the kernels that move rows; the others do not depend on it, so 1."""
    return problem.n if problem.kernel in ("spread_rows", "sum_rows") else 1


def make_work(problem: Problem, device: torch.device, local_share: float) -> Work:
    """Random inputs of a problem's shape, experts chosen evenly; its kernel on them."""
    data = _Data(problem, device, local_share)
    if problem.kernel == "up_swiglu" or problem.kernel.startswith("rows_times_weight"):
        return _product(problem, data)
    if problem.kernel.startswith("weight_gradient"):
        return _gradient(problem, data)
    return _rows(problem, data)


class _Data:
    """A row order of a problem, and random tensors in it."""

    def __init__(self, problem: Problem, device: torch.device, local_share: float) -> None:
        self.dtype, self.device, self.topk = problem.dtype, device, topk_of(problem)
        self.generator = torch.Generator(device).manual_seed(0)
        self.num_tokens = max(1, problem.slots // self.topk)
        shape = (self.num_tokens, self.topk)
        places = torch.rand(shape, device=device, generator=self.generator) / local_share * problem.experts
        indices = torch.where(places < problem.experts, places, -1.0).int().clamp_(max=problem.experts - 1)
        self.order = row_order.order_rows(indices, problem.experts)
        self.num_rows, self.num_used = self.order.slot_P.numel(), int(self.order.num_tiles) * row_order.ROW_TILE
        self.is_padding = self.order.slot_P < 0
        self.num_slots = int((~self.is_padding).sum())

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(std=scale, generator=self.generator)

    def rows(self, columns: int) -> Tensor:
        """Random rows [P, columns], zero in rows of padding, as kernels expect."""
        return self.random(self.num_rows, columns).masked_fill_(self.is_padding[:, None], 0.0)


def _nothing() -> None:
    pass


def _product(problem: Problem, data: _Data) -> Work:
    kernel, _, experts, n, k, _ = problem
    x, order = data.rows(k), data.order
    if kernel == "up_swiglu":
        gate_up = data.random(experts, 2 * n, k, scale=k**-0.5)

        def up(tiles: Tiles) -> tuple[Tensor, ...]:
            hidden, activation = grouped_gemm.up_swiglu(x, gate_up, order, tiles, without_padding=True)
            return hidden[: data.num_slots], activation[: data.num_used]

        return Work(up, _nothing, None)
    transposed = kernel.endswith("_t")
    shape = (experts, n, k) if transposed else (experts, k, n)
    weight = data.random(*shape, scale=k**-0.5)

    def run(tiles: Tiles) -> tuple[Tensor, ...]:
        return (grouped_gemm.rows_times_weight(x, weight, order, transposed=transposed, tiles=tiles),)

    return Work(run, _nothing, data.num_used)


def _gradient(problem: Problem, data: _Data) -> Work:
    kernel, dtype, experts, n, k, _ = problem
    a, b, order = data.rows(n), data.rows(k), data.order
    if kernel == "weight_gradient":
        return Work(lambda tiles: (grouped_gemm.weight_gradient(a, b, order, tiles=tiles),), _nothing, None)
    dtype = torch.float32 if kernel.endswith("fp32") else dtype
    main = torch.zeros(experts, n, k, dtype=dtype, device=data.device)
    return Work(lambda tiles: (grouped_gemm.weight_gradient(a, b, order, main, tiles),), main.zero_, None)


def _rows(problem: Problem, data: _Data) -> Work:
    k, order, topk = problem.k, data.order, data.topk
    if problem.kernel == "spread_rows":
        x = data.random(data.num_tokens, k)
        return Work(lambda tiles: (permute.spread_rows(x, order, topk, tiles=tiles),), _nothing, data.num_used)
    if problem.kernel == "sum_rows":
        values, out = data.rows(k), data.random(data.num_tokens, k)
        return Work(lambda tiles: (permute.sum_rows(values, order, None, topk, out, tiles),), _nothing, None)
    hidden, gradient = data.random(data.num_slots, 2 * k), data.rows(k)
    row_weight = torch.rand(data.num_rows, device=data.device, generator=data.generator)
    row_weight.masked_fill_(data.is_padding, 0.0)
    changed = gradient.clone()

    def run(tiles: Tiles) -> tuple[Tensor, ...]:
        dhidden, dweights = permute.swiglu_backward_(changed, hidden, row_weight, order, topk, tiles)
        return dhidden[: data.num_used], changed[: data.num_used], dweights

    return Work(run, lambda: changed.copy_(gradient), None)


def tune_missing(
    problems: Iterable[Problem],
    device: torch.device,
    entries: Table,
    *,
    local_share: float = 1.0,
    exact_only: bool = False,
    seconds: float = float("inf"),
    clock: Clock = time_runs,
) -> tuple[dict[str, Entry], list[TuningResult]]:
    """``entries`` and those of problems that have none, tuned now (see ``tune``) and added to the file on disk.

    What ``exact_only`` found takes no faster entry's place there: runs that may change bits go on as they were. A file
    that cannot be written is one warning: the entries are there all the same.
    """
    missing = [problem for problem in dict.fromkeys(problems) if str(problem) not in entries]
    outcomes = tune(missing, device, local_share=local_share, exact_only=exact_only, seconds=seconds, clock=clock)
    found = {str(outcome.problem): outcome.entry for outcome in outcomes if outcome.entry is not None}
    faster = {name for name, entry in table(device).items() if exact_only and not entry.matches_default_bits}
    if found.keys() - faster:
        try:
            tile_cache.save(hardware(device).key, {name: found[name] for name in found.keys() - faster})
        except OSError as error:
            logger.warning(
                "tuned tiles cannot be kept (%s), the next start tunes again; name a file in OPTIMUS_TILES", error
            )
    return {**entries, **found}, outcomes


def line(outcome: TuningResult) -> str:
    """One line on a problem."""
    left_out = f"; {len(outcome.left_out)} left out" if outcome.left_out else ""
    if outcome.entry is None:
        return f"{outcome.problem}: default, {next(iter(outcome.left_out.values()))}"
    tiles, best, default, matches_default_bits = outcome.entry
    how = "default" if tiles == outcome.default else f"{default / best:.2f} times the default's {default:.1f} us"
    how += "" if matches_default_bits else ", other bits"
    return f"{outcome.problem}: {tiles}: {best:.1f} us ({how}; of {len(outcome.microseconds)} timed{left_out})"
