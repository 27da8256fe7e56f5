"""Rules on what is kept where: ZeRO stages, recomputation, host memory. As in checks.py, which runs them."""

from __future__ import annotations

from megatron.optimus.config.schema import OptimizerName, Recompute, RunConfig, StateDtype


def zero_stage_fits(config: RunConfig) -> str | None:
    """What zero_stage=3, which DeepSpeed's own optimizer runs, does not go together with."""
    optimizer, parallel = config.optimizer, config.parallel
    stage = optimizer.zero_stage
    if stage == 0:
        return "zero_stage=0: use 1, which shards the optimizer's states, or 2 or 3"
    if stage < 3:
        offloads = [name for name in ("optimizer_cpu_offload", "param_cpu_offload") if getattr(optimizer, name)]
        return f"{offloads[0]} needs zero_stage=3, this run has zero_stage={stage}" if offloads else None
    for axis in ("tensor_model", "pipeline_model", "expert_model", "context"):
        name = f"{axis}_parallel_size"
        size = getattr(parallel, name)
        if size > 1:
            return f"zero_stage=3 shards over data-parallel ranks alone, but {name}={size}; use 1, or zero_stage=1 or 2"
    if optimizer.optimizer is not OptimizerName.ADAM:
        return f"zero_stage=3 needs optimizer=adam, not {optimizer.optimizer.value}; or use zero_stage=1 or 2"
    if optimizer.optimizer_state_dtype is not StateDtype.FP32:
        kept = optimizer.optimizer_state_dtype.value
        return f"zero_stage=3 keeps states in fp32, not optimizer_state_dtype={kept}; or use zero_stage=1 or 2"
    return None


def recomputed_layers_exist(config: RunConfig, world_size: int) -> str | None:
    parallel, num_layers = config.parallel, config.model.num_layers
    count = parallel.recompute_num_layers
    if not count:
        return None
    if not parallel.recompute_modules:
        parts = " ".join(part.value for part in Recompute)
        return (
            f"recompute_num_layers={count} without recompute_modules recomputes nothing; "
            f"name parts (--recompute-modules {parts}), or leave recompute_num_layers out"
        )
    if count <= num_layers:
        return None
    return f"recompute_num_layers={count} exceeds num_layers={num_layers}; use at most {num_layers}; default: all"


def offloaded_layers_exist(config: RunConfig, world_size: int) -> str | None:
    count, num_layers = config.parallel.cpu_offloading_num_layers, config.model.num_layers
    if count <= num_layers:
        return None
    return f"cpu_offloading_num_layers={count} exceeds num_layers={num_layers}; use at most {num_layers}, 0 for none"
