"""Every instruction set of this processor gives the specification's values, AMX to all 24 bits of fp32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron.optimus import ops
from megatron.optimus.ops import backend as backend_module
from megatron.optimus.ops import reference
from tests.ops.cases import CASES, NAMES, TOLERANCE, Case, make_inputs, mismatches, values_and_gradients

if backend_module.compiled_library_error():
    pytest.skip("the compiled operations are missing", allow_module_level=True)

from megatron.optimus.ops import cpu

SETS = cpu.instruction_sets()
# Many blocks of an expert, a row beyond a tile, columns beyond a tile of every set, depths beyond a chunk, buffers of
# rows that are written past the caches.
LARGE = Case(701, 200, 140, 2, 2)


@pytest.fixture(autouse=True)
def _fastest_again() -> Iterator[None]:
    ops.set_backend("cpu")
    yield
    cpu.use_instructions(None)


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, torch.dtype], tuple[list[Tensor], dict[str, Tensor]]]:
    made = {}
    for dtype in TOLERANCE:
        for name, case in {**CASES, "large": LARGE}.items():
            inputs = make_inputs(case, dtype)
            wide = [t.double() if t.is_floating_point() else t for t in inputs]
            made[name, dtype] = inputs, values_and_gradients(reference.moe_mlp, wide)
    return made


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", SETS)
def test_values_and_gradients(
    name: str, dtype: torch.dtype, answers: dict[tuple[str, torch.dtype], tuple[list[Tensor], dict[str, Tensor]]]
) -> None:
    cpu.use_instructions(name)
    for (case, of_dtype), (inputs, want) in answers.items():
        if of_dtype == dtype:
            assert not mismatches(values_and_gradients(ops.moe_mlp, inputs), want, TOLERANCE[dtype]), case


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case",
    [Case(700, 48, 40, 3, 2), Case(517, 96, 64, 8, 4), Case(900, 48, 140, 1, 1)],
    ids=["few experts", "more", "one expert"],
)
def test_the_thread_count_changes_no_bit(name: str, case: Case, dtype: torch.dtype) -> None:
    """Where there are fewer experts than threads, these share one; its blocks are still added in their order."""
    cpu.use_instructions(name)
    inputs = make_inputs(case, dtype)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = values_and_gradients(ops.moe_mlp, inputs)
        torch.set_num_threads(3)
        three = values_and_gradients(ops.moe_mlp, inputs)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one[n], three[n]) for n in NAMES)


def _product(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """x @ weight.T: the hidden rows before SwiGLU of a layer with one expert, which has all slots."""
    down, weights = torch.zeros(1, x_TI.shape[1], weight_OI.shape[0] // 2), torch.ones(x_TI.shape[0], 1)
    _, [hidden] = cpu.moe_mlp_forward(x_TI, weight_OI[None], down, weights, torch.zeros_like(weights).long())
    return hidden


@pytest.mark.parametrize("name", SETS)
def test_no_bit_of_fp32_is_lost(name: str) -> None:
    """a - b of neighbouring fp32 numbers of every size is their last bit; a part too few would give zero: the bits set
    lie so far apart that each needs a bf16 part of its own."""
    cpu.use_instructions(name)
    scale = 2.0 ** torch.arange(-60, 60).float()
    x = torch.stack([scale * (1 + 2.0**-10 + 2.0**-23), scale * (1 + 2.0**-10)], dim=1)
    weight = torch.tensor([[1.0, -1.0], [1.0, -1.0]])
    assert torch.equal(_product(x, weight), (scale * 2.0**-23)[:, None].expand(-1, 2))
    assert torch.equal(_product(weight, x), (scale * 2.0**-23).expand(2, -1))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("decades", [0, 3])
def test_products_err_about_as_little_as_those_of_torch(name: str, decades: int) -> None:
    """Against fp64, relative to the sum of magnitudes; the largest error as well as the mean."""
    cpu.use_instructions(name)
    generator = torch.Generator().manual_seed(5)

    def spread(*size: int) -> Tensor:
        exponents = torch.empty(size).uniform_(-decades, decades, generator=generator) if decades else torch.zeros(size)
        return torch.randn(size, generator=generator) * 10.0**exponents

    x, weight = spread(300, 192), spread(200, 192)
    want = x.double() @ weight.double().T
    bound = x.double().abs() @ weight.double().abs().T
    ours = (_product(x, weight).double() - want).abs() / bound
    of_torch = ((x @ weight.T).double() - want).abs() / bound
    assert ours.max() <= 1.5 * of_torch.max() and ours.mean() <= 1.5 * of_torch.mean()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_value_that_is_not_finite_stays_in_its_row(name: str, value: float) -> None:
    cpu.use_instructions(name)
    inputs = make_inputs(CASES["odd_tokens"], torch.float32)
    inputs[0][17, 3] = value
    y = ops.moe_mlp(*inputs[:5])
    finite = y.isfinite().all(dim=1)
    assert not y[17].isfinite().any() and finite[:17].all() and finite[18:].all()


def test_an_instruction_set_that_is_not_there_raises() -> None:
    with pytest.raises(ValueError, match=f"instruction set 'avx9' is not there; this processor has {', '.join(SETS)}"):
        cpu.use_instructions("avx9")


def test_the_log_names_the_instructions(caplog: pytest.LogCaptureFixture) -> None:
    backend_module._resolve.cache_clear()
    with caplog.at_level("INFO", logger="optimus"):
        backend_module.resolve(torch.device("cpu"), torch.float32)
    backend_module._resolve.cache_clear()
    want = f"expert kernels on cpu float32: cpu on {SETS[0]} (as set); router: cpu"
    assert [r.getMessage() for r in caplog.records] == [want]
