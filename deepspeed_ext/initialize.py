"""initialize(): deepspeed.initialize with the EP-aware ZeRO optimizer in place of DeepSpeed's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE as DeepSpeedMoE
from deepspeed.runtime.config import DeepSpeedConfig, get_gradient_clipping
from deepspeed.runtime.zero import partition_parameters
from torch import nn

from deepspeed_ext import versions
from deepspeed_ext.config_checks import check_kinds, without_auto
from deepspeed_ext.config_keys import keys_without_effect, refuse_unsupported, unknown_keys
from deepspeed_ext.ds_config import build_torch_optimizer, reason_for_deepspeed, resolve_config, zero_options
from deepspeed_ext.engine import EPEngine
from deepspeed_ext.groups import (
    ZeroGroups,
    build_groups,
    expert_group_name,
    init_distributed,
    mark_experts,
    world_group,
)
from deepspeed_ext.optimizers import shard_optimizer_for
from deepspeed_ext.zero.deepspeed_api import end_optimizers_of
from deepspeed_ext.zero.options import ZeroOptions
from deepspeed_ext.zero.sync_errors import (
    InvalidCall,
    Signatures,
    check_same_parameters,
    gather,
    parameter_signatures,
    require_same_on_all_ranks,
    run_on_all_ranks,
)

logger = logging.getLogger("deepspeed_ext")

# Bound here: a program may put our initialize() in the place of deepspeed.initialize (patch.py does).
_deepspeed_initialize = deepspeed.initialize

OptimizerFactory = Callable[[list[Any]], torch.optim.Optimizer]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | OptimizerFactory | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: torch.utils.data.Dataset | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    *,
    groups: ZeroGroups | None = None,
    is_expert: Callable[[str], str | None] | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Builds a training engine, as ``deepspeed.initialize`` does, with the EP-aware ZeRO optimizer.

    This optimizer runs ZeRO stages 1 and 2 without offload (options: ``ds_config.zero_options``); every other
    configuration goes to ``deepspeed.initialize`` unchanged. One log line says which. DeepSpeed's throughput timer
    would wait for the device twice a micro-batch; here it does not, unless the configuration has a section "timers".
    Collective over all ranks.

    Args:
        groups: the process groups to use. None: all ranks are one dense group, and N consecutive ranks share the
            experts of the expert group "ep_size_N".
        is_expert: returns the expert group of a parameter's name, or None for a dense parameter. None: DeepSpeed's
            attributes decide (``param.allreduce = False``, ``param.group_name = "ep_size_N"``).

    The other arguments are those of ``deepspeed.initialize``.

    Returns:
        (engine, optimizer, dataloader or None, lr scheduler or None).

    Raises:
        ValueError: the same on every rank, for
            a configuration that on any rank is missing, no JSON or out of range;
            an expert-parallel size that does not divide the number of ranks;
            a parameter that is twice in the optimizer; sparse embeddings;
            ranks with different names, shapes, dtypes or order of parameters, optimizer options or accumulation steps;
            experts spread over ranks, in MoE layers not DeepSpeed's, where DeepSpeed's own optimizer would run.
    """
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)

    def read() -> tuple[nn.Module, dict[str, Any], str | None, int | None]:
        if not isinstance(model, nn.Module):
            raise InvalidCall(f"initialize needs model=, a torch.nn.Module, got {type(model).__name__}")
        resolved = resolve_config(args, config, config_params)
        check_kinds(resolved)
        resolved = without_auto(resolved)
        marked = None if is_expert is None else mark_experts(model, is_expert)
        return model, resolved, reason_for_deepspeed(resolved, model, mesh_param), marked

    model, config, reason, marked = run_on_all_ranks(read, world_group())
    require_same_on_all_ranks("who runs the optimizer", reason or "deepspeed_ext", world_group())
    _log_choice(reason)
    _warn(config, reason, gather(marked, world_group()).values())
    passed_on = {"args": args, "model": model, "training_data": training_data, "lr_scheduler": lr_scheduler}
    passed_on |= {"mpu": mpu, "dist_init_required": dist_init_required, "collate_fn": collate_fn}
    if reason is not None:
        _refuse_spread_experts(model, reason)
        in_args = getattr(args, "deepspeed_config", None) is not None
        passed_on |= {"optimizer": optimizer, "model_parameters": model_parameters, "mesh_param": mesh_param}
        passed_on |= {"config": None if in_args else config}  # DeepSpeed refuses one given twice
        end_optimizers_of(model.parameters())
        return _deepspeed_initialize(distributed_port=distributed_port, **passed_on)
    engine = _build_engine(optimizer, model_parameters, config, groups, passed_on)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _refuse_spread_experts(model: nn.Module, reason: str) -> None:
    """Raises ValueError if ranks hold different experts, which DeepSpeed would sum or shard over all ranks.

    DeepSpeed recognises experts by its own MoE layers only. Experts that every rank holds are dense parameters to it:
    their attributes are reset.
    """
    if any(isinstance(module, DeepSpeedMoE) for module in model.modules()):
        return
    for name, param in model.named_parameters():
        group = expert_group_name(param)
        if group == "ep_size_1":
            param.allreduce = True  # type: ignore[attr-defined]
        elif group is not None:
            raise ValueError(
                f"{name} belongs to the expert group {group!r}, and DeepSpeed's own optimizer ({reason}) would mix the "
                "experts of different ranks; use ZeRO stage 1 or 2 without offload, or keep all experts on every rank"
            )


def _build_engine(
    optimizer: torch.optim.Optimizer | OptimizerFactory | None,
    model_parameters: Iterable[Any] | None,
    config: dict[str, Any],
    groups: ZeroGroups | None,
    passed_on: dict[str, Any],
) -> EPEngine:
    """Builds the engine with the sharded optimizer. ``passed_on``: arguments for DeepSpeed's engine as they are."""
    config.setdefault("timers", {"throughput": {"synchronized": False}})
    prepared = _prepare(passed_on["model"], optimizer, model_parameters, config, groups, passed_on["mpu"])
    passed_on |= dict(zip(("optimizer", "zero_groups", "zero_options", "config_class"), prepared, strict=True))
    end_optimizers_of(passed_on["model"].parameters())
    partition_parameters.shutdown_init_context()  # a surrounding zero.Init must not see the engine's own modules
    engine = EPEngine(config=config, **passed_on)
    partition_parameters.restore_init_context()
    versions.configure_python_gc(engine)
    return engine


def _prepare(
    model: nn.Module,
    given: torch.optim.Optimizer | OptimizerFactory | None,
    model_parameters: Iterable[Any] | None,
    config: dict[str, Any],
    groups: ZeroGroups | None,
    mpu: Any,
) -> tuple[torch.optim.Optimizer, ZeroGroups, ZeroOptions, DeepSpeedConfig]:
    """Builds torch optimizer, groups, options and DeepSpeed's parsed configuration, and compares them across ranks."""

    def build() -> tuple[torch.optim.Optimizer, ZeroOptions, DeepSpeedConfig, Signatures]:
        if groups is not None:
            groups.check()
        refuse_unsupported(config)
        options = zero_options(config)
        optimizer = _torch_optimizer(model, given, model_parameters, config)
        parsed = DeepSpeedConfig(config, mpu)
        for group in optimizer.param_groups:
            shard_optimizer_for(optimizer, group)
        signatures = parameter_signatures(model, optimizer.param_groups)
        if groups is not None and not signatures.keys() <= {None, *groups.expert}:
            unknown = sorted(str(name) for name in signatures.keys() - {None, *groups.expert})
            raise ValueError(f"expert groups {unknown} have no process group; given: {sorted(groups.expert)}")
        return optimizer, options, parsed, signatures

    optimizer, options, parsed, signatures = run_on_all_ranks(build, world_group())
    require_same_on_all_ranks("gradient_accumulation_steps", parsed.gradient_accumulation_steps, world_group())
    if groups is None:
        # Creating a process group is collective: ranks without experts take part too.
        names = gather({name for name in signatures if name is not None}, world_group())
        groups = build_groups(set().union(*names.values()))
    check_same_parameters(signatures, groups, options)
    return optimizer, groups, options, parsed


def _torch_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | OptimizerFactory | None,
    model_parameters: Iterable[Any] | None,
    config: dict[str, Any],
) -> torch.optim.Optimizer:
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if not (optimizer is None or callable(optimizer)):
        raise ValueError(
            f"optimizer={optimizer!r}: expected a torch.optim.Optimizer, a function of the parameters that makes one, "
            "or None and an 'optimizer' section in the configuration"
        )
    params = list(model_parameters if model_parameters is not None else model.parameters())
    built = optimizer(params) if optimizer is not None else build_torch_optimizer(config, params, model)
    if not isinstance(built, torch.optim.Optimizer):
        raise ValueError(f"optimizer= is a function that returned {built!r}, not a torch.optim.Optimizer")
    return built


def _log_choice(reason: str | None) -> None:
    if dist.get_rank() == 0:
        if reason is None:
            logger.info("optimizer: EP-aware ZeRO of deepspeed_ext")
        else:
            logger.info("optimizer: DeepSpeed's own (%s)", reason)


def _is_muon(config: dict[str, Any]) -> bool:
    return str((config.get("optimizer") or {}).get("type", "")).lower() == "muon"


def _warn(config: dict[str, Any], reason: str | None, marked: Collection[int | None]) -> None:
    """Logs warnings. ``marked``: number of expert parameters of each rank; a pipeline stage may have none."""
    lines = [unknown_keys(config)]
    if reason is None:
        lines.append(keys_without_effect(config))
        if "gradient_clipping" not in config and get_gradient_clipping(config):  # 0 before 0.19.3
            lines.append(
                "gradients are clipped to norm 1: the configuration has no gradient_clipping, and that is DeepSpeed's "
                "default; set it, 0 for none. torch.nn.utils.clip_grad_norm_ clips nothing here: param.grad is None "
                "after backward"
            )
        if _is_muon(config) and get_gradient_clipping(config):
            lines.append(
                f"gradient_clipping={get_gradient_clipping(config)} clips the gradients, before Muon's momentum; stock "
                "DeepSpeed clips the orthogonalised updates, which makes its steps far smaller than muon_lr. Set 0 for "
                "the same weights in both"
            )
    if 0 in marked and not any(marked):
        lines.append("is_expert named no parameter of the model: all are trained as dense ones")
    if dist.get_rank() == 0:
        for line in filter(None, lines):
            logger.warning("%s", line)
