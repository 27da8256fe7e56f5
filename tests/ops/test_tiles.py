"""The choice of tiles and the file of tuned ones, without Triton: what fits, what is asked for, what is believed."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from megatron.optimus.ops.triton import tiles as tiles_module
from megatron.optimus.ops.triton.candidates import CANDIDATES, Tiles
from megatron.optimus.ops.triton.tiles import (
    Hardware,
    bucket,
    fitting,
    layer_problems,
    shared_bytes,
    sum_bytes,
)
from tests.ops.tile_cases import ADA, FIRST, H200, LIKE, PRODUCT, SECOND, THIRD, chosen, entry

pytestmark = pytest.mark.usefixtures("file")

REAL_HARDWARE = tiles_module.hardware


def test_the_default_is_the_measured_one_or_the_first_that_fits() -> None:
    """Those of docs/design/expert_kernels.md are first; on a GPU with less shared memory the next best that fits."""
    for problem in layer_problems(64, 2048, 1024, 8, 16384, torch.bfloat16, torch.float32):
        assert fitting(problem, H200)[0] == CANDIDATES[problem.kernel][0] == chosen(problem)
        small = fitting(problem, ADA)
        assert all(shared_bytes(problem.kernel, t, ADA) <= ADA.shared_bytes for t in small) and len(small) > 1
    assert fitting(PRODUCT, ADA)[0] == Tiles(128, 128, 64, 4, 3, 1)
    with pytest.raises(
        ValueError,
        match="rows_times_weight: no tiles fit 1000 bytes of shared memory and 32768 of registers",
    ):
        fitting(PRODUCT, ADA._replace(shared_bytes=1000))
    narrow = fitting(PRODUCT._replace(n=40), H200)
    assert narrow[0] == FIRST and all(tiles.cols == 64 for tiles in narrow[1:])


@pytest.mark.parametrize(
    ("capability", "engine", "keeps"),
    [
        ((8, 0), False, False),
        ((8, 9), False, False),
        ((9, 0), True, True),
        ((10, 0), True, True),
        ((12, 0), True, False),
    ],
    ids=["Ampere", "Ada", "Hopper", "Blackwell", "small Blackwell"],
)
def test_what_a_device_is(
    capability: tuple[int, int], engine: bool, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"multiprocessor_count": 108, "max_shared_mem": 166912}
    utils = SimpleNamespace(get_device_properties=lambda index: found if index == 3 else None)
    driver = SimpleNamespace(active=SimpleNamespace(utils=utils))
    triton = SimpleNamespace(__version__="3.6", runtime=SimpleNamespace(driver=driver))
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    key = f"GPU, {capability[0]}.{capability[1]}, triton 3.6"
    got = REAL_HARDWARE.__wrapped__(torch.device("cuda", 3))
    assert got == Hardware(key, 108, 166912, has_tma=engine, keeps_last_stage=keeps)


def test_an_amd_gpu_has_no_engine_and_is_not_taken_for_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch calls it cuda, of capability 9.4. Properties as Triton reports them of an MI300X; no AMD GPU ran this."""
    found = {"multiprocessor_count": 304, "max_shared_mem": 65536}
    utils = SimpleNamespace(get_device_properties=lambda index: found if index == 3 else None)
    triton = SimpleNamespace(
        __version__="3.6", runtime=SimpleNamespace(driver=SimpleNamespace(active=SimpleNamespace(utils=utils)))
    )
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "MI300X")
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    got = REAL_HARDWARE.__wrapped__(torch.device("cuda", 3))
    assert got == Hardware("MI300X, gfx942, triton 3.6", 304, 65536, False, False, 65536, splits_in_shared=True)
    for problem in layer_problems(64, 2048, 1024, 8, 16384, torch.bfloat16, torch.float32):
        assert all(shared_bytes(problem.kernel, tiles, got) <= 65536 for tiles in fitting(problem, got))
    assert fitting(PRODUCT, got)[0] == Tiles(128, 128, 32, 4, 4, 2)


def test_an_intel_gpu_takes_the_path_without_an_engine_and_tiles_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Properties as triton-xpu reports them of a tile of a Max 1550; no Intel GPU ran this."""
    found = {"multiprocessor_count": 64, "max_shared_mem": 131072, "sub_group_sizes": (16, 32)}
    utils = SimpleNamespace(get_device_properties=lambda index: found if index == 3 else None)
    driver = SimpleNamespace(active=SimpleNamespace(utils=utils))
    triton = SimpleNamespace(__version__="3.6", runtime=SimpleNamespace(driver=driver))
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", None)  # nothing of CUDA is asked
    intel = SimpleNamespace(get_device_name=lambda device: "Max 1550", current_device=lambda: 3)
    monkeypatch.setattr(torch, "get_device_module", lambda device: intel if device.type == "xpu" else None)
    for device in (torch.device("xpu", 3), torch.device("xpu")):
        got = REAL_HARDWARE.__wrapped__(device)
        assert got == Hardware("Max 1550, xpu, triton 3.6", 64, 131072, False, False, register_bytes=16384)
    for problem in layer_problems(64, 2048, 1024, 8, 16384, torch.bfloat16, torch.bfloat16):
        fit = fitting(problem, got)
        assert all(sum_bytes(problem.kernel, t) <= 8192 for t in fit)
        assert all(shared_bytes(problem.kernel, t, got) <= 131072 for t in fit)
        assert all(tiles_module.is_legal(problem.kernel, t, got) for t in fit)
        on_nvidia = got._replace(register_bytes=H200.register_bytes)
        assert len(fitting(problem, on_nvidia)) >= len(fit) >= 4
    assert fitting(PRODUCT, got)[0] == Tiles(64, 128, 64, 4, 4, 2)
    assert not tiles_module.is_legal(PRODUCT.kernel, Tiles(128, 128, 64, 4, 3, 1), got)  # sums fill all registers
    assert tiles_module.num_programs(Tiles(64, 128, 64, 4, 4, 2), LIKE.device) == 2 * H200.processors


def test_problems_of_a_layer() -> None:
    problems = layer_problems(4, 19, 13, 3, 100, torch.float16, torch.float16)
    assert {p.slots for p in problems} == {512} and {p.experts for p in problems} == {4}
    assert [(p.kernel, p.n, p.k) for p in problems] == [
        ("up_swiglu", 16, 24),  # widths are padded to a multiple of 8
        ("rows_times_weight_t", 24, 16),
        ("rows_times_weight", 16, 24),
        ("rows_times_weight", 24, 32),
        ("weight_gradient", 24, 16),  # the first of a step
        ("weight_gradient", 32, 24),
        ("weight_gradient_add", 24, 16),
        ("weight_gradient_add", 32, 24),
        ("spread_rows", 3, 24),
        ("sum_rows", 3, 24),
        ("swiglu_backward", 1, 16),
    ]
    plain = layer_problems(4, 19, 13, 3, 100, torch.float16)
    assert {p.kernel for p in problems} - {p.kernel for p in plain} == {"weight_gradient_add"}
    assert [bucket(n) for n in (0, 1, 2, 3, 4, 5, 131072, 131073)] == [1, 1, 2, 4, 4, 8, 131072, 262144]


def test_a_tuned_problem_and_its_neighbours_in_size_take_its_tiles() -> None:
    tiles_module.set_tables({H200.key: {str(PRODUCT): entry(SECOND)}})
    assert [chosen(PRODUCT, n) for n in (131072, 100000, 262144, 200000, 65536)] == [SECOND] * 5
    assert [chosen(PRODUCT, n) for n in (32768, 262145)] == [FIRST] * 2
    tiles_module.set_tables(
        {H200.key: {str(PRODUCT._replace(slots=n)): entry(t) for n, t in ((64, SECOND), (256, THIRD))}}
    )
    assert chosen(PRODUCT, 128) == THIRD  # the larger of two neighbours


def test_every_part_of_the_key_separates() -> None:
    tiles_module.set_tables({H200.key: {str(PRODUCT): entry(SECOND)}})
    others = [
        PRODUCT._replace(kernel="rows_times_weight_t"),
        PRODUCT._replace(dtype=torch.float16),
        PRODUCT._replace(experts=8),
        PRODUCT._replace(n=1024),
        PRODUCT._replace(k=2048),
    ]
    assert [chosen(other) for other in others] == [FIRST] * 5
    for key in ("H200, 9.0, triton 4", "H100, 9.0, triton 3"):
        tiles_module.set_tables({key: {str(PRODUCT): entry(SECOND)}})
        assert chosen(PRODUCT) == FIRST


def test_tiles_that_do_not_fit_this_device_are_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles_module.set_tables({ADA.key: {str(PRODUCT): entry(SECOND)}})
    monkeypatch.setattr(tiles_module, "hardware", lambda device: ADA)
    assert not tiles_module.is_legal(PRODUCT.kernel, SECOND, ADA)
    assert chosen(PRODUCT) == fitting(PRODUCT, ADA)[0] and tiles_module.summary(LIKE.device) == "default tiles"
