"""AdamW and Adam: the rule behind torch.optim.AdamW and torch.optim.Adam."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_ext.rules.base import Shard, StepScalars, UpdateRule
from deepspeed_ext.rules.kernels import reference
from deepspeed_ext.rules.kernels.reference import AdamOptions


class AdamRule(UpdateRule):
    """Options of a group: lr, betas, eps, weight_decay, decoupled_weight_decay (True: AdamW), maximize, state_dtype."""

    state_kinds = ("exp_avg", "exp_avg_sq")
    unsigned_kinds = frozenset({"exp_avg_sq"})

    def update_(self, shard: Shard, options: Mapping[str, Any], scalars: StepScalars) -> None:
        beta1, beta2 = options["betas"]
        values = AdamOptions(
            lr=float(options["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(options["eps"]),
            weight_decay=float(options["weight_decay"]),
            decoupled=bool(options.get("decoupled_weight_decay", True)),
            maximize=bool(options.get("maximize", False)),
        )
        reference.adam(shard, values, scalars)
