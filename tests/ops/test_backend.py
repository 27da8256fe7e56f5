"""Which backend ``auto`` takes on GPUs, with imitated devices, and what the line says. No Intel GPU ran any of it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from megatron.optimus import ops
from megatron.optimus.ops import backend as backend_module
from megatron.optimus.ops.triton import tiles


def test_auto_prefers_cuda_on_hopper_and_says_why_not_elsewhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend_module, "_KERNELS", {})
    monkeypatch.setattr(backend_module, "_triton_error", lambda device_type: None)
    monkeypatch.setattr(backend_module, "_cuda_error", lambda device_type: "those here have 8.0")
    monkeypatch.setattr(tiles, "summary", lambda device: "3 tuned tiles")
    backend_module._resolve.cache_clear()
    with caplog.at_level("INFO", logger="optimus"):
        assert backend_module.resolve(torch.device("cuda"), torch.bfloat16) is ops.Backend.TRITON
        monkeypatch.setattr(backend_module, "_cuda_error", lambda device_type: None)
        backend_module._resolve.cache_clear()
        assert backend_module.resolve(torch.device("cuda"), torch.bfloat16) is ops.Backend.CUDA
        assert backend_module._resolve_routing.__wrapped__(ops.Backend.AUTO, "cuda") is ops.Backend.TRITON
    backend_module._resolve.cache_clear()
    assert [r.getMessage() for r in caplog.records] == [
        "expert kernels on cuda bfloat16: triton with 3 tuned tiles (not cuda: those here have 8.0); router: triton",
        "expert kernels on cuda bfloat16: cuda; router: triton",
    ]


def test_rocm_takes_triton_and_refuses_cuda_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With torch's own flag set by hand and a Triton that is imitated: none of this was run on an AMD GPU."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(backend_module, "_KERNELS", {})
    monkeypatch.setattr(tiles, "summary", lambda device: "default tiles")
    cached = (backend_module._resolve, backend_module._cuda_error, backend_module._triton_error)
    for names, error in (("amd",), None), (("nvidia",), "this triton (3.6) has no backend for AMD GPUs"):
        monkeypatch.setitem(sys.modules, "triton", fake_triton(names=names))
        for one in cached:
            one.cache_clear()
        found = backend_module.obstacle_of(ops.Backend.TRITON, "cuda", torch.bfloat16)
        assert found is None if error is None else (found or "").startswith(error)
        if error is None:
            with caplog.at_level("INFO", logger="optimus"):
                assert backend_module.resolve(torch.device("cuda"), torch.bfloat16) is ops.Backend.TRITON
            with pytest.raises(
                ops.BackendUnavailableError, match="NVIDIA's Hopper GPUs, and this torch is built for ROCm"
            ):
                backend_module._resolve.__wrapped__(ops.Backend.CUDA, "cuda", torch.bfloat16)
    for one in cached:
        one.cache_clear()
    assert [r.getMessage() for r in caplog.records] == [
        "expert kernels on cuda bfloat16: triton with default tiles; router: triton"
    ]


def test_apple_gpus_run_the_reference_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        assert backend_module._resolve.__wrapped__(ops.Backend.AUTO, "mps", dtype) is ops.Backend.REFERENCE
    assert backend_module.resolve_routing(torch.device("mps")) is ops.Backend.REFERENCE
    assert all("which is slower, because there are none for Apple GPUs" in r.getMessage() for r in caplog.records)
    assert len(caplog.records) == 2


INTEL = SimpleNamespace(get_current_target=lambda: SimpleNamespace(backend="xpu"))


def fake_triton(active: object = INTEL, names: tuple[str, ...] = ("intel", "nvidia")) -> SimpleNamespace:
    backends = SimpleNamespace(backends=dict.fromkeys(names))
    runtime = SimpleNamespace(driver=SimpleNamespace(active=active))
    return SimpleNamespace(__version__="3.6", backends=backends, runtime=runtime)


def test_auto_on_intel_gpus_takes_sycl_then_triton_then_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a Triton and a device that are imitated: none of this was run on an Intel GPU."""
    xpu = torch.device("xpu")
    monkeypatch.setattr(backend_module, "_KERNELS", {})
    monkeypatch.setattr(tiles, "summary", lambda device: f"default tiles of {device.type}")
    monkeypatch.setattr(backend_module, "_sycl_error", lambda device_type: None)
    monkeypatch.setitem(sys.modules, "triton", fake_triton())
    chosen, dtypes = [], (torch.bfloat16, torch.float32)
    with caplog.at_level("INFO", logger="optimus"):
        for step in range(3):
            for cached in (backend_module._resolve, backend_module._resolve_routing, backend_module._triton_error):
                cached.cache_clear()
            chosen.append([backend_module.resolve(xpu, dtype).value for dtype in dtypes])
            chosen[-1].append(backend_module.resolve_routing(xpu).value)
            if step == 0:
                monkeypatch.setattr(backend_module, "_sycl_error", lambda device_type: "no icpx")
            else:
                monkeypatch.setitem(sys.modules, "triton", fake_triton(names=("nvidia", "amd")))
    for cached in (backend_module._resolve, backend_module._resolve_routing, backend_module._triton_error):
        cached.cache_clear()
    assert chosen == [["sycl"] * 3, ["triton", "reference", "triton"], ["reference"] * 3]
    slower, half = "reference, which is slower, because sycl: no icpx", "it has bfloat16 and float16 only"
    missing = "this triton (3.6) has no backend for Intel GPUs; install triton-xpu in its place, in the version that"
    lines = [r.getMessage() for r in caplog.records]
    assert lines[:3] == [
        "expert kernels on xpu bfloat16: sycl; router: sycl",
        "expert kernels on xpu float32: sycl; router: sycl",
        "expert kernels on xpu bfloat16: triton with default tiles of xpu (not sycl: no icpx); router: triton",
    ]
    assert lines[3].startswith(f"expert kernels on xpu float32: {slower}; triton: {half}")
    assert lines[4].startswith(f"expert kernels on xpu bfloat16: {slower}; triton: {missing}") and len(lines) == 6


def _fails() -> None:
    raise RuntimeError("0 active drivers\nsecond line")


@pytest.mark.parametrize(
    ("triton", "error"),
    [
        (fake_triton(), None),
        (fake_triton(names=("nvidia",)), "no backend for Intel GPUs; install triton-xpu"),
        (fake_triton(SimpleNamespace(get_current_target=_fails)), "does not start (0 active drivers); see that it has"),
        (fake_triton(SimpleNamespace(get_current_target=lambda: SimpleNamespace(backend="cuda"))), "compiles for cuda"),
        (None, "triton is not installed"),
    ],
    ids=["Intel", "NVIDIA", "no driver", "other target", "none"],
)
def test_triton_on_an_intel_gpu_needs_intels_own(
    triton: object, error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", triton)
    found = backend_module._triton_error.__wrapped__("xpu")
    assert found is None if error is None else error in (found or "")
    ops.set_backend("triton")
    monkeypatch.setattr(backend_module, "_triton_error", lambda device_type: found)
    if found:
        with pytest.raises(ops.BackendUnavailableError, match="backend 'triton' cannot run on xpu bfloat16"):
            backend_module._resolve.__wrapped__(ops.Backend.TRITON, "xpu", torch.bfloat16)
