"""Predicts the weak scaling of a run: each rank keeps its work, the number of data-parallel replicas grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.optimus.config.layout import Layout
from megatron.optimus.config.schema import RunConfig
from megatron.optimus.planner.hardware import Machine
from megatron.optimus.planner.plan import Plan, plan
from megatron.optimus.report.figure import Line, Panel

# arXiv 2604.00785, figure 4 and its text: Mula-220B, EP 12, PP 8, 8 sequences a data- and expert-parallel rank.
PAPER = {384: 1.00, 768: 0.97, 1536: 0.90, 3072: 0.90, 6144: 0.90, 12288: 0.90}
SEQUENCES_EACH = 8


@dataclass(frozen=True)
class Point:
    """One size of the curve."""

    plan: Plan
    efficiency: float  # tokens/s a device over those of the smallest size
    paper: float | None


def weak_scaling(
    config: RunConfig, machine: Machine, paper: Mapping[int, float] = PAPER, sizes: Sequence[int] = tuple(PAPER)
) -> list[Point]:
    """Plans a run at every size, its data-parallel ranks with SEQUENCES_EACH sequences each.

    ``paper``: the efficiencies to put beside it; empty for a run that the paper does not report.
    """
    plans = []
    for size in sizes:
        batch = SEQUENCES_EACH * Layout.from_config(config.parallel, size).dp
        training = replace(config.training, global_batch_size=batch, rampup_batch_size=[])
        plans.append(plan(replace(config, training=training), size, machine))
    first = plans[0].time.tokens_per_second_per_device
    return [Point(made, made.time.tokens_per_second_per_device / first, paper.get(made.world_size)) for made in plans]


def with_paper_settings(config: RunConfig) -> RunConfig:
    """Makes the run with the paper's choices where ours differ: bf16 gradients, nothing hidden behind computation."""
    optimizer = replace(
        config.optimizer,
        accumulate_allreduce_grads_in_fp32=False,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
    )
    return replace(config, optimizer=optimizer)


def table(curves: dict[str, list[Point]]) -> str:
    """Writes a Markdown table: efficiency, step and its data-parallel communication, of each curve and of the paper."""
    names = list(curves)
    lines = ["| ranks | dp | " + " | ".join(names) + " | paper |", "|" + "---|" * (3 + len(names))]
    for points in zip(*curves.values(), strict=True):
        made, paper = points[0].plan, points[0].paper
        cells = [
            f"{100 * point.efficiency:.1f}%, {point.plan.time.total:.2f} s ({point.plan.time.data:.2f})"
            for point in points
        ]
        lines.append(
            f"| {made.world_size:,} | {made.ranks[0].layout.dp} | "
            + " | ".join(cells)
            + f" | {'' if paper is None else f'{100 * paper:.0f}%'} |"
        )
    lines += ["", "Each: efficiency, step, in it gradients and weights between replicas, hidden or not."]
    return "\n".join(lines) + "\n"


def panel(curves: dict[str, list[Point]], title: str) -> Panel:
    """The diagram of the curves, and of the paper's where there is one."""
    lines: dict[str, Line] = {
        name: ([point.plan.world_size for point in points], [100 * point.efficiency for point in points])
        for name, points in curves.items()
    }
    first = next(iter(curves.values()))
    reported = [point for point in first if point.paper is not None]
    if reported:
        efficiencies = [100 * (point.paper or 0.0) for point in reported]
        lines["reported in arXiv 2604.00785"] = [point.plan.world_size for point in reported], efficiencies
    sizes = [point.plan.world_size for point in first]
    return Panel(title, "tiles", "weak-scaling efficiency, %", lines, x_ticks=sizes, y_range=(60, 105))
