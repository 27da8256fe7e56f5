"""Says which options would make a run fit that ran out of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from megatron.optimus.config.schema import ConfigError, OptimizerStateDtype, Recompute, RunConfig, divisors
from megatron.optimus.planner.hardware import Figure, Machine
from megatron.optimus.planner.plan import Plan, plan
from megatron.optimus.planner.search import RECOMPUTATION

GIB = 2**30
_MOST = 3  # options that are named
_ENOUGH = 0.95  # of what is planned for the run that did not fit: less than that must be saved

Change = tuple[str, Callable[[RunConfig], RunConfig]]  # as options, and what they change
_NOTHING: Change = ("", lambda config: config)


def with_memory(machine: Machine, total: int, *, is_host: bool) -> Machine:
    """Returns a machine whose devices have ``total`` bytes; of a host's memory all counts that a process can have."""
    memory = Figure(float(total), "as this device says")
    if not is_host:
        return replace(machine, memory=memory)
    nothing = Figure(0.0, "included in what is free")
    return replace(machine, memory=memory, non_allocator_bytes=nothing, communicator=nothing)


def what_fits(config: RunConfig, world_size: int, machine: Machine) -> str:
    """Writes what would fit: single options if any is enough, else the mildest combination.

    Tried are smaller micro-batches (the global batch stays), recomputation, ZeRO stage 2, and moments in fewer bits.

    Args:
        config: the run that did not fit.
        world_size: its ranks.
        machine: the device, with the memory that there is.
    """
    try:
        now = plan(config, world_size, machine)
    except ConfigError:
        return ""
    limit = min(now.usable, _ENOUGH * now.worst.peak)
    kinds = [list(kind) for kind in _changes(config)]

    def first(choices: Iterable[Sequence[Change]]) -> str:
        return next(filter(None, (_words(config, world_size, machine, each, limit) for each in choices)), "")

    singles = [words for kind in kinds if (words := first([one] for one in kind))][:_MOST]
    found = "; or ".join(singles) or first(product(*([_NOTHING, *kind] for kind in kinds)))
    text = f"would fit: {found}" if found else ""
    if now.fits:
        planned = f"{now.worst.peak / GIB:.1f} GiB are planned of {now.usable / GIB:.1f} usable"
        return "; ".join(filter(None, [f"{planned}, so something else may hold memory there", text]))
    return text or _more_devices(config, world_size, machine, kinds)


def _words(config: RunConfig, world_size: int, machine: Machine, changes: Sequence[Change], limit: float) -> str:
    """The changes as options with what is then planned, if that is allowed and within ``limit``; else nothing."""
    made = _with(config, world_size, machine, changes)
    if made is None or made.worst.peak > limit:
        return ""
    options = " ".join(words for words, _ in changes if words)
    return f"{options} ({made.worst.peak / GIB:.1f} GiB planned of {made.usable / GIB:.1f} usable)"


def _with(config: RunConfig, world_size: int, machine: Machine, changes: Sequence[Change]) -> Plan | None:
    for _, change in changes:
        config = change(config)
    try:
        return plan(config, world_size, machine)
    except ConfigError:
        return None


def _more_devices(config: RunConfig, world_size: int, machine: Machine, kinds: list[list[Change]]) -> str:
    least = _with(config, world_size, machine, [kind[-1] for kind in kinds if kind])
    size = (
        ""
        if least is None
        else f" ({least.worst.peak / GIB:.1f} GiB with all of them, {least.usable / GIB:.1f} usable)"
    )
    return (
        f"no micro-batch, recomputation, ZeRO stage or dtype of moments makes it fit {world_size} device"
        f"{'s' if world_size > 1 else ''}{size}: use more, `optimus plan` finds a layout"
    )


def _changes(config: RunConfig) -> Iterator[Iterator[Change]]:
    """Changes of each kind, the mildest first."""

    def micro_batch(size: int) -> Change:
        words = f"--micro-batch-size {size}"
        return words, lambda run: replace(run, training=replace(run.training, micro_batch_size=size))

    def recompute(parts: list[Recompute]) -> Change:
        words = "--recompute-modules " + " ".join(part.value for part in parts)
        return words, lambda run: replace(run, parallel=replace(run.parallel, recompute_modules=list(parts)))

    def moments(dtype: OptimizerStateDtype) -> Change:
        words = f"--optimizer-state-dtype {dtype.value}"
        return words, lambda run: replace(run, optimizer=replace(run.optimizer, optimizer_state_dtype=dtype))

    now = config.training.micro_batch_size
    yield map(micro_batch, [size for size in reversed(divisors(now)) if size < now])
    has = set(config.parallel.recompute_modules)
    yield map(recompute, [parts for parts in RECOMPUTATION if set(parts) > has])
    if config.optimizer.zero_stage == 1:
        stage2: Change = ("--zero-stage 2", lambda run: replace(run, optimizer=replace(run.optimizer, zero_stage=2)))
        yield iter([stage2])
    narrower = {
        OptimizerStateDtype.FP32: [OptimizerStateDtype.BF16, OptimizerStateDtype.INT8],
        OptimizerStateDtype.BF16: [OptimizerStateDtype.INT8],
    }
    yield map(moments, narrower.get(config.optimizer.optimizer_state_dtype, []))
