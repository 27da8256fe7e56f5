"""The command that checks coordinates: changes are flat over width and depth with muP, and grow without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.optimus.commands import coordinate_check as command
from tests.unit.training.test_coordinate_check import BASE, EXPERTS, MUP

COMPLETEP = "--parametrization completep --base-hidden-size 32 --base-num-layers 2 "
FLAT, GROWS = 0.25, 0.5


def slopes(out: Path, words: str) -> dict[tuple[str, str], dict[str, float]]:
    """Slopes of the changes by parametrization and axis."""
    assert command.main([*words.split(), "--out", str(out)]) == 0
    return {(row["parametrization"], row["axis"]): row["change_slope"] for row in json.loads(out.read_text())}


@pytest.mark.parametrize("optimizer", ["adam --lr 4e-3", "muon --lr 4e-3 --muon-adjust-lr-fn match_rms_adamw"])
def test_changes_are_flat_over_the_width_and_grow_with_standard_parametrization(optimizer: str, tmp_path: Path) -> None:
    words = f"--widths 32,64,128 --steps 4 --optimizer {optimizer} "
    found = slopes(tmp_path / "out.json", words + BASE + EXPERTS + MUP)
    flat, grown = found["mup", "width"], found["standard", "width"]
    assert flat.keys() == grown.keys() >= {"attention", "MLP", "experts", "router logits", "residual stream", "logits"}
    for name in ("attention", "MLP", "experts", "residual stream", "logits"):
        assert abs(flat[name]) < FLAT and grown[name] > GROWS, (name, flat, grown)
    assert flat["router logits"] < FLAT and grown["router logits"] > 0.4


def test_changes_are_flat_over_the_depth_with_completep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--depths 2,4,8 --steps 4 --optimizer adam --lr 4e-3 --plot " + str(tmp_path / "picture.png ")
    found = slopes(tmp_path / "out.json", words + BASE + COMPLETEP)
    assert abs(found["completep", "depth"]["residual stream"]) < FLAT
    assert found["standard", "depth"]["residual stream"] > GROWS
    assert found["completep", "depth"]["attention"] == pytest.approx(-1, abs=0.25)  # of each of more and more layers
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
    printed = capsys.readouterr().out
    assert "completep, change after 4 steps" in printed and "grows" in printed.split("standard, change")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (BASE, "--widths and --depths are both absent"),
        ("--widths 64 " + BASE, "must be two or more different whole numbers"),
        ("--widths 64,0 " + BASE, "must be two or more different whole numbers"),
        ("--widths 32,40 " + BASE, "use multiples of 16"),
        ("--widths 32,64 --out /no/such/folder/x.json --steps 1 " + BASE, "cannot be written"),
    ],
)
def test_wrong_words_are_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(words.split()) == 2
    printed = capsys.readouterr().err.strip().splitlines()
    assert message in printed[-1] and printed[-1].startswith("error: ")
