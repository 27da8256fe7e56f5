"""The only place that knows cuda from xpu from cpu (kernels in ops/ aside). Everything else gets a ``torch.device``."""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.optimus.config.schema import Backend, ConfigError, Device
from megatron.optimus.platform import environment as launch_env
from megatron.optimus.platform.environment import LaunchEnv, Launcher

_BACKENDS = {"cuda": Backend.NCCL, "xpu": Backend.XCCL, "cpu": Backend.GLOO}

# Dense peaks in FLOP/s of one device as torch counts devices, by part of its name; the first match counts.
# NVIDIA: data sheets, without sparsity. Intel Max 1550: one tile (the unit under ZE_FLAT_DEVICE_HIERARCHY=FLAT) of
# Aurora's parts, 56 active cores x 4096 bf16 (256 fp32) operations a cycle x 1.6 GHz.
_PEAK_FLOPS: list[tuple[str, dict[torch.dtype, float]]] = [
    ("H100 PCIe", {torch.bfloat16: 756e12, torch.float32: 51e12}),
    ("H100 NVL", {torch.bfloat16: 835e12, torch.float32: 60e12}),
    ("H200 NVL", {torch.bfloat16: 835e12, torch.float32: 60e12}),
    ("H100", {torch.bfloat16: 989e12, torch.float32: 67e12}),
    ("H200", {torch.bfloat16: 989e12, torch.float32: 67e12}),
    ("A100", {torch.bfloat16: 312e12, torch.float32: 19.5e12}),
    ("Max 1550", {torch.bfloat16: 367e12, torch.float32: 22.9e12}),
]


def default_kind() -> str:
    """The first of cuda, xpu and cpu that torch sees here."""
    return "cuda" if torch.cuda.is_available() else "xpu" if torch.xpu.is_available() else "cpu"


def pick(device: Device, local_rank: int) -> torch.device:
    """The device of this rank; ``auto`` prefers cuda, then xpu, then cpu.

    Raises ConfigError where the kind is missing or a node has more ranks than devices.
    """
    kind = device.value
    if device is Device.AUTO:
        kind = default_kind()
    if kind == "cpu":
        return torch.device("cpu")
    module = _accelerator(kind)
    count = module.device_count() if module.is_available() else 0
    if count == 0:
        raise ConfigError(f"device={kind}, but torch {torch.__version__} sees none; use --device cpu or auto")
    if local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} needs a {kind} device of its own, but this node shows {count}; "
            f"start at most {count} processes a node"
        )
    return torch.device(kind, local_rank)


def _accelerator(kind: str) -> ModuleType:
    return torch.cuda if kind == "cuda" else torch.xpu


def set_device(device: torch.device) -> None:
    """Makes ``device`` the default of its kind; nothing to do on cpu."""
    if device.type != "cpu":
        _accelerator(device.type).set_device(device)


def backend_for(device: torch.device, backend: Backend) -> str:
    """The torch.distributed backend; ``auto`` by device. Raises ConfigError where it cannot serve the device."""
    own = _BACKENDS[device.type]
    if backend not in (Backend.AUTO, Backend.GLOO, own):
        raise ConfigError(f"distributed_backend={backend.value} does not serve {device.type}; use {own.value} or auto")
    return own.value if backend is Backend.AUTO else backend.value


def synchronize(device: torch.device) -> None:
    """Waits for all queued work of ``device``."""
    if device.type != "cpu":
        _accelerator(device.type).synchronize(device)


class Mark:
    """A point in the work queued on a device: passed when all that was queued before is done. Nobody waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        self._time = time.perf_counter()  # a cpu queues nothing
        if device.type != "cpu":
            module = _accelerator(device.type)
            self._event = module.Event(enable_timing=True)
            self._event.record(module.current_stream(device))

    @property
    def is_passed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def seconds_since(self, earlier: Mark) -> float:
        """Between the passing of both, by the device's clock; waits until this one is passed."""
        if self._event is None:
            return self._time - earlier._time
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class HostCopy:
    """Tensors of one device on their way to the host; the host does not wait for them before ``read``."""

    def __init__(self, *tensors: Tensor) -> None:
        self._copies = list(tensors)
        self._event: Any = None
        if tensors[0].device.type != "cpu":  # page-locked, or the copies would wait for the device
            self._copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors]
            for copy, tensor in zip(self._copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            self._event = _accelerator(tensors[0].device.type).Event()
            self._event.record()

    def read(self) -> list[Tensor]:
        """The copies; waits until the device has come as far as to make them, not for what was queued later."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies


def from_host(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the host on ``device``; the host does not wait for the device."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@functools.cache
def _side_stream(device: torch.device) -> Any:
    return _accelerator(device.type).Stream(device, priority=-1)  # else it would wait for what it is to run beside


def on_side_stream(device: torch.device, work: Callable[[], Sequence[Tensor]]) -> Callable[[], Sequence[Tensor]]:
    """Queues ``work``, after all that is queued so far and beside what will be; later work waits for it from where the
    function that is returned is called, which gives its results. On cpu it is done at once.

    What it reads must live until then.
    """
    if device.type == "cpu":
        results = work()
        return lambda: results
    module, stream = _accelerator(device.type), _side_stream(device)
    stream.wait_stream(module.current_stream(device))
    with module.stream(stream):
        results = work()
        done = stream.record_event()

    def join() -> Sequence[Tensor]:
        here = module.current_stream(device)
        here.wait_event(done)
        for result in results:  # they belong to the other stream's memory, which must not be used again too early
            result.record_stream(here)
        return results

    return join


def overlaps_collectives(device: torch.device) -> bool:
    """Whether exchanges by the collective library are started beside computation that fills the device.

    Not on CUDA, where they are kernels: the blocks of a persistent product hold the registers of every multiprocessor,
    so an exchange waits for them or delays those whose place it takes, each of which has a fixed share of the tiles.
    Four H200, Mula-20B with four layers, experts over all, all-gather: a step of 128.5 ms with nothing beside the
    router and the last product of the experts' backward, 129.8 with both (a backward in halves takes 1% longer than a
    whole one, too; benchmarks/results/layout_speed_moe20b_h200x4.json). Copy engines take no multiprocessors: what they
    move is started beside (moe/dispatch/symmetric.py). On XPU it is not measured.
    """
    return device.type != "cuda"


def without_peer_access(device: torch.device, others: list[int]) -> list[int]:
    """Which of the CUDA devices with these numbers, as far as this process sees them, cannot share memory with it."""
    seen = [other for other in others if other != device.index and other < torch.cuda.device_count()]
    return [other for other in seen if not torch.cuda.can_device_access_peer(device, other)]


def runs_behind(device: torch.device) -> bool:
    """Whether work is queued on ``device`` while the host goes on."""
    return device.type != "cpu"


def memory_allocated(device: torch.device) -> int:
    """Bytes of live tensors; 0 on cpu, where torch keeps no count."""
    return 0 if device.type == "cpu" else int(_accelerator(device.type).memory_allocated(device))


def peak_memory(device: torch.device) -> int:
    """Largest ``memory_allocated`` since the start or ``reset_peak_memory``; 0 on cpu."""
    return 0 if device.type == "cpu" else int(_accelerator(device.type).max_memory_allocated(device))


def reset_peak_memory(device: torch.device) -> None:
    if device.type != "cpu":
        _accelerator(device.type).reset_peak_memory_stats(device)


def device_name(device: torch.device) -> str:
    """The product name ("NVIDIA H200"), or "cpu"."""
    return "cpu" if device.type == "cpu" else str(_accelerator(device.type).get_device_name(device))


def peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Dense peak in FLOP/s of the device called ``name`` in ``dtype``; None where unknown (MFU is then null)."""
    for part, peaks in _PEAK_FLOPS:
        if part in name:
            return peaks.get(dtype)
    return None


def seed_all(seed: int) -> None:
    """Seeds Python, numpy and torch on every device of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_deterministic(enabled: bool) -> None:
    """Refuses (RuntimeError at the call) kernels whose result can change from run to run. Call before the first one."""
    if enabled:
        launch_env.set_default("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is not deterministic without it
        launch_env.set_default("NCCL_ALGO", "^NVLS")  # switches that reduce add in the order of arrival
    torch.use_deterministic_algorithms(enabled)
    torch.backends.cudnn.benchmark = False


def set_cpu_threads(launch: LaunchEnv) -> int:
    """Gives this rank OMP_NUM_THREADS, or else its share of the node's cores, and returns it.

    torchrun would leave one thread to each rank, no launcher all cores to each. mpiexec and srun may have bound the
    process to cores of its own; those are not divided again.
    """
    asked = launch_env.threads_asked_for()
    if asked is not None:
        torch.set_num_threads(asked)
        return asked
    count = os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else count  # macOS cannot bind
    is_bound = launch.launcher in (Launcher.MPI, Launcher.SLURM) and cores < count
    threads = cores if is_bound else max(1, cores // launch.local_world_size)
    torch.set_num_threads(threads)
    return threads
