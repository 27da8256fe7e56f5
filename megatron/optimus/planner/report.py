"""Writes plans as text and as JSON."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from megatron.optimus.config.costs import Collective
from megatron.optimus.config.schema import RunConfig
from megatron.optimus.models.parameters import num_parameters
from megatron.optimus.planner.communication import sent_by_axis
from megatron.optimus.planner.hardware import Figure, Machine
from megatron.optimus.planner.memory import Memory
from megatron.optimus.planner.plan import Plan
from megatron.optimus.planner.search import SearchResult, bubble_hint
from megatron.optimus.planner.step_time import seconds

GIB = 2**30


def gib(size: float) -> str:
    """Bytes as GiB with two decimals."""
    return f"{size / GIB:.2f}"


def layout_words(config: RunConfig, world_size: int) -> str:
    """Describes a layout, as in "pp 8, ep 12, dp 384, micro-batch 1, recompute moe"; sizes of one are left out."""
    parallel = config.parallel
    sizes = {
        "tp": parallel.tensor_model_parallel_size,
        "pp": parallel.pipeline_model_parallel_size,
        "chunks": parallel.virtual_pipeline_model_parallel_size,
        "cp": parallel.context_parallel_size,
        "ep": parallel.expert_model_parallel_size,
        "etp": parallel.expert_tensor_parallel_size,
    }
    dense = sizes["tp"] * sizes["pp"] * sizes["cp"]
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    if parallel.context_parallel_size > 1:
        words.append({"a2a": "Ulysses", "p2p": "ring"}[parallel.cp_comm_type.value])
    words += [f"dp {world_size // dense}", f"micro-batch {config.training.micro_batch_size}"]
    if parallel.recompute_modules:
        words.append("recompute " + "+".join(part.value for part in parallel.recompute_modules))
    return ", ".join(words)


def layout_options(config: RunConfig) -> str:
    """Writes what the search varies as options of the training program."""
    parallel = config.parallel
    values: dict[str, object] = {
        "tensor-model-parallel-size": parallel.tensor_model_parallel_size,
        "pipeline-model-parallel-size": parallel.pipeline_model_parallel_size,
        "pipeline-schedule": parallel.pipeline_schedule.value,
        "virtual-pipeline-model-parallel-size": parallel.virtual_pipeline_model_parallel_size,
        "context-parallel-size": parallel.context_parallel_size,
        "cp-comm-type": parallel.cp_comm_type.value,
        "expert-model-parallel-size": parallel.expert_model_parallel_size,
        "micro-batch-size": config.training.micro_batch_size,
        "recompute-modules": " ".join(part.value for part in parallel.recompute_modules),
    }
    return " ".join(f"--{name} {value}".rstrip() for name, value in values.items())


def split_words(plan: Plan) -> str:
    """Describes the layers of each pipeline rank, chunk by chunk, and who decided the split."""
    each = ["+".join(str(len(chunk)) for chunk in rank.chunks) for rank in plan.ranks]
    runs = [(words, len(list(alike))) for words, alike in groupby(each)]
    ranks = ", ".join(words if number == 1 else f"{number} x {words}" for words, number in runs)
    parallel = plan.config.parallel
    fixed = parallel.decoder_first_pipeline_num_layers or parallel.decoder_last_pipeline_num_layers
    why = "as fixed by the options" if fixed else "split for the slowest rank, the head included"
    return f"layers of the pipeline ranks: {ranks} ({why})"


# ---- text


def plan_text(plan: Plan, *, explain: bool) -> str:
    """Writes the memory of the first, the last and the fullest pipeline rank, what is sent, and the time."""
    machine = plan.machine
    lines = [f"{plan.world_size} x {machine.device}: {layout_words(plan.config, plan.world_size)}"]
    if not machine.is_measured:
        lines.append(f"{machine.name}: speeds are public or assumed figures, not measured by us (--explain names each)")
    if len(plan.ranks) > 1:
        lines.append(split_words(plan))
    lines += ["", *_memory_lines(plan), "", *_communication_lines(plan), "", *_time_lines(plan)]
    if explain:
        lines += ["", *_part_lines(plan.worst), "", *_collective_lines(plan), "", *machine_lines(machine)]
    return "\n".join(lines) + "\n"


def shown(plan: Plan) -> list[Memory]:
    """Picks the first, the last and the fullest pipeline rank, each once."""
    ranks = sorted({0, len(plan.ranks) - 1, plan.worst.pipeline_rank})
    return [plan.memories[rank] for rank in ranks]


def _memory_lines(plan: Plan) -> list[str]:
    columns = shown(plan)
    rows: list[tuple[str, list[str]]] = [
        ("parameters", [f"{num_parameters(plan.ranks[m.pipeline_rank]):,}" for m in columns]),
        ("weights", [gib(m.states.parameters) for m in columns]),
        ("gradients", [gib(m.states.gradients) for m in columns]),
        ("gradient buffer pool", [gib(m.pool) for m in columns]),
        ("master weights", [gib(m.states.masters) for m in columns]),
        ("optimizer states", [gib(m.states.states) for m in columns]),
        ("batch, buffers, libraries", [gib(m.buffers) for m in columns]),
        ("activations at the peak", [gib(m.worst.activations) for m in columns]),
        ("  of one layer, micro-batch", [gib(max(m.saved_per_layer, default=0)) for m in columns]),
        ("  micro-batches in flight", [f"{m.in_flight}" for m in columns]),
        ("working memory at the peak", [gib(m.worst.temporaries) for m in columns]),
        ("peak", [gib(m.peak) for m in columns]),
    ]
    name = "pipeline rank" if len(plan.ranks) > 1 else "every rank"
    header = f"{'memory, GiB, ' + name:<32}" + "".join(f"{m.pipeline_rank:>16}" for m in columns)
    lines = [header] + [f"{label:<32}" + "".join(f"{cell:>16}" for cell in cells) for label, cells in rows]
    machine = plan.machine
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    lines.append(
        f"{verdict}: {gib(plan.worst.peak)} of {gib(plan.usable)} usable ({gib(machine.memory.value)} less "
        f"{gib(machine.non_allocator_bytes.value)} outside of torch, "
        f"{gib(plan.communicators * machine.communicator.value)} of {plan.communicators} communicators and "
        f"{100 * machine.slack.value:.0f}% allocator slack); "
        f"peak at: {plan.worst.worst.name}"
    )
    return lines


def _communication_lines(plan: Plan) -> list[str]:
    rank = plan.worst.pipeline_rank
    totals = sent_by_axis(plan.collectives(rank))
    if not totals:
        return ["communication: none"]
    words = ", ".join(f"{axis} {gib(size)}" for axis, size in sorted(totals.items(), key=lambda item: -item[1]))
    return [f"sent by a rank in a step, GiB: {words}"]


def _time_lines(plan: Plan) -> list[str]:
    time, hint = plan.time, bubble_hint(plan)
    return [
        f"predicted step {time.total:.3f} s: compute {time.compute:.3f}, exposed communication {time.exposed:.3f} "
        f"({100 * time.exposed / time.total:.0f}%), bubble {time.bubble:.3f} ({100 * time.bubble_share:.0f}%), "
        f"optimizer and the rest {time.update:.3f}"
        + (f", device waiting for its host {time.launching:.3f}" if time.launching else ""),
        f"{time.tokens_per_second:,.0f} tokens/s, {time.tokens_per_second_per_device:,.0f} a device, "
        f"{time.tokens_per_second_per_device * time.flops_per_token / 1e12:.0f} TFLOP/s, MFU {100 * time.mfu:.1f}%",
        *([hint] if hint else []),
    ]


def _part_lines(memory: Memory) -> list[str]:
    lines = [f"a layer and the ends on pipeline rank {memory.pipeline_rank}, MiB of one micro-batch"]
    lines.append(f"{'part':<20}{'saved':>12}{'forward':>12}{'backward':>12}")
    for part in memory.parts:
        sizes = "".join(f"{size / 2**20:>12.1f}" for size in (part.saved, part.forward, part.backward))
        lines.append(f"{part.name:<20}{sizes}")
    lines += ["", "moments, GiB besides what always stays"]
    for moment in sorted(memory.moments, key=lambda moment: -moment.total)[:6]:
        lines.append(
            f"{moment.name:<44} activations {gib(moment.activations):>8}, working {gib(moment.temporaries):>8}"
        )
    return lines


def _collective_lines(plan: Plan) -> list[str]:
    rank = plan.ranks[plan.worst.pipeline_rank]
    head = f"{'axis':<10}{'kind':<16}{'purpose':<34}{'ranks':>7}{'count':>8}{'MiB each':>12}{'s alone':>10}"
    lines = [f"{head}  hidden by"]
    for one in plan.collectives(rank.pipeline_rank):
        lines.append(
            f"{one.axis:<10}{one.kind.value:<16}{one.purpose:<34}{one.size:>7}{one.count:>8}"
            f"{one.payload / 2**20:>12.2f}{seconds(one, rank, plan.machine):>10.4f}  {one.hiding.value}"
        )
    return lines


def figures(machine: Machine) -> dict[str, Figure]:
    """Lists every constant of a machine by name."""
    return {name: value for name, value in vars(machine).items() if isinstance(value, Figure)}


def machine_lines(machine: Machine) -> list[str]:
    """The constants of a machine, each with its source and whether it was measured by us."""
    lines = [f"constants of {machine.name} ({machine.file})"]
    for name, figure in figures(machine).items():
        how = "measured" if figure.is_measured else "not measured by us"
        lines.append(f"{name:<24}{figure.value:>12.4g}  {how}; {figure.source}")
    return lines


def search_text(found: SearchResult, world_size: int) -> str:
    """Writes the best layouts, and why the others are not among them."""
    lines = [f"best of {found.tried} layouts tried, by predicted tokens/s"]
    for number, made in enumerate(found.best, start=1):
        time = made.time
        lines.append(
            f"{number:>3}. {time.tokens_per_second_per_device:>8,.0f} tokens/s a device, MFU {100 * time.mfu:4.1f}%, "
            f"{gib(made.worst.peak):>7} GiB, bubble {100 * time.bubble_share:2.0f}%, exposed "
            f"{100 * time.exposed / time.total:2.0f}%: {layout_words(made.config, world_size)}"
        )
    if found.best:
        lines.append(f"the first as options: {layout_options(found.best[0].config)}")
        if hint := bubble_hint(found.best[0]):
            lines.append(f"the first has {hint}")
    elif found.tried:
        lines.append("  none fits")
    else:
        lines.append(f"  none: the sizes named on the command line do not divide {world_size} ranks, or the model")
    for reason, count in found.refused.items():
        lines.append(f"refused by {reason}: {count}; one of them: {found.examples[reason]}")
    why = "would be faster but needs" if found.best else "needs least of those that do not fit:"
    for made in found.too_large:
        lines.append(f"{why} {gib(made.worst.peak)} of {gib(made.usable)} GiB: {layout_words(made.config, world_size)}")
    return "\n".join(lines) + "\n"


# ---- JSON

# Constants whose key is not the field's name: it stays as it was first published.
_JSON_KEYS = {
    "non_allocator_bytes": "outside",
    "intra_node_bandwidth": "inside",
    "two_rank_bandwidth": "pair",
    "node_bandwidth": "network",
}


def plan_json(plan: Plan) -> dict[str, Any]:
    """Makes an object with everything of a plan: bytes, seconds and shares."""
    time = plan.time
    return {
        "system": plan.machine.name,
        "measured_system": plan.machine.is_measured,
        "ranks": plan.world_size,
        "layout": layout_words(plan.config, plan.world_size),
        "layers": [[len(chunk) for chunk in rank.chunks] for rank in plan.ranks],  # of pipeline ranks, by chunk
        "fits": plan.fits,
        "usable_bytes": round(plan.usable),
        "communicators": plan.communicators,
        "memory": [memory_json(plan, memory) for memory in plan.memories],
        "communication": [collective_json(one) for one in plan.collectives(plan.worst.pipeline_rank)],
        "time": {
            "step_s": time.total,
            "compute_s": time.compute,
            "exposed_s": time.exposed,
            "bubble_s": time.bubble,
            "update_s": time.update,
            "launching_s": time.launching,
            "communication_s": time.communication,
            "tokens_per_second": time.tokens_per_second,
            "tokens_per_second_per_device": time.tokens_per_second_per_device,
            "mfu": time.mfu,
            "bubble_share": time.bubble_share,
            "bubble_hint": bubble_hint(plan) or None,
        },
        "constants": {_JSON_KEYS.get(name, name): vars(figure) for name, figure in figures(plan.machine).items()},
    }


def memory_json(plan: Plan, memory: Memory) -> dict[str, Any]:
    """A rank's memory as JSON values, in bytes."""
    return {
        "pipeline_rank": memory.pipeline_rank,
        "parameters": num_parameters(plan.ranks[memory.pipeline_rank]),
        "states": vars(memory.states),
        "lent_bytes": memory.pool,
        "buffer_bytes": memory.buffers,
        "saved_per_layer_bytes": list(memory.saved_per_layer),
        "in_flight": memory.in_flight,
        "peak_bytes": memory.peak,
        "peak_at": memory.worst.name,
        "moments": [
            {"name": one.name, "activations": one.activations, "working": one.temporaries} for one in memory.moments
        ],
        "parts": [vars(part) for part in memory.parts],
    }


def collective_json(one: Collective) -> dict[str, Any]:
    """A collective as JSON values; ``sent`` is in bytes."""
    return {**vars(one), "kind": one.kind.value, "hiding": one.hiding.value, "sent": one.sent}
