"""Compiles every Triton kernel of a step for AMD's gfx942, which is not here; see test_triton_compiled.py.

The functions are those that a run calls, on tensors of the CPU, with a driver that says it is an AMD GPU's. A kernel is
compiled for the arguments that it gets and not launched. Prints, as JSON, for each compiled kernel its name, bytes of
shared memory, matrix instructions, spilled registers, wide loads and loads of 2 bytes.

python -m tests.ops.compile_for_amd
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from deepspeed_ext.optimizers import states
from deepspeed_ext.optimizers.base import Shard, StepScalars
from deepspeed_ext.optimizers.kernels import triton_ops
from deepspeed_ext.optimizers.kernels.options import AdamOptions, LionOptions, SGDOptions
from megatron.optimus.ops.triton import (
    attention_logits,
    backend,
    elementwise,
    grouped_gemm,
    norm,
    permute,
    router_statistics,
    row_order,
    tiles,
)

TOKENS, TOPK, EXPERTS, WIDTH, INNER = 256, 4, 16, 512, 256
MACHINE = tiles.Hardware("gfx942", 304, 65536, False, False, register_bytes=65536, splits_in_shared=True)
found: list[list[Any]] = []


class Driver:
    """Triton's driver of a GPU that is not here."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", "gfx942", 64)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(self: Any, *args: Any, warmup: bool, **options: Any) -> Any:
    made = RUN(self, *args, warmup=True, **options)
    text = made.asm["amdgcn"]
    patterns = (r"v_mfma", r"(?:global|buffer)_load_dwordx4", r"load_(?:ushort|short_d16|ubyte)")
    counts = [len(re.findall(pattern, text)) for pattern in patterns]
    spilled = sum(map(int, re.findall(r"vgpr_spill_count:\s+(\d+)", text)))
    found.append([self.__name__, made.metadata.shared, spilled, *counts])
    return made


RUN = JITFunction.run


def experts(indices: Tensor, weights: Tensor, x: Tensor) -> None:
    gate_up, down = x.new_zeros(EXPERTS, 2 * INNER, WIDTH), x.new_zeros(EXPERTS, WIDTH, INNER)
    y, hidden, order = backend._moe_mlp._init_fn(x, gate_up, down, weights, indices)
    for dtype in (torch.float32, torch.bfloat16):  # of main gradients, to which is added
        buffers = [torch.zeros(weight.shape, dtype=dtype) for weight in (gate_up, down)]
        *_, dhidden, x_rows = backend._input_gradients(y, x, gate_up, down, weights, hidden, order, buffers[1], True)
        grouped_gemm.weight_gradient(dhidden, x_rows, row_order.PaddedRowOrder(*order), out=buffers[0])
    backend.expert_counts(indices, EXPERTS)
    positions = torch.zeros(TOKENS, TOPK, dtype=torch.int64)
    permute.sum_copies(permute.copy_rows(x, positions, TOKENS * TOPK), positions)


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    JITFunction.run = compile_only
    tiles.hardware = grouped_gemm.hardware = lambda device: MACHINE  # type: ignore[assignment]
    indices, weights = torch.zeros(TOKENS, TOPK, dtype=torch.int64), torch.zeros(TOKENS, TOPK)
    x = torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16)
    experts(indices, weights, x)
    logits = torch.zeros(TOKENS, EXPERTS)
    scores = backend.router_topk(logits, TOPK, False, True, None)[0]
    backend.router_topk_backward(logits, indices, scores[:, :TOPK].contiguous(), None, False, True)
    router_statistics.statistics(logits, logits, indices)
    queries, positions = x.view(1, 4, TOKENS, -1), torch.arange(TOKENS)
    attention_logits.largest_scores(queries, queries, positions, positions, None, None)
    router_statistics.gradients(logits, logits, logits[0], logits[0, 0])
    elementwise.silu_mul_backward(x, x, elementwise.silu_mul(x, x))
    elementwise.rotate(x.view(1, 4, TOKENS, -1), torch.zeros(TOKENS, 64), torch.zeros(TOKENS, 64), False)
    for other in (None, x):
        total, normed = norm.add_rms_norm(x, other, x[0], 1e-5)
        norm.rms_norm_backward(total, x[0], normed, other, 1e-5)
    heads, tables = x.view(1, TOKENS, 4, -1), (torch.zeros(TOKENS, 64), torch.zeros(TOKENS, 64))
    for scale in (heads[0, 0, 0], x[0]):
        rotated = norm.norm_rotate(heads, scale, 1e-5, *tables)
        norm.norm_rotate_backward(heads, scale, rotated.transpose(1, 2), 1e-5, *tables)
    lse = elementwise.log_sum_exp(x)
    valid = torch.ones(TOKENS, dtype=torch.bool)
    elementwise.cross_entropy_gradient_(x, lse, indices[:, 0].contiguous(), valid, valid, 0.0)
    optimizer()
    sys.stdout.write(json.dumps(found))


def optimizer() -> None:
    """Every element-wise update, with states in fp32 and in 8 bits."""
    scalars = StepScalars.of(torch.device("cpu"), 1)
    for dtype in ("fp32", "int8"):
        group = {"lr": 0.1, "betas": (0.9, 0.95), "momentum": 0.9, "eps": 1e-8, "weight_decay": 0.1}
        for kernel, options, kinds in (
            (triton_ops.adam, AdamOptions, ("exp_avg", "exp_avg_sq")),
            (triton_ops.lion, LionOptions, ("exp_avg",)),
            (triton_ops.sgd, SGDOptions, ("momentum_buffer",)),
        ):
            master = torch.zeros(4096)
            state = {}
            for kind in kinds:
                coded = torch.uint8 if kind == "exp_avg_sq" else torch.int8
                state[kind] = torch.zeros(4096, dtype=torch.float32 if dtype == "fp32" else coded)
                if dtype == "int8":
                    state[kind + states.SCALE_SUFFIX] = torch.zeros(4096 // states.BLOCK)
            kernel(Shard(master, master.bfloat16(), master.bfloat16(), state), options.from_group(group), scalars)


if __name__ == "__main__":
    main()
