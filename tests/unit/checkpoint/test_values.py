"""Values that mark a checkpoint."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch

from megatron.optimus.checkpoint import Manifest, Saver, TensorSlice, load_manifest, store
from megatron.optimus.checkpoint.values import describe_values, largest_magnitude, shorten, warnings_of
from megatron.optimus.commands import verify


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_magnitude(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, -4.0, 2.0], dtype=dtype)
    assert largest_magnitude(values) == 4.0 and largest_magnitude(-values) == 4.0
    assert largest_magnitude(torch.cat([values, values.new_tensor([-math.inf])])) == math.inf
    assert math.isnan(largest_magnitude(torch.cat([values.new_tensor([math.nan]), values])))
    assert largest_magnitude(values[:0]) == 0.0
    assert largest_magnitude(torch.tensor([300])) == 0.0


def test_a_flipped_exponent_bit_is_far_out() -> None:
    weight = torch.full((1000,), 0.02)
    weight.view(torch.int32)[7] ^= 1 << 30
    [line] = describe_values({("w", "master"): [0.1, largest_magnitude(weight)]})
    assert line == "w (master) holds a value of magnitude 6.81e+36"
    usual = {("w", "master"): [50.0], ("w", "exp_avg"): [1e5], ("w", "exp_avg_sq"): [1e10], ("x", "rng"): [0.0]}
    assert describe_values(usual) == []
    assert describe_values({("w", "exp_avg_sq"): [math.nan]}) == ["w (exp_avg_sq) holds values that are not finite"]


def test_of_many_lines_the_first_are_shown() -> None:
    assert shorten([str(n) for n in range(8)]) == [str(n) for n in range(8)]
    assert shorten([str(n) for n in range(30)]) == [*(str(n) for n in range(8)), "and 22 more"]


def test_marks_are_read_with_suspicion() -> None:
    assert warnings_of({}) == warnings_of({"warnings": 7}) == warnings_of({"warnings": [1, None]}) == []
    [line] = warnings_of({"warnings": ["\x1b[31m" + "x" * 500]})
    assert line.isprintable() and len(line) == 300


@pytest.mark.parametrize("local", [False, True])
def test_a_checkpoint_is_marked_shown_and_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], local: bool
) -> None:
    logging.getLogger("optimus").propagate = True
    good, bad = torch.ones(10), torch.ones(10)
    bad[3] = 7.8e36
    slices = [TensorSlice(name, "master", (10,), 0, 10, t) for name, t in (("good", good), ("bad", bad))]
    header = Manifest("full", 5, 10, {}, {"warnings": ["loss not finite in step 4"], "mine": 1}, {}, {})
    saver = Saver(tmp_path / "checkpoints", local=tmp_path / "disk" if local else None)
    saver.start(slices, header, retain=None)
    [saved] = saver.drain()
    line = "bad (master) holds a value of magnitude 7.8e+36"
    assert saved.warnings == (line,) and f"step 5 is saved, but {line}" in caplog.text
    assert load_manifest(saved.path).metadata == {"warnings": ["loss not finite in step 4", line], "mine": 1}
    assert verify.main([str(tmp_path / "checkpoints")]) == 0
    shown = capsys.readouterr().out
    assert "good, full" in shown
    assert f"marked when it was saved: {line}" in shown and "marked when it was saved: loss not" in shown
    caplog.clear()
    store.load_newest(tmp_path / "checkpoints", store.everything)
    assert f"was marked when it was saved: {line}" in caplog.text

    bad.fill_(1.0)
    saver.start(slices, Manifest("full", 6, 12, {}, {}, {}, {}), retain=None)
    [saved] = saver.drain()
    assert saved.warnings == () and load_manifest(saved.path).metadata == {}
