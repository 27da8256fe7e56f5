"""Compiles kernels for GPUs that are not here and prints what the compiler says, as JSON; see test_triton_compiled.py.

python -m tests.ops.compile_kernels 80 90
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron.optimus.ops.triton import grouped_gemm
from megatron.optimus.ops.triton.candidates import CANDIDATES, Tiles

KERNELS = ("up_swiglu", "rows_times_weight_t", "weight_gradient", "weight_gradient_add", "weight_gradient_add_fp32")
WRITTEN = "weight_gradient_fp32"  # with the tiles of the last
PLACES = {80: 3, 90: 0, 120: 3}  # of a candidate, by architecture
HEIGHT, WIDTH = 1024, 2048


def source(kernel: str, tiles: Tiles, by_engine: bool) -> ASTSource:
    bm, bn, bk = tiles[:3]

    def tensor(block: list[int], dtype: str = "bf16") -> str:
        return f"tensordesc<{dtype}[{','.join(map(str, block))}]>" if by_engine else f"*{dtype}"

    constants: dict[str, Any] = {"BM": bm, "BN": bn, "BK": bk, "NUM_PROGRAMS": 100, "BY_ENGINE": by_engine}
    order = {"tile_expert_ptr": "*i32", "num_tiles_ptr": "*i32", "num_rows": "i32", "num_experts": "i32"}
    if kernel == "up_swiglu":
        function: Any = grouped_gemm._up_swiglu
        signature = {"x": tensor([bm, bk]), "gate_up": tensor([1, 2, bn, bk]), "hidden_ptr": "*bf16"}
        signature |= {"activation": tensor([bm, bn // 2]), "slot_ptr": "*i32", "tile_expert_ptr": "*i32"}
        signature |= {"tile_shift_ptr": "*i32", "num_tiles_ptr": "*i32", "num_rows": "i32", "num_experts": "i32"}
        constants.update(F=HEIGHT, D=WIDTH, ROW_TILE=128, WITHOUT_PADDING=True)
    elif kernel == "rows_times_weight_t":
        function = grouped_gemm._rows_times_weight
        signature = {"a": tensor([bm, bk]), "b": tensor([1, bn, bk]), "c": tensor([bm, bn]), **order}
        constants.update(N=HEIGHT, K=WIDTH, TRANSPOSED=True, ROW_TILE=128)
    else:
        function, adds, wide = grouped_gemm._weight_gradient, "add" in kernel, kernel.endswith("fp32")
        out = tensor([1, bm, bn // 4 if adds or wide else bn], "fp32" if wide else "bf16")
        signature = {"a": tensor([bk, bm]), "b": tensor([bk, bn]), "c": out}
        signature |= {"first_row_ptr": "*i32", "count_ptr": "*i32", "by_size_ptr": "*i32"}
        signature |= {"num_rows": "i32", "num_experts": "i32"}
        constants.update(M=HEIGHT, N=WIDTH, ADD=adds, IN_PARTS=adds or wide, BY_COPY=by_engine and adds and wide)
    aligned = {(place,): [["tt.divisibility", 16]] for place, kind in enumerate(signature.values()) if kind[0] == "*"}
    return ASTSource(function, {**signature, **dict.fromkeys(constants, "constexpr")}, constants, aligned)


def main() -> None:
    found = []
    for architecture in map(int, sys.argv[1:]):
        for kernel in (*KERNELS, WRITTEN):
            like = KERNELS[-1] if kernel == WRITTEN else kernel
            tiles = CANDIDATES[like][PLACES[architecture]]
            options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
            target = GPUTarget("cuda", architecture, 32)
            made = triton.compile(source(kernel, tiles, architecture >= 90), target=target, options=options)
            ptx = made.asm["ptx"]
            counts = [len(re.findall(name, ptx)) for name in (r"ld\.global\.b16", r"cp\.async\.c", r"mma")]
            found.append([architecture, like, PLACES[architecture], made.metadata.shared, *counts])
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
