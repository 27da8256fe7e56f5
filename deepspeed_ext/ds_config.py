"""Reads a DeepSpeed configuration: which optimizer it selects, which engine runs it, and with which options."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import hjson
import torch
from deepspeed.runtime.config import get_gradient_clipping, get_torch_autocast_dtype
from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config

from deepspeed_ext.config_checks import number, optimizer_params, own_section, refuse_auto
from deepspeed_ext.config_keys import NARROW_MASTERS
from deepspeed_ext.muon_section import build_muon
from deepspeed_ext.optimizers import OPTIMIZERS
from deepspeed_ext.zero.options import DEFAULT_BUCKET_NUMEL, LossScaleOptions, ZeroOptions
from deepspeed_ext.zero.sync_errors import InvalidCall

# Keys of the section "deepspeed_ext", each a field of ZeroOptions. A value must have the type of the one given here.
_OWN_OPTIONS = {"overlap_param_gather": False, "clip_after_steps": 0, "reduce_each_micro_batch": False}
_OWN_OPTIONS |= {"measure_gradient_noise": False}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DTYPES |= {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_config(args: Any, config: Any, config_params: Any) -> dict[str, Any]:
    """Returns the configuration as a new dict.

    Args:
        args: its attribute ``deepspeed_config`` may be the path of a JSON file.
        config: a dict or the path of a JSON file.
        config_params: DeepSpeed's old name of ``config``.

    Raises:
        ValueError: no or two configurations are given, or the file does not exist or holds no JSON object.
    """
    given = config if config is not None else config_params
    if getattr(args, "deepscale_config", None) is not None:  # its old name, which DeepSpeed replaces too
        args.deepspeed_config, args.deepscale_config = args.deepscale_config, None
    from_args = getattr(args, "deepspeed_config", None)
    if given is not None and from_args is not None:
        raise ValueError("a configuration is given both as config= and in args.deepspeed_config; give one")
    given = given if given is not None else from_args
    if given is None:
        raise ValueError("no DeepSpeed configuration: pass config= as a dict or a JSON path")
    if isinstance(given, Mapping):
        return dict(given)
    if not isinstance(given, (str, os.PathLike)):
        raise ValueError(f"config={given!r}: expected a dict or the path of a JSON file")
    if not os.path.isfile(given):
        what = "is not a file" if os.path.exists(given) else "does not exist"
        raise ValueError(f"DeepSpeed configuration {str(given)!r} {what}")
    try:
        with open(given) as file:  # hjson, as DeepSpeed: comments may be in it
            loaded = hjson.load(file, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"DeepSpeed configuration {str(given)!r} is not JSON: {error}") from error
    if not isinstance(loaded, Mapping) or not loaded:
        raise ValueError(f"DeepSpeed configuration {str(given)!r} holds no JSON object with keys")
    return dict(loaded)


def reason_for_deepspeed(config: Mapping[str, Any], model: torch.nn.Module, mesh_param: Any) -> str | None:
    """Returns why DeepSpeed's own optimizer has to run, or None for ZeRO stages 1 and 2 without offload."""
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    offloaded = [(zero.get(key) or {}).get("device", "none") for key in ("offload_optimizer", "offload_param")]
    reasons = {
        f"ZeRO stage {stage}": stage not in (1, 2),
        "offload": any(device not in ("none", None) for device in offloaded) or bool(zero.get("cpu_offload")),
        "ZenFlow": bool(zero.get("zenflow")),
        "masters in 16 bits": _has_narrow_masters(config),
        "PipelineModule": isinstance(model, PipelineModule),
        "sequence parallelism": mesh_param is not None or "sequence_parallel_size" in config,
        "AutoTP": (config.get("tensor_parallel") or {}).get("autotp_size", 0) > 1,
        "AutoEP": bool((config.get("expert_parallel") or {}).get("enabled")),
        "hybrid engine": bool((config.get("hybrid_engine") or {}).get("enabled")),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def zero_options(config: Mapping[str, Any]) -> ZeroOptions:
    """Returns the options of the sharded optimizer.

    Args:
        config: DeepSpeed's keys zero_optimization.{stage, reduce_bucket_size, overlap_comm}, gradient_clipping,
            data_types.grad_accum_dtype, communication_data_type and bf16.check_grad_overflow (absent: 2^26 elements,
            overlap, norm 1, fp32, fp32, true); section "fp16": the loss scale; section "deepspeed_ext":
            overlap_param_gather, clip_after_steps, reduce_each_micro_batch and measure_gradient_noise.

    Raises:
        ValueError: an unknown key in the section "deepspeed_ext", or a value of the wrong type, out of range or "auto".
        InvalidCall: an odd allgather_bucket_size, which has no other effect.
    """
    refuse_auto(config)
    zero = config.get("zero_optimization") or {}
    if number("zero_optimization.allgather_bucket_size", gathered := zero.get("allgather_bucket_size", 2)) % 2:
        raise InvalidCall(
            "zero_optimization.allgather_bucket_size must be a multiple of nccl_start_alignment_factor, 2, got "
            f"{gathered}; give an even number"
        )
    bf16, communicate = get_bfloat16_config(config), config.get("communication_data_type")
    return ZeroOptions(
        stage=int(zero.get("stage", 1)),
        bucket_numel=int(
            number("zero_optimization.reduce_bucket_size", zero.get("reduce_bucket_size", DEFAULT_BUCKET_NUMEL))
        ),
        grad_dtype=_dtype("data_types.grad_accum_dtype", (config.get("data_types") or {}).get("grad_accum_dtype")),
        comm_dtype=None if communicate is None else _dtype("communication_data_type", communicate),
        overlap_comm=zero.get("overlap_comm") is not False,
        max_norm=number("gradient_clipping", get_gradient_clipping(config)),
        check_grad_overflow=bf16.check_grad_overflow or not bf16.enabled,
        loss_scale=_loss_scale(config),
        **own_section(config.get("deepspeed_ext") or {}, _OWN_OPTIONS),
    )


def _loss_scale(config: Mapping[str, Any]) -> LossScaleOptions | None:
    """Returns the loss scale of fp16 parameters, or of fp32 ones under fp16 ``torch_autocast``; None without fp16."""
    section = config.get("fp16") or {}
    autocast = config.get("torch_autocast") or {}
    has_fp16_autocast = autocast.get("enabled") and get_torch_autocast_dtype(config) is torch.float16
    if not (section.get("enabled") or has_fp16_autocast):
        return None
    fp16 = get_float16_config({"fp16": section})  # raises for values out of range
    if section.get("enabled") and get_bfloat16_config(config).enabled:
        raise ValueError("fp16 and bf16 are both enabled; enable one")
    return LossScaleOptions(
        initial=fp16.loss_scale or float(fp16.initial_dynamic_scale()),
        is_dynamic=fp16.loss_scale == 0,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        refills_hysteresis=fp16.consecutive_hysteresis,
        minimum=float(fp16.min_loss_scale),
    )


def _has_narrow_masters(config: Mapping[str, Any]) -> bool:
    """Whether masters or moments are to be in 16 bits; a value "auto" is DeepSpeed's default, false."""
    sections = [config.get(name) or {} for name in ("bf16", "bfloat16", "fp16")]
    return any(section.get(key) not in (None, False, "auto") for section in sections for key in NARROW_MASTERS)


def _dtype(key: str, value: str | None) -> torch.dtype:
    if value not in (None, *_DTYPES):
        raise ValueError(f"{key}={value!r} is not supported; use {' or '.join(sorted(_DTYPES))}")
    return torch.float32 if value is None else _DTYPES[value]


def build_torch_optimizer(
    config: Mapping[str, Any], params: Iterable[Any], model: torch.nn.Module | None = None
) -> torch.optim.Optimizer:
    """Builds the torch optimizer that the configuration's section "optimizer" names; nothing is JIT-compiled.

    As in DeepSpeed, "Adam" means decoupled weight decay unless adam_w_mode is false. What is absent has DeepSpeed's
    default: no weight decay without torch_adam, and for Lion lr 1e-3 and betas (0.9, 0.999).

    Args:
        config: {"optimizer": {"type": one of ``optimizers.OPTIMIZERS``, Muon or a class of torch.optim, "params": its
            options}}.
        params: parameters, or parameter groups.
        model: whose parameters Muon tells apart by their names.

    Raises:
        ValueError: the section is missing, the type unknown, or an option unknown or out of range.
    """
    section = config.get("optimizer")
    if not section:
        raise ValueError('no optimizer: pass optimizer=, or an "optimizer" section in the configuration')
    name = str(section.get("type", ""))
    kind = name.lower()
    options = optimizer_params(section.get("params") or {})
    if "max_grad_norm" in options:
        raise ValueError("max_grad_norm is not an optimizer parameter; use gradient_clipping in the configuration")
    if kind == "muon":
        return build_muon(options, params, model)
    decoupled, corrects = options.pop("adam_w_mode", True), options.pop("bias_correction", True)
    if kind == "adam" and decoupled:
        kind = "adamw"
    if not corrects and kind not in ("adam", "adamw"):
        raise ValueError(f"bias_correction=false is for Adam and AdamW, not {name}; remove it")
    classes = {known.lower(): optimizer_class for known, optimizer_class in OPTIMIZERS.items()}
    optimizer_class = classes.get(kind) or _class_of_torch(name)
    try:
        optimizer = optimizer_class(params, **_with_defaults(kind, options))
    except TypeError as error:
        raise ValueError(f"optimizer {name!r}: {error}") from error
    if not corrects:
        for group in (optimizer.defaults, *optimizer.param_groups):
            group["bias_correction"] = False  # read by ShardAdam
    return optimizer


def _with_defaults(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options with the defaults of DeepSpeed's own optimizers, which are not torch's or the paper's."""
    if kind == "adamw" and not options.get("torch_adam"):
        options.setdefault("weight_decay", 0.0)
    elif kind == "lion":
        options.setdefault("lr", 1e-3)
        options.setdefault("betas", (0.9, 0.999))
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    # What these two ask for is always so.
    return {key: value for key, value in options.items() if key not in ("torch_adam", "fp32_optimizer_states")}


def _class_of_torch(name: str) -> type[torch.optim.Optimizer]:
    """Finds a class of torch.optim by its exact name, as DeepSpeed does, and Adagrad in any case."""
    found = getattr(torch.optim, "Adagrad" if name.lower() == "adagrad" else name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ValueError(
            f"optimizer type {name!r} is not one of {', '.join(OPTIMIZERS)}, Muon or a class of torch.optim; pass "
            "optimizer="
        )
    return found
