"""The element-wise updates in plain torch: the specification of the fused kernels, and their fallback.

Every function updates a shard's 1-D tensors in place, one block after the other (blocks.py): arithmetic is fp32, states
may be kept in bf16 or int8, and a skipped step changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed_ext.optimizers.base import Shard, StepScalars
from deepspeed_ext.optimizers.blocks import ShardBlock, blocks_of, wide_dtype
from deepspeed_ext.optimizers.kernels.options import AdamOptions, LionOptions, MomentumOptions, SGDOptions


def _decay(block: ShardBlock, options: AdamOptions | SGDOptions) -> tuple[Tensor, Tensor]:
    """Returns (master, gradient) after weight decay, which acts on one of them."""
    if options.decoupled_weight_decay:
        return block.master * (1 - options.lr * options.weight_decay), block.gradient()
    return block.master, block.gradient() + options.weight_decay * block.master


def adam(shard: Shard, options: AdamOptions, scalars: StepScalars) -> None:
    """Updates by AdamW (Loshchilov and Hutter 2019, algorithm 2) or Adam; states "exp_avg" and "exp_avg_sq"."""
    step = scalars.step.to(wide_dtype(scalars.step.device))
    correction1 = (1 - torch.pow(options.beta1, step)).float()
    correction2 = (1 - torch.pow(options.beta2, step)).sqrt().float()
    for block in blocks_of(shard, ("exp_avg", "exp_avg_sq"), scalars, options.maximize):
        master, gradient = _decay(block, options)
        m = torch.lerp(block.read("exp_avg"), gradient, 1 - options.beta1)
        v = options.beta2 * block.read("exp_avg_sq") + (1 - options.beta2) * gradient.square()
        denominator = v.sqrt() / correction2 + options.eps
        block.write_weights(master - (options.lr / correction1) * (m / denominator))
        block.write("exp_avg", m)
        block.write("exp_avg_sq", v)


def lion(shard: Shard, options: LionOptions, scalars: StepScalars) -> None:
    """Updates by Lion (Chen et al. 2023, algorithm 2); state "exp_avg"."""
    for block in blocks_of(shard, ("exp_avg",), scalars, options.maximize):
        gradient, m = block.gradient(), block.read("exp_avg")
        update = torch.lerp(m, gradient, 1 - options.beta1).sign()
        block.write_weights(block.master * (1 - options.lr * options.weight_decay) - options.lr * update)
        block.write("exp_avg", torch.lerp(m, gradient, 1 - options.beta2))


def sgd(shard: Shard, options: SGDOptions, scalars: StepScalars) -> None:
    """Updates as torch.optim.SGD does, or with decoupled decay; state "momentum_buffer" if momentum > 0."""
    undamped = torch.where(scalars.step == 1, 1.0, 1 - options.dampening)  # the first step is not dampened
    for block in blocks_of(shard, ("momentum_buffer",), scalars, options.maximize):
        master, gradient = _decay(block, options)
        if options.momentum > 0:
            buffer = options.momentum * block.read("momentum_buffer") + undamped * gradient
            gradient = gradient + options.momentum * buffer if options.nesterov else buffer
            block.write("momentum_buffer", buffer)
        block.write_weights(master - options.lr * gradient)


def momentum(shard: Shard, options: MomentumOptions, scalars: StepScalars, update: Tensor) -> None:
    """Updates Muon's momentum (state "momentum_buffer") and writes what is to be orthogonalised to ``update`` [n]."""
    for block in blocks_of(shard, ("momentum_buffer",), scalars, options.maximize):
        gradient = block.gradient()
        buffer = torch.lerp(block.read("momentum_buffer"), gradient, 1 - options.momentum)
        update[block.where] = torch.lerp(gradient, buffer, options.momentum) if options.nesterov else buffer
        block.write("momentum_buffer", buffer)


def apply_update(master: Tensor, param: Tensor, update: Tensor, decay: float, lr: float, scalars: StepScalars) -> None:
    """Sets master to decay * master - lr * update, and param to its copy; ``update`` in any float dtype, all [n]."""
    block = ShardBlock(Shard(master=master, grad=update, param=param), 0, scalars)
    block.write_weights(master * decay - lr * update.float())
