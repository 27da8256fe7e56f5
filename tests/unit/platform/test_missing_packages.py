"""A package that is not installed is one line with the remedy, in every command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.optimus.cli import COMMANDS
from megatron.optimus.platform import missing_packages

ROOT = Path(__file__).parents[3]
REQUIRED = tuple(missing_packages.REQUIRED)
# A Python that finds only its own library and this tree, as that of a system.
BARE = """
import importlib.abc, runpy, sys
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
sys.path.insert(0, {root!r})
sys.argv = {argv!r}
runpy.{how}({what!r}, run_name="__main__", **{more!r})
"""
# Words with which each command reaches the work for which it needs packages.
WORDS = {
    "pretrain": "--preset mula-tiny --data-path corpus",
    "launch": "--nproc-per-node 2 --preset mula-tiny --data-path corpus",
    "plan": "--preset mula-tiny --world-size 2 --check-build",
    "preprocess": "--input README.md --output-prefix {folder}/tokens --tokenizer-model {folder}",
    "train-tokenizer": "--input README.md --vocab-size 300 --output {folder}/tokenizer",
    "inspect-data": "corpus",
    "convert": "runs/none {folder}/hf --to hf",
    "generate": "runs/none --prompt a",
    "serve": "runs/none",
    "evaluate": "runs/none --tasks a",
    "make-tasks": "README.md --out {folder}/tasks",
    "report": "runs/none",
    "watch": "runs/none",
    "verify": "runs/none",
    "expert-balance": "runs/none",
    "doctor": "",
    "tune-kernels": "--preset mula-tiny",
    "average": "runs/a runs/b --out {folder}/soup",
    "coordinate-check": "--preset mula-tiny --widths 64,128",
    "drill": "--out {folder}/drill --count 1",
    "lr-find": "--preset mula-tiny --data-path corpus",
    "preflight": "--nproc-per-node 1 --save {folder}",
    "sweep": "--vary lr=1e-3,1e-2 --run-dir {folder}/sweep -- --preset mula-tiny --data-path corpus",
}


def bare_python(what: str, argv: list[str], blocked: tuple[str, ...] = REQUIRED) -> subprocess.CompletedProcess[str]:
    how, more = ("run_path", {}) if what.endswith(".py") else ("run_module", {"alter_sys": True})
    code = BARE.format(blocked=blocked, root=str(ROOT), argv=[what, *argv], how=how, what=what, more=more)
    words = [sys.executable, "-I", "-c", code]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)


def is_one_line(done: subprocess.CompletedProcess[str], *missing: str) -> bool:
    line = done.stderr
    is_line = done.returncode == 2 and line.startswith("error: ") and line.count("\n") == 1 and "pip install " in line
    return is_line and all(name in line for name in missing)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_in_one_line_what_to_install(name: str, tmp_path: Path) -> None:
    done = bare_python("megatron.optimus", [name, *WORDS[name].format(folder=tmp_path).split()])
    assert is_one_line(done, *REQUIRED), done.stderr


@pytest.mark.parametrize(
    "program",
    ["megatron.optimus.pretrain", "megatron.optimus.launch", "tools/verify_checkpoint.py", "examples/local/demo.py",
     "examples/data/olmoe_mix_0924/recipe.py"],
)  # fmt: skip
def test_a_program_that_is_started_without_the_command_does_too(program: str, tmp_path: Path) -> None:
    words = {"tools/verify_checkpoint.py": ["runs/none"], "examples/local/demo.py": ["--run-dir", str(tmp_path)]}
    if program.endswith("recipe.py"):
        words[program] = ["--help"]
    done = bare_python(program, words.get(program, "--nproc-per-node 2 --preset mula-tiny --data-path c".split()))
    assert is_one_line(done, *REQUIRED), done.stderr


def test_one_missing_package_is_named_alone() -> None:
    done = bare_python("megatron.optimus", ["verify", "runs/none"], ("xxhash",))
    assert is_one_line(done, "xxhash") and "torch" not in done.stderr.partition(" not installed")[0], done.stderr
    assert str(ROOT / "requirements.txt") in done.stderr


def test_what_is_not_missing_keeps_its_traceback() -> None:
    for error in (ImportError("cannot import name 'x'", name="torch"), ValueError("torch"), ModuleNotFoundError("x")):
        assert missing_packages.explain(error) is None
    ours = ModuleNotFoundError("No module named 'megatron.optimus.x'", name="megatron.optimus.x")
    inside = ModuleNotFoundError("No module named 'numpy.x'", name="numpy.x")
    assert missing_packages.explain(ours) is None and missing_packages.explain(inside) is None
    optional = missing_packages.explain(ModuleNotFoundError("No module named 'nowhere_at_all'", name="nowhere_at_all"))
    assert optional is not None and optional.endswith(": pip install nowhere_at_all")


def test_the_doctor_lists_them_all_where_it_can_read_its_options() -> None:
    missing = tuple(name for name in REQUIRED if name != "yaml")
    done = bare_python("megatron.optimus", ["doctor", "--json"], missing)
    report = json.loads(done.stdout)
    broken = [one for one in report["findings"] if one["state"] == "broken"]
    assert done.returncode == 1 and [one["name"] for one in broken] == list(missing), done.stderr
    assert all(one["value"] == "not installed" and one["remedy"].startswith("pip install '") for one in broken)


def test_packages_and_extras_are_those_of_the_project_file() -> None:
    """As text, because Python 3.10 has no parser of it."""
    text = (missing_packages._SOURCE_TREE / "pyproject.toml").read_text(encoding="utf-8")
    needed = re.search(r"^dependencies = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert needed is not None
    assert re.findall(r'"(.*?)"', needed[1]) == [name + least for name, least in missing_packages.REQUIRED.values()]
    optional = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    found = {
        line.partition(" ")[0]: re.findall(r'"([\w-]+)>=', line.partition("#")[0])
        for line in optional.splitlines()
        if line
    }
    assert found == {name: list(extra.packages.values()) for name, extra in missing_packages.EXTRAS.items()}


@pytest.mark.parametrize(
    ("version", "requirement", "fits"),
    [
        ("2.13.0+cpu", ">=2.10", True),
        ("2.9.1", ">=2.10", False),
        ("0.19.8", "==0.19.8", True),
        ("0.19.9", "==0.19.8", False),
        ("1", "", True),
    ],
)
def test_versions(version: str, requirement: str, fits: bool) -> None:
    assert missing_packages.satisfies(version, requirement) is fits
