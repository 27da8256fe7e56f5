"""The text of ``--dry-run``: model, layout, memory, length, data and output; with ``--verbose`` every option too."""

from __future__ import annotations

import math

from megatron.optimus.config.checks import check, check_optimizer
from megatron.optimus.config.duration import batch_sizes, last_step, total_samples
from megatron.optimus.config.layout import Layout
from megatron.optimus.config.schema import ConfigError, RunConfig, TrainingConfig
from megatron.optimus.config.serialize import to_yaml
from megatron.optimus.models.huggingface.architectures import export_notice
from megatron.optimus.models.parameters import count_parameters
from megatron.optimus.planner.hardware import machine_named
from megatron.optimus.planner.plan import plan
from megatron.optimus.platform.log import counted

GIB = 2**30


def describe(config: RunConfig, world_size: int, *, verbose: bool = False) -> str:
    """Returns the text of ``--dry-run``.

    Args:
        config: the run.
        world_size: number of ranks; with 1 (no launcher), the smallest number that the layout needs is described.
        verbose: whether every option comes first, as YAML that ``--config`` reads.

    Raises:
        ConfigError: for options that do not fit together.
    """
    if world_size == 1:
        world_size = smallest_world(config)
    check(config, world_size)
    check_optimizer(config)
    options = [to_yaml(config)] if verbose else []
    lines = [*options, *_model_lines(config), *_layout_lines(config, world_size), *_folder_lines(config)]
    return "\n".join([*lines, *([] if verbose else ["every option: --dry-run --verbose"]), ""])


def smallest_world(config: RunConfig) -> int:
    """Returns the smallest number of ranks that the parallel sizes divide."""
    parallel = config.parallel
    dense = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    experts = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size
    return math.lcm(dense, experts) * parallel.pipeline_model_parallel_size


def _model_lines(config: RunConfig) -> list[str]:
    model, counts = config.model, count_parameters(config.model)
    experts = f", {model.num_experts} experts, {model.moe_router_topk} for each token" if model.is_moe else ""
    lines = [
        f"model: {model.num_layers} layers, hidden size {model.hidden_size}, {model.num_attention_heads} heads"
        f"{experts}, vocabulary of {model.vocab_size:,}",
        f"parameters: {counts.total:,} total, {counts.active:,} active per token",
    ]
    if config.model.is_moe:
        lines.append(f"            {counts.expert:,} in experts, {counts.total - counts.expert:,} elsewhere")
    return [*lines, *filter(None, [export_notice(model)])]


def _memory_line(config: RunConfig, world_size: int) -> str:
    """The planner's count, which knows every tensor of the states and estimates activations."""
    try:
        memory = plan(config, world_size, machine_named("h200")).worst
    except ConfigError as error:
        return f"memory of a rank: not estimated ({error})"
    states = memory.states
    return (
        f"memory of a rank: {memory.peak / GIB:.2f} GiB at the peak on a GPU, of them weights "
        f"{states.parameters / GIB:.2f}, gradients {states.gradients / GIB:.2f}, master weights and optimizer states "
        f"{(states.masters + states.states) / GIB:.2f}"
    )


def _folder_lines(config: RunConfig) -> list[str]:
    data, save = config.data, config.checkpoint
    folder = save.save or f"{config.logging.run_dir}/checkpoints"
    sources = data.data_file_list or ", ".join(data.data_path) or "none given: --data-path or --data-file-list"
    when = f"every {save.save_interval:,} steps and at the end" if save.save_interval else "at the end"
    return [
        f"data: {sources}; tokenizer: {data.tokenizer_model or 'none given'}; split {data.split}",
        f"output: {config.logging.run_dir}; checkpoints {when} in {folder}",
        *([f"starts from: {save.load}, if {folder} has no checkpoint"] if save.load else []),
    ]


def _layout_lines(config: RunConfig, world_size: int) -> list[str]:
    layout = Layout.from_config(config.parallel, world_size)
    counts = count_parameters(config.model)
    training = config.training
    experts = counts.expert // (layout.ep * layout.etp * layout.pp)
    others = (counts.total - counts.expert) // (layout.pp * layout.tp)  # as if all stages were equal
    lines = [
        f"layout of {counted(world_size, 'rank')}: "
        f"dense view pp={layout.pp} dp={layout.dp} cp={layout.cp} tp={layout.tp}, "
        f"expert view pp={layout.pp} edp={layout.edp} ep={layout.ep}" + f" etp={layout.etp}" * (layout.etp > 1),
        f"per rank: {experts:,} expert and {others:,} other parameters"
        + (" (mean over pipeline stages)" if layout.pp > 1 else ""),
        _memory_line(config, world_size),
        f"per step: {training.global_batch_size} sequences x {training.seq_length} tokens = "
        f"{training.global_batch_size * training.seq_length:,} tokens; per rank "
        f"{training.global_batch_size // (layout.dp * training.micro_batch_size)} micro-batches of "
        f"{training.micro_batch_size} sequences",
        *_duration_lines(training),
        "rank 0's groups: "
        + ", ".join(f"{axis} {_ranks(layout.groups(axis)[0])}" for axis in ("pp", "dp", "cp", "tp", "ep", "edp")),
    ]
    if config.model.is_moe:
        lines.append(
            f"experts per rank: {config.model.num_experts // layout.ep} of {config.model.num_experts} in each layer"
            + f" of the {len(config.model.moe_layers)} that have experts" * config.model.has_dense_layers
        )
    return lines


def _duration_lines(training: TrainingConfig) -> list[str]:
    steps, samples = last_step(training), total_samples(training)
    lines = [f"in all: {steps:,} steps, {samples:,} sequences, {samples * training.seq_length:,} tokens"]
    if training.rampup_batch_size:
        sizes = batch_sizes(training)
        first, increment, position = training.rampup_batch_size
        before = sizes.steps(0, position)
        before += sizes.after(0, before) < position
        lines.append(
            f"batch-size ramp: {first} sequences a step, {increment} more in each further stage of "
            f"{position // (len(sizes.stages()) - 1):,} sequences; {sizes.full} after {before:,} steps"
        )
    return lines


def _ranks(ranks: list[int]) -> str:
    if len(ranks) <= 4:
        return str(ranks)
    return f"[{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}] ({len(ranks)})"
