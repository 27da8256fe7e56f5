# mypy: disable-error-code=no-untyped-def
"""The element-wise updates in Triton (NVIDIA and Intel GPUs): one pass over a shard, bound by memory bandwidth.

AdamW moves 28 bytes a parameter: gradient bf16 (2), master and both moments in and out (24), parameter bf16 (2). Every
program reads the scalars of the step from device memory, so the host never waits. Positions are 64-bit, since a shard
may hold more than 2^31 elements. reference.py is the specification.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed_ext.optimizers import states
from deepspeed_ext.optimizers.base import Shard, StepScalars
from deepspeed_ext.optimizers.kernels.options import AdamOptions, LionOptions, MomentumOptions, SGDOptions

# Elements of a program, multiples of states.BLOCK (the second for 8-bit states), and its warps: on an H200 the fastest,
# or within 0.2% of it, among 256 to 4096 elements and 2 to 8 warps.
_BLOCK, _CODED_BLOCK = 1024, 2048
_WARPS = 4
# Where a forward shares the device: programs of a whole multiprocessor each, on 3 / 7 of them. On an H200 such 48 reach
# 91% of an update's bandwidth. With 40 or 132, or the grid of an update alone, a step of Mula-7B took longer.
_SHARED_BLOCK, _SHARED_WARPS = 4096, 32

_STATE_BLOCK = tl.constexpr(states.BLOCK)
_SHIFT = tl.constexpr(states.SHIFT)
_NOISE_SHIFT = tl.constexpr(states.SHIFT - 16)  # 16 random bits, brought below the code's last bit
_SIGNED_OFFSET = tl.constexpr(2.0**-states.SIGNED_EXPONENTS)
_UNSIGNED_OFFSET = tl.constexpr(2.0**-states.UNSIGNED_EXPONENTS)
_SIGNED_BITS = tl.constexpr((127 - states.SIGNED_EXPONENTS) << 23)
_UNSIGNED_BITS = tl.constexpr((127 - states.UNSIGNED_EXPONENTS) << 23)
_SMALLEST_SCALE = tl.constexpr(states.SMALLEST_SCALE)


@triton.jit
def _positions(block, numel, BLOCK: tl.constexpr):
    """Positions [BLOCK] of a block in the shard, and which of them lie inside."""
    index = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return index, index < numel


@triton.jit
def _scaled(gradient, scale_ptr, MAXIMIZE: tl.constexpr):
    """The gradient clipped and averaged, with the opposite sign for MAXIMIZE.

    Kernels call it after all loads: where the product stands decides which products the compiler fuses into sums, and
    so the last bit of the result.
    """
    gradient *= tl.load(scale_ptr)
    if MAXIMIZE:
        gradient = -gradient
    return gradient


@triton.jit
def _store_weights(master_ptr, param_ptr, index, mask, master, STORES_PARAM: tl.constexpr):
    tl.store(master_ptr + index, master, mask=mask)
    if STORES_PARAM:
        tl.store(param_ptr + index, master.to(param_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_state(ptr, scale_ptr, block, index, mask, BLOCK: tl.constexpr):
    """Decodes a block of a state to fp32 [BLOCK]; the pointer's dtype says how it is kept."""
    dtype: tl.constexpr = ptr.dtype.element_ty
    stored = tl.load(ptr + index, mask=mask, other=0)
    if dtype.primitive_bitwidth == 8:
        OFFSET: tl.constexpr = _SIGNED_OFFSET if dtype == tl.int8 else _UNSIGNED_OFFSET
        OFFSET_BITS: tl.constexpr = _SIGNED_BITS if dtype == tl.int8 else _UNSIGNED_BITS
        row = tl.cast(block, tl.int64) * (BLOCK // _STATE_BLOCK) + tl.arange(0, BLOCK // _STATE_BLOCK)
        is_inside = tl.max(tl.reshape(mask.to(tl.int32), [BLOCK // _STATE_BLOCK, _STATE_BLOCK]), 1) > 0
        scale = tl.load(scale_ptr + row, mask=is_inside, other=0.0)
        code = stored.to(tl.int32)
        bits = (tl.abs(code) << _SHIFT) + OFFSET_BITS
        y = (bits.to(tl.float32, bitcast=True) - OFFSET) * (1.0 / (1.0 - OFFSET))
        y = tl.where(code < 0, -y, y)
        y = tl.reshape(y, [BLOCK // _STATE_BLOCK, _STATE_BLOCK]) * scale[:, None]
        return tl.reshape(y, [BLOCK])
    else:
        return stored.to(tl.float32)


@triton.jit
def _store_state(ptr, scale_ptr, block, index, mask, value, bits, BLOCK: tl.constexpr):
    """Encodes and stores a state, rounded stochastically by 16 random ``bits`` for each element."""
    dtype: tl.constexpr = ptr.dtype.element_ty
    if dtype == tl.float32:
        tl.store(ptr + index, value, mask=mask)
    elif dtype == tl.bfloat16:
        noisy = value.to(tl.int32, bitcast=True) + bits
        rounded = (noisy & -65536).to(tl.float32, bitcast=True)
        tl.store(ptr + index, rounded.to(tl.bfloat16), mask=mask)
    else:
        OFFSET: tl.constexpr = _SIGNED_OFFSET if dtype == tl.int8 else _UNSIGNED_OFFSET
        OFFSET_BITS: tl.constexpr = _SIGNED_BITS if dtype == tl.int8 else _UNSIGNED_BITS
        value = tl.where(mask, value, 0.0)  # elements beyond the end must not enter the scale
        rows = tl.reshape(value, [BLOCK // _STATE_BLOCK, _STATE_BLOCK])
        magnitude = tl.abs(rows)
        scale = tl.max(magnitude, 1)
        scale = tl.where(scale >= _SMALLEST_SCALE, scale, 0.0)
        inverse = tl.where(scale > 0.0, 1.0 / tl.where(scale > 0.0, scale, 1.0), 0.0)
        y = magnitude * inverse[:, None]
        noise = tl.reshape(bits << _NOISE_SHIFT, [BLOCK // _STATE_BLOCK, _STATE_BLOCK])
        code = ((y * (1.0 - OFFSET) + OFFSET).to(tl.int32, bitcast=True) - OFFSET_BITS + noise) >> _SHIFT
        if dtype == tl.int8:
            code = tl.where(rows < 0.0, -code, code)
        else:
            code = tl.where((code == 0) & (y > 0.0), 1, code)
        row = tl.cast(block, tl.int64) * (BLOCK // _STATE_BLOCK) + tl.arange(0, BLOCK // _STATE_BLOCK)
        is_inside = tl.max(tl.reshape(mask.to(tl.int32), [BLOCK // _STATE_BLOCK, _STATE_BLOCK]), 1) > 0
        tl.store(scale_ptr + row, scale, mask=is_inside)
        tl.store(ptr + index, tl.reshape(code, [BLOCK]).to(dtype), mask=mask)


@triton.jit
def _random_bits(index, step):
    """See states.random_bits."""
    x = index.to(tl.uint32) * 0x9E3779B9 + step.to(tl.int32).to(tl.uint32) * 0x85EBCA6B
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _adam(
    grad_ptr, master_ptr, param_ptr, m_ptr, m_scale_ptr, v_ptr, v_scale_ptr, scale_ptr, skip_ptr, step_ptr, numel,
    lr, decay, coupled_decay, rest1, beta2, rest2, eps,
    LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr, MAXIMIZE: tl.constexpr, COUPLED: tl.constexpr,
    STORES_PARAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(skip_ptr) == 0.0:
        step = tl.load(step_ptr)
        # In fp64: the difference of 1 and a beta near 1 would lose most of 24 bits.
        correction1 = (1.0 - tl.exp(step.to(tl.float64) * LOG_BETA1)).to(tl.float32)
        correction2 = tl.sqrt((1.0 - tl.exp(step.to(tl.float64) * LOG_BETA2)).to(tl.float32))
        for block in range(tl.program_id(0), tl.cdiv(numel, BLOCK), tl.num_programs(0)):
            index, mask = _positions(block, numel, BLOCK)
            gradient = tl.load(grad_ptr + index, mask=mask, other=0.0).to(tl.float32)
            master = tl.load(master_ptr + index, mask=mask, other=0.0)
            m = _load_state(m_ptr, m_scale_ptr, block, index, mask, BLOCK)
            v = _load_state(v_ptr, v_scale_ptr, block, index, mask, BLOCK)
            gradient = _scaled(gradient, scale_ptr, MAXIMIZE)
            if COUPLED:
                gradient += coupled_decay * master
            m += rest1 * (gradient - m)
            v = beta2 * v + rest2 * (gradient * gradient)
            master = decay * master - (lr / correction1) * (m / (tl.sqrt(v) / correction2 + eps))
            _store_weights(master_ptr, param_ptr, index, mask, master, STORES_PARAM)
            bits = _random_bits(index, step)
            _store_state(m_ptr, m_scale_ptr, block, index, mask, m, (bits & 0xFFFF).to(tl.int32), BLOCK)
            _store_state(v_ptr, v_scale_ptr, block, index, mask, v, (bits >> 16).to(tl.int32), BLOCK)


@triton.jit
def _lion(
    grad_ptr, master_ptr, param_ptr, m_ptr, m_scale_ptr, scale_ptr, skip_ptr, step_ptr, numel, lr, decay, rest1, rest2,
    MAXIMIZE: tl.constexpr, STORES_PARAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(skip_ptr) == 0.0:
        for block in range(tl.program_id(0), tl.cdiv(numel, BLOCK), tl.num_programs(0)):
            index, mask = _positions(block, numel, BLOCK)
            gradient = tl.load(grad_ptr + index, mask=mask, other=0.0).to(tl.float32)
            master = tl.load(master_ptr + index, mask=mask, other=0.0)
            m = _load_state(m_ptr, m_scale_ptr, block, index, mask, BLOCK)
            gradient = _scaled(gradient, scale_ptr, MAXIMIZE)
            direction = m + rest1 * (gradient - m)
            sign = tl.where(direction > 0.0, 1.0, 0.0) - tl.where(direction < 0.0, 1.0, 0.0)
            master = decay * master - lr * sign
            m += rest2 * (gradient - m)
            _store_weights(master_ptr, param_ptr, index, mask, master, STORES_PARAM)
            bits = _random_bits(index, tl.load(step_ptr))
            _store_state(m_ptr, m_scale_ptr, block, index, mask, m, (bits & 0xFFFF).to(tl.int32), BLOCK)


@triton.jit
def _sgd(
    grad_ptr, master_ptr, param_ptr, m_ptr, m_scale_ptr, scale_ptr, skip_ptr, step_ptr, numel,
    lr, decay, coupled_decay, momentum, undamped,
    MAXIMIZE: tl.constexpr, COUPLED: tl.constexpr, HAS_MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr,
    STORES_PARAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(skip_ptr) == 0.0:
        for block in range(tl.program_id(0), tl.cdiv(numel, BLOCK), tl.num_programs(0)):
            index, mask = _positions(block, numel, BLOCK)
            gradient = tl.load(grad_ptr + index, mask=mask, other=0.0).to(tl.float32)
            master = tl.load(master_ptr + index, mask=mask, other=0.0)
            gradient = _scaled(gradient, scale_ptr, MAXIMIZE)
            if COUPLED:
                gradient += coupled_decay * master
            if HAS_MOMENTUM:
                step = tl.load(step_ptr)
                m = momentum * _load_state(m_ptr, m_scale_ptr, block, index, mask, BLOCK)
                m += tl.where(step == 1.0, 1.0, undamped) * gradient
                bits = _random_bits(index, step)
                _store_state(m_ptr, m_scale_ptr, block, index, mask, m, (bits & 0xFFFF).to(tl.int32), BLOCK)
                gradient = gradient + momentum * m if NESTEROV else m
            master = decay * master - lr * gradient
            _store_weights(master_ptr, param_ptr, index, mask, master, STORES_PARAM)


@triton.jit
def _momentum(
    grad_ptr, update_ptr, m_ptr, m_scale_ptr, scale_ptr, skip_ptr, step_ptr, numel, momentum, rest,
    MAXIMIZE: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(skip_ptr) == 0.0:
        for block in range(tl.program_id(0), tl.cdiv(numel, BLOCK), tl.num_programs(0)):
            index, mask = _positions(block, numel, BLOCK)
            gradient = tl.load(grad_ptr + index, mask=mask, other=0.0).to(tl.float32)
            m = _load_state(m_ptr, m_scale_ptr, block, index, mask, BLOCK)
            gradient = _scaled(gradient, scale_ptr, MAXIMIZE)
            m += rest * (gradient - m)
            update = gradient + momentum * (m - gradient) if NESTEROV else m
            tl.store(update_ptr + index, update.to(update_ptr.dtype.element_ty), mask=mask)
            bits = _random_bits(index, tl.load(step_ptr))
            _store_state(m_ptr, m_scale_ptr, block, index, mask, m, (bits & 0xFFFF).to(tl.int32), BLOCK)


@triton.jit
def _apply_update(
    master_ptr, param_ptr, update_ptr, skip_ptr, numel, decay, lr, STORES_PARAM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    if tl.load(skip_ptr) == 0.0:
        block = tl.program_id(0)
        index, mask = _positions(block, numel, BLOCK)
        update = tl.load(update_ptr + index, mask=mask, other=0.0).to(tl.float32)
        master = decay * tl.load(master_ptr + index, mask=mask, other=0.0) - lr * update
        _store_weights(master_ptr, param_ptr, index, mask, master, STORES_PARAM)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -1000.0  # exp() of it is zero


@functools.cache
def _shared_programs(device: torch.device) -> int:
    if device.type == "cpu":
        return 3  # Triton's interpreter
    processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, processors * 3 // 7)


def _launch(shard: Shard, scalars: StepScalars) -> tuple[tuple[int], dict[str, int]]:
    """The grid of an update, and the block and warps of its programs."""
    numel = shard.master.numel()
    if scalars.shares_device:
        programs = min(triton.cdiv(numel, _SHARED_BLOCK), _shared_programs(shard.master.device))
        return (programs,), {"BLOCK": _SHARED_BLOCK, "num_warps": _SHARED_WARPS}
    is_coded = any(kind.endswith(states.SCALE_SUFFIX) for kind in shard.state)
    block = _CODED_BLOCK if is_coded else _BLOCK
    return (triton.cdiv(numel, block),), {"BLOCK": block, "num_warps": _WARPS}


def _state(shard: Shard, kind: str) -> tuple[Tensor, Tensor | None]:
    return shard.state[kind], shard.state.get(kind + states.SCALE_SUFFIX)


def _stores_param(master: Tensor, param: Tensor) -> bool:
    return master.data_ptr() != param.data_ptr()


def _decay(options: AdamOptions | SGDOptions) -> float:
    """Factor on the master weights."""
    return 1 - options.lr * options.weight_decay if options.decoupled_weight_decay else 1.0


def _is_coupled(options: AdamOptions | SGDOptions) -> bool:
    """Whether weight decay is added to the gradient."""
    return not options.decoupled_weight_decay and options.weight_decay != 0


def adam(shard: Shard, options: AdamOptions, scalars: StepScalars) -> None:
    """See reference.adam."""
    numel, (grid, tile) = shard.master.numel(), _launch(shard, scalars)
    _adam[grid](
        shard.grad, shard.master, shard.param, *_state(shard, "exp_avg"), *_state(shard, "exp_avg_sq"),
        scalars.scale, scalars.skip, scalars.step, numel,
        options.lr, _decay(options), options.weight_decay,
        1 - options.beta1, options.beta2, 1 - options.beta2, options.eps,
        LOG_BETA1=_log(options.beta1), LOG_BETA2=_log(options.beta2), MAXIMIZE=options.maximize,
        COUPLED=_is_coupled(options),
        STORES_PARAM=_stores_param(shard.master, shard.param), **tile,
    )  # fmt: skip


def lion(shard: Shard, options: LionOptions, scalars: StepScalars) -> None:
    """See reference.lion."""
    numel, (grid, tile) = shard.master.numel(), _launch(shard, scalars)
    _lion[grid](
        shard.grad, shard.master, shard.param, *_state(shard, "exp_avg"), scalars.scale, scalars.skip, scalars.step,
        numel, options.lr, 1 - options.lr * options.weight_decay, 1 - options.beta1, 1 - options.beta2,
        MAXIMIZE=options.maximize, STORES_PARAM=_stores_param(shard.master, shard.param), **tile,
    )  # fmt: skip


def sgd(shard: Shard, options: SGDOptions, scalars: StepScalars) -> None:
    """See reference.sgd."""
    numel, (grid, tile) = shard.master.numel(), _launch(shard, scalars)
    has_momentum = options.momentum > 0
    state = _state(shard, "momentum_buffer") if has_momentum else (shard.master, None)
    _sgd[grid](
        shard.grad, shard.master, shard.param, *state, scalars.scale, scalars.skip, scalars.step, numel,
        options.lr, _decay(options), options.weight_decay,
        options.momentum, 1 - options.dampening, MAXIMIZE=options.maximize,
        COUPLED=_is_coupled(options), HAS_MOMENTUM=has_momentum,
        NESTEROV=options.nesterov, STORES_PARAM=_stores_param(shard.master, shard.param), **tile,
    )  # fmt: skip


def momentum(shard: Shard, options: MomentumOptions, scalars: StepScalars, update: Tensor) -> None:
    """See reference.momentum."""
    numel, (grid, tile) = shard.master.numel(), _launch(shard, scalars)
    _momentum[grid](
        shard.grad, update, *_state(shard, "momentum_buffer"), scalars.scale, scalars.skip, scalars.step, numel,
        options.momentum, 1 - options.momentum, MAXIMIZE=options.maximize, NESTEROV=options.nesterov, **tile,
    )  # fmt: skip


def apply_update(master: Tensor, param: Tensor, update: Tensor, decay: float, lr: float, scalars: StepScalars) -> None:
    """See reference.apply_update."""
    numel = master.numel()
    _apply_update[(triton.cdiv(numel, _BLOCK),)](
        master, param, update, scalars.skip, numel, decay, lr, STORES_PARAM=_stores_param(master, param), BLOCK=_BLOCK,
        num_warps=_WARPS,
    )  # fmt: skip
