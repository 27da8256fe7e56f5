"""What is said to fit is planned to fit, by options that the training program takes."""

from __future__ import annotations

import re

import pytest

from megatron.optimus.config.load import load
from megatron.optimus.planner.hardware import H200, machine_of_device
from megatron.optimus.planner.plan import plan
from megatron.optimus.planner.what_fits import what_fits, with_memory

B7 = "--preset mula-7b-a1b --seq-length 4096 --global-batch-size 64"


@pytest.mark.parametrize(
    ("words", "ranks", "gib", "kinds"),
    [
        (f"{B7} --micro-batch-size 4", 1, 139.8, {"--micro-batch-size", "--optimizer-state-dtype"}),
        (
            f"{B7} --micro-batch-size 32 --global-batch-size 256",
            8,
            139.8,
            {"--micro-batch-size", "--recompute-modules"},
        ),
        (f"{B7} --micro-batch-size 8", 2, 79.0, set()),  # a combination
    ],
)
def test_what_is_named_fits(words: str, ranks: int, gib: float, kinds: set[str]) -> None:
    machine = with_memory(H200, int(gib * 2**30), is_host=False)
    assert not plan(load(words.split()).config, ranks, machine).fits
    text = what_fits(load(words.split()).config, ranks, machine)
    found = re.findall(r"(--[^()]+) \((\d+\.\d) GiB planned of (\d+\.\d) usable\)", text)
    assert text.startswith("would fit: ") and found, text
    for options, peak, usable in found:
        made = plan(load(f"{words} {options}".split()).config, ranks, machine)
        assert made.fits and float(peak) <= float(usable)
        assert float(peak) == pytest.approx(made.worst.peak / 2**30, abs=0.06)
    assert kinds <= set(re.findall(r"--[\w-]+", text))


def test_where_nothing_fits_more_devices_are_named() -> None:
    machine = with_memory(H200, 20 << 30, is_host=False)
    text = what_fits(load(f"{B7} --micro-batch-size 1".split()).config, 1, machine)
    assert "makes it fit 1 device (" in text and "optimus plan" in text


def test_a_run_that_should_have_fitted_blames_something_else() -> None:
    text = what_fits(load(f"{B7} --micro-batch-size 4".split()).config, 8, H200)
    why = r"\d+\.\d GiB are planned of \d+\.\d usable, so something else may hold memory there; would fit"
    assert re.match(why, text)


def test_a_run_that_cannot_be_planned_gets_no_advice() -> None:
    assert what_fits(load(f"{B7} --micro-batch-size 5".split()).config, 8, H200) == ""


def test_machines_are_found_by_the_devices_name() -> None:
    assert machine_of_device("NVIDIA H200", "cuda").name == "h200"
    assert machine_of_device("an unknown GPU", "cuda").kernels is H200.kernels
    assert not machine_of_device("cpu", "cpu").kernels.fused_elementwise
