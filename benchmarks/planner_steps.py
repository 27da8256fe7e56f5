"""The planner's step times against every measured step of the raw results, as a table of docs/planner.md.

    python benchmarks/planner_steps.py                 prints the table; on any machine, nothing is run
    python benchmarks/planner_steps.py --write         puts it into docs/planner.md, between its two marks

The layouts are those of the raw files themselves: the options that layout_speed.py, overlap.py and training_step.py
wrote down, turned into command lines by these programs' own code. Planned is each program with the kernels that it had
when it was measured (BEFORE, SEPARATE_NORMS, H200). What was measured with one whose communication has changed since is
left out (SUPERSEDED).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installation

import layout_speed_sections as sections
import overlap_systems
import torch
import training_step
from layout_speed_programs import run_config
from time_to_loss import MODELS

from megatron.optimus.config.rank_plan import rank_plans
from megatron.optimus.planner.hardware import H200
from megatron.optimus.planner.report import layout_words
from megatron.optimus.planner.step_time import step_time

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks/results", ROOT / "docs/planner.md"
BEGIN, END = "<!-- begin: benchmarks/planner_steps.py --write -->", "<!-- end -->"
SUPERSEDED = {  # (file, variant): every variant where it is empty
    ("layout_speed_moe20b_h200x4.json", "allgather"),  # beside the router and the experts' last product
    ("layout_speed_moe20b_h200x4.json", "alltoall"),
    ("layout_speed_moe20b_h200x4.json", "symmetric"),  # by a kernel
    ("layout_speed_moe20b_h200x4.json", "symmetric, home last"),
}
TAKEN = {  # what was measured under another name and is now what the program does
    ("layout_speed_moe20b_h200x4.json", "allgather, home last"): "allgather",
    ("layout_speed_moe20b_h200x4.json", "symmetric, home by copies"): "symmetric",
}


_THEN = {  # fitted, as hardware.py's are now, to the peaks' runs of that program
    **{"products": 790e12, "attention": 353e12, "experts": 526e12, "traffic": 3.4e12},
    **{"layer_time": 0.5e-3, "step_time": 6.9e-3},
}
# Norms and losses of routers by operations of torch; before that, rotary embedding, SwiGLU and loss too.
SEPARATE_NORMS = replace(H200, kernels=replace(H200.kernels, norm_width=0, router_experts=0))
BEFORE = replace(
    SEPARATE_NORMS,
    kernels=replace(SEPARATE_NORMS.kernels, fused_elementwise=False),
    **{name: replace(getattr(H200, name), value=value) for name, value in _THEN.items()},
)
MACHINES = {  # of files with kernels that are not as old as BEFORE's
    **dict.fromkeys(("layout_speed_h200x2.json", "layout_speed_experts_h200x2.json"), SEPARATE_NORMS),
    **dict.fromkeys(("training_step_720m_h200.json", "small_kernels_h200.txt"), H200),
}
# Of small_kernels_h200.txt, whose program was training_step.py with these options in place of its own.
NORM_STEPS = {
    "720M MoE, AdamW, new norms and router losses": "moe-720m --micro-batch-size 64 --global-batch-size 128",
    "Mula-7B, new norms and router losses": "mula-7b-a1b --micro-batch-size 2 --global-batch-size 8",
}


@dataclass(frozen=True)
class Row:
    file: str
    what: str
    ranks: int
    measured: float  # ms
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def rows() -> list[Row]:
    """Of all results that have steps of our program on H200, file by file."""
    found = []
    for path in sorted(RESULTS.glob("*_h200*.json")):
        kinds = {"layout_speed_": _layout_speed, "overlap_": _overlap, "training_step_720m_": _training_step}
        for kind in [kinds[start] for start in kinds if path.name.startswith(start)]:
            if (path.name, "") not in SUPERSEDED:
                found += list(kind(path.name, json.loads(path.read_text())))
    return found + list(_norm_steps(RESULTS / "small_kernels_h200.txt"))


class Options(argparse.Namespace):
    """Those of a raw file; what the program has learned since was not asked for."""

    def __getattr__(self, name: str) -> None:
        return None


def _layout_speed(file: str, raw: dict[str, Any]) -> Iterator[Row]:
    args = Options(**{**raw["options"], "moe_variants": None})  # None: all that are the program's own
    for name, section in raw["sections"].items():
        variants = sections.SECTIONS[name](args, raw["ranks"]).variants
        for result in section["results"]:
            variant = result["variant"]
            if (file, variant) in SUPERSEDED:
                continue
            build = variants[TAKEN.get((file, variant), variant)]
            if isinstance(build, sections.Ours) and build.change is None:  # not a peer's, nothing taken out
                config = run_config(build.words.split(), torch.device("cuda"))
                preset = args.moe_preset if name.startswith("moe") else args.preset
                yield _row(file, preset, config, raw["ranks"], result["step_ms"])


def _overlap(file: str, raw: dict[str, Any]) -> Iterator[Row]:
    about = raw["about"]
    args = Options(**about)
    for result in raw["results"]:
        system = result["system"]
        if system in overlap_systems.OURS and (file, system) not in SUPERSEDED:
            config = overlap_systems.config_of(system, overlap_systems.run_config(args))
            yield _row(file, args.preset, config, about["ranks"], result["step_ms"])


def _training_step(file: str, raw: dict[str, Any]) -> Iterator[Row]:
    for result in raw["results"]:
        if result["system"] == "ours":
            config = run_config(training_step.words(result["model"], Options(**raw["options"])), torch.device("cuda"))
            yield _row(file, result["model"], config, 1, result["step_ms"])


def _norm_steps(path: Path) -> Iterator[Row]:
    for line in path.read_text().splitlines():
        what, _, rest = line.partition(": step ")
        if what in NORM_STEPS:
            model, *words = NORM_STEPS[what].split()
            given = MODELS[model].split() if model in MODELS else ["--preset", model, "--seq-length", "4096"]
            yield _row(path.name, model, run_config([*given, *words], torch.device("cuda")), 1, float(rest.split()[0]))


def _variant(config: Any) -> str:
    """What tells a layout from others beside its sizes."""
    parallel, optimizer, layers = config.parallel, config.optimizer, config.model.num_layers
    words = [f"{layers} layer{'s' * (layers > 1)}"]
    if parallel.tp_comm_overlap:
        words.append("overlapped")
    if parallel.pipeline_model_parallel_size > 1:
        words.append(parallel.pipeline_schedule.value)
    if parallel.expert_model_parallel_size > 1:
        chunks = parallel.moe_dispatch_chunks
        words.append(parallel.moe_token_dispatcher_type.value + (f" in {chunks} parts" if chunks > 1 else ""))
    if not optimizer.overlap_grad_reduce:
        words.append("optimizer not overlapped")
    if optimizer.zero_stage == 2:
        words.append("ZeRO stage 2")
    if optimizer.grad_reduce_in_bf16:
        words.append("gradients sent in bf16")
    return ", ".join(words)


def _row(file: str, preset: str, config: Any, ranks: int, measured: float) -> Row:
    predicted = step_time(rank_plans(config, ranks), MACHINES.get(file, BEFORE)).total * 1e3
    model = preset.split("-")[1].upper()  # mula-7b-a1b
    layout, length = layout_words(config, ranks), config.training.seq_length
    return Row(file, f"{model}, {_variant(config)}; {layout}, sequence {length:,}", ranks, measured, predicted)


def table(found: list[Row]) -> str:
    """Markdown."""
    lines = ["| GPUs | run | measured, ms | predicted | error | raw |", "|" + "---|" * 6]
    for row in found:
        link = f"[{Path(row.file).stem}](../benchmarks/results/{row.file})"
        numbers = f"{row.measured:.1f} | {row.predicted:.1f} | {100 * row.error:+.1f}%"
        lines.append(f"| {row.ranks} | {row.what} | {numbers} | {link} |")
    errors = sorted(abs(row.error) for row in found)
    middle, most = errors[len(errors) // 2], errors[-1]
    lines += ["", f"{len(found)} steps: half of them within {100 * middle:.1f}%, all within {100 * most:.1f}%."]
    return "\n".join(lines) + "\n"


def page_with(text: str, page: str, begin: str = BEGIN, end: str = END) -> str:
    """The page with the table in its place."""
    before, rest = page.split(begin)
    return f"{before}{begin}\n{text}{end}{rest.split(end, 1)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    text = table(rows())
    if parser.parse_args().write:
        PAGE.write_text(page_with(text, PAGE.read_text()))
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
