"""The model of a run, its optimizer, and DeepSpeed's engine around both.

Of the training program this file alone imports deepspeed_ext.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from enum import Enum
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor, nn

import deepspeed_ext
from megatron.optimus.config.checks import gradient_accumulation_steps
from megatron.optimus.config.choices import OPTIMIZER_LIBRARY, KernelLibrary
from megatron.optimus.config.options import did_you_mean
from megatron.optimus.config.parametrization import UNSCALED, UpdateScaling, update_scaling
from megatron.optimus.config.schema import ConfigError, Float8, OptimizerConfig, OptimizerName, Precision, RunConfig
from megatron.optimus.context import RunContext
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.initialize import draw_weights, initialize_weights, materialize
from megatron.optimus.models.parameters import count_parameters
from megatron.optimus.models.partition import whole_shape
from megatron.optimus.moe.dispatch.ownership import read_placements
from megatron.optimus.moe.dispatch.select import select_dispatcher
from megatron.optimus.ops import fp8
from megatron.optimus.parallel.apply import parallelize
from megatron.optimus.parallel.converters import load_converters
from megatron.optimus.parallel.tensor import register_gradient_sums
from megatron.optimus.platform import device as devices
from megatron.optimus.platform import older_stacks
from megatron.optimus.platform.memory import needs_memory
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.training.kernel_tuning import select_tiles

own_optimizer = deepspeed_ext.optimizers.own_optimizer
Engine = deepspeed_ext.EPEngine
StateChecksums, checksum, checksums = deepspeed_ext.StateChecksums, deepspeed_ext.checksum, deepspeed_ext.checksums
import_ahead = deepspeed_ext.import_ahead  # torch's compiler and what the first optimizer needs
NOISE_GROUPS = deepspeed_ext.gradient_noise.GROUPS  # parts of the model whose noise is measured apart
TrainingState = deepspeed_ext.EPZeroOptimizer | deepspeed_ext.Stage3States  # what a checkpoint reads and writes

ParamGroup = dict[str, Any]


class _Optimizer(NamedTuple):
    """What ``--optimizer NAME`` builds, and the options of its parameter groups besides lr and weight_decay."""

    build: Callable[[list[ParamGroup]], torch.optim.Optimizer]
    options: Callable[[OptimizerConfig], ParamGroup]


def _muon_options(config: OptimizerConfig) -> ParamGroup:
    return {
        "betas": (config.adam_beta1, config.adam_beta2),
        "adam_eps": config.adam_eps,
        "momentum": config.muon_momentum,
        "ns_steps": config.muon_num_ns_steps,
        "adjust_lr_fn": config.muon_adjust_lr_fn.value,
    }


_OPTIMIZERS: dict[OptimizerName, _Optimizer] = {
    OptimizerName.ADAM: _Optimizer(
        torch.optim.AdamW, lambda c: {"betas": (c.adam_beta1, c.adam_beta2), "eps": c.adam_eps}
    ),
    OptimizerName.SGD: _Optimizer(
        torch.optim.SGD, lambda c: {"momentum": c.sgd_momentum, "decoupled_weight_decay": True}
    ),
    OptimizerName.MUON: _Optimizer(deepspeed_ext.Muon, _muon_options),
    OptimizerName.NORMUON: _Optimizer(
        own_optimizer("normuon"), lambda c: _muon_options(c) | {"beta2": c.normuon_beta2}
    ),
    OptimizerName.CAUTIOUS_ADAMW: _Optimizer(
        own_optimizer("cautious-adamw"), lambda c: {"betas": (c.adam_beta1, c.adam_beta2), "eps": c.adam_eps}
    ),
    OptimizerName.LAMB: _Optimizer(
        own_optimizer("lamb"),
        lambda c: {
            "betas": (c.adam_beta1, c.adam_beta2),
            "eps": c.adam_eps,
            "max_weight_norm": c.lamb_max_weight_norm,
        },
    ),
    OptimizerName.SCHEDULE_FREE_ADAMW: _Optimizer(
        own_optimizer("schedule-free-adamw"),
        lambda c: {
            "betas": (c.schedule_free_beta, c.adam_beta2),
            "eps": c.adam_eps,
            "warmup_iters": c.schedule_free_warmup_iters,
        },
    ),
    OptimizerName.SCHEDULE_FREE_SGD: _Optimizer(
        own_optimizer("schedule-free-sgd"),
        lambda c: {"momentum": c.schedule_free_beta, "warmup_iters": c.schedule_free_warmup_iters},
    ),
}


def optimizer_of(name: OptimizerName) -> _Optimizer:
    """What ``--optimizer`` builds: an entry of the table, else the class of deepspeed_ext.optimizers of that name."""
    if name in _OPTIMIZERS:
        return _OPTIMIZERS[name]
    if name.is_of_library:
        return _library_optimizer(name)
    build = own_optimizer(name.value)
    return _Optimizer(build, partial(_own_options, signature(build).parameters))


def _own_options(arguments: Collection[str], config: OptimizerConfig) -> ParamGroup:
    """Those arguments of an optimizer NAME for which there are options NAME_argument; its betas are NAME_beta1 and 2.

    One for matrices has AdamW's betas and eps from AdamW's options. Its own are ``matrix_betas`` and ``eps``, which
    without options of its own are AdamW's too.
    """
    prefix = config.optimizer.value.replace("-", "_")
    adam = {"betas": (config.adam_beta1, config.adam_beta2), "adam_eps": config.adam_eps}
    found: ParamGroup = {name: value for name, value in adam.items() if config.optimizer.is_for_matrices}
    if config.optimizer.is_for_matrices:
        found |= {name: config.adam_eps for name in ("eps", "graft_eps") if name in arguments}
    found |= {name: getattr(config, f"{prefix}_{name}") for name in arguments if hasattr(config, f"{prefix}_{name}")}
    key = "matrix_betas" if "matrix_betas" in arguments else "betas"
    if betas := [getattr(config, f"{prefix}_beta{n}") for n in (1, 2, 3) if hasattr(config, f"{prefix}_beta{n}")]:
        found[key] = tuple(betas)
    elif "matrix_betas" in arguments:
        found[key] = found["betas"]
    return {name: value.value if isinstance(value, Enum) else value for name, value in found.items()}


def _library_optimizer(name: OptimizerName) -> _Optimizer:
    """A class of pytorch_optimizer. Raises ConfigError where there is none of that name."""
    try:
        build = deepspeed_ext.optimizers.library_optimizer(name.value.removeprefix(OPTIMIZER_LIBRARY))
    except ValueError as error:
        raise ConfigError(f"optimizer={name.value}: {error}") from error
    known = [known for known in signature(build).parameters if known not in ("params", "lr", "weight_decay", "kwargs")]

    def options(config: OptimizerConfig) -> ParamGroup:
        found: ParamGroup = {}
        for word in config.optimizer_options:
            key, _, value = word.partition("=")
            if key not in known:
                hint = did_you_mean(key, known, f"it has {', '.join(known)}")
                raise ConfigError(f"optimizer_options: {name.value} has no option {key!r} (value {value!r}); {hint}")
            found[key] = _parsed(value)
        return found

    return _Optimizer(build, options)


def _parsed(text: str) -> Any:
    """A number, true, false, a list in brackets or text, as YAML has them; 1e-6 is a number too."""
    with contextlib.suppress(ValueError):
        return float(text) if not text.isdecimal() else int(text)
    return tuple(value) if isinstance(value := yaml.safe_load(text), list) else value


@needs_memory("building the model")
def build_model(run: RunContext, *, draws: bool = True) -> Decoder:
    """Builds this rank's share of the model with its initial weights, on the device. Collective.

    Without ``draws`` the weights have no values until a checkpoint is loaded, or ``draw_initial_weights`` is called.
    """
    config, mesh = run.config, run.mesh
    with torch.device("meta"):
        model = Decoder(config.model)
    placements = read_placements(run)
    parallel = select_dispatcher(run)
    with run.startup.phase("kernels", "choosing the tiles of expert kernels"):
        select_tiles(run.with_parallel(parallel))
    converters = load_converters(_converters(run))
    parallelize(model, mesh, parallel, config.training.seq_length, placements, converters)
    total, own = count_parameters(config.model).total, sum(weight.numel() for weight in model.parameters())
    what = "drawing initial weights" if draws else "allocating the weights"
    doing = f"{what} of {total / 1e6:,.0f} M parameters, {own / 1e6:,.0f} M of them on this rank"
    with run.startup.phase("weights", doing), ThreadPoolExecutor(1) as pool:
        imported = pool.submit(import_ahead)  # beside the threads that draw
        if draws:
            initialize_weights(model, seed=config.training.seed, device=run.device, dtype=run.dtype)
        else:
            materialize(model, run.device, run.dtype)
        imported.result()
    register_gradient_sums(model, mesh)
    return model


def draw_initial_weights(run: RunContext, model: Decoder, engine: Engine) -> None:
    """Draws the weights of a model built without, and sets the optimizer's states as if it had been built with."""
    with run.startup.phase("weights", "drawing initial weights"):
        draw_weights(model, run.config.training.seed)
        engine.optimizer.restart_from_params()


def _converters(run: RunContext) -> list[str]:
    """Names of the model converters of a run. Raises ConfigError where the device has no float8 products."""
    training, converters = run.config.training, list(run.config.parallel.model_converters)
    if training.norm_backend is KernelLibrary.APEX:
        converters.insert(0, "apex_norms")
    if training.fp8 is Float8.NONE:
        return converters
    try:
        fp8.check_device(run.device, run.dtype)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return ["fp8", *converters]


@needs_memory("building the optimizer's state")
def build_engine(run: RunContext, model: Decoder) -> Engine:
    """Wraps the model in DeepSpeed's engine, with the EP-aware sharded optimizer; zero_stage=3 has DeepSpeed's own."""
    config = run.config
    engine, *_ = deepspeed_ext.initialize(
        model=model,
        optimizer=build_optimizer(model, config.optimizer),
        config=deepspeed_config(config, gradient_accumulation_steps(config, run.mesh.layout.world_size)),
        groups=_groups(model, run.mesh),
    )
    if config.optimizer.ema_decay is not None:
        engine.optimizer.keep_average(evaluates=config.optimizer.evaluate_ema)
    return engine


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Builds the torch optimizer. Raises ConfigError where one of another library is absent or cannot run on shards."""
    groups = param_groups(model, config)
    if config.optimizer_backend is KernelLibrary.APEX:
        return _fused_adam(groups)
    build = optimizer_of(config.optimizer).build
    if not config.optimizer.is_of_library:
        return build(groups)
    try:
        optimizer = build(groups)
        for group in optimizer.param_groups:
            deepspeed_ext.optimizers.shard_optimizer_for(optimizer, group)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer={config.optimizer.value}: {error}") from error
    return optimizer


def _fused_adam(groups: list[ParamGroup]) -> torch.optim.Optimizer:
    try:
        return older_stacks.apex_class("optimizers", "FusedAdam")(groups)
    except (ImportError, RuntimeError, TypeError) as error:  # TypeError: its tensor type of CUDA where there is none
        raise ConfigError(f"optimizer_backend=apex: {error}; leave it out for the AdamW of Optimus") from error


def param_groups(model: nn.Module, config: OptimizerConfig) -> list[ParamGroup]:
    """Groups the trainable parameters by how the optimizer updates them, in the model's order; no group is empty.

    Weight decay leaves out the parameters that the configuration excludes. With muP or CompleteP the groups differ in
    rate, decay and epsilon, too. Muon updates the matrices between embedding
    and output projection (experts one by one, gate and up projection apart); its other parameters get AdamW.
    """
    if config.optimizer.is_for_matrices:
        _mark_stacked(model)
    members: dict[tuple[bool, bool, UpdateScaling], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = config.optimizer.is_for_matrices and _is_hidden_matrix(name, parameter)
            scaling = _update_scaling(model, config, name, parameter)
            members.setdefault((is_matrix, _is_decayed(name, parameter, config), scaling), []).append(parameter)
    options = {
        "lr": config.lr,
        "state_dtype": config.optimizer_state_dtype.value,
        **optimizer_of(config.optimizer).options(config),
    }
    groups = []
    for (is_matrix, is_decayed, scaling), parameters in members.items():
        group = {"params": parameters, **options, "weight_decay": config.weight_decay if is_decayed else 0.0}
        if scaling != UNSCALED:
            group |= {name: options[name] * scaling.eps for name in ("eps", "adam_eps") if name in options}
            group["lr_scale"] = scaling.lr  # the trainer sets lr in each step
            group["lr"] *= scaling.lr
            group["weight_decay"] *= scaling.weight_decay
        if config.optimizer.is_for_matrices:
            group["use_muon"] = is_matrix
        groups.append(group)
    return groups


def _update_scaling(model: nn.Module, config: OptimizerConfig, name: str, parameter: nn.Parameter) -> UpdateScaling:
    """The factors of muP or CompleteP; none for a model that is no decoder of ours."""
    if not isinstance(model, Decoder):
        return UNSCALED
    return update_scaling(model.config, config, name, whole_shape(parameter))


def _is_embedding(name: str) -> bool:
    return name.endswith(("embedding.weight", "lm_head.weight"))


def _is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() >= 2 and not _is_embedding(name)


def _is_decayed(name: str, parameter: nn.Parameter, config: OptimizerConfig) -> bool:
    if _is_embedding(name):
        return config.weight_decay_embeddings
    if name.endswith("bias"):
        return config.weight_decay_biases
    return parameter.dim() >= 2 or config.weight_decay_norms


def _mark_stacked(model: nn.Module) -> None:
    """Marks the tensors that hold two projections, which Muon orthogonalises apart."""
    for name, parameter in model.named_parameters():
        if name.endswith("gate_up_weight"):
            parameter.stacked_matrices = 2  # type: ignore[attr-defined]


def training_state(engine: Engine) -> TrainingState:
    """The optimizer state of an engine as a checkpoint reads and writes it, at every ZeRO stage."""
    if isinstance(engine.optimizer, deepspeed_ext.EPZeroOptimizer):
        return engine.optimizer
    return deepspeed_ext.Stage3States(engine)


def set_micro_batches(engine: Engine, count: int) -> None:
    """Sets the number of micro-batches from the next step on. Call it between steps, on every rank alike."""
    if count == engine.gradient_accumulation_steps():
        return
    engine.set_train_batch_size(count * engine.train_micro_batch_size_per_gpu() * engine.dp_world_size)
    # DeepSpeed's own engine (zero_stage=3) steps when micro_steps is a multiple of the count, and would cut the next
    # step short. deepspeed_ext's engine resets it by itself.
    engine.micro_steps = 0


def update_average(engine: Engine, config: OptimizerConfig, step: int) -> None:
    """Updates the moving average of the weights where it is due after ``step``. Local; waits for nothing."""
    if config.ema_decay is not None and step % config.ema_interval == 0:
        engine.optimizer.update_average(1 - config.ema_decay**config.ema_interval)


def update_curvature(engine: Engine, num_labels: Tensor | float) -> None:
    """Ends a backward of sampled labels, over ``num_labels`` of the global batch, in the place of ``engine.step()``."""
    engine.optimizer.update_curvature(num_labels)
    engine.micro_steps = 0  # the next step begins with its first micro-batch


def step_outcome(engine: Engine) -> Tensor:
    """Gradient norm of the last step, 1.0 if the step was skipped, and what was measured of its noise: float64 [2 + n].

    The noise is |G|^2 and tr(Sigma) / B of each of NOISE_GROUPS where ``log_gradient_noise_scale`` asks for it. It is
    on the device, without waiting for it; with zero_stage=3 it is on the host.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, deepspeed_ext.EPZeroOptimizer):
        outcome = optimizer.outcome.to(devices.sum_dtype(optimizer.outcome.device))
        noise = optimizer.gradient_noise
        return outcome if noise is None else torch.cat([outcome, noise.view(-1)])
    return torch.tensor([float(engine.get_global_grad_norm()), float(optimizer.overflow)], dtype=torch.float64)


def deepspeed_config(config: RunConfig, accumulation_steps: int) -> dict[str, Any]:
    """The configuration of DeepSpeed's engine. Nothing in it makes the host wait for the device."""
    optimizer = config.optimizer
    # A pipeline runs the backwards of all micro-batches between two calls of the engine, which sees them as one.
    in_stages = config.parallel.pipeline_model_parallel_size > 1
    zero: dict[str, Any] = {"stage": optimizer.zero_stage, "overlap_comm": optimizer.overlap_grad_reduce}
    if optimizer.ddp_bucket_size is not None:
        zero["reduce_bucket_size"] = optimizer.ddp_bucket_size
    elif optimizer.zero_stage == 3:
        zero["reduce_bucket_size"] = deepspeed_ext.ZeroOptions().bucket_numel  # DeepSpeed's own takes 2 GB in fp32
    in_host_memory = {"device": "cpu", "pin_memory": devices.pins_memory(torch.device(devices.default_kind()))}
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
        "deepspeed_ext": {
            "overlap_param_gather": optimizer.overlap_param_gather,
            "measure_gradient_noise": config.logging.log_gradient_noise_scale,
        },
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
        matrices={None: mesh.group("stage"), **{str(name): mesh.group("edp_etp") for name in names}},
        expert_tensor=mesh.group("etp"),
    )


def init_engine(timeout: timedelta) -> None:
    """Puts DeepSpeed's communication layer on top of the process group that already exists."""
    deepspeed_ext.init_distributed(timeout=timeout)


def shutdown_engine() -> None:
    """Leaves every process group, DeepSpeed's included: one that is alive can abort the process at exit."""
    deepspeed_ext.shutdown()
