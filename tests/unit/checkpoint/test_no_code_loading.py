"""No file of the packages and tools can run code from a checkpoint: nothing unpickles, evaluates or executes."""

import ast
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_FILES = sorted(
    path for part in ("megatron/optimus", "deepspeed_ext", "tools") for path in (_ROOT / part).rglob("*.py")
)
_IMPORTER = _ROOT / "deepspeed_ext" / "torch_files.py"  # reads torch.save's format for everybody
_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}

_SWITCHES = ("allow_pickle", "shell", "trust_remote_code")


def offences(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in _MODULES]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = {alias.name for alias in node.names}
            if module.split(".")[0] in _MODULES or (module == "torch" and "load" in names):
                found.append(f"from {module} import {', '.join(sorted(names))}")
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in ("eval", "exec", "__import__", "torch.load", "builtins.eval", "builtins.exec"):
                found.append(f"{name}(...)")
        elif isinstance(node, ast.keyword) and node.arg in _SWITCHES and ast.unparse(node.value) != "False":
            found.append(node.arg)
    return found


@pytest.mark.parametrize("path", _FILES, ids=lambda path: str(path.relative_to(_ROOT)))
def test_nothing_can_execute_what_it_loads(path):
    found = offences(path.read_text())
    assert found == (["torch.load(...)"] if path == _IMPORTER else [])


def test_the_importer_of_foreign_files_never_unpickles_objects():
    calls = [
        node
        for node in ast.walk(ast.parse(_IMPORTER.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert len(calls) == 1
    [value] = [keyword.value for keyword in calls[0].keywords if keyword.arg == "weights_only"]
    assert isinstance(value, ast.Constant) and value.value is True


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "eval('1')",
        "exec('1')",
        "np.load(x, allow_pickle=True)",
        "run(x, shell=True)",
    ],
)
def test_the_lint_sees(source):
    assert offences(source)


def test_the_lint_allows_what_only_looks_alike():
    assert _FILES
    assert offences("model.eval()\njson.load(f)\nstore.load(p)\nnp.load(f, allow_pickle=False)") == []
