"""``optimus drill`` on two ranks: faults are noticed, named and recovered from, and wrong command lines are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.optimus.commands import drill


def test_short_drill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ranks", "2", "--faults", "kill-start,kill,flip", "--steps", "50", "--out", str(tmp_path / "out")]
    assert drill.main(words) == 0, capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "drill.json").read_text())
    assert sorted(one["fault"] for one in found["faults"]) == ["flip", "kill", "kill-start"]
    for one in found["faults"]:
        assert one["named"] in one["ranks"] and one["identical"] and one["noticed_s"] < one["recovered_s"], one
    assert "| SIGKILL of a rank in a step | 1 |" in (tmp_path / "out" / "drill.md").read_text()
    assert not list((tmp_path / "out").glob("round-*"))  # only those with a broken promise are kept


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--faults", "kil"], "unknown fault 'kil'"),
        (["--ranks", "3"], "--ranks=3 must be 2 or more and a multiple of --nodes=2"),
        (["--out", "/"], "/ is not empty"),
    ],
)
def test_bad_command_lines(tmp_path: Path, words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert drill.main(["--out", str(tmp_path / "out"), *words]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
