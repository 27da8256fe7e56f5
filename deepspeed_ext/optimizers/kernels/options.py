"""Hyperparameters of one kernel call, read from a parameter group as host numbers; the same for every backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

_Options = TypeVar("_Options", bound="KernelOptions")
_CONVERT = {"float": float, "bool": bool}  # a learning rate may be a tensor


@dataclass(frozen=True)
class KernelOptions:
    """Base class: fields are named like the keys of a parameter group, except that ``betas`` is beta1 and beta2."""

    @classmethod
    def from_group(cls: type[_Options], group: Mapping[str, Any]) -> _Options:
        """Reads every field from a parameter group; a key that the group does not have takes the field's default."""
        values = dict(group)
        if "betas" in values:
            values["beta1"], values["beta2"] = values["betas"]
        given = [field for field in fields(cls) if field.name in values]
        return cls(**{field.name: _CONVERT[str(field.type)](values[field.name]) for field in given})


@dataclass(frozen=True)
class AdamOptions(KernelOptions):
    """``decoupled_weight_decay``: the decay acts on the weights (AdamW), else it is added to the gradient (Adam)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled_weight_decay: bool = True
    maximize: bool = False


@dataclass(frozen=True)
class LionOptions(KernelOptions):
    """Weight decay is decoupled, as in the paper."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    maximize: bool = False


@dataclass(frozen=True)
class SGDOptions(KernelOptions):
    """``decoupled_weight_decay``: the decay acts on the weights, else it is added to the gradient as in torch."""

    lr: float
    momentum: float
    weight_decay: float
    dampening: float = 0.0
    nesterov: bool = False
    decoupled_weight_decay: bool = False
    maximize: bool = False


@dataclass(frozen=True)
class MomentumOptions(KernelOptions):
    """The element-wise half of Muon: an exponential moving average of gradients, with or without Nesterov momentum."""

    momentum: float
    nesterov: bool
    maximize: bool = False
