"""The command that makes one page of runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.optimus import cli
from tests.unit.report.test_page import data_of


def test_the_command(make_run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, other = make_run(), make_run("second", seed=2)
    assert cli.main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n" and (folder / "report.html").exists()
    out = tmp_path / "both.html"
    (other / "samples.jsonl").unlink()
    (other / "samples.jsonl").symlink_to("/etc/hostname")
    assert cli.main(["report", str(folder), str(other), "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert said.startswith("note: ") and said.count("\n") == 1 and "samples.jsonl cannot be read" in said
    assert len(data_of(out.read_text(encoding="utf-8"))["runs"]) == 2
    for words, message in (
        ([str(tmp_path / "none")], "no such folder"),
        ([str(folder), "--out", str(tmp_path / "no" / "x.html")], "cannot be written: No such file"),
        ([], "arguments are required: RUN"),
    ):
        assert cli.main(["report", *words]) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1 and said.startswith("error: ")
