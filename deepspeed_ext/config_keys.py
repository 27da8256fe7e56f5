"""What each key of a DeepSpeed 0.19.8 configuration means where our optimizer runs; README.md shows it as a table.

A key in none of these sets is read by nobody (a test compares them with what DeepSpeed looks for).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

# Read by us.
OURS = {
    *("bf16", "bfloat16", "checkpoint", "communication_data_type", "data_types", "deepspeed_ext", "fp16"),
    *("gradient_accumulation_steps", "gradient_allreduce_op", "gradient_clipping", "optimizer", "torch_autocast"),
    *("zero_allow_untested_optimizer", "zero_optimization"),
}
# Work as in DeepSpeed: its engine and data loader read them, whoever runs the optimizer.
ENGINES = {
    *("activation_checkpointing", "autotuning", "comet", "compile", "csv_monitor", "data_efficiency"),
    *("dataloader_drop_last", "datastates_ckpt", "disable_python_gc", "dump_state", "flops_profiler", "log_level"),
    *("managed_gradient_accumulation", "memory_breakdown", "scheduler", "steps_per_print", "tensorboard", "timers"),
    *("train_batch_size", "train_micro_batch_size_per_gpu", "vocabulary_size", "wall_clock_breakdown", "wandb"),
    "weight_quantization",
}
# Hand the configuration to DeepSpeed's own path.
DELEGATING = {
    *("expert_parallel", "hybrid_engine", "pipeline", "sequence_parallel_size", "tensor_parallel", "aio"),
    *("seq_parallel_communication_data_type", "use_data_before_expert_parallelism", "zero_force_ds_cpu_optimizer"),
}
# Removed from DeepSpeed, which says so in its error.
REMOVED = {
    *("amp", "compression_training", "curriculum_learning", "eigenvalue", "elasticity", "graph_harvesting", "nebula"),
    *("progressive_layer_drop", "quantize_training", "sparse_attention", "sparse_gradients"),
}
# Change nothing here; a value other than DeepSpeed's default is a warning. (default, what happens instead)
WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "bf16.immediate_grad_update": (False, "gradients are taken as they come"),
    "comms_logger.enabled": (False, "the optimizer's exchanges are torch.distributed's own; use torch.profiler"),
    "disable_allgather": (False, "parameters are gathered bucket by bucket"),
    "gradient_predivide_factor": (1.0, "gradients are summed, then divided once, in fp32"),
    "prescale_gradients": (False, "gradients are summed, then divided once, in fp32"),
    "zero_optimization.allgather_bucket_size": (500_000_000, "reduce_bucket_size serves both"),
    "zero_optimization.allgather_partitions": (True, "parameters are gathered bucket by bucket"),
    "zero_optimization.compute_grad_norm": (True, "the norm decides whether a step is skipped"),
    "zero_optimization.contiguous_gradients": (True, "gradients lie in buckets"),
    "zero_optimization.elastic_checkpoint": (False, "universal checkpoints load at any layout"),
    "zero_optimization.enable_sanity_checks": (False, "ranks are compared when the engine is built"),
    "zero_optimization.ignore_unused_parameters": (True, "a missing gradient is a zero"),
    "zero_optimization.legacy_stage1": (False, "there is one stage 1"),
    "zero_optimization.load_from_fp32_weights": (True, "masters are loaded from masters"),
    "zero_optimization.parameter_alignment": (False, "bucket ends are aligned to 256 elements"),
    "zero_optimization.reduce_scatter": (True, "gradients are always reduce-scattered"),
    "zero_optimization.round_robin_gradients": (False, "a bucket is cut evenly among its ranks"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": (False, "Muon is ours"),
    "zero_optimization.use_multi_rank_bucket_allreduce": (True, "gradients are always reduce-scattered"),
    "zero_optimization.zero_hpz_partition_size": (1, "it is of stage 3"),
    "zero_optimization.zero_quantized_gradients": (False, "communication_data_type halves the bytes"),
    "zero_optimization.zero_quantized_nontrainable_weights": (False, "it is of stage 3"),
    "zero_optimization.zero_quantized_weights": (False, "it is of stage 3"),
}
# Of "zero_optimization": read by us, or what decides who runs it, and what stage 3 alone reads, in DeepSpeed as well.
ZERO_OURS = {
    *("stage", "reduce_bucket_size", "overlap_comm", "offload_param", "offload_optimizer", "zenflow"),
    *("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"),
}
ZERO_STAGE_3 = {
    *("gather_16bit_weights_on_model_save", "leaf_module", "log_trace_cache_warnings", "max_live_parameters"),
    *("max_reuse_distance", "memory_efficient_linear", "model_persistence_threshold", "module_granularity_threshold"),
    *("override_module_apply", "param_persistence_threshold", "pipeline_loading_checkpoint", "prefetch_bucket_size"),
    *("stage3_gather_fp16_weights_on_model_save", "sub_group_size", "use_all_reduce_for_fetch_params"),
    "allgather_sequential",
}
TOP_LEVEL_KEYS = OURS | ENGINES | DELEGATING | REMOVED | {name.split(".")[0] for name in WITHOUT_EFFECT}


def unknown_keys(config: Mapping[str, Any]) -> str | None:
    """One line on the keys at the top of a configuration that nothing reads, with the nearest known ones, or None."""
    unknown = []
    for key in map(str, config.keys() - TOP_LEVEL_KEYS):
        near = difflib.get_close_matches(key, TOP_LEVEL_KEYS, n=1)
        unknown.append(f"{key!r} (did you mean {near[0]!r}?)" if near else repr(key))
    if not unknown:
        return None
    return f"the DeepSpeed configuration has keys that nothing reads: {', '.join(sorted(unknown))}"


def keys_without_effect(config: Mapping[str, Any]) -> str | None:
    """One line on keys that ask for something our optimizer does not do, and what it does instead, or None."""
    found = []
    for name, (default, instead) in WITHOUT_EFFECT.items():
        *section, key = name.split(".")
        holder = config.get(section[0]) if section else config
        value = holder.get(key, default) if isinstance(holder, Mapping) else default
        if value is not None and value != default:
            found.append(f"{name}={value!r} ({instead})")
    return f"without effect in ZeRO stages 1 and 2 of deepspeed_ext: {'; '.join(found)}" if found else None


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raises ValueError for what would fail later, or train another model than asked for, without a clear word."""
    if (config.get("compile") or {}).get("deepcompile"):
        raise ValueError(
            "compile.deepcompile=true is not supported: DeepCompile rewrites the reductions of stock ZeRO; remove it, "
            "engine.compile() and torch.compile work"
        )
