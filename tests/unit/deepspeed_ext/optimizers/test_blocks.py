"""Blocks of a shard: they cover it once, states go with their scales, and a skipped step writes nothing."""

from __future__ import annotations

import pytest
import torch

from deepspeed_ext.optimizers import Shard, StepScalars, blocks, states
from deepspeed_ext.optimizers.blocks import bias_correction, block_numel, blocks_of, check_options

CPU = torch.device("cpu")
NUMEL = 3 * states.BLOCK + 17


def shard_of(dtype: str) -> Shard:
    master = torch.arange(float(NUMEL))
    shard = Shard(master, torch.full_like(master, 3.0), master.bfloat16())
    shard.state = states.zeros("mean", master, states.StateDtype(dtype), signed=True)
    return shard


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_blocks_cover_a_shard_once_and_write_where_they_read(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "CPU_BLOCK", 2 * states.BLOCK)
    shard, seen = shard_of(dtype), []
    for block in blocks_of(shard, ("mean",), StepScalars.of(CPU, 1, scale=0.5), maximize=True):
        assert torch.equal(block.master, torch.arange(float(NUMEL))[block.where])
        assert torch.equal(block.gradient(), torch.full_like(block.master, -1.5))
        block.write("mean", torch.full_like(block.master, 1 + len(seen)))
        torch.testing.assert_close(block.read("mean"), torch.full_like(block.master, 1 + len(seen)), rtol=0.1, atol=0)
        block.write_weights(block.master + 0.25)
        seen += range(block.where.start, block.where.stop)
    assert seen == list(range(NUMEL))
    assert torch.equal(shard.master, torch.arange(float(NUMEL)) + 0.25)
    assert torch.equal(shard.param, shard.master.bfloat16())
    expected = torch.ones(NUMEL)
    expected[2 * states.BLOCK :] = 2 * states.BLOCK + 1  # the number of elements seen before
    torch.testing.assert_close(states.read(shard.state, "mean"), expected, rtol=0.1, atol=0)


def test_a_skipped_step_has_no_blocks_on_a_cpu() -> None:
    assert list(blocks_of(shard_of("fp32"), ("mean",), StepScalars.of(CPU, 1, skip=True))) == []


def test_a_block_holds_whole_blocks_of_8_bit_states() -> None:
    assert block_numel(CPU) % states.BLOCK == 0 and block_numel(torch.device("cuda")) % states.BLOCK == 0


def test_bias_correction_is_that_of_fp64() -> None:
    step = torch.tensor(100_000.0)
    assert bias_correction(0.999999, step).item() == pytest.approx(1 - 0.999999**100_000, rel=1e-6)
    assert bias_correction(torch.tensor([0.0, 0.5]), torch.tensor(2.0)).tolist() == [1.0, 0.75]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(lr=-1.0, weight_decay=0.0), "lr=-1.0 must not be negative"),
        (dict(lr=float("nan"), weight_decay=0.0), "lr=nan must not be negative"),
        (dict(lr=0.0, weight_decay=0.0, eps=-1e-9), "eps=-1e-09 must not be negative"),
        (dict(lr=0.0, weight_decay=0.0, betas=(0.9, 1.0)), r"betas=\(0.9, 1.0\) are out of range"),
    ],
)
def test_options_out_of_range(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_options(**options)
