"""A launch that cannot start, or shows what it would."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.optimus import launch


def test_nodes_whose_names_have_no_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nodes").write_text("x1.invalid\nx2.invalid\n")
    (tmp_path / "mpiexec").write_text("#!/bin/false\n")
    (tmp_path / "mpiexec").chmod(0o755)
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["--nproc-per-node", "1", "--max-restarts", "1", "--preset", "mula-tiny", "--data-path", "corpus"]
    assert launch.main([*words, "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no address at which the other nodes can reach this one: ")
    assert "export OPTIMUS_LAUNCH_ADDRESS=" in error
    assert launch.main([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert (
        "mpiexec -genvall -n 2 -ppn 1 -f HOSTFILE -disable-auto-cleanup python -m megatron.optimus.launcher." in shown
    )
    assert "# once, on spare nodes too; these agents start the ranks:\npython -m megatron.optimus.pretrain" in shown
