"""Moments in bf16 and 8 bits: what is exact, how large errors are, and that rounding adds up to nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepspeed_ext.optimizers import states
from deepspeed_ext.optimizers.states import BLOCK, StateDtype, StoredState, stored_part
from tests.allocations import Allocations


def wide_range(numel: int, *, signed: bool) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(numel, generator=generator) * torch.exp(3 * torch.randn(numel, generator=generator))
    return value if signed else value.square()


@pytest.mark.parametrize("signed", [True, False])
def test_8_bit_codes_keep_the_relative_error_below_a_16th_over_their_range(signed: bool) -> None:
    value = wide_range(20 * BLOCK + 3, signed=signed)
    codes, scale = states.encode(value, signed=signed)
    assert codes.dtype == (torch.int8 if signed else torch.uint8) and codes.shape == value.shape
    decoded = states.decode(codes, scale)
    largest = scale.repeat_interleave(BLOCK)[: value.numel()]
    offset = 2.0 ** -(states.SIGNED_EXPONENTS if signed else states.UNSIGNED_EXPONENTS)
    error = (decoded - value).abs()
    # Relative above the offset, absolute below, where an unsigned value is kept from zero by up to a whole step.
    assert (error <= value.abs() / 16 * 1.0001 + offset * largest / (16 if signed else 8)).all()
    is_largest = value.abs() == largest
    assert is_largest.sum() >= 21 and torch.equal(decoded[is_largest], value[is_largest])


@pytest.mark.parametrize("signed", [True, False])
def test_encoding_what_was_decoded_changes_no_bit(signed: bool) -> None:
    codes, scale = states.encode(wide_range(10 * BLOCK + 100, signed=signed), signed=signed)
    again, again_scale = states.encode(states.decode(codes, scale), signed=signed)
    assert torch.equal(codes, again) and torch.equal(scale, again_scale)


def test_zero_stays_zero_and_a_positive_second_moment_stays_positive() -> None:
    value = torch.zeros(2 * BLOCK)
    value[0], value[1], value[2] = 1.0, 1e-20, 0.0
    decoded = states.decode(*states.encode(value, signed=False))
    assert decoded[1] > 0 and decoded[2] == 0 and not decoded[BLOCK:].any()


def test_blocks_are_independent_of_how_shards_are_cut() -> None:
    value = wide_range(8 * BLOCK, signed=True)
    whole = states.encode(value, signed=True)
    parts = [states.encode(part, signed=True) for part in value.split(2 * BLOCK)]
    assert torch.equal(whole[0], torch.cat([part[0] for part in parts]))
    assert torch.equal(whole[1], torch.cat([part[1] for part in parts]))


def test_stochastic_rounding_is_right_on_average_and_repeatable() -> None:
    value = torch.full((1 << 16,), 1.0 + 2**-10)  # an eighth of bf16's spacing above 1
    bits = states.random_bits(0, value.numel(), torch.tensor(3.0))
    for half in (bits & 0xFFFF, bits >> 16):
        rounded = states.round_to_bf16(value, half)
        assert set(rounded.unique().tolist()) == {1.0, 1.0 + 2**-7}
        assert abs(rounded.double().mean().item() - value[0].item()) < 2e-5
        assert torch.equal(states.round_to_bf16(-value, half), -rounded)
    assert torch.equal(bits[100:], states.random_bits(100, value.numel() - 100, torch.tensor(3.0)))
    other = states.random_bits(0, value.numel(), torch.tensor(4.0))
    assert (bits == other).float().mean() < 1e-3


@pytest.mark.parametrize("signed", [True, False])
def test_stochastic_8_bit_codes_are_right_on_average(signed: bool) -> None:
    block = wide_range(BLOCK, signed=signed)
    block /= block.abs().max()
    bits = states.random_bits(0, 4096 * BLOCK, torch.tensor(5.0)) & 0xFFFF
    decoded = states.decode(*states.encode(block.repeat(4096), signed=signed, bits=bits)).view(4096, BLOCK)
    spacing = (block.abs() + 2.0**-15) / 8
    assert ((decoded - block).abs() <= spacing * 1.0001).all()
    # 4096 draws of a two-valued variable one spacing apart: standard error spacing / 128 at most
    assert ((decoded.double().mean(0) - block).abs() < 5 * spacing / 128).all()


@pytest.mark.parametrize(("dtype", "bytes_each"), [("fp32", 4), ("bf16", 2), ("int8", 1 + 4 / BLOCK)])
def test_memory_and_round_trip(dtype: str, bytes_each: float) -> None:
    like = torch.empty(4 * BLOCK)
    state = states.zeros("m", like, StateDtype.parse(dtype))
    assert sum(tensor.nbytes for tensor in state.values()) == bytes_each * like.numel()
    value = wide_range(like.numel(), signed=True)
    states.write(state, "m", value)
    kept = states.read(state, "m").clone()
    assert kept.dtype == torch.float32 and torch.allclose(kept, value, rtol=1 / 16, atol=value.abs().max() * 2**-18)
    states.write(state, "m", kept)
    assert torch.equal(states.read(state, "m"), kept)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_a_part_is_read_and_written_in_steps(dtype: str, signed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit what the whole state gives, with no temporary beyond the staging memory."""
    monkeypatch.setattr(states, "STAGING_BYTES", 128 * BLOCK)  # four blocks at a time
    numel = 50 * BLOCK + 100
    state = states.zeros("m", torch.empty(numel), StateDtype.parse(dtype), signed=signed)
    states.write(state, "m", wide_range(numel, signed=signed))
    whole = states.read(state, "m")
    for start, stop in ((0, numel), (7, 9), (3 * BLOCK + 5, 40 * BLOCK + 1), (BLOCK, 2 * BLOCK), (numel, numel)):
        part = stored_part(state, "m", slice(start, stop))
        assert isinstance(part, StoredState)
        assert torch.equal(part.read(), whole[start:stop])
        assert torch.equal(part.part(1, stop - start).read(), whole[start + 1 : stop])

    other = states.zeros("m", torch.empty(numel), StateDtype.parse(dtype), signed=signed)
    expected = {key: value.clone() for key, value in other.items()}
    value = wide_range(numel, signed=signed).flip(0)
    states.write(expected, "m", torch.cat([torch.zeros(2 * BLOCK), value[2 * BLOCK :]]))
    target = stored_part(other, "m", slice(2 * BLOCK, numel))
    with Allocations() as written:
        target.write(value[2 * BLOCK :])
    assert all(torch.equal(other[key], expected[key]) for key in expected)
    assert written.largest <= states.STAGING_BYTES
    result = target.values.new_empty(0)
    with Allocations() as taken:
        result = target.part(0, 4 * BLOCK).read()
    assert taken.largest == result.nbytes


def test_errors_name_what_would_work() -> None:
    with pytest.raises(ValueError, match="state_dtype='fp8' is unknown; use fp32, bf16 or int8"):
        StateDtype.parse("fp8")
    with pytest.raises(ValueError, match=r"'m' has shape \(256,\), not \(3,\)"):
        states.write(states.zeros("m", torch.empty(256), StateDtype.FP32), "m", torch.zeros(3))
