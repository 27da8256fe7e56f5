"""``optimus doctor`` on this machine, and its report of problems that this machine does not have."""

from __future__ import annotations

import getpass
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from megatron.optimus.commands import diagnosis
from megatron.optimus.commands.diagnosis import Finding, State
from megatron.optimus.commands.doctor import main, text_of
from megatron.optimus.platform.exchange import Exchange


def findings_of(report: dict[str, Any]) -> list[Finding]:
    return [Finding(**{**one, "state": State(one["state"])}) for one in report["findings"]]


def test_this_machine_is_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is imitated: DeepSpeed is imported and two ranks exchange tensors."""
    code = main(["--json", "--device", "cpu", "--run-dir", str(tmp_path / "run"), "--save", str(tmp_path / "save")])
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["is_healthy"]
    found = {(one.section, one.name): one for one in findings_of(report)}
    assert {section for section, _ in found} == {
        *("Software", "Devices", "Kernels", "Collectives", "Limits", "Space", "Optional")
    }
    assert "2 ranks on cpu exchanged tensors in" in found["Collectives", "gloo"].value
    assert found["Software", "deepspeed"] == Finding("Software", "deepspeed", "0.19.8")
    assert found["Kernels", "cpu"].value.startswith("C++ operations, ")
    assert "GiB free" in found["Space", "run-dir"].value and not (tmp_path / "run").exists()
    text = text_of(findings_of(report))
    assert max(map(len, text.splitlines())) <= 80 and text.isascii()
    # This test's folder, which the user named, has the user's name in it.
    others = "".join(f"{one}" for one in found.values() if one.section != "Space")
    private = {socket.gethostname(), getpass.getuser(), str(Path.home())} - {"root"}
    assert not [word for word in private if word in others]


def without_torch_work(monkeypatch: pytest.MonkeyPatch, exchanged: Exchange) -> None:
    monkeypatch.setattr(diagnosis, "exchange", lambda kind, limit_s: exchanged)
    monkeypatch.setattr(diagnosis, "imports_deepspeed", lambda limit_s: iter(()))


def test_problems_end_with_what_mends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_torch_work(monkeypatch, Exchange("", 0.0, "connection refused\x1b[31m"))
    monkeypatch.setattr(diagnosis.missing_packages, "REQUIRED", {"numpy": ("numpy", ">=99"), "zzz": ("zzz", "")})
    monkeypatch.setattr(diagnosis.shutil, "which", lambda name: None)
    monkeypatch.setattr(diagnosis.resource, "getrlimit", lambda limit: (1024, 4096))
    from megatron.optimus.ops import backend

    monkeypatch.setattr(backend, "obstacle_of", lambda *rest: "the compiled operations are missing; build them")
    (tmp_path / "file").touch()
    assert main(["--device", "mps", "--run-dir", str(tmp_path / "file" / "below")]) == 1
    lines = capsys.readouterr().out.splitlines()
    table, mend = lines[: lines.index("To mend")], lines[lines.index("To mend") :]
    states = {words[1]: words[0] for words in map(str.split, table) if len(words) > 1}
    assert {states[name] for name in ("numpy", "zzz", "mps", "ranks", "run-dir")} == {"FAIL"}
    assert states["open"] == states["compiler"] == "warn"
    for command in (
        *("pip install 'numpy>=99'", "pip install 'zzz'", "ulimit -n 4096", "apt-get install g++"),
        *("GLOO_SOCKET_IFNAME=lo optimus doctor", "optimus doctor --run-dir A_FOLDER_OF_YOURS"),
    ):
        assert f"       {command}" in mend
    assert mend[1].startswith("  1. numpy: Optimus needs numpy>=99") and "\x1b" not in "".join(lines)
    assert lines[-1].startswith("5 problems and "), lines[-1]
    assert all(len(line) <= 80 for line in lines if not line.startswith("       "))


def test_a_missing_backend_is_a_warning_with_its_cost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron.optimus.ops import backend

    without_torch_work(monkeypatch, Exchange("gloo", 0.1, None))
    monkeypatch.setattr(backend, "obstacle_of", lambda *rest: "the compiled operations are missing; build them")
    assert main(["--device", "cpu"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "warn cpu C++ operations: the compiled operations are missing" in text
    assert "cpu: the demo trains 1.29 times as fast with them" in text and "build_ext --inplace" in text


def test_a_torch_that_cannot_be_imported_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diagnosis, "_torch_error", lambda: "libcudart.so.12: cannot open shared object file")
    assert main(["--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    [broken] = [one for one in findings_of(report) if one.state is State.BROKEN]
    assert "libcudart" in broken.value and broken.remedy == "pip install --force-reinstall torch"
    assert {one.section for one in findings_of(report)} == {"Software", "Space", "Optional"}
