"""Chooses the tile sizes of each kernel of the expert layer: the measured default, or the table of tuned ones.

A kernel asks once for every problem (kernel, dtype, shape) and gets, in this order: the tuned tiles of the problem;
those of the same problem with twice or half the slots, as the number of rows changes from step to step where experts
are spread over ranks; the default, which is the first candidate that fits the device. Timing: autotune.py.

A table is read from disk (tile_cache.py) at the first use, or set by ``use``, as the trainer does on every rank.
Legend: N = T*K slots, E experts on this device, D model width, F inner width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from megatron.optimus.ops.triton import tile_cache
from megatron.optimus.ops.triton.candidates import CANDIDATES, Table, Tiles

ROW_TILE = 128  # the rows of each expert begin at a multiple of it (row_order.py)
_ALIGN = 8  # widths are padded to it
# Registers of one warp, wavefront or sub-group. NVIDIA: 255 of 32 lanes; Intel: 256 of 64 bytes, a thread with the
# large file; AMD: 256 of 64 lanes, as two wavefronts share a SIMD.
_NVIDIA_REGISTERS, _INTEL_REGISTERS, _AMD_REGISTERS = 32 * 1024, 16 * 1024, 64 * 1024


class Problem(NamedTuple):
    """The key of a choice of tiles: kernel, dtype and shape.

    A product of rows has results of width ``n``, sums over depth ``k``. A weight gradient is [n, k].
    Kernels that move rows have ``n`` = K, the experts of a token, and rows of ``k`` elements.
    """

    kernel: str  # of CANDIDATES
    dtype: torch.dtype
    experts: int
    n: int  # 1 for swiglu_backward
    k: int
    slots: int  # a power of two: see ``bucket``

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kernel} {dtype} E{self.experts} {self.n}x{self.k} N{self.slots}"


class Hardware(NamedTuple):
    """The properties of a device that tiles depend on."""

    key: str  # device, compute capability, version of Triton
    processors: int
    shared_bytes: int  # of one program
    has_tma: bool  # copies tiles by itself: NVIDIA's tensor memory engine
    keeps_last_stage: bool  # products read shared memory without a copy in registers, so every stage is a buffer
    register_bytes: int = _NVIDIA_REGISTERS  # of one warp
    # AMD: results leave from registers, but sums that are split, gate from up, pass through shared memory.
    splits_in_shared: bool = False


@functools.cache
def hardware(device: torch.device) -> Hardware:
    """Reads the properties of an accelerator; for the CPU those of Triton's interpreter, where everything fits."""
    import triton

    if device.type == "cpu":
        return Hardware(f"interpreter, triton {triton.__version__}", 4, 1 << 60, True, True)
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    found = triton.runtime.driver.active.utils.get_device_properties(index)
    is_amd = device.type == "cuda" and torch.version.hip is not None
    is_nvidia = device.type == "cuda" and not is_amd  # others have no such engine; a gfx942 would call itself 9.4
    capability = torch.cuda.get_device_capability(device) if is_nvidia else (0, 0)
    name = module.get_device_name(index)
    arch = f"{capability[0]}.{capability[1]}" if is_nvidia else device.type
    if is_amd:
        arch = str(torch.cuda.get_device_properties(index).gcnArchName).partition(":")[0]
    registers = _AMD_REGISTERS if is_amd else _INTEL_REGISTERS if device.type == "xpu" else _NVIDIA_REGISTERS
    return Hardware(
        f"{name}, {arch}, triton {triton.__version__}",
        found["multiprocessor_count"],
        found["max_shared_mem"],
        has_tma=capability >= (9, 0),
        keeps_last_stage=capability[0] in (9, 10),
        register_bytes=registers,
        splits_in_shared=is_amd,
    )


def bucket(slots: int) -> int:
    """The next power of two."""
    return 1 << max(0, slots - 1).bit_length()


def shared_bytes(kernel: str, tiles: Tiles, machine: Hardware) -> int:
    """Shared memory of a program: operands of the stages, in 16 bits, and room through which the result leaves.

    An upper bound of what the compiler asks for: at most 1 KiB above it where there is a memory engine, further above
    elsewhere (a test compiles). For up_swiglu it may lie another half of the result's room above: hidden is stored by
    rows, which takes the compiler no more shared memory than storing blocks.
    """
    if not tiles.depth:
        return 0
    rows, cols, depth, _, stages, _ = tiles
    wide = 2 * cols if kernel == "up_swiglu" else cols
    result = rows * cols * 2
    if kernel.startswith("weight_gradient_add"):  # leaves in four parts
        result = rows * cols // 4 * (4 if kernel.endswith("fp32") else 2)
    if machine.splits_in_shared:
        result = rows * wide * 4 if kernel == "up_swiglu" else 0
    buffers = stages if machine.keeps_last_stage else stages - 1
    return buffers * (rows + wide) * depth * 2 + result + 1024


def sum_bytes(kernel: str, tiles: Tiles) -> int:
    """Bytes of registers that the fp32 sums of a product take in each warp."""
    wide = 2 * tiles.cols if kernel == "up_swiglu" else tiles.cols
    return tiles.rows * wide * 4 // tiles.warps if tiles.depth else 0


def _fits(kernel: str, tiles: Tiles, machine: Hardware) -> bool:
    """In shared memory, and its sums in half of the registers: with more of them the operands would spill."""
    in_registers = sum_bytes(kernel, tiles) <= machine.register_bytes // 2
    return in_registers and shared_bytes(kernel, tiles, machine) <= machine.shared_bytes


def fitting(problem: Problem, machine: Hardware) -> list[Tiles]:
    """Candidates that a device has the shared memory and registers for; the first is the default. Tiles much larger
    than the result are left out, but for the default. Raises ValueError where none fits."""
    fit = [t for t in CANDIDATES[problem.kernel] if _fits(problem.kernel, t, machine)]
    if not fit:
        raise ValueError(
            f"{problem.kernel}: no tiles fit {machine.shared_bytes} bytes of shared memory and "
            f"{machine.register_bytes} of registers a warp on {machine.key}; use another backend"
        )
    return fit[:1] + [t for t in fit[1:] if _is_sensible(problem, t)]


def _is_sensible(problem: Problem, tiles: Tiles) -> bool:
    if not tiles.depth:
        return True
    gradient = problem.kernel.startswith("weight_gradient")
    rows, cols = (problem.n, problem.k) if gradient else (ROW_TILE, problem.n)
    return tiles.rows <= max(64, bucket(rows)) and tiles.cols <= max(64, bucket(cols))


def is_legal(kernel: str, tiles: Tiles, machine: Hardware) -> bool:
    """Whether an entry read from a file may be launched: a declared candidate that fits."""
    return tiles in CANDIDATES.get(kernel, ()) and _fits(kernel, tiles, machine)


_tables: dict[str, Table] | None = None  # by Hardware.key; None: not read yet


def set_tables(tables: Mapping[str, Table] | None) -> None:
    """Sets what every later launch of this process chooses from; None: read the disk again at the next launch."""
    global _tables  # noqa: PLW0603  one process-wide choice is the point
    _tables = None if tables is None else dict(tables)
    _chosen.cache_clear()


def table(device: torch.device) -> Table:
    """The tuned entries in use on a device that may be launched there."""
    global _tables  # noqa: PLW0603
    if _tables is None:
        _tables = tile_cache.load()
    machine = hardware(device)
    entries = _tables.get(machine.key, {})
    return {key: entry for key, entry in entries.items() if is_legal(key.split(" ", 1)[0], entry.tiles, machine)}


def tiles_for(kernel: str, like: torch.Tensor, experts: int, n: int, k: int, slots: int) -> Tiles:
    """The tiles to launch ``kernel`` with on a tensor's device and dtype."""
    return _chosen(Problem(kernel, like.dtype, experts, n, k, bucket(slots)), like.device)


@functools.cache
def _chosen(problem: Problem, device: torch.device) -> Tiles:
    entries = table(device)
    for slots in (problem.slots, 2 * problem.slots, problem.slots // 2):
        entry = entries.get(str(problem._replace(slots=slots)))
        if entry is not None:
            return entry.tiles
    return fitting(problem, hardware(device))[0]


def num_programs(tiles: Tiles, device: torch.device) -> int:
    """Number of programs to launch of a persistent kernel."""
    return hardware(device).processors * tiles.programs


def summary(device: torch.device) -> str:
    """Describes the tiles in use for the log: "default tiles", or "12 tuned tiles"."""
    count = len(table(device))
    return f"{count} tuned tiles" if count else "default tiles"


def layer_problems(
    experts: int, width: int, inner: int, topk: int, rows: int, dtype: torch.dtype, add_to: torch.dtype | None = None
) -> list[Problem]:
    """Every problem of one expert layer, forward and backward, on ``rows`` tokens. ``add_to``: the dtype of main
    gradients, of which the first is written and others are added; None: there are none."""
    D, F = (math.ceil(n / _ALIGN) * _ALIGN for n in (width, inner))
    gradients = ["weight_gradient_add_fp32"] if add_to == torch.float32 else ["weight_gradient"]  # in either way
    gradients += [] if add_to in (None, torch.float32) else ["weight_gradient_add"]
    shapes = (
        ("up_swiglu", F, D),
        ("rows_times_weight_t", D, F),
        ("rows_times_weight", F, D),
        ("rows_times_weight", D, 2 * F),
        *((gradient, *shape) for gradient in gradients for shape in ((D, F), (2 * F, D))),
        ("spread_rows", topk, D),
        ("sum_rows", topk, D),
        ("swiglu_backward", 1, F),
    )
    return [Problem(name, dtype, experts, n, depth, bucket(rows * topk)) for name, n, depth in shapes]
