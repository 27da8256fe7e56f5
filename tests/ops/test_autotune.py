"""Tiles of the Triton kernels: every candidate is right, and tuning takes the fastest that is.

On a GPU, or under Triton's interpreter: TRITON_INTERPRET=1 pytest THIS_FILE.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.optimus import ops
from megatron.optimus.ops.triton import tile_cache
from megatron.optimus.ops.triton import tiles as tiles_module
from megatron.optimus.ops.triton.candidates import CANDIDATES, Entry, Tiles
from megatron.optimus.ops.triton.tiles import Problem, layer_problems, tiles_for
from tests.ops.cases import CASES, TOLERANCE, Case, expected, make_inputs, mismatches, values_and_gradients
from tests.ops.targets import HAS_CUDA, INTERPRETED

if not (HAS_CUDA or INTERPRETED):
    pytest.skip("neither CUDA nor Triton's interpreter", allow_module_level=True)

from megatron.optimus.ops.triton import autotune, grouped_gemm, permute, row_order

DEVICE = torch.device("cpu" if INTERPRETED else "cuda", None if INTERPRETED else 0)
DTYPE = torch.float16  # the interpreter has no bf16 product
D, F = 40, 24  # no multiple of any tile
COUNTS = (0, 5, 130)
PRODUCTS = [name for name, candidates in CANDIDATES.items() if candidates[0].depth]


@pytest.fixture(autouse=True)
def _file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("OPTIMUS_TILES", str(tmp_path / "tiles.json"))
    tiles_module.set_tables(None)
    yield tmp_path / "tiles.json"
    tiles_module.set_tables(None)


def use_engine(monkeypatch: pytest.MonkeyPatch, engine: bool) -> None:
    """Descriptors from the host, or those that kernels make where there is no memory engine."""
    machine = tiles_module.hardware(DEVICE)._replace(has_tma=engine)
    for module in (tiles_module, grouped_gemm):
        monkeypatch.setattr(module, "hardware", lambda device: machine)


@functools.cache
def order() -> row_order.PaddedRowOrder:
    experts = torch.cat([torch.full((n,), e) for e, n in enumerate(COUNTS)] + [torch.tensor([-1, -1])])
    experts = experts[torch.randperm(len(experts), generator=torch.Generator().manual_seed(0))]
    return row_order.order_rows(experts[:, None].to(DEVICE), len(COUNTS))


def in_rows(width: int, seed: int) -> Tensor:
    """Random rows, zero where there is no slot."""
    values = torch.randn(order().slot_P.numel(), width, generator=torch.Generator().manual_seed(seed))
    return values.to(DTYPE).to(DEVICE).masked_fill_((order().slot_P < 0)[:, None], 0.0)


def weights(*shape: int) -> Tensor:
    values = torch.randn(len(COUNTS), *shape, generator=torch.Generator().manual_seed(9))
    return (values / shape[-1] ** 0.5).to(DTYPE).to(DEVICE)


def of_expert(values_P: Tensor, expert: int) -> Tensor:
    first = int(order().first_row_E[expert])
    return values_P[first : first + COUNTS[expert]].double()


def is_close(got: Tensor, want: Tensor, tolerance: float) -> bool:
    return bool((got.double() - want).abs().max() <= tolerance * want.abs().max()) if want.numel() else True


def product_errors(kernel: str, tiles: Tiles) -> list[str]:
    """What a kernel with these tiles gets wrong, against products in fp64 expert by expert."""
    wrong = []
    if kernel == "up_swiglu":
        x, weight = in_rows(D, 1), weights(2 * F, D)
        hidden, activation = grouped_gemm.up_swiglu(x, weight, order(), tiles)
        kept, again = grouped_gemm.up_swiglu(x, weight, order(), tiles, without_padding=True)
        for e in range(len(COUNTS)):
            want = of_expert(x, e) @ weight[e].double().T
            gate, up = want.chunk(2, dim=1)
            if not is_close(of_expert(hidden, e), want, 2e-3):
                wrong.append(f"hidden of {e}")
            if not torch.equal(kept[: sum(COUNTS)].split(COUNTS)[e].double(), of_expert(hidden, e)):
                wrong.append(f"hidden without padding of {e}")
            if not torch.equal(of_expert(again, e), of_expert(activation, e)):
                wrong.append(f"activation beside hidden without padding of {e}")
            if not is_close(of_expert(activation, e), torch.nn.functional.silu(gate) * up, 2e-3):
                wrong.append(f"activation of {e}")
    elif kernel.startswith("rows_times_weight"):
        transposed = kernel.endswith("_t")
        x, weight = in_rows(D, 2), weights(F, D) if transposed else weights(D, F)
        got = grouped_gemm.rows_times_weight(x, weight, order(), transposed=transposed, tiles=tiles)
        for e in range(len(COUNTS)):
            of_e = weight[e].double()
            if not is_close(of_expert(got, e), of_expert(x, e) @ (of_e.T if transposed else of_e), 2e-3):
                wrong.append(f"rows of {e}")
    else:
        a, b = in_rows(D, 3), in_rows(F, 4)
        out = weights(D, F).to(torch.float32 if kernel.endswith("fp32") else DTYPE) if "add" in kernel else None
        before = 0.0 if out is None else out.double()
        got = grouped_gemm.weight_gradient(a, b, order(), out, tiles)
        want = torch.stack([of_expert(a, e).T @ of_expert(b, e) for e in range(len(COUNTS))]) + before
        if not is_close(got, want, 2e-6 if kernel.endswith("fp32") else 2e-3):
            wrong.append("gradient")
    return wrong


@pytest.mark.parametrize("engine", [True, False], ids=["engine", "pointers"])
@pytest.mark.parametrize("kernel", PRODUCTS)
def test_every_candidate_of_a_product_is_right(kernel: str, engine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not engine and not INTERPRETED:
        pytest.skip("for GPUs without a memory engine")
    machine = tiles_module.hardware(DEVICE)
    use_engine(monkeypatch, engine)
    for tiles in CANDIDATES[kernel]:
        if tiles_module.is_legal(kernel, tiles, machine):
            assert product_errors(kernel, tiles) == [], tiles


def different(kernel: str) -> list[Tiles]:
    """Candidates that differ in more than warps, of which the interpreter knows nothing."""
    if not INTERPRETED:
        return list(CANDIDATES[kernel])
    return list({tiles[:3]: tiles for tiles in CANDIDATES[kernel]}.values())


def test_a_whole_layer_with_other_tiles_than_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Problem] = []

    def last(kernel: str, like: Tensor, experts: int, n: int, k: int, slots: int) -> Tiles:
        asked.append(Problem(kernel, like.dtype, experts, n, k, tiles_module.bucket(slots)))
        return CANDIDATES[kernel][-1]

    for module in (grouped_gemm, permute):
        monkeypatch.setattr(module, "tiles_for", last)
    use_engine(monkeypatch, not INTERPRETED and tiles_module.hardware(DEVICE).has_tma)
    case = Case(11, 19, 13, 2, 2, "some_foreign")
    inputs = make_inputs(case, DTYPE)
    ops.set_backend("triton")
    got = values_and_gradients(ops.moe_mlp, [t.to(DEVICE) for t in inputs])
    assert not mismatches(got, expected(inputs), TOLERANCE[DTYPE])
    # what is tuned ahead of a run is what the run asks for
    assert set(asked) == set(layer_problems(2, 19, 13, 2, 11, DTYPE))


SMALL = Problem("rows_times_weight", DTYPE, 2, 128, 16, 16)
LARGE, MIDDLE, LITTLE = (Tiles(128, 256, 64, 8, 3, 1), Tiles(128, 128, 64, 4, 3, 1), Tiles(64, 64, 32, 4, 3, 2))


class FakeClock:
    """Microseconds by the order of the runs."""

    def __init__(self, *microseconds: float) -> None:
        self.microseconds, self.calls = microseconds, 0

    def __call__(self, runs: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
        self.calls += 1
        return [*self.microseconds, *[99.0] * len(runs)][: len(runs)]


@pytest.fixture
def three_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CANDIDATES, SMALL.kernel, (LARGE, MIDDLE, LITTLE))


def break_tiles(monkeypatch: pytest.MonkeyPatch, broken: Tiles, how: Callable[[Tensor], Tensor]) -> None:
    right = grouped_gemm.rows_times_weight

    def wrong(*args: object, tiles: Tiles, **options: object) -> Tensor:
        out = right(*args, tiles=tiles, **options)  # type: ignore[arg-type]
        return how(out) if tiles == broken else out

    monkeypatch.setattr(grouped_gemm, "rows_times_weight", wrong)


@pytest.mark.usefixtures("three_candidates")
def test_the_fastest_is_taken_and_a_tie_stays_with_the_default() -> None:
    before = torch.get_rng_state()
    for times, best, microseconds in (
        ((50.0, 40.0, 45.0), MIDDLE, 40.0),
        ((50.0, 60.0, 20.0), LITTLE, 20.0),
        ((50.0, 49.5, 70.0), LARGE, 50.0),
    ):
        [outcome] = autotune.tune([SMALL, SMALL], DEVICE, clock=FakeClock(*times))
        assert outcome.entry is not None and outcome.left_out == {}
        assert outcome.entry[:3] == (best, microseconds, 50.0)
        assert outcome.microseconds == dict(zip((LARGE, MIDDLE, LITTLE), times, strict=True))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.usefixtures("three_candidates")
def test_what_does_not_run_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(out: Tensor) -> Tensor:
        raise RuntimeError("out of resource: shared memory, Required: 300000\nmore")

    break_tiles(monkeypatch, LITTLE, fail)
    [outcome] = autotune.tune([SMALL], DEVICE, clock=FakeClock(50.0, 40.0))
    assert outcome.entry is not None and outcome.entry.tiles == MIDDLE
    assert outcome.left_out == {LITTLE: "RuntimeError: out of resource: shared memory, Required: 300000"}
    assert "1 left out" in autotune.line(outcome)


@pytest.mark.usefixtures("three_candidates")
@pytest.mark.parametrize("element", [(0, 0), (-1, 127)], ids=["first", "last"])
def test_a_candidate_with_another_result_is_rejected_before_it_is_timed(
    element: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One element of the used rows is off by what a lost step of the sum would be."""
    used = autotune.make_work(SMALL, DEVICE, 1.0).num_used
    assert used is not None

    def shift(out: Tensor) -> Tensor:
        out[:used][element] += 0.5
        return out

    break_tiles(monkeypatch, MIDDLE, shift)
    [outcome] = autotune.tune([SMALL], DEVICE, clock=FakeClock(50.0, 40.0))
    assert (
        list(outcome.left_out) == [MIDDLE] and "another result than the default's: off by" in outcome.left_out[MIDDLE]
    )
    assert outcome.entry is not None and outcome.entry.tiles == LITTLE  # timed second
    break_tiles(monkeypatch, LITTLE, lambda out: out * float("nan"))
    [outcome] = autotune.tune([SMALL], DEVICE, clock=FakeClock(50.0))
    assert set(outcome.left_out) == {MIDDLE, LITTLE}


@pytest.mark.usefixtures("three_candidates")
def test_other_bits_are_noted_and_refused_where_only_the_same_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_bit(out: Tensor) -> Tensor:
        bits = out.view(torch.int16)
        bits[0, 0] += 1
        return out

    break_tiles(monkeypatch, MIDDLE, last_bit)
    [outcome] = autotune.tune([SMALL], DEVICE, clock=FakeClock(50.0, 40.0))
    assert outcome.entry == Entry(MIDDLE, 40.0, 50.0, matches_default_bits=False) and "other bits" in autotune.line(
        outcome
    )
    [outcome] = autotune.tune([SMALL], DEVICE, exact_only=True, clock=FakeClock(50.0, 40.0))
    assert outcome.left_out == {MIDDLE: "other bits than the default's"}
    assert outcome.entry == Entry(LITTLE, 40.0, 50.0, matches_default_bits=True)


@pytest.mark.usefixtures("three_candidates")
def test_no_time_and_no_memory_leave_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(50.0)
    [outcome] = autotune.tune([SMALL], DEVICE, seconds=-1.0, clock=clock)
    assert outcome.entry is None and clock.calls == 0 and "tuning took longer" in autotune.line(outcome)

    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")

    monkeypatch.setattr(autotune, "make_work", full)
    [outcome] = autotune.tune([SMALL], DEVICE, clock=clock)
    assert outcome.entry is None and "out of memory: tried to allocate 80 GiB" in autotune.line(outcome)


@pytest.mark.usefixtures("three_candidates")
def test_a_second_start_takes_them_from_disk(_file: Path) -> None:
    like, clock = torch.empty(0, dtype=DTYPE, device=DEVICE), FakeClock(50.0, 60.0, 30.0)
    assert tiles_for(SMALL.kernel, like, *SMALL[2:]) == LARGE
    assert tiles_module.summary(DEVICE) == "default tiles"
    entries, [outcome] = autotune.tune_missing([SMALL], DEVICE, {}, clock=clock)
    assert entries == {str(SMALL): outcome.entry}
    assert tiles_for(SMALL.kernel, like, *SMALL[2:]) == LARGE, "the choice of a process does not change under it"
    tiles_module.set_tables(None)  # a process that begins
    assert tiles_for(SMALL.kernel, like, *SMALL[2:]) == LITTLE
    assert tiles_module.summary(DEVICE) == "1 tuned tiles"
    again, none = autotune.tune_missing([SMALL], DEVICE, tiles_module.table(DEVICE), clock=clock)
    assert again == entries and none == [] and clock.calls == 1
    assert list(tile_cache.load(_file)) == [tiles_module.hardware(DEVICE).key]


@pytest.mark.usefixtures("three_candidates")
def test_what_keeps_every_bit_takes_no_faster_entrys_place(_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faster = Entry(MIDDLE, 20.0, 50.0, matches_default_bits=False)
    key = tiles_module.hardware(DEVICE).key
    tile_cache.save(key, {str(SMALL): faster})
    tiles_module.set_tables(None)
    entries, _ = autotune.tune_missing([SMALL], DEVICE, {}, exact_only=True, clock=FakeClock(50.0, 60.0, 30.0))
    assert entries[str(SMALL)].tiles == LITTLE
    assert tile_cache.load(_file)[key][str(SMALL)] == faster
    autotune.tune_missing([SMALL], DEVICE, {}, clock=FakeClock(50.0, 60.0, 30.0))
    assert tile_cache.load(_file)[key][str(SMALL)].tiles == LITTLE


@pytest.mark.usefixtures("three_candidates")
def test_entries_that_cannot_be_kept_are_used_all_the_same(
    _file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _file.write_text("in the way")
    monkeypatch.setenv("OPTIMUS_TILES", str(_file / "below a file"))
    with caplog.at_level("WARNING", logger="optimus"):
        entries, _ = autotune.tune_missing([SMALL], DEVICE, {}, clock=FakeClock(50.0, 40.0))
    assert entries[str(SMALL)].tiles == MIDDLE
    assert [r.getMessage() for r in caplog.records if "cannot be kept" in r.getMessage()]


def test_foreign_slots_are_part_of_the_problem_but_no_work() -> None:
    problem = SMALL._replace(slots=4096)
    whole, part = (autotune.make_work(problem, DEVICE, share).num_used for share in (1.0, 0.25))
    assert whole is not None and part is not None and part < 0.5 * whole


def test_the_log_says_whether_tiles_are_tuned(caplog: pytest.LogCaptureFixture) -> None:
    from megatron.optimus.ops import backend

    ops.set_backend("triton")
    key = tiles_module.hardware(DEVICE).key
    for tables, words in (({}, "default tiles"), ({key: {str(SMALL): Entry(LITTLE, 1.0, 2.0, True)}}, "1 tuned tiles")):
        tiles_module.set_tables(tables)
        backend._resolve.cache_clear()
        caplog.clear()
        with caplog.at_level("INFO", logger="optimus"):
            backend.resolve(DEVICE, DTYPE)
        [record] = caplog.records
        expected_line = f"expert kernels on {DEVICE.type} float16: triton with {words} (as set); router: triton"
        assert record.getMessage() == expected_line
    backend._resolve.cache_clear()


def test_the_tool_tunes_a_layer_and_keeps_it(
    _file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron.optimus.commands.tune_kernels import main

    for kernel, candidates in list(CANDIDATES.items()):
        monkeypatch.setitem(CANDIDATES, kernel, (candidates[0], candidates[-1]))
    sizes = "--hidden-size 16 --num-attention-heads 2 --num-experts 2 --moe-router-topk 1 --moe-ffn-hidden-size 16"
    words = [*sizes.split(), "--tokens", "4", "--device", DEVICE.type, "--explain"]
    assert main(words) == 0
    written = capsys.readouterr().out
    [entries] = tile_cache.load(_file).values()
    assert set(entries) == set(map(str, layer_problems(2, 16, 16, 1, 4, torch.bfloat16, torch.float32)))
    assert all(f"{problem}: " in written for problem in entries) and "us  128x256x64, 8 warps, 3 stages" in written
    tiles_module.set_tables(None)
    assert main(words) == 0 and capsys.readouterr().out.count("(tuned before)") == len(entries)
    monkeypatch.setenv("OPTIMUS_TILES", str(_file / "below a file"))
    tiles_module.set_tables(None)
    assert main(words) == 2
    assert f"error: {_file}/below a file cannot be written: " in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs an accelerator")
def test_a_small_layer_is_tuned_for_real() -> None:
    """Every kernel is timed; with what was chosen the layer is right, bitwise repeatable, and launched from disk."""
    case, dtype = CASES["some_foreign"], torch.bfloat16
    problems = layer_problems(case.experts, case.width, case.inner, case.topk, case.tokens, dtype)
    entries, outcomes = autotune.tune_missing(problems, DEVICE, {})
    assert set(entries) == set(map(str, problems))
    for outcome in outcomes:
        assert outcome.entry is not None and len(outcome.microseconds) > 1, autotune.line(outcome)
        assert all(0 < t < 1e5 for t in outcome.microseconds.values())
        assert not any("another result" in reason for reason in outcome.left_out.values()), outcome.left_out
    tiles_module.set_tables(None)
    like = torch.empty(0, dtype=dtype, device=DEVICE)
    assert all(tiles_for(p.kernel, like, *p[2:]) == entries[str(p)].tiles for p in problems)
    assert autotune.tune_missing(problems, DEVICE, tiles_module.table(DEVICE))[1] == []
    ops.set_backend("triton")
    inputs = make_inputs(case, dtype)
    on_device = [t.to(DEVICE) for t in inputs]
    first, second = (values_and_gradients(ops.moe_mlp, on_device) for _ in range(2))
    assert not mismatches(first, expected(inputs), TOLERANCE[dtype])
    assert all(torch.equal(first[name], second[name]) for name in first)
