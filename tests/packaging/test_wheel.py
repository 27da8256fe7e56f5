"""The wheel holds our two packages and nothing that could shadow another project's."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[zipfile.ZipFile, str]:
    """The wheel of a machine without a compiler, and what is said while it is built. From a copy, so that no build
    folder appears in the tree; `make` has compiled the same sources."""
    if not all(importlib.util.find_spec(module) for module in ("pip", "setuptools")):
        pytest.skip("building a wheel here needs pip and setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("megatron", "deepspeed_ext", "csrc", "tools", "tests", "examples"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-v"]
    command += ["-w", str(folder), str(source)]
    environment = {**os.environ, "PATH": str(folder)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path), result.stdout + result.stderr


@pytest.fixture
def wheel(built: tuple[zipfile.ZipFile, str]) -> zipfile.ZipFile:
    return built[0]


def test_without_a_compiler_one_line_says_what_is_missing(built: tuple[zipfile.ZipFile, str]) -> None:
    said = [line for line in built[1].splitlines() if "without compiled kernels" in line]
    assert said and len({line.strip() for line in said}) == 1, built[1][-2000:]
    assert "no C++ compiler on the PATH; install g++ or clang++ and reinstall" in said[0]
    assert not [name for name in built[0].namelist() if name.endswith(".so")]


def test_top_levels(wheel: zipfile.ZipFile) -> None:
    files = [name for name in wheel.namelist() if ".dist-info/" not in name]
    tops = {"/".join(name.split("/")[:2]) if name.startswith("megatron/") else name.split("/")[0] for name in files}
    assert tops == {"megatron/optimus", "deepspeed_ext"}
    assert "megatron/__init__.py" not in files
    modules = {path.relative_to(ROOT).as_posix() for top in tops for path in (ROOT / top).rglob("*.py")}
    assert modules <= set(files), "every module of the tree is in the wheel"


def test_presets_and_machines(wheel: zipfile.ZipFile) -> None:
    for folder in ("config/presets", "planner/systems"):
        found = {path.relative_to(ROOT).as_posix() for path in (ROOT / "megatron/optimus" / folder).glob("*.yaml")}
        assert found and found <= set(wheel.namelist())
    assert {f"megatron/optimus/report/page.{kind}" for kind in ("html", "css", "js")} <= set(wheel.namelist())
    assert "megatron/optimus/inference/server/page.html" in wheel.namelist()


def test_name_and_requirements(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = wheel.read(name).decode()
    assert "\nName: optimus-megatron\n" in metadata
    assert "Requires-Dist: deepspeed<=0.19.8,>=0.17.6" in metadata


def test_megatron_core_can_be_installed_beside_us() -> None:
    import megatron
    from megatron import optimus

    assert getattr(megatron, "__file__", None) is None and Path(optimus.__file__).is_relative_to(ROOT)
    if any((Path(entry) / "core").is_dir() for entry in megatron.__path__):
        assert importlib.util.find_spec("megatron.core") is not None


def test_types_and_license(wheel: zipfile.ZipFile) -> None:
    """Type checkers read our annotations (PEP 561), and the license travels with the package (PEP 639)."""
    names = wheel.namelist()
    assert {"megatron/optimus/py.typed", "deepspeed_ext/py.typed"} <= set(names)
    (name,) = (name for name in names if name.endswith(".dist-info/licenses/LICENSE"))
    assert wheel.read(name).decode() == (ROOT / "LICENSE").read_text(encoding="utf-8")
    (name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    assert "\nLicense-Expression: Apache-2.0\n" in wheel.read(name).decode()


@pytest.mark.parametrize(("version", "is_enough"), [("65.5.0", False), ("76.1.0", False), ("77.0.0", True)])
def test_an_old_setuptools_is_one_line(version: str, is_enough: bool, tmp_path: Path) -> None:
    """That of a fresh environment of Python 3.11 is 65.5.0, and stumbles over the license in pyproject.toml."""
    (tmp_path / "setuptools.py").write_text(f"__version__ = {version!r}\ndef setup(**_): print('built')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PATH": str(tmp_path)}  # without a compiler
    done = subprocess.run(
        [sys.executable, "setup.py"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if is_enough:
        assert (done.returncode, done.stdout) == (0, "built\n"), done.stderr
    else:
        line = f"error: setuptools {version} is too old to build this package: pip install -U 'setuptools>=77'\n"
        assert (done.returncode, done.stdout, done.stderr) == (1, "", line)
