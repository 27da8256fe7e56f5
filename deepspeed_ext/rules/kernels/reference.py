"""The element-wise updates in plain torch: the specification of the fused kernels, and what runs where there are none.

Every function works on a shard's 1-D tensors in place, takes the step's scalars as device tensors and never reads them
on the host: a skipped step is computed and not stored. Arithmetic is fp32; states in bf16 and int8 are encoded as
states.py says.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_ext.rules import states
from deepspeed_ext.rules.base import Shard, StepScalars


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


def store(target: Tensor, value: Tensor, skip: Tensor) -> None:
    """target <- value, rounded to nearest into target's dtype, unless ``skip``."""
    target.copy_(torch.where(skip != 0, target, value.to(target.dtype)))


def store_state(shard: Shard, kind: str, value: Tensor, skip: Tensor, bits: Tensor) -> None:
    """A new fp32 state in the form it is kept in, unless ``skip``; ``bits``: 16 random bits for each element."""
    stored = shard.state[kind]
    if stored.dtype == torch.float32:
        store(stored, value, skip)
    elif stored.dtype == torch.bfloat16:
        store(stored, states.round_to_bf16(value, bits), skip)
    else:
        codes, scale = states.encode(value, signed=stored.dtype == torch.int8)
        store(stored, codes, skip)
        store(shard.state[kind + states.SCALE_SUFFIX], scale, skip)


def scaled_gradient(shard: Shard, scalars: StepScalars, maximize: bool) -> Tensor:
    """fp32, clipped and divided, turned around for ``maximize``."""
    gradient = shard.grad.float() * scalars.scale
    return -gradient if maximize else gradient


def store_weights(shard: Shard, master: Tensor, skip: Tensor) -> None:
    store(shard.master, master, skip)
    if shard.param.data_ptr() != shard.master.data_ptr():
        store(shard.param, master, skip)


def adam(shard: Shard, options: AdamOptions, scalars: StepScalars) -> None:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) or Adam, states "exp_avg" and "exp_avg_sq"."""
    master, gradient = shard.master, scaled_gradient(shard, scalars, options.maximize)
    if options.decoupled:
        master = master * (1 - options.lr * options.weight_decay)
    else:
        gradient = gradient + options.weight_decay * master
    m = torch.lerp(states.read(shard.state, "exp_avg"), gradient, 1 - options.beta1)
    v = torch.lerp(states.read(shard.state, "exp_avg_sq"), gradient.square(), 1 - options.beta2)
    step = scalars.step.double()
    correction1 = (1 - torch.pow(options.beta1, step)).float()
    correction2 = (1 - torch.pow(options.beta2, step)).sqrt().float()
    denominator = v.sqrt() / correction2 + options.eps
    store_weights(shard, master - (options.lr / correction1) * (m / denominator), scalars.skip)
    bits = states.random_bits(0, m.numel(), scalars.step)
    store_state(shard, "exp_avg", m, scalars.skip, bits & 0xFFFF)
    store_state(shard, "exp_avg_sq", v, scalars.skip, bits >> 16)
