"""Hyperparameters of one update, read once from a param group: host numbers, the same for every backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AdamOptions:
    """``decoupled``: weight decay on the weights (AdamW), else added to the gradient (Adam)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> AdamOptions:
        beta1, beta2 = group["betas"]
        return cls(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=bool(group.get("decoupled_weight_decay", True)),
            maximize=bool(group.get("maximize", False)),
        )


@dataclass(frozen=True)
class LionOptions:
    """Weight decay is decoupled, as in the paper."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    maximize: bool

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> LionOptions:
        beta1, beta2 = group["betas"]
        return cls(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=float(group["weight_decay"]),
            maximize=bool(group.get("maximize", False)),
        )


@dataclass(frozen=True)
class SgdOptions:
    """``decoupled``: weight decay on the weights, else added to the gradient as torch.optim.SGD does."""

    lr: float
    momentum: float
    dampening: float
    nesterov: bool
    weight_decay: float
    decoupled: bool
    maximize: bool

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> SgdOptions:
        return cls(
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group.get("dampening", 0.0)),
            nesterov=bool(group.get("nesterov", False)),
            weight_decay=float(group["weight_decay"]),
            decoupled=bool(group.get("decoupled_weight_decay", False)),
            maximize=bool(group.get("maximize", False)),
        )


@dataclass(frozen=True)
class MomentumOptions:
    """The element-wise half of Muon: an exponential mean of gradients, with Nesterov's look-ahead or without."""

    momentum: float
    nesterov: bool
    maximize: bool
