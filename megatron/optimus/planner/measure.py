"""Measures this machine for ``optimus plan --measure``: products, attention, memory, copies to the host, collectives.

Each figure is the median of repetitions for half a second. What is not measured (launch times, other nodes, what
torch's allocator does not hold) is taken from the machine that is most like this one, and the file says so. Collectives
run over all devices of this machine, on a CPU over two ranks with gloo.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml

from megatron.optimus.planner.hardware import KERNELS, Machine, machine_of_device
from megatron.optimus.platform import device as devices
from megatron.optimus.platform import process_groups

_SECONDS = 0.5  # of repetitions for each figure
_CPU_RANKS = 2
Figures = dict[str, tuple[float, str]]  # name -> (value, what was measured)


def measured_yaml(log: Callable[[str], object]) -> str:
    """Measures this machine and returns the text of its file.

    Args:
        log: is called with a line for each figure.
    """
    kind = devices.default_kind()
    device = torch.device(kind, 0) if kind != "cpu" else torch.device("cpu")
    devices.set_device(device)
    name = devices.device_name(device)
    count = torch.get_device_module(device).device_count() if kind != "cpu" else _CPU_RANKS
    base = machine_of_device(name, kind)
    figures = _of_device(device) | _of_collectives(kind, count)
    for figure, (value, what) in figures.items():
        log(f"{figure:<24}{value:>12.4g}  {what}")
    return _yaml(name, kind, count, base, figures)


def _yaml(name: str, kind: str, count: int, base: Machine, figures: Figures) -> str:
    when = time.strftime("%Y-%m-%d")
    content = {
        "extends": base.name,
        "device": name if kind != "cpu" else f"CPU, {torch.get_num_threads()} threads a rank",
        "chip": name,
        "kernels": next(key for key, kernels in KERNELS.items() if kernels is base.kernels),
        "devices_per_node": count,
        "figures": {
            key: {"value": value, "source": f"measured on {when}: {what}", "measured": True}
            for key, (value, what) in figures.items()
        },
    }
    head = (
        "# Written by optimus plan --measure. Figures that are not here are those of the machine that it extends,\n"
        "# not measured on this one; among them how fast nodes reach each other (node_bandwidth).\n"
    )
    return head + yaml.safe_dump(content, sort_keys=False, width=110)


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    """The median time of ``action``, after one run that does not count."""
    action()
    devices.synchronize(device)
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end or len(times) < 3:
        began = time.perf_counter()
        action()
        devices.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


# ---- one device


def _of_device(device: torch.device) -> Figures:
    is_cpu = device.type == "cpu"
    dtype = torch.float32 if is_cpu else torch.bfloat16
    side = 1024 if is_cpu else 8192
    figures: Figures = {"memory": _memory(device)}
    rate = _product_rate(device, dtype, side)
    figures["products"] = (rate, f"{_short(dtype)} product of {side} x {side} x {side}, alone")
    known = devices.peak_flops(devices.device_name(device), torch.bfloat16)
    figures["peak"] = (
        (known, "data sheet, dense bf16") if known else (rate, "no data sheet known: the rate of products")
    )
    wide = rate if is_cpu else _product_rate(device, torch.float32, side // 2)
    figures["wide"] = (wide, "fp32 product, alone")
    figures["experts"] = _experts(device, dtype)
    for name, length in (("attention", 512 if is_cpu else 4096), ("attention_long", 2048 if is_cpu else 65536)):
        figures[name] = _attention(device, dtype, length)
    figures["traffic"] = _traffic(device)
    if is_cpu:
        figures |= dict.fromkeys(
            ("non_allocator_bytes", "communicator"), (0.0, "nothing lies outside of a host's memory")
        )
    else:
        figures["host"] = _host_copies(device)
    return figures


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _memory(device: torch.device) -> tuple[float, str]:
    if device.type == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total / _CPU_RANKS, f"memory of this machine, a share for each of {_CPU_RANKS} ranks"
    return float(devices.memory_info(device)[2]), "memory of the device as torch has it"


def _product_rate(device: torch.device, dtype: torch.dtype, side: int) -> float:
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * side**3 / _seconds(lambda: torch.mm(a, b, out=out), device)


def _experts(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    count, rows, width, inner = (8, 64, 512, 256) if device.type == "cpu" else (64, 1024, 2048, 1024)
    x = torch.randn(count, rows, width, device=device, dtype=dtype)
    weight = torch.randn(count, width, inner, device=device, dtype=dtype)
    rate = 2 * count * rows * width * inner / _seconds(lambda: torch.bmm(x, weight), device)
    return rate, f"{count} products of {rows} x {width} x {inner} at once, in place of the expert kernels"


def _attention(device: torch.device, dtype: torch.dtype, length: int) -> tuple[float, str]:
    heads, width = 8, 128
    q, k, v = (torch.randn(1, heads, length, width, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

    def both_ways() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    flops = 6 * length * length * heads * width  # causal counted at half; the backward as two forwards
    return flops / _seconds(both_ways, device), f"torch's attention, {length:,} tokens, both ways"


def _traffic(device: torch.device) -> tuple[float, str]:
    size = 32 << 20 if device.type == "cpu" else 1 << 30
    a = torch.ones(size // 4, device=device)
    b, out = torch.ones_like(a), torch.empty_like(a)
    return 3 * size / _seconds(lambda: torch.add(a, b, out=out), device), "sum of two tensors into a third"


def _host_copies(device: torch.device) -> tuple[float, str]:
    size = 256 << 20
    here, there = (
        torch.empty(size, dtype=torch.uint8, pin_memory=True),
        torch.empty(size, dtype=torch.uint8, device=device),
    )
    return size / _seconds(lambda: there.copy_(here), device), "copies of 256 MiB from pinned memory"


# ---- collectives


def _of_collectives(kind: str, count: int) -> Figures:
    """Rates of all-reduces over all devices, over two of them, and of a tiny one; nothing with one device."""
    if count < 2:
        return {}
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"  # a file: a port would be open to every host
        ranks = [
            context.Process(target=_rank, args=(rank, count, kind, store, answers), daemon=True)
            for rank in range(count)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(60)
        failed = [str(number) for number, rank in enumerate(ranks) if rank.exitcode != 0]
        for rank in ranks:
            rank.kill()
    if failed or answers.empty():
        return {}
    pair, everyone, tiny = answers.get()
    figures: Figures = {"two_rank_bandwidth": (pair, f"all-reduces of two {kind} ranks")}
    figures["intra_node_bandwidth"] = (everyone, f"all-reduces of {count} {kind} ranks")
    figures["latency"] = (
        tiny / math.log2(count),
        f"all-reduces of 4 bytes over {count} ranks, for each of log2 of them",
    )
    return figures


def _rank(rank: int, count: int, kind: str, store: str, answers: mp.SimpleQueue[tuple[float, float, float]]) -> None:
    if kind == "cpu":
        torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind != "cpu" else torch.device("cpu")
    devices.set_device(device)
    backend = devices.backend_for(device, devices.DistributedBackend.AUTO)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=count)
    two = dist.new_group([0, 1])
    size = 16 << 20 if kind == "cpu" else 256 << 20
    large, small = (torch.ones(numel, device=device) for numel in (size // 4, 1))

    def median(tensor: torch.Tensor, group: dist.ProcessGroup | None, repetitions: int) -> float:
        times = []
        for _ in range(repetitions):
            dist.barrier(group)
            devices.synchronize(device)
            began = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            devices.synchronize(device)
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])

    pair = size / median(large, two, 20) if rank < 2 else 0.0  # a rank of two sends as much as there is
    everyone = 2 * (count - 1) / count * size / median(large, None, 20)
    tiny = median(small, None, 50)
    if rank == 0:
        answers.put((pair, everyone, tiny))
    process_groups.shutdown()
