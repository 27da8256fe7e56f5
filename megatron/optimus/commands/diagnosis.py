"""What ``optimus doctor`` looks at: each check yields findings, and none of them ends the program.

Torch is imported inside the checks, because that it cannot be imported is a finding too. Nothing here names a host, a
user or the value of a variable, so that a report can be sent to others as it is.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from megatron.optimus.config.choices import Device
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.platform import environment, missing_packages
from megatron.optimus.platform.exchange import RANKS, exchange
from megatron.optimus.platform.log import first_line

GIB = 1 << 30
_SOURCE_TREE = Path(__file__).resolve().parents[3]
_OLDEST_PYTHON = (3, 10)
# Bytes below which a folder is a warning: a checkpoint of Mula-7B with optimizer states takes 100 GB, one of the demo
# 0.2. Files below which a limit is one: a rank has a socket to every other, and a file for every shard that it reads.
_LITTLE_SPACE, _LITTLE_SHARED_MEMORY, _FEW_FILES = 10 * GIB, GIB, 4096
# What a missing backend costs. Each figure is docs/performance.md's, and a test finds it there.
COSTS = {
    "cpu": "the demo trains 1.29 times as fast with them, on two cores with AVX2",
    "cuda": "in Triton the expert layer takes 1.08 to 1.15 times as long, on an H200",
    "triton": "experts, router and optimizer run in plain PyTorch; the factor is not measured",
    "sycl": "experts run in Triton or plain PyTorch; not measured on an Intel GPU",
}


class State(str, Enum):
    """How one checked part of the installation is."""

    OK = "ok"
    ABSENT = "absent"  # and not needed here
    WARNING = "warning"  # works, but slower or not for long
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    section: str
    name: str
    value: str
    state: State = State.OK
    cost: str = ""  # what it costs to leave it so
    remedy: str = ""  # the command that mends it


def software() -> Iterator[Finding]:
    """Yields Python, the packages that every installation needs, and those of GPUs and older stacks."""
    where = "Software"
    is_old = sys.version_info < _OLDEST_PYTHON
    needed = ".".join(map(str, _OLDEST_PYTHON))
    state = (State.BROKEN, f"Optimus needs {needed}") if is_old else (State.OK, "")
    yield Finding(where, "python", platform.python_version(), *state)
    for module, (distribution, least) in missing_packages.REQUIRED.items():
        found = (_version(distribution) or "unknown") if missing_packages.is_installed(module) else None
        wanted = f"{distribution}{least}"
        if found is None:
            remedy = f"pip install '{wanted}'"
            yield Finding(where, module, "not installed", State.BROKEN, "nothing can be trained", remedy)
        elif not missing_packages.satisfies(found, least):
            remedy = f"pip install '{wanted}'"
            yield Finding(where, module, found, State.BROKEN, f"Optimus needs {wanted}", remedy)
        else:
            yield Finding(where, module, found)
    if not missing_packages.is_installed("torch"):
        return
    if (error := _torch_error()) is not None:
        remedy = "pip install --force-reinstall torch"
        yield Finding(where, "torch", f"cannot be imported: {error}", State.BROKEN, "nothing runs", remedy)
        return
    from megatron.optimus.platform import older_stacks

    triton = _version("triton") or _version("pytorch-triton-rocm") or _version("pytorch-triton-xpu")
    yield _optional("triton", triton, "kernels of GPUs")
    ipex = older_stacks.version(older_stacks.IPEX)
    error = older_stacks.ipex_error() if ipex else None
    if error is None:
        yield _optional("IPEX", ipex, "torch knows Intel GPUs without it")
    else:
        remedy = "pip uninstall intel_extension_for_pytorch"
        yield Finding(where, "IPEX", f"{ipex}: {error}", State.WARNING, "it is not used", remedy)
    yield _optional("oneCCL", older_stacks.version(older_stacks.CCL), "its bindings; torch has xccl and gloo")
    yield _optional("apex", older_stacks.version(older_stacks.APEX), "for norm_backend=apex and optimizer_backend=apex")


def _optional(name: str, found: str | None, purpose: str) -> Finding:
    if found is not None:
        return Finding("Software", name, found)
    return Finding("Software", name, f"not installed ({purpose})", State.ABSENT)


def imports_deepspeed(limit_s: float) -> Iterator[Finding]:
    """Yields a finding where DeepSpeed is installed and cannot be imported; in a process of its own."""
    if not missing_packages.is_installed("deepspeed"):
        return
    variables = environment.current() | environment.import_path()
    command = [sys.executable, "-c", "import deepspeed"]
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=limit_s, check=False)
        error = None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]
    except subprocess.TimeoutExpired:
        error = f"no answer within {limit_s:g} s"
    if error is not None:
        remedy = f"pip install --force-reinstall 'deepspeed{missing_packages.REQUIRED['deepspeed'][1]}'"
        yield Finding("Software", "deepspeed", f"cannot be imported: {error}", State.BROKEN, "no training", remedy)


def devices(asked: Device) -> Iterator[Finding]:
    """Yields the processor and every kind of accelerator, also one that this torch was not built for."""
    import torch

    from megatron.optimus.platform import device as module

    where = "Devices"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding(where, "cpu", f"{cores} cores, {platform.machine()}, {_host_memory()}")
    for kind in ("cuda", "xpu", "mps"):
        count = module.device_count(kind)
        if count:
            yield Finding(where, kind, _described(torch.device(kind, 0), count))
    yield Finding(where, "torch for", module.build())
    try:
        module.device_for_rank(asked, 0)
    except ConfigError as error:
        yield Finding(
            where, asked.value, str(error), State.BROKEN, "the run does not start", "optimus doctor --device auto"
        )
    for name, hint, kind, remedy in (
        ("NVIDIA GPU", "/dev/nvidia0", "cuda", "pip install --force-reinstall torch"),
        ("AMD GPU", "/dev/kfd", "cuda", "pip install --force-reinstall torch --index-url URL_OF_ROCM_BUILDS"),
    ):
        if Path(hint).exists() and not module.device_count(kind):
            cost = f"torch for {module.build()} sees none: everything runs on the CPU"
            yield Finding(where, name, "present, not used", State.WARNING, cost, remedy)


def _described(device: object, count: int) -> str:
    import torch

    from megatron.optimus.platform import device as module

    assert isinstance(device, torch.device)
    if device.type == "mps":
        return "Apple GPU; --device mps uses it, with one process (not run by us)"
    free, _, total = module.memory_info(device)
    text = f"{count} x {module.device_name(device)}, {total / GIB:.0f} GiB each, the first {free / GIB:.0f} free"
    return f"{text}, {module.architecture(device)}" if device.type == "cuda" else text


def _host_memory() -> str:
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return "memory unknown"
    return f"{pages * size / GIB:.0f} GiB"


def kernels(kind: str) -> Iterator[Finding]:
    """Yields the backends of operations for a kind of device, the fastest first, and what a missing one costs."""
    import torch

    from megatron.optimus.ops import backend as backends

    where = "Kernels"
    dtype = torch.float32 if kind == "cpu" else torch.bfloat16
    has_faster = False
    for backend in backends.native(kind):
        error = backends.obstacle_of(backend, kind, dtype)
        name, what = backend.value, _KERNELS[backend.value]
        if error is None:
            yield Finding(where, name, what + _instructions(name))
            has_faster = True
        elif has_faster or "it needs Hopper" in error or "there are none" in error:
            yield Finding(where, name, f"{what}: {error.partition(';')[0]}", State.ABSENT)
        else:
            yield Finding(where, name, f"{what}: {error.partition(';')[0]}", State.WARNING, COSTS[name], _build(name))
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if compiler is not None:
        yield Finding(where, "compiler", compiler)
    else:
        cost = "C++ operations cannot be built, and Triton cannot launch its kernels"
        is_needed = not has_faster or kind != "cpu"
        state = State.WARNING if is_needed else State.ABSENT
        yield Finding(where, "compiler", "no C++ compiler", state, cost, "apt-get install g++" if is_needed else "")


_KERNELS = {
    "cpu": "C++ operations",
    "cuda": "CUDA C++ for Hopper",
    "triton": "Triton",
    "sycl": "SYCL for Intel GPUs",
}


def _instructions(name: str) -> str:
    if name != "cpu":
        return ""
    from megatron.optimus.ops import cpu

    return f", {cpu.instruction_sets()[0]}"


def _build(name: str) -> str:
    if name == "triton":
        return "pip install triton"
    if (_SOURCE_TREE / "setup.py").exists():
        return "python setup.py build_ext --inplace"
    return "pip install --force-reinstall --no-deps --no-build-isolation optimus-megatron"


def collectives(kind: str, limit_s: float) -> Iterator[Finding]:
    """Yields the outcome of a real exchange between two ranks, on the CPU and on the accelerators of ``kind``."""
    from megatron.optimus.platform import device as module

    where = "Collectives"
    kinds = ["cpu"]
    if kind in ("cuda", "xpu"):
        if module.device_count(kind) >= RANKS:
            kinds.append(kind)
        else:
            yield Finding(where, kind, "one device: no second rank to exchange with", State.ABSENT)
    for each in kinds:
        found = exchange(each, limit_s=limit_s)
        if found.error is None:
            text = f"{RANKS} ranks on {each} exchanged tensors in {found.seconds:.2f} s"
            yield Finding(where, found.backend, text)
        else:
            cost = "runs of several ranks cannot start"
            remedy = "optimus doctor --timeout 300" if "did not end within" in found.error else _DEBUG[each]
            yield Finding(where, f"ranks on {each}", found.error, State.BROKEN, cost, remedy)


# What makes the library say more.
_DEBUG = {
    "cpu": "GLOO_SOCKET_IFNAME=lo optimus doctor",
    "cuda": "NCCL_DEBUG=INFO optimus doctor",
    "xpu": "CCL_LOG_LEVEL=info optimus doctor",
}


def space(folders: dict[str, Path]) -> Iterator[Finding]:
    """Yields the free space of each folder, given by its option, and of shared memory."""
    where = "Space"
    for option, folder in folders.items():
        place = folder.absolute()
        while not place.exists():
            place = place.parent
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            cost, remedy = "the run does not start", f"optimus doctor --{option} A_FOLDER_OF_YOURS"
            yield Finding(where, option, f"{folder}: cannot be written", State.BROKEN, cost, remedy)
            continue
        yield _free(option, f"{folder}: ", place, _LITTLE_SPACE, f"optimus doctor --{option} A_LARGER_DISK")
    shared = Path("/dev/shm")
    if shared.is_dir():
        remedy = "mount -o remount,size=16G /dev/shm   # docker run --shm-size=16g"
        yield _free("/dev/shm", "", shared, _LITTLE_SHARED_MEMORY, remedy)


def _free(name: str, label: str, place: Path, least: int, remedy: str) -> Finding:
    free = shutil.disk_usage(place).free
    text = f"{label}{free / GIB:.1f} GiB free"
    if free < least // 100:
        return Finding("Space", name, text, State.BROKEN, "the first save fails", remedy)
    if free < least:
        what = "NCCL's and worker processes' buffers" if name == "/dev/shm" else "checkpoints"
        return Finding("Space", name, text, State.WARNING, f"it may be too little for {what}", remedy)
    return Finding("Space", name, text)


def extras() -> Iterator[Finding]:
    """Yields the optional packages, by the name of their extra, and the command that installs each."""
    for name, extra in missing_packages.EXTRAS.items():
        missing = [dist for module, dist in extra.packages.items() if not missing_packages.is_installed(module)]
        found = ", ".join(f"{dist} {_version(dist) or ''}".strip() for dist in extra.packages.values())
        if missing:
            command = f"pip install {' '.join(missing)}"
            yield Finding("Optional", name, f"{extra.purpose}: {command}", State.ABSENT, "", command)
        else:
            yield Finding("Optional", name, found)


def limits(kind: str) -> Iterator[Finding]:
    """Yields the limits of this process that runs meet."""
    where = "Limits"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _FEW_FILES:
        yield Finding(where, "open files", "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}")
    else:
        cost = "with hundreds of ranks: Too many open files"
        most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        remedy = f"ulimit -n {most}" if most > soft else "echo '* - nofile 65536' >> /etc/security/limits.conf"
        yield Finding(where, "open files", f"{soft:,}", State.WARNING, cost, remedy)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked == resource.RLIM_INFINITY:
        yield Finding(where, "locked memory", "unlimited")
    elif kind != "cpu" and Path("/sys/class/infiniband").is_dir():
        cost = "InfiniBand cannot register memory"
        yield Finding(where, "locked memory", f"{locked >> 10:,} KiB", State.WARNING, cost, "ulimit -l unlimited")
    else:
        yield Finding(where, "locked memory", f"{locked >> 10:,} KiB")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_error() -> str | None:
    try:
        importlib.import_module("torch")
    except Exception as error:  # a library that is missing, or is for another machine
        return first_line(error)
    return None
