"""The element-wise updates in plain torch: the specification of the fused kernels, and their fallback.

Every function updates a shard's 1-D tensors in place. The scalars of the step are device tensors and are never read on
the host: a skipped step is computed and not stored. Arithmetic is fp32; states.py encodes states in bf16 and int8.
``first`` is the position of the first element in the rank's shard, from which the random bits follow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed_ext.optimizers import states
from deepspeed_ext.optimizers.base import Shard, StepScalars
from deepspeed_ext.optimizers.kernels.options import AdamOptions, LionOptions, MomentumOptions, SGDOptions


def _store(target: Tensor, value: Tensor, skip: Tensor) -> None:
    """Sets target to value, rounded to nearest into target's dtype, unless ``skip``."""
    target.copy_(torch.where(skip != 0, target, value.to(target.dtype)))


def _store_state(shard: Shard, kind: str, value: Tensor, skip: Tensor, bits: Tensor) -> None:
    """Encodes and stores an fp32 state, unless ``skip``; ``bits``: 16 random bits for each element."""
    stored = shard.state[kind]
    if stored.dtype == torch.float32:
        _store(stored, value, skip)
    elif stored.dtype == torch.bfloat16:
        _store(stored, states.round_to_bf16(value, bits), skip)
    else:
        codes, scale = states.encode(value, signed=stored.dtype == torch.int8, bits=bits)
        _store(stored, codes, skip)
        _store(shard.state[kind + states.SCALE_SUFFIX], scale, skip)


def _gradient(shard: Shard, scalars: StepScalars, maximize: bool) -> Tensor:
    """Returns the gradient in fp32, clipped and averaged, with the opposite sign for ``maximize``."""
    gradient = shard.grad.float() * scalars.scale
    return -gradient if maximize else gradient


def _random_bits(shard: Shard, kind: str, first: int, step: Tensor) -> Tensor:
    if shard.state[kind].dtype == torch.float32:
        return torch.zeros((), dtype=torch.int64, device=step.device)  # fp32 needs no rounding
    return states.random_bits(first, shard.grad.numel(), step)


def _store_weights(shard: Shard, master: Tensor, skip: Tensor) -> None:
    _store(shard.master, master, skip)
    if shard.param.data_ptr() != shard.master.data_ptr():
        _store(shard.param, master, skip)


def _decay(master: Tensor, gradient: Tensor, options: AdamOptions | SGDOptions) -> tuple[Tensor, Tensor]:
    """Returns (master, gradient) after weight decay, which acts on one of them."""
    if options.decoupled_weight_decay:
        return master * (1 - options.lr * options.weight_decay), gradient
    return master, gradient + options.weight_decay * master


def adam(shard: Shard, options: AdamOptions, scalars: StepScalars, first: int = 0) -> None:
    """Updates by AdamW (Loshchilov and Hutter 2019, algorithm 2) or Adam; states "exp_avg" and "exp_avg_sq"."""
    master, gradient = _decay(shard.master, _gradient(shard, scalars, options.maximize), options)
    m = torch.lerp(states.read(shard.state, "exp_avg"), gradient, 1 - options.beta1)
    v = options.beta2 * states.read(shard.state, "exp_avg_sq") + (1 - options.beta2) * gradient.square()
    step = scalars.step.to(torch.float32 if scalars.step.device.type == "mps" else torch.float64)
    correction1 = (1 - torch.pow(options.beta1, step)).float()
    correction2 = (1 - torch.pow(options.beta2, step)).sqrt().float()
    denominator = v.sqrt() / correction2 + options.eps
    _store_weights(shard, master - (options.lr / correction1) * (m / denominator), scalars.skip)
    bits = _random_bits(shard, "exp_avg", first, scalars.step)
    _store_state(shard, "exp_avg", m, scalars.skip, bits & 0xFFFF)
    _store_state(shard, "exp_avg_sq", v, scalars.skip, bits >> 16)


def lion(shard: Shard, options: LionOptions, scalars: StepScalars, first: int = 0) -> None:
    """Updates by Lion (Chen et al. 2023, algorithm 2); state "exp_avg"."""
    gradient = _gradient(shard, scalars, options.maximize)
    m = states.read(shard.state, "exp_avg")
    update = torch.lerp(m, gradient, 1 - options.beta1).sign()
    master = shard.master * (1 - options.lr * options.weight_decay) - options.lr * update
    _store_weights(shard, master, scalars.skip)
    bits = _random_bits(shard, "exp_avg", first, scalars.step)
    _store_state(shard, "exp_avg", torch.lerp(m, gradient, 1 - options.beta2), scalars.skip, bits & 0xFFFF)


def sgd(shard: Shard, options: SGDOptions, scalars: StepScalars, first: int = 0) -> None:
    """Updates as torch.optim.SGD does, or with decoupled decay; state "momentum_buffer" if momentum > 0."""
    master, gradient = _decay(shard.master, _gradient(shard, scalars, options.maximize), options)
    if options.momentum > 0:
        undamped = torch.where(scalars.step == 1, 1.0, 1 - options.dampening)  # the first step is not dampened
        buffer = options.momentum * states.read(shard.state, "momentum_buffer") + undamped * gradient
        gradient = gradient + options.momentum * buffer if options.nesterov else buffer
        bits = _random_bits(shard, "momentum_buffer", first, scalars.step)
        _store_state(shard, "momentum_buffer", buffer, scalars.skip, bits & 0xFFFF)
    _store_weights(shard, master - options.lr * gradient, scalars.skip)


def momentum(shard: Shard, options: MomentumOptions, scalars: StepScalars, update: Tensor, first: int = 0) -> None:
    """Updates Muon's momentum (state "momentum_buffer") and writes what is to be orthogonalised to ``update`` [n]."""
    gradient = _gradient(shard, scalars, options.maximize)
    buffer = torch.lerp(states.read(shard.state, "momentum_buffer"), gradient, 1 - options.momentum)
    update.copy_(torch.lerp(gradient, buffer, options.momentum) if options.nesterov else buffer)
    bits = _random_bits(shard, "momentum_buffer", first, scalars.step)
    _store_state(shard, "momentum_buffer", buffer, scalars.skip, bits & 0xFFFF)


def apply_update(master: Tensor, param: Tensor, update: Tensor, decay: float, lr: float, scalars: StepScalars) -> None:
    """Sets master to decay * master - lr * update, and param to its copy; ``update`` in any float dtype, all [n]."""
    target = Shard(master=master, grad=update, param=param)
    _store_weights(target, master * decay - lr * update.float(), scalars.skip)
