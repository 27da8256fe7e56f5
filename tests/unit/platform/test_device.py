"""The device switch on a machine with and without accelerators (those are imitated)."""

import itertools
import os
import time
import types
from collections.abc import Iterator

import pytest
import torch

from megatron.optimus.config.schema import ConfigError, Device, DistributedBackend
from megatron.optimus.platform import device as device_module
from megatron.optimus.platform import older_stacks
from megatron.optimus.platform.device import (
    DeviceEvent,
    backend_for,
    device_for_rank,
    device_name,
    memory_allocated,
    peak_flops,
    peak_memory,
    reset_peak_memory,
    set_cpu_threads,
    set_deterministic,
    set_device,
    synchronize,
)
from megatron.optimus.platform.environment import Launcher, RankEnvironment

CPU, MPS = torch.device("cpu"), torch.device("mps", 0)


def machine(monkeypatch: pytest.MonkeyPatch, cuda: int = 0, xpu: int = 0) -> None:
    for kind, count in (("cuda", cuda), ("xpu", xpu)):
        module = types.SimpleNamespace(is_available=lambda n=count: n > 0, device_count=lambda n=count: n)
        monkeypatch.setattr(torch, kind, module)


def test_auto_prefers_cuda_then_xpu_then_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, cuda=8, xpu=12)
    assert device_for_rank(Device.AUTO, 3) == torch.device("cuda", 3)
    assert device_for_rank(Device.XPU, 11) == torch.device("xpu", 11)
    assert device_for_rank(Device.CPU, 3) == CPU
    machine(monkeypatch, xpu=12)
    assert device_for_rank(Device.AUTO, 11) == torch.device("xpu", 11)
    machine(monkeypatch)
    assert device_for_rank(Device.AUTO, 5) == CPU


def test_an_apple_gpu_is_taken_where_it_is_asked_for_by_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: major <= 13)
    assert device_for_rank(Device.AUTO, 0) == CPU
    assert device_for_rank(Device.MPS, 0) == MPS
    with pytest.raises(ConfigError, match=r"local rank 1 of device=mps: no collectives .* start one process"):
        device_for_rank(Device.MPS, 1)
    device_module.check_dtype(MPS, torch.float32)
    device_module.check_dtype(CPU, torch.bfloat16)
    with pytest.raises(ConfigError, match="params_dtype=bf16: Apple GPUs have bf16 from macOS 14"):
        device_module.check_dtype(MPS, torch.bfloat16)
    assert not device_module.pins_memory(MPS) and not device_module.has_streams(MPS)
    assert device_module.sum_dtype(MPS) is torch.float32 and device_module.sum_dtype(CPU) is torch.float64
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device=mps.*sees none"):
        device_for_rank(Device.MPS, 0)


def test_calls_on_an_apple_gpu_take_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.mps has one device, no streams, and neither a peak nor page-locked copies."""
    calls: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("wait")

        def elapsed_time(self, later: object) -> float:
            return 1500.0

    sizes = {"current_allocated_memory": 3, "driver_allocated_memory": 5, "recommended_max_memory": 16}
    functions = {name: lambda size=size: size for name, size in sizes.items()}
    mps = types.SimpleNamespace(Event=Event, synchronize=lambda: calls.append("synchronize"), **functions)
    monkeypatch.setattr(torch, "mps", mps)
    set_device(MPS)
    reset_peak_memory(MPS)
    synchronize(MPS)
    first, second = DeviceEvent(MPS), DeviceEvent(MPS)
    assert second.seconds_since(first) == 1.5 and calls == ["synchronize", "record", "record", "wait"]
    assert (memory_allocated(MPS), peak_memory(MPS), device_module.memory_info(MPS)) == (3, 5, (11, 5, 16))
    assert device_name(MPS) == "Apple GPU"


def test_torch_says_what_it_is_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(older_stacks, "load_ipex", lambda: None)
    for name, value in (("cuda", None), ("hip", None)):
        monkeypatch.setattr(torch.version, name, value)
    assert device_module.build() == "CPUs" and not device_module.is_rocm()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    line = f"torch {torch.__version__} built for CUDA 13.0, device cuda, collectives by nccl"
    assert device_module.start_line(torch.device("cuda", 1), DistributedBackend.AUTO) == line
    monkeypatch.setattr(torch.version, "hip", "6.4.43483")
    assert device_module.is_rocm() and device_module.build() == "ROCm 6.4.43483"
    line = f"torch {torch.__version__} built for ROCm 6.4.43483, device cuda, collectives by RCCL (nccl)"
    assert device_module.start_line(torch.device("cuda", 1), DistributedBackend.AUTO) == line
    monkeypatch.setattr(older_stacks, "load_ipex", lambda: "intel-extension-for-pytorch 2.8.0 (its kernels)")
    assert device_module.start_line(CPU, DistributedBackend.AUTO).endswith(
        "by gloo; intel-extension-for-pytorch 2.8.0 (its kernels)"
    )


def test_missing_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, cuda=2)
    with pytest.raises(ConfigError, match=r"device=xpu.*sees none.*--device cpu"):
        device_for_rank(Device.XPU, 0)
    with pytest.raises(ConfigError, match=r"local rank 2 .* shows 2; start at most 2"):
        device_for_rank(Device.AUTO, 2)


def test_backends() -> None:
    for kind, backend in (("cuda", "nccl"), ("xpu", "xccl"), ("cpu", "gloo")):
        assert backend_for(torch.device(kind), DistributedBackend.AUTO) == backend
        assert backend_for(torch.device(kind), DistributedBackend.GLOO) == "gloo"
        assert backend_for(torch.device(kind), DistributedBackend(backend)) == backend
    assert backend_for(MPS, DistributedBackend.AUTO) == "gloo"
    with pytest.raises(ConfigError, match="distributed_backend=ccl does not serve cuda; use nccl or auto"):
        backend_for(torch.device("cuda"), DistributedBackend.CCL)
    with pytest.raises(
        ConfigError, match=r"distributed_backend=ccl: oneccl_bindings_for_pytorch is not .*; or use gloo"
    ):
        backend_for(CPU, DistributedBackend.CCL)
    with pytest.raises(ConfigError, match="distributed_backend=nccl does not serve cpu; use gloo or auto"):
        backend_for(CPU, DistributedBackend.NCCL)


def test_cpu_calls_do_nothing_and_do_not_fail() -> None:
    set_device(CPU)
    synchronize(CPU)
    reset_peak_memory(CPU)
    assert (memory_allocated(CPU), peak_memory(CPU), device_name(CPU)) == (0, 0, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() and not torch.xpu.is_available(), reason="no accelerator")
def test_accelerator_calls() -> None:
    device = device_for_rank(Device.AUTO, 0)
    set_device(device)
    reset_peak_memory(device)
    before = memory_allocated(device)
    tensor = torch.zeros(1 << 20, device=device)
    synchronize(device)
    assert memory_allocated(device) - before >= tensor.nbytes
    del tensor
    assert peak_memory(device) - before >= 4 << 20
    assert device_name(device) not in ("", "cpu")


def test_marks_are_passed_in_their_order_on_a_cpu() -> None:
    first = DeviceEvent(CPU)
    time.sleep(0.02)
    second = DeviceEvent(CPU)
    assert 0.02 <= second.seconds_since(first) < 5 and first.seconds_since(first) == 0.0
    assert 0 <= second.work_seconds_since(first) < 0.02  # a wait is no work


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_marks_of_accelerators_are_timed_events_of_the_present_stream(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    calls: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            calls.append(stream)

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            calls.append("waits")

        def elapsed_time(self, later: object) -> float:
            assert isinstance(later, Event) and later is not self
            return 1500.0 if calls[-1] == "waits" else -1.0  # milliseconds

    monkeypatch.setattr(torch, kind, types.SimpleNamespace(Event=Event, current_stream=str))
    first, second = (DeviceEvent(torch.device(kind, 3)) for _ in range(2))
    assert calls == [f"{kind}:3"] * 2 and not second.is_done
    assert second.seconds_since(first) == 1.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_marks_measure_the_device_and_nobody_waits_for_them() -> None:
    """Of an idle device a mark is passed at once, of a busy one when it has come there; the host is ahead of both."""
    device = torch.device("cuda", torch.cuda.current_device())
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def work(times: int) -> None:
        for _ in range(times):
            torch.mm(a, a)

    def event() -> torch.cuda.Event:
        made = torch.cuda.Event(enable_timing=True)
        made.record()
        return made

    work(10)
    synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        marks, events = [DeviceEvent(device)], [event()]
        for times in (400, 0, 400):
            work(times)
            marks.append(DeviceEvent(device))
            events.append(event())
        assert not marks[-1].is_done, "the host did not wait"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    by_marks = [later.seconds_since(earlier) for earlier, later in itertools.pairwise(marks)]
    synchronize(device)
    by_events = [earlier.elapsed_time(later) / 1e3 for earlier, later in itertools.pairwise(events)]
    assert by_marks == pytest.approx(by_events, rel=0.05, abs=2e-3)  # other processes' work may come between the two
    assert by_marks[0] > 10 * by_marks[1] >= 0.0
    time.sleep(0.2)
    assert DeviceEvent(device).seconds_since(marks[-1]) >= 0.2, "a mark on an idle device is passed when it is taken"


def test_peak_flops() -> None:
    assert peak_flops("NVIDIA H200", torch.bfloat16) == 989e12
    assert peak_flops("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989e12
    assert peak_flops("NVIDIA H100 PCIe", torch.bfloat16) == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", torch.bfloat16) == 312e12
    assert peak_flops("Intel(R) Data Center GPU Max 1550", torch.bfloat16) == 367e12
    assert peak_flops("NVIDIA H200", torch.float64) is None
    assert peak_flops("cpu", torch.bfloat16) is None


def test_deterministic_refuses_unstable_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.setenv(name, "")  # so that it is restored afterwards
        monkeypatch.delenv(name)
    try:
        set_deterministic(True)
        assert (
            torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
        )
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and os.environ["NCCL_ALGO"] == "^NVLS"
    finally:
        set_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """A node of 16 cores, all of them ours until a test says otherwise."""
    node = types.SimpleNamespace(mine=16)
    monkeypatch.setattr(device_module.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(device_module.os, "sched_getaffinity", lambda pid: set(range(node.mine)), raising=False)
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    yield node
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("launcher", "local_size", "mine", "threads"),
    [
        (Launcher.TORCHRUN, 4, 16, 4),
        (Launcher.ALONE, 1, 16, 16),
        (Launcher.TORCHRUN, 3, 16, 5),
        (Launcher.TORCHRUN, 32, 16, 1),  # never none
        (Launcher.TORCHRUN, 2, 8, 4),  # a container's or taskset's cores are shared
        (Launcher.MPI, 4, 16, 4),  # not bound
        (Launcher.MPI, 4, 4, 4),  # bound by --cpu-bind: already this rank's own
        (Launcher.SLURM, 4, 2, 2),
    ],
)
def test_cpu_threads(
    cores: types.SimpleNamespace, launcher: Launcher, local_size: int, mine: int, threads: int
) -> None:
    cores.mine = mine
    launch = RankEnvironment(0, local_size, 0, local_size, "127.0.0.1", 29500, launcher)
    assert set_cpu_threads(launch) == threads
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("asked", "by_torchrun", "threads"),
    [("3", False, 3), ("1", False, 1), ("2,4", False, 2), ("3", True, 3), ("1", True, 8), ("", False, 8)],
)
def test_threads_that_the_user_asked_for(
    asked: str, by_torchrun: bool, threads: int, cores: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun says 1 where nobody asked."""
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    if by_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert set_cpu_threads(RankEnvironment(0, 2, 0, 2, "127.0.0.1", 29500, Launcher.TORCHRUN)) == threads
    assert torch.get_num_threads() == threads


def test_a_number_of_threads_that_is_none(cores: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "0")
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS='0' is not a number of threads"):
        set_cpu_threads(RankEnvironment(0, 1, 0, 1, "127.0.0.1", 29500, Launcher.ALONE))


def test_work_beside_is_done_at_once_on_cpu() -> None:
    done: list[int] = []
    end = device_module.on_side_stream(torch.device("cpu"), lambda: [done.append(1), torch.ones(2)][1:])
    assert done == [1]
    [result] = end()
    assert torch.equal(result, torch.ones(2)) and end()[0] is result


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_work_beside_sees_what_was_queued_before_and_is_seen_by_what_is_queued_after() -> None:
    """Also when memory that either side frees is given out again meanwhile."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    a = torch.randn(2048, 2048, device=device) / 2048**0.5
    expected = a
    for _ in range(20):
        expected = expected @ a
    for _ in range(3):
        x = torch.full_like(a, torch.nan)
        torch.cuda._sleep(10_000_000)
        x.copy_(a)  # late: work beside that did not wait would read NaN

        def chain(x: torch.Tensor = x) -> list[torch.Tensor]:
            y = x
            for _ in range(20):
                y = y @ x
            return [y]

        end = device_module.on_side_stream(device, chain)
        for _ in range(5):
            torch.full((2048, 2048), torch.nan, device=device)  # beside, in memory that is freed at once
        [result] = end()
        copy = result.clone()
        del result
        torch.full((2048, 2048), torch.nan, device=device)
        torch.testing.assert_close(copy, expected)
