"""Where the model meets DeepSpeed: the one file of the package that imports deepspeed_ext."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

import deepspeed_ext
from megatron.optimus.config.checks import gradient_accumulation_steps
from megatron.optimus.config.schema import OptimizerName, Precision, RunConfig
from megatron.optimus.context import RunContext
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.training.parameter_groups import param_groups

Engine = deepspeed_ext.EPEngine
TrainingState = deepspeed_ext.EPZeroOptimizer | deepspeed_ext.Stage3States  # what a checkpoint reads and writes

_OPTIMIZERS: dict[OptimizerName, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    OptimizerName.ADAM: torch.optim.AdamW,
    OptimizerName.SGD: torch.optim.SGD,
    OptimizerName.MUON: deepspeed_ext.Muon,
    OptimizerName.LION: deepspeed_ext.Lion,
}


def build_engine(run: RunContext, model: Decoder) -> Engine:
    """DeepSpeed's engine around the model, with the EP-aware sharded optimizer; with zero_stage=3, DeepSpeed's own."""
    config = run.config
    engine, *_ = deepspeed_ext.initialize(
        model=model,
        optimizer=_OPTIMIZERS[config.optimizer.optimizer](param_groups(model, config.optimizer)),
        config=deepspeed_config(config, gradient_accumulation_steps(config, run.mesh.layout.world_size)),
        groups=_groups(model, run.mesh),
    )
    return engine


def training_state(engine: Engine) -> TrainingState:
    """What a checkpoint holds of the engine, whoever's optimizer it has."""
    if isinstance(engine.optimizer, deepspeed_ext.EPZeroOptimizer):
        return engine.optimizer
    return deepspeed_ext.Stage3States(engine)


def set_micro_batches(engine: Engine, count: int) -> None:
    """Micro-batches of the next step and those after it. Between steps, on every rank alike."""
    if count == engine.gradient_accumulation_steps():
        return
    engine.set_train_batch_size(count * engine.train_micro_batch_size_per_gpu() * engine.dp_world_size)
    # For zero_stage=3, whose engine is DeepSpeed's own: it takes a step when this is a multiple of the count, and would
    # cut the next one short. deepspeed_ext's has done it.
    engine.micro_steps = 0


def step_outcome(engine: Engine) -> Tensor:
    """float64 [2]: gradient norm of the last step, 1.0 if it was skipped. On the device, without waiting for it; with
    zero_stage=3 on the host."""
    optimizer = engine.optimizer
    if isinstance(optimizer, deepspeed_ext.EPZeroOptimizer):
        return optimizer.outcome.double()
    return torch.tensor([float(engine.get_global_grad_norm()), float(optimizer.overflow)], dtype=torch.float64)


def deepspeed_config(config: RunConfig, accumulation_steps: int) -> dict[str, Any]:
    """The configuration of DeepSpeed's engine; nothing in it makes the host wait for the device."""
    optimizer = config.optimizer
    # A pipeline runs the backwards of all micro-batches between two calls of the engine, which sees them as one.
    in_stages = config.parallel.pipeline_model_parallel_size > 1
    zero: dict[str, Any] = {"stage": optimizer.zero_stage, "overlap_comm": optimizer.overlap_grad_reduce}
    if optimizer.ddp_bucket_size is not None:
        zero["reduce_bucket_size"] = optimizer.ddp_bucket_size
    elif optimizer.zero_stage == 3:
        zero["reduce_bucket_size"] = deepspeed_ext.ZeroOptions().bucket_numel  # DeepSpeed's own takes 2 GB in fp32
    in_host_memory = {"device": "cpu", "pin_memory": devices.default_kind() != "cpu"}
    if optimizer.optimizer_cpu_offload:
        zero["offload_optimizer"] = in_host_memory
    if optimizer.param_cpu_offload:
        zero["offload_param"] = in_host_memory
    accumulate = "fp32" if optimizer.accumulate_allreduce_grads_in_fp32 else "bf16"
    return {
        "train_micro_batch_size_per_gpu": config.training.micro_batch_size,
        "gradient_accumulation_steps": 1 if in_stages else accumulation_steps,
        "gradient_clipping": optimizer.clip_grad,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # it would be compiled here, at the start
        "bf16": {"enabled": config.training.params_dtype is Precision.BF16},
        "data_types": {"grad_accum_dtype": accumulate},
        "communication_data_type": "bf16" if optimizer.grad_reduce_in_bf16 else accumulate,
        "deepspeed_ext": {"overlap_param_gather": optimizer.overlap_param_gather},
        "timers": {"throughput": {"enabled": False}},
        "steps_per_print": 1_000_000_000,  # the trainer reports, not the engine
    }


def _groups(model: Decoder, mesh: Mesh) -> deepspeed_ext.ZeroGroups:
    names = {getattr(parameter, "group_name", None) for parameter in model.parameters()} - {None}
    return deepspeed_ext.ZeroGroups(
        dense=mesh.group_or_self("dense"),
        expert={str(name): mesh.group("edp") for name in names},
        model=mesh.group("model"),
        tensor=mesh.group("tp"),
    )


def init_engine(timeout: timedelta) -> None:
    """Puts DeepSpeed's communication layer on top of the process group that already exists."""
    deepspeed_ext.init_distributed(timeout=timeout)


def shutdown_engine() -> None:
    """Leaves every process group, DeepSpeed's included; a live one can abort the process at exit."""
    deepspeed_ext.shutdown()
