"""Predicts the share of time in which a run makes progress that lasts, by how it recovers from failures.

Failures are a Poisson process: a job of N nodes fails N times as often as a node. Three ways to recover are compared;
what each costs is measured where that was possible here, and marked where it is assumed:

    disk        all processes end and start anew, import from a parallel file system, meet and load from disk
    launcher    the launcher has everything imported and forks the ranks; they meet and load from disk
    memory      the state goes to host memory and a buddy node every few steps; a spare loads it from the buddy

The time model is that of J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
Future Generation Computer Systems 22 (2006), whose first order is J. W. Young's (CACM 17, 1974).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.optimus.config.rank_plan import rank_plans
from megatron.optimus.config.schema import ParallelConfig, Precision, RunConfig
from megatron.optimus.models.parameters import num_parameters
from megatron.optimus.planner.hardware import Figure, Machine
from megatron.optimus.report.figure import Line, Panel

SIZES = (384, 768, 1536, 3072, 6144, 12288)  # ranks of the table
DAY_SECONDS, SPARES_CERTAINTY = 86400.0, 0.99
_LEAST_INTERVAL = 1.0  # seconds between checkpoints: about a step

COSTS: Mapping[str, Figure] = {
    "notice_s": Figure(15.0, "assumed: a process that dies is seen at once, a node by its time-outs"),
    "launch_s": Figure(20.0, "assumed: mpiexec over thousands of nodes, pause of the launcher included"),
    "fork_s": Figure(1.3, "benchmarks/results/restart_cpu.json: kill to next step, 4 CPU ranks, quiet machine", True),
    "import_s": Figure(3.3, "benchmarks/results/startup_gloo.json: from a local disk, the files cached", True),
    "imported_files": Figure(1857, "modules with a file once the training program is imported, counted", True),
    "file_calls": Figure(4, "assumed: calls of the file system for each, looked up along sys.path"),
    "metadata_per_s": Figure(1e5, "assumed: calls that a parallel file system answers in a second, for all nodes"),
    "environment_bytes": Figure(5e9, "assumed: an installation with torch, staged to each node's disk"),
    "staging_node_bytes_s": Figure(1e9, "assumed: broadcast to a node's disk, all nodes at the same time"),
    "meet_s_per_rank": Figure(0.011, "benchmarks/results/startup_gloo.json: 64 ranks on 2 cores, so at most", True),
    "groups_s_per_rank": Figure(0.0085, "the same: all groups of the grid", True),
    "stall_s": Figure(0.2, "benchmarks/results/checkpoint_io_h200x4.json: training waits for the copy to host", True),
    "node_disk_bytes_s": Figure(1.61e9, "checkpoint_io_h200x4.json: drain of four ranks to one disk", True),
    "node_load_bytes_s": Figure(2.03e9, "the same: load", True),
    "disk_bytes_s": Figure(2e11, "assumed: a parallel file system, for all nodes together"),
    "build_s": Figure(
        7.0, "benchmarks/results/first_step_h200.txt: model, optimizer and first step, a second start", True
    ),
}


@dataclass(frozen=True)
class Recovery:
    """A way to recover, in seconds."""

    name: str
    stall: float  # training waits for each checkpoint
    durable_after: float  # from the copy until the checkpoint would survive the failure
    restart: float  # from the failure until the step after the checkpoint begins


@dataclass(frozen=True)
class Prediction:
    """A recovery at its best interval, for a job of some size."""

    recovery: Recovery
    interval: float  # seconds of work between checkpoints
    share: float  # of the time that is progress that lasts


@dataclass(frozen=True)
class RecoveryRow:
    """All recoveries for one size."""

    ranks: int
    nodes: int
    mtbf: float  # seconds, of the job
    spares: int
    predictions: tuple[Prediction, ...]


def best_interval(stall: float, mtbf: float) -> float:
    """Work between checkpoints that costs least, in seconds, by Daly 2006; ``mtbf`` where the stall is long.

    sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d, of which Young's sqrt(2 d M) is the first term.

    Args:
        stall: d, seconds that a checkpoint takes from training.
        mtbf: M, seconds.
    """
    if stall >= 2 * mtbf:
        return mtbf
    ratio = stall / (2 * mtbf)
    return math.sqrt(2 * stall * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def effective_share(interval: float, recovery: Recovery, mtbf: float) -> float:
    """Share of time that is progress that lasts, failures in a restart or in repeated work included.

    Daly 2006: work of t seconds takes M exp(R/M) (exp((t + d)/M) - 1). R is here the restart and the work
    that is done again because it came after the copy, and before the checkpoint was durable.

    Args:
        interval: t, seconds of work between checkpoints, at least ``recovery.durable_after``.
        recovery: d and R.
        mtbf: M, seconds between failures of the job.
    """
    lost = recovery.restart + recovery.durable_after
    exponent = (interval + recovery.stall) / mtbf
    if exponent + lost / mtbf > 500:
        return 0.0
    return interval / (mtbf * math.exp(lost / mtbf) * math.expm1(exponent))


def predict(recovery: Recovery, mtbf: float, least_interval: float) -> Prediction:
    """The best interval, which is not below ``least_interval`` nor below the time in which a checkpoint is written."""
    interval = max(best_interval(recovery.stall, mtbf), recovery.durable_after, least_interval)
    return Prediction(recovery, interval, effective_share(interval, recovery, mtbf))


def spares_needed(nodes: int, node_mtbf: float) -> int:
    """Computes how many spares suffice with 99%, where a failure takes a node out for a day: a Poisson quantile."""
    mean = DAY_SECONDS * nodes / node_mtbf
    term = total = math.exp(-mean)
    count = 0
    while total < SPARES_CERTAINTY and count < nodes:
        count += 1
        term *= mean / count
        total += term
    return count


def recoveries(config: RunConfig, machine: Machine, ranks: int, node_mtbf: float) -> list[Recovery]:
    """Lists the ways to recover with their costs for a job of ``ranks``; ``node_mtbf`` in seconds."""
    cost = {name: figure.value for name, figure in COSTS.items()}
    nodes = max(1, ranks // machine.devices_per_node)
    state, _ = checkpoint_bytes(config)
    write = state / min(cost["node_disk_bytes_s"] * nodes, cost["disk_bytes_s"])
    load = state / min(cost["node_load_bytes_s"] * nodes, cost["disk_bytes_s"])
    start = start_seconds(ranks)
    meet, imports = start["meet"] + start["groups"], start["imports, parallel"]
    disk = cost["notice_s"] + cost["launch_s"] + imports + meet + load + cost["build_s"]
    forked = cost["notice_s"] + cost["fork_s"] + meet + load + cost["build_s"]
    buddy = state / nodes / machine.node_bandwidth.value
    in_memory = Recovery("memory", cost["stall_s"], buddy, cost["notice_s"] + cost["fork_s"] + meet + buddy)
    from_disk, by_launcher = (
        Recovery(name, cost["stall_s"], write, seconds) for name, seconds in (("disk", disk), ("launcher", forked))
    )
    # Node and buddy lost together: the buddy fails before the state has a second place again.
    mtbf = node_mtbf / nodes
    interval = predict(from_disk, mtbf, 0.0).interval
    both = -math.expm1(-(in_memory.restart + buddy) / node_mtbf)
    in_memory = replace(in_memory, restart=in_memory.restart + both * (interval / 2 + disk))
    return [from_disk, by_launcher, in_memory]


def start_seconds(ranks: int) -> dict[str, float]:
    """Seconds of the parts of a start: imports from a parallel file system or local disks, staging, process groups."""
    cost = {name: figure.value for name, figure in COSTS.items()}
    calls = ranks * cost["imported_files"] * cost["file_calls"]
    return {
        "imports, parallel": cost["import_s"] + calls / cost["metadata_per_s"],
        "imports, staged": cost["import_s"],
        "staging, once": cost["environment_bytes"] / cost["staging_node_bytes_s"],
        "meet": ranks * cost["meet_s_per_rank"],
        "groups": ranks * cost["groups_s_per_rank"],
    }


def checkpoint_bytes(config: RunConfig) -> tuple[int, int]:
    """Bytes of a full checkpoint (fp32 weights and the optimizer's states) and of one of weights only."""
    numel = num_parameters(rank_plans(replace(config, parallel=ParallelConfig()), 1)[0])
    options = config.optimizer
    states = max(options.optimizer.num_states, 2 if options.optimizer.is_for_matrices else 0)
    weight = 4 if config.training.params_dtype is Precision.FP32 else 2
    return int(numel * (4 + states * options.optimizer_state_dtype.element_bytes)), numel * weight


def effective_time(
    config: RunConfig, machine: Machine, node_mtbf_hours: float, sizes: Sequence[int] = SIZES
) -> list[RecoveryRow]:
    """Predicts the share of effective time at every size.

    Args:
        config: the run, for the size of its state.
        machine: ranks of a node, and how fast nodes reach each other.
        node_mtbf_hours: mean time between failures of one node.
        sizes: ranks.
    """
    rows = []
    for ranks in sizes:
        nodes = max(1, ranks // machine.devices_per_node)
        node_mtbf = node_mtbf_hours * 3600
        ways = recoveries(config, machine, ranks, node_mtbf)
        predictions = tuple(predict(way, node_mtbf / nodes, _LEAST_INTERVAL) for way in ways)
        rows.append(RecoveryRow(ranks, nodes, node_mtbf / nodes, spares_needed(nodes, node_mtbf), predictions))
    return rows


def table(rows: Sequence[RecoveryRow]) -> str:
    """Writes a Markdown table: share of effective time, best interval and restart of each recovery; then the start."""
    names = [prediction.recovery.name for prediction in rows[0].predictions]
    head = ["ranks", "nodes", "failure every", "spares a day", *names, "start: imports parallel / staged, meet, groups"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [f"{row.ranks:,}", f"{row.nodes:,}", _time(row.mtbf), str(row.spares)]
        for one in row.predictions:
            back = _time(one.recovery.restart)
            cells.append(f"{100 * one.share:.1f}%, save every {_time(one.interval)}, back in {back}")
        start = start_seconds(row.ranks)
        parts = [_time(start[name]) for name in ("imports, parallel", "imports, staged", "meet", "groups")]
        lines.append("| " + " | ".join([*cells, f"{parts[0]} / {parts[1]}, {parts[2]}, {parts[3]}"]) + " |")
    assumed = ", ".join(name for name, figure in COSTS.items() if not figure.is_measured)
    lines += ["", f"A model: its parts are measured on one machine, but for those assumed: {assumed}."]
    return "\n".join(lines) + "\n"


def _time(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


# Devices and the effective time that is reported: arXiv 2407.21783 (more than 90%; 419 unexpected interruptions in 54
# days, so a node of 8 fails every 6,300 hours) and arXiv 2509.16293 (97% dense over three months, 91% MoE over one).
PUBLISHED = {"Llama 3 (> 90%)": (16384, 0.90), "ByteRobust, dense": (9600, 0.97), "ByteRobust, MoE": (9600, 0.91)}


def panel(rows: Sequence[RecoveryRow], title: str) -> Panel:
    """The diagram of the share over the number of ranks, beside published ones."""
    ranks = [row.ranks for row in rows]
    lines: dict[str, Line] = {
        f"{first.recovery.name}: model": (ranks, [100 * row.predictions[number].share for row in rows])
        for number, first in enumerate(rows[0].predictions)
    }
    lines |= {name: ([devices], [100 * share]) for name, (devices, share) in PUBLISHED.items()}
    label = "ranks (published: GPUs)"
    return Panel(title, label, "effective time, %", lines, x_ticks=ranks, y_range=(60, 101))
