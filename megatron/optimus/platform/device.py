"""Everything that differs between CUDA, ROCm, XPU, MPS and CPU, except for the kernels in ops/ and deepspeed_ext.

Other modules take a ``torch.device`` and call these functions; torch.cuda, torch.xpu and torch.mps are named in this
file only. ROCm's GPUs are torch's devices "cuda", and its RCCL is the backend "nccl": ``is_rocm`` tells them apart.
Another accelerator needs: its name in ``default_kind`` and ``_accelerator``, its backend in ``_BACKENDS``, its peak in
``_PEAK_FLOPS``, and in config/ the enums ``Device`` and ``DistributedBackend`` and the rule ``backend_serves_device``.
docs/accelerators.md says which of them were run.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron.optimus.config.schema import ConfigError, Device, DistributedBackend
from megatron.optimus.platform import environment, older_stacks
from megatron.optimus.platform.environment import Launcher, RankEnvironment

_Result = TypeVar("_Result")

_BACKENDS = {
    "cuda": DistributedBackend.NCCL,
    "xpu": DistributedBackend.XCCL,
    "cpu": DistributedBackend.GLOO,
    "mps": DistributedBackend.GLOO,
}
_CCL_DEVICES = ("cpu", "xpu")  # those that the module oneccl_bindings_for_pytorch serves

_CUDA_ERROR_NOT_INITIALIZED = 3  # of the driver: nobody has called cuInit

# Dense peaks in FLOP/s of one device as torch counts devices, by part of its name; the first match counts.
# NVIDIA, AMD: data sheets, without sparsity. Intel Max 1550: one tile (the unit under ZE_FLAT_DEVICE_HIERARCHY=FLAT) of
# Aurora's parts, 56 active cores x 4096 bf16 (256 fp32) operations a cycle x 1.6 GHz.
_PEAK_FLOPS: list[tuple[str, dict[torch.dtype, float]]] = [
    ("H100 PCIe", {torch.bfloat16: 756e12, torch.float32: 51e12}),
    ("H100 NVL", {torch.bfloat16: 835e12, torch.float32: 60e12}),
    ("H200 NVL", {torch.bfloat16: 835e12, torch.float32: 60e12}),
    ("H100", {torch.bfloat16: 989e12, torch.float32: 67e12}),
    ("H200", {torch.bfloat16: 989e12, torch.float32: 67e12}),
    ("B200", {torch.bfloat16: 2.25e15, torch.float32: 80e12}),
    ("MI300X", {torch.bfloat16: 1307.4e12, torch.float32: 163.4e12}),
    ("A100", {torch.bfloat16: 312e12, torch.float32: 19.5e12}),
    ("Max 1550", {torch.bfloat16: 367e12, torch.float32: 22.9e12}),
]


def default_kind() -> str:
    """Returns the first of "cuda", "xpu" and "cpu" that torch finds on this machine.

    An Apple GPU is used where it is asked for (``--device mps``): one process alone can have it, without our kernels.
    """
    return "cuda" if torch.cuda.is_available() else "xpu" if torch.xpu.is_available() else "cpu"


def is_rocm() -> bool:
    """Whether this torch is built for ROCm, whose AMD GPUs it calls cuda."""
    return torch.version.hip is not None


def build() -> str:
    """Returns what this torch is built for: "CUDA 13.0", "ROCm 6.4", "XPU", "Apple GPUs" or "CPUs"."""
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    return "XPU" if torch.xpu._is_compiled() else "Apple GPUs" if torch.backends.mps.is_built() else "CPUs"


def device_count(kind: str) -> int:
    """Returns the number of devices of a kind that this process can use; for the CPU 1."""
    if kind == "cpu":
        return 1
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    module = _accelerator(kind)
    return int(module.device_count()) if module.is_available() else 0


def kind_without_opening() -> str:
    """Returns what ``default_kind`` will find in a process forked from this one, without opening a device here.

    CUDA and Level Zero do not survive a fork. The kernel's device files say which accelerator a machine has.
    """
    if not environment.hides_cuda() and os.path.exists("/dev/nvidiactl" if torch.version.cuda else "/dev/kfd"):
        return "cuda" if torch.version.cuda or torch.version.hip else "cpu"
    return "xpu" if hasattr(torch, "xpu") and torch.xpu._is_compiled() and os.path.exists("/dev/dri") else "cpu"


def close_nvml() -> None:
    """Closes NVML, which imports initialise and which holds files of /dev/nvidia* open; CUDA is not touched.

    Whoever uses NVML afterwards calls ``open_nvml`` first.
    """
    library = _loaded_library("libnvidia-ml.so.1")
    while library is not None and library.nvmlShutdown() == 0:  # it counts its users
        pass


def open_nvml() -> None:
    """Initialises NVML where this process has loaded it, for modules that did so before ``close_nvml``."""
    if (library := _loaded_library("libnvidia-ml.so.1")) is not None:
        library.nvmlInit_v2()


def is_cuda_initialized() -> bool:
    """Whether the CUDA driver is initialised in this process, by whomever; asks the driver and initialises nothing.

    CUDA does not survive a fork from then on.
    """
    driver, count = _loaded_library("libcuda.so.1"), ctypes.c_int()
    return driver is not None and driver.cuDeviceGetCount(ctypes.byref(count)) != _CUDA_ERROR_NOT_INITIALIZED


def computes(kind: str) -> bool:
    """Whether the first device of a kind adds numbers in this process; initialises the device."""
    return float(torch.ones(8, device=kind).sum()) == 8.0


def _loaded_library(name: str) -> ctypes.CDLL | None:
    """A shared library that this process has loaded already; None where it has not."""
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except (OSError, AttributeError):  # not loaded; a system without such a flag
        return None


def device_for_rank(device: Device, local_rank: int) -> torch.device:
    """Returns the device of this rank; ``auto`` prefers cuda, then xpu, then cpu.

    Args:
        device: the option ``device``.
        local_rank: number of this rank on its node, which is the number of its device.

    Raises:
        ConfigError: where there is no such device, or a node has more ranks than devices.
    """
    kind = device.value
    if device is Device.AUTO:
        kind = default_kind()
    if kind == "cpu":
        return torch.device("cpu")
    count = device_count(kind)
    if count == 0:
        raise ConfigError(f"device={kind}, but torch {torch.__version__} sees none; use --device cpu or auto")
    if kind == "mps" and local_rank > 0:
        raise ConfigError(
            f"local rank {local_rank} of device=mps: no collectives run on Apple GPUs; start one process, or use "
            "--device cpu"
        )
    if local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} needs a {kind} device of its own, but this node shows {count}; "
            f"start at most {count} processes a node"
        )
    return torch.device(kind, local_rank)


def check_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ConfigError where a device cannot train in a dtype: bf16 on an Apple GPU needs macOS 14."""
    if device.type == "mps" and dtype is torch.bfloat16 and not torch.backends.mps.is_macos_or_newer(14, 0):
        raise ConfigError("params_dtype=bf16: Apple GPUs have bf16 from macOS 14 on; use --params-dtype fp32")


def _accelerator(kind: str) -> ModuleType:
    return torch.cuda if kind == "cuda" else torch.mps if kind == "mps" else torch.xpu


def set_device(device: torch.device) -> None:
    """Makes ``device`` the current device of this thread; does nothing on cpu and for a device without a number."""
    if device.type in ("cuda", "xpu") and device.index is not None:
        _accelerator(device.type).set_device(device)


def backend_for(device: torch.device, backend: DistributedBackend) -> str:
    """Returns the torch.distributed backend; that of Intel GPUs is ccl where torch has no xccl and its module is here.

    Raises:
        ConfigError: it cannot move tensors of the device, or its module is not installed.
    """
    own = _BACKENDS[device.type]
    if backend is DistributedBackend.CCL and device.type in _CCL_DEVICES:
        if (error := older_stacks.ccl_error()) is not None:
            raise ConfigError(f"distributed_backend=ccl: {error}; or use {own.value}")
        return backend.value
    if backend not in (DistributedBackend.AUTO, DistributedBackend.GLOO, own):
        raise ConfigError(f"distributed_backend={backend.value} does not serve {device.type}; use {own.value} or auto")
    if (
        backend is DistributedBackend.AUTO
        and own is DistributedBackend.XCCL
        and not has_xccl()
        and older_stacks.ccl_error() is None
    ):
        return DistributedBackend.CCL.value
    return own.value if backend is DistributedBackend.AUTO else backend.value


def has_xccl() -> bool:
    """Whether this torch has the backend xccl for Intel GPUs."""
    return bool(getattr(torch.distributed, "is_xccl_available", bool)())


def synchronize(device: torch.device) -> None:
    """Waits for all queued work of ``device``."""
    if device.type == "mps":
        torch.mps.synchronize()  # of the only device: it takes no argument
    elif device.type != "cpu":
        _accelerator(device.type).synchronize(device)


def pins_memory(device: torch.device) -> bool:
    """Whether copies between ``device`` and pinned host memory overlap with work; an Apple GPU shares the host's."""
    return device.type not in ("cpu", "mps")


def has_streams(device: torch.device) -> bool:
    """Whether torch has streams of ``device``, on which work overlaps."""
    return device.type not in ("cpu", "mps")


def sum_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype of sums over many tokens: float64, in which counts are exact; Apple GPUs have float32 only."""
    return torch.float32 if device.type == "mps" else torch.float64


def register_host_memory(address: int, size: int) -> bool:
    """Pins ``size`` bytes of this process's memory for CUDA; False where the driver refuses."""
    return int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0


def unregister_host_memory(address: int) -> None:
    """Undoes ``register_host_memory``."""
    torch.cuda.cudart().cudaHostUnregister(address)


class DeviceEvent:
    """A timing event on the current stream of a device, recorded when it is created; the host clock on cpu."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        self._time = time.perf_counter()  # for cpu, where work is done when its call returns
        self._work_time = time.thread_time()
        if device.type == "mps":
            self._event = torch.mps.Event(enable_timing=True)
            self._event.record()
        elif device.type != "cpu":
            module = _accelerator(device.type)
            self._event = module.Event(enable_timing=True)
            self._event.record(module.current_stream(device))

    @property
    def is_done(self) -> bool:
        """Whether all work queued before the event is done; does not wait."""
        return self._event is None or bool(self._event.query())

    def seconds_since(self, earlier: DeviceEvent) -> float:
        """Returns the device's time between two events; waits for this one."""
        if self._event is None:
            return self._time - earlier._time
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3

    def work_seconds_since(self, earlier: DeviceEvent) -> float:
        """As ``seconds_since``; on cpu without waits for other ranks and programs: CPU time of the calling thread."""
        return self._work_time - earlier._work_time if self._event is None else self.seconds_since(earlier)


class AsyncHostCopy:
    """A copy of tensors from one device to the host that does not block the host before ``read``."""

    def __init__(self, *tensors: Tensor) -> None:
        self._copies = list(tensors)
        self._event: Any = None
        if not pins_memory(tensors[0].device):
            self._copies = [x.cpu() for x in tensors]  # of an Apple GPU it waits
        else:  # page-locked, or the copies would wait for the device
            self._copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors]
            for copy, tensor in zip(self._copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            self._event = _accelerator(tensors[0].device.type).Event()
            self._event.record()

    def read(self) -> list[Tensor]:
        """Returns the copies; waits for them, but not for work that was queued later."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies


def to_device_async(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the host on ``device``; the host does not wait for the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if pins_memory(device) else tensor.to(device)


@functools.cache
def _side_stream(device: torch.device) -> Any:
    # With priority: else its work would wait for the work it is to overlap.
    return _accelerator(device.type).Stream(device, priority=-1)


def on_side_stream(device: torch.device, work: Callable[[], Sequence[Tensor]]) -> Callable[[], Sequence[Tensor]]:
    """Runs ``work`` on a side stream, after all work queued so far and overlapping with what is queued next.

    Args:
        device: device of the work; on cpu and mps it runs at once.
        work: queues kernels and returns their results; the tensors it reads must live until the results are fetched.

    Returns:
        A function that makes the current stream wait for ``work`` and returns its results.
    """
    if not has_streams(device):
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
        for result in results:  # allocated on the side stream, which must not reuse their memory too early
            result.record_stream(here)
        return results

    return join


def overlaps_collectives(device: torch.device) -> bool:
    """Whether to overlap the expert dispatch's collectives with GEMMs that fill the device.

    Not on CUDA: NCCL's collectives are kernels, and the blocks of a persistent GEMM hold the registers of every
    multiprocessor, so that a collective waits for them or delays those whose place it takes. Overlapping made a step of
    Mula-20B with four layers on four H200 1% slower (benchmarks/results/layout_speed_moe20b_h200x4.json). Transfers by
    copy engines take no multiprocessors and do overlap (moe/dispatch/symmetric.py). Not measured on XPU.
    """
    return device.type != "cuda"


def without_peer_access(device: torch.device, others: list[int]) -> list[int]:
    """Returns those of the CUDA devices ``others``, if visible here, that have no peer access to ``device``."""
    seen = [other for other in others if other != device.index and other < torch.cuda.device_count()]
    return [other for other in seen if not torch.cuda.can_device_access_peer(device, other)]


def is_asynchronous(device: torch.device) -> bool:
    """Whether kernels of ``device`` run asynchronously to the host."""
    return device.type != "cpu"


def memory_allocated(device: torch.device) -> int:
    """Returns the bytes of live tensors; 0 on cpu, where torch keeps no count."""
    if device.type == "mps":
        return int(torch.mps.current_allocated_memory())
    return 0 if device.type == "cpu" else int(_accelerator(device.type).memory_allocated(device))


def peak_memory(device: torch.device) -> int:
    """Returns the largest ``memory_allocated`` since the start or ``reset_peak_memory``; 0 on cpu.

    On mps, where torch keeps no peak, it is what torch's allocator holds now.
    """
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    return 0 if device.type == "cpu" else int(_accelerator(device.type).max_memory_allocated(device))


def reset_peak_memory(device: torch.device) -> None:
    """Restarts the measurement of ``peak_memory``."""
    if device.type not in ("cpu", "mps"):
        _accelerator(device.type).reset_peak_memory_stats(device)


def memory_info(device: torch.device) -> tuple[int, int, int]:
    """Returns bytes of an accelerator: free, held by this process's allocator, and in all."""
    if device.type == "mps":
        held, total = int(torch.mps.driver_allocated_memory()), int(torch.mps.recommended_max_memory())
        return total - held, held, total
    module = _accelerator(device.type)
    free, total = module.mem_get_info(device)
    return int(free), int(module.memory_reserved(device)), int(total)


def device_name(device: torch.device) -> str:
    """Returns the product name ("NVIDIA H200"), or "cpu"."""
    if device.type == "mps":
        return "Apple GPU"
    return "cpu" if device.type == "cpu" else str(_accelerator(device.type).get_device_name(device))


def architecture(device: torch.device) -> str:
    """Returns what kernels of a device "cuda" are compiled for: "capability 9.0", or on ROCm "gfx942"."""
    if is_rocm():
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"capability {major}.{minor}"


def peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Returns the dense peak in FLOP/s of a device by its name; None where unknown (MFU is then null)."""
    for part, peaks in _PEAK_FLOPS:
        if part in name:
            return peaks.get(dtype)
    return None


def set_deterministic(enabled: bool) -> None:
    """Makes torch refuse kernels that are not deterministic (RuntimeError at the call); call before the first."""
    if enabled:
        environment.set_default("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is not deterministic without it
        environment.set_default("NCCL_ALGO", "^NVLS")  # in-switch reductions add in the order of arrival
    if enabled != torch.are_deterministic_algorithms_enabled():  # the call imports torch's compiler, for seconds
        torch.use_deterministic_algorithms(enabled)
    torch.backends.cudnn.benchmark = False


def set_cpu_threads(launch: RankEnvironment) -> int:
    """Sets torch's CPU threads to OMP_NUM_THREADS or else to an equal share of the node's cores, and returns it.

    torchrun would give each rank one thread, and a start without a launcher all cores. mpiexec and srun may have bound
    the process to its own cores; those are not divided again.
    """
    requested = environment.requested_threads()
    if requested is not None:
        torch.set_num_threads(requested)
        return requested
    count = os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else count  # macOS cannot bind
    is_bound = launch.launcher in (Launcher.MPI, Launcher.SLURM) and cores < count
    threads = cores if is_bound else max(1, cores // launch.local_world_size)
    torch.set_num_threads(threads)
    return threads


class DeviceGraph:
    """Kernels of some work, recorded once and launched together: a CUDA graph.

    Args:
        pool: a graph that never runs at the same time, to share its memory; None: memory of its own.
    """

    def __init__(self, pool: DeviceGraph | None = None) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = None if pool is None else pool._graph.pool()

    def record(self, work: Callable[[], _Result]) -> _Result:
        """Runs the host's part of ``work`` and records its kernels without running them. Waits for the device.

        Returns:
            What ``work`` returned. Its tensors lie in the graph's memory: each replay writes them.
        """
        # thread_local: threads that read data or save a checkpoint may call what a recording thread must not.
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            return work()

    def replay(self) -> None:
        """Queues the recorded kernels, which read and write the memory that they did when they were recorded."""
        self._graph.replay()


def start_line(device: torch.device, backend: DistributedBackend, apex: Sequence[str] = ()) -> str:
    """Returns the line of the start: torch, what it is built for, the collectives, and what older stacks are used.

    Args:
        device: of this rank.
        backend: the option ``distributed_backend``.
        apex: what the run takes from apex.
    """
    chosen = backend_for(device, backend)
    collectives = "RCCL (nccl)" if chosen == "nccl" and is_rocm() else chosen
    found = [older_stacks.load_ipex()]
    found += [f"{older_stacks.CCL} (collectives)"] if chosen == "ccl" else []
    found += [f"apex {older_stacks.version(older_stacks.APEX)} ({', '.join(apex)})"] if apex else []
    older = "; ".join(text for text in found if text)
    text = f"torch {torch.__version__} built for {build()}, device {device.type}, collectives by {collectives}"
    return f"{text}; {older}" if older else text
