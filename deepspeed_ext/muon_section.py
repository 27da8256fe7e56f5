"""Builds Muon from the section "optimizer" of a DeepSpeed configuration, with DeepSpeed's keys, defaults and marks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch

from deepspeed_ext.optimizers import Muon

# DeepSpeed's options of the matrices (True) and of all other parameters (False), with its defaults.
_DEFAULTS: dict[bool, dict[str, Any]] = {
    True: {"lr": 0.02, "weight_decay": 0.0, "momentum": 0.95, "ns_method": "gram"},
    False: {"lr": 3e-4, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-10},
}
_RATES = {True: "muon_lr", False: "adam_lr"}
_SWITCHES = {"adam_w_mode", "torch_adam", "fp32_optimizer_states", "per_head_muon"}


def build_muon(options: Mapping[str, Any], params: Iterable[Any], model: torch.nn.Module | None) -> Muon:
    """Builds Muon for the matrices among the parameters and AdamW for the others, with DeepSpeed's keys and defaults.

    A key of a parameter group wins over ``muon_lr`` and ``adam_lr``, and these win over ``lr``.

    Args:
        options: the section's "params".
        params: parameters, or parameter groups.
        model: DeepSpeed's own function marks its parameters (``use_muon``) by shape and name; None: they are marked.

    Raises:
        ValueError: an option is unknown or out of range, or a parameter has no mark or four dimensions.
    """
    known = _DEFAULTS[True].keys() | _DEFAULTS[False].keys() | {*_RATES.values(), *_SWITCHES}
    if unknown := sorted(options.keys() - known):
        raise ValueError(f"optimizer.params of Muon: {', '.join(unknown)} unknown; known: {', '.join(sorted(known))}")
    if options.get("per_head_muon") and not hasattr(deepspeed, "resolve_per_head_muon_after_sharding"):
        raise ValueError(f"per_head_muon=true needs deepspeed 0.19.8, here is {deepspeed.__version__}; remove it")
    if model is not None:
        deepspeed.set_optimizer_flags(SimpleNamespace(optimizer_name="muon", optimizer_params=options), model)
    given = list(params)
    halves = []
    for group in given if given and isinstance(given[0], Mapping) else [{"params": given}]:
        trained = [param for param in group["params"] if param.requires_grad]
        for use_muon in (True, False):
            half = [param for param in trained if _uses_muon(param) is use_muon]
            if half:
                halves.append({"params": half, "use_muon": use_muon, **_options_of(use_muon, options, group)})
    return Muon(halves)


def _uses_muon(param: torch.nn.Parameter) -> bool:
    """Reads DeepSpeed's mark, and passes on its number of heads: matrices one below the other."""
    if not hasattr(param, "use_muon"):
        raise ValueError(
            f"Muon needs every parameter marked, one of shape {tuple(param.shape)} is not: it is not of model=; set "
            "param.use_muon = True or False"
        )
    if param.use_muon and param.dim() == 4 and not getattr(param, "is_expert_group", False):
        raise ValueError(
            f"Muon by configuration: a parameter of shape {tuple(param.shape)} is a convolution's, whose update here "
            "would not be DeepSpeed's; pass optimizer=deepspeed_ext.Muon(...) with it in a group of use_muon=False"
        )
    if heads := getattr(param, "muon_num_heads", None):
        param.stacked_matrices = heads  # type: ignore[attr-defined]
    return bool(param.use_muon)


def _options_of(use_muon: bool, options: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of ``deepspeed_ext.Muon`` for one half of a parameter group."""
    rate = {"lr": options[_RATES[use_muon]]} if _RATES[use_muon] in options else {}
    chosen = {**_DEFAULTS[use_muon], **options, **rate, **group}
    shared = {"lr": chosen["lr"], "weight_decay": chosen["weight_decay"]}
    if not use_muon:
        decoupled = bool(options.get("adam_w_mode", True))
        return {
            **shared,
            "betas": tuple(chosen["betas"]),
            "adam_eps": chosen["eps"],
            "decoupled_weight_decay": decoupled,
        }
    if chosen["ns_method"] not in ("gram", "standard"):
        raise ValueError(f"optimizer.params.ns_method={chosen['ns_method']!r} is unknown; use gram or standard")
    # Two orders of the same products. Stock runs "standard" in bf16 on the CPU too, "gram" in fp32 there.
    ns_dtype = torch.bfloat16 if chosen["ns_method"] == "standard" else None
    return {**shared, "momentum": chosen["momentum"], "ns_dtype": ns_dtype}
