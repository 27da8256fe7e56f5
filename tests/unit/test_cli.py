"""The command ``optimus``: its subcommands, their help, and what it says of a wrong one."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.optimus.cli import COMMANDS, main
from megatron.optimus.version import __version__

ROOT = Path(__file__).resolve().parents[2]
FACES = {
    path: [word for word in path.read_text().split('"') if word in COMMANDS] for path in sorted(ROOT.glob("tools/*.py"))
}


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
    assert main([]) == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command_has_one_style(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main([name, "--help"])
    text = capsys.readouterr().out
    assert info.value.code == 0 and text.startswith(f"usage: optimus {name} ")
    assert "show this help message and exit" in text and text.splitlines()[2][0].isupper()


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("pretrain", "launch")])
def test_a_wrong_flag_is_one_line_and_code_2(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.import_module(COMMANDS[name][0]).main(["--zzzz"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


def test_an_unknown_command_names_its_neighbour(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["covnert"]) == 2
    assert capsys.readouterr().err == "error: optimus has no command 'covnert'; did you mean convert?\n"


def test_version_and_a_dry_run_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"optimus {__version__}\n"
    assert main(["pretrain", "--preset", "mula-tiny", "--dry-run"]) == 0
    short = capsys.readouterr().out
    assert main(["pretrain", "--preset", "mula-tiny", "--dry-run", "--verbose"]) == 0
    whole = capsys.readouterr().out
    assert len(short.splitlines()) < 16 and "every option: --dry-run --verbose" in short and "  lr: " not in short
    assert "  lr: " in whole and short.rpartition("every option")[0] in whole


def test_help_imports_neither_torch_nor_numpy() -> None:
    code = "import sys; from megatron.optimus.cli import main; main(['--help']); "
    code += "print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")


def test_a_start_imports_nothing_slow_that_it_does_not_use() -> None:
    """DeepSpeed's autotuner imports MLflow where it is installed; a program that wants MLflow gets it afterwards."""
    pytest.importorskip("mlflow")
    slow = "{'mlflow', 'pandas', 'scipy', 'transformers', 'lm_eval', 'fastapi', 'matplotlib', 'pytorch_optimizer'}"
    code = f"import sys; import megatron.optimus.training.trainer; print({slow} & set(sys.modules)); import mlflow"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")


@pytest.mark.parametrize("path", FACES, ids=lambda path: path.stem)
def test_a_tool_is_a_face_of_one_command(path: Path) -> None:
    """All have the same text but for the command's name, whose help has a test above."""
    [name] = FACES[path]
    [of_one] = FACES[ROOT / "tools/doctor.py"]
    assert path.read_text() == (ROOT / "tools/doctor.py").read_text().replace(of_one, name)


def test_a_tool_is_started_from_any_folder() -> None:
    words = [sys.executable, str(ROOT / "tools/expert_balance.py"), "--help"]
    done = subprocess.run(words, cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: optimus expert-balance ")


def test_the_package_can_be_run() -> None:
    command = [sys.executable, "-m", "megatron.optimus", "--version"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.startswith("optimus 0.")
