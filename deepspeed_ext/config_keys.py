"""The keys of a DeepSpeed 0.19.8 configuration, by what they do in ZeRO stages 1 and 2 of deepspeed_ext.

README.md shows them as a table. A key in none of these sets is not read at all; a test compares the sets with the keys
that DeepSpeed looks for. To add an option of our own, add it to the section "deepspeed_ext" (``_OWN_OPTIONS`` in
ds_config.py) and as a field of the same name to ``ZeroOptions``. To read another of DeepSpeed's top-level keys, move it
to ``READ_HERE`` and read it in ``ds_config.zero_options``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

# Read by deepspeed_ext.
READ_HERE = {
    *("bf16", "bfloat16", "checkpoint", "communication_data_type", "data_types", "deepspeed_ext", "fp16"),
    *("gradient_accumulation_steps", "gradient_allreduce_op", "gradient_clipping", "optimizer", "torch_autocast"),
    *("zero_allow_untested_optimizer", "zero_optimization"),
}
# Read by DeepSpeed's engine and data loader, which work as always.
READ_BY_DEEPSPEED = {
    *("activation_checkpointing", "autotuning", "comet", "compile", "csv_monitor", "data_efficiency"),
    *("dataloader_drop_last", "datastates_ckpt", "disable_python_gc", "dump_state", "flops_profiler", "log_level"),
    *("managed_gradient_accumulation", "memory_breakdown", "scheduler", "steps_per_print", "tensorboard", "timers"),
    *("train_batch_size", "train_micro_batch_size_per_gpu", "vocabulary_size", "wall_clock_breakdown", "wandb"),
    "weight_quantization",
}
# Select DeepSpeed's own optimizers or engines, or belong to them.
DELEGATING = {
    *("expert_parallel", "hybrid_engine", "pipeline", "sequence_parallel_size", "tensor_parallel", "aio"),
    *("seq_parallel_communication_data_type", "use_data_before_expert_parallelism", "zero_force_ds_cpu_optimizer"),
}
NARROW_MASTERS = ("bf16_master_weights_and_grads", "bf16_optimizer_states", "fp16_master_weights_and_grads")
DELEGATING |= {f"{name.split('_')[0]}.{name}" for name in NARROW_MASTERS}
# Removed from DeepSpeed, whose error says so.
REMOVED = {
    *("amp", "compression_training", "curriculum_learning", "eigenvalue", "elasticity", "graph_harvesting", "nebula"),
    *("progressive_layer_drop", "quantize_training", "sparse_attention", "sparse_gradients"),
}
# Without effect: (DeepSpeed's default, what happens instead). Another value than the default is a warning.
WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "bf16.immediate_grad_update": (False, "gradients are reduced as backward produces them"),
    "optimizer.legacy_fusion": (False, "one fused kernel updates each bucket"),
    "comms_logger.enabled": (False, "the optimizer's exchanges are torch.distributed's own; use torch.profiler"),
    "disable_allgather": (False, "parameters are gathered bucket by bucket"),
    "gradient_predivide_factor": (1.0, "gradients are summed, then divided once, in fp32"),
    "prescale_gradients": (False, "gradients are summed, then divided once, in fp32"),
    "torch_autocast.lower_precision_safe_modules": (
        None,
        "gradients of all modules travel in communication_data_type",
    ),
    "zero_optimization.allgather_bucket_size": (500_000_000, "reduce_bucket_size serves both"),
    "zero_optimization.allgather_partitions": (True, "parameters are gathered bucket by bucket"),
    "zero_optimization.compute_grad_norm": (True, "the norm decides whether a step is skipped"),
    "zero_optimization.contiguous_gradients": (True, "gradients are always in contiguous buckets"),
    "zero_optimization.elastic_checkpoint": (False, "universal checkpoints load at any layout"),
    "zero_optimization.enable_sanity_checks": (False, "ranks are compared when the engine is built"),
    "zero_optimization.ignore_unused_parameters": (True, "a missing gradient is a zero"),
    "zero_optimization.legacy_stage1": (False, "there is one stage 1"),
    "zero_optimization.load_from_fp32_weights": (True, "masters are loaded from masters"),
    "zero_optimization.parameter_alignment": (False, "bucket ends are aligned to 256 elements"),
    "zero_optimization.reduce_scatter": (True, "gradients are always reduce-scattered"),
    "zero_optimization.round_robin_gradients": (False, "a bucket is cut evenly among its ranks"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": (
        False,
        "deepspeed_ext.Muon keeps its momentum like any other state",
    ),
    "zero_optimization.use_multi_rank_bucket_allreduce": (True, "gradients are always reduce-scattered"),
    "zero_optimization.zero_hpz_partition_size": (1, "it is of stage 3"),
    "zero_optimization.zero_quantized_gradients": (False, "communication_data_type halves the bytes"),
    "zero_optimization.zero_quantized_nontrainable_weights": (False, "it is of stage 3"),
    "zero_optimization.zero_quantized_weights": (False, "it is of stage 3"),
}
# The keys of sections that we and DeepSpeed's engine read together: (ours, the engine's). Those of "zero_optimization"
# are in README.md; other sections are the engine's alone.
SECTION_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "bf16": ({"check_grad_overflow"}, {"enabled"}),
    "checkpoint": (
        {"load_universal"},
        {"checkpoint_serialization", "parallel_write", "tag_validation", "use_node_local_storage", "writer"},
    ),
    "data_types": ({"grad_accum_dtype"}, {"buffer_dtype", "keep_in_fp32_modules", "param_dtype"}),
    "fp16": (
        {"consecutive_hysteresis", "hysteresis", "initial_scale_power", "loss_scale", "loss_scale_window"}
        | {"min_loss_scale"},
        {"auto_cast", "enabled"},
    ),
    "optimizer": ({"params", "type"}, set()),
    "torch_autocast": ({"dtype"}, {"enabled"}),
}
TOP_LEVEL_KEYS = READ_HERE | READ_BY_DEEPSPEED | REMOVED
TOP_LEVEL_KEYS |= {name.split(".")[0] for name in (*WITHOUT_EFFECT, *DELEGATING)}


def unknown_keys(config: Mapping[str, Any]) -> str | None:
    """Returns a warning for keys that nothing reads, with the nearest known keys; None without any.

    They are those at the top and in the sections of SECTION_KEYS, most of which DeepSpeed does not check itself.
    """
    places = [("", config, TOP_LEVEL_KEYS)]
    for section, (ours, engines) in SECTION_KEYS.items():
        others = {name.split(".")[1] for name in (*WITHOUT_EFFECT, *DELEGATING) if name.startswith(f"{section}.")}
        places.append((f"{section}.", config.get(section) or {}, ours | engines | others))
    unknown = []
    for prefix, found, known in places:
        for key in map(str, found.keys() - known):
            near = difflib.get_close_matches(key, known, n=1)
            unknown.append(f"{prefix + key!r} (did you mean {prefix + near[0]!r}?)" if near else repr(prefix + key))
    if not unknown:
        return None
    return f"the DeepSpeed configuration has keys that nothing reads: {', '.join(sorted(unknown))}"


def keys_without_effect(config: Mapping[str, Any]) -> str | None:
    """Returns a warning for keys without effect, with what happens instead; None without any."""
    found = []
    for name, (default, instead) in WITHOUT_EFFECT.items():
        *section, key = name.split(".")
        holder = config.get(section[0]) if section else config
        if section == ["bf16"] and holder is None:
            holder = config.get("bfloat16")  # the section's old name
        value = holder.get(key, default) if isinstance(holder, Mapping) else default
        if value is not None and value != default:
            found.append(f"{name}={value!r} ({instead})")
    return f"without effect in ZeRO stages 1 and 2 of deepspeed_ext: {'; '.join(found)}" if found else None


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raises ValueError for options that would fail later, or silently train something else than asked for."""
    if (config.get("compile") or {}).get("deepcompile"):
        raise ValueError(
            "compile.deepcompile=true is not supported: DeepCompile rewrites the reductions of stock ZeRO; remove it, "
            "engine.compile() and torch.compile work"
        )
