"""No file of the packages and tools can run code from a checkpoint: nothing unpickles, evaluates or executes."""

import ast
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_FILES = sorted(
    path for part in ("megatron/optimus", "deepspeed_ext", "tools") for path in (_ROOT / part).rglob("*.py")
)
_IMPORTER = _ROOT / "deepspeed_ext" / "torch_files.py"  # reads torch.save's format for everybody
_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "runpy"}
_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}
_CALLS |= {f"torch.{part}load" for part in ("", "jit.", "hub.", "serialization.", "package.")}
_ENDINGS = (".read_pickle", ".unsafe_load", ".full_load", ".unsafe_load_all", ".full_load_all", "PackageImporter")
_LOADERS = ("yaml.Loader", "yaml.FullLoader", "yaml.UnsafeLoader", "yaml.CLoader")
_SWITCHES = ("allow_pickle", "shell", "trust_remote_code")


def modules_of(tree: ast.AST) -> dict[str, str]:
    """What the names of imported modules stand for: {"t": "torch"} after ``import torch as t``."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    prefixes = [(node, f"{node.module}." if isinstance(node, ast.ImportFrom) else "") for node in imports]
    return {alias.asname: prefix + alias.name for node, prefix in prefixes for alias in node.names if alias.asname}


def offences(source: str) -> list[str]:
    tree = ast.parse(source)
    modules, found = modules_of(tree), []

    def full_name(node: ast.AST) -> str:
        first, _, rest = ast.unparse(node).partition(".")
        name = f"{modules.get(first, first)}.{rest}" if rest else modules.get(first, first)
        return name.removeprefix("builtins.")

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in _MODULES]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = {alias.name for alias in node.names}
            if module.split(".")[0] in _MODULES or any(f"{module}.{name}" in _CALLS for name in names):
                found.append(f"from {module} import {', '.join(sorted(names))}")
        elif isinstance(node, ast.Call):
            name = full_name(node.func)
            by_name = name == "getattr" and ast.unparse(node.args[1]).strip("'") in ("load", "eval", "exec")
            if name in _CALLS or name.endswith(_ENDINGS) or by_name:
                found.append(f"{name}(...)")
        elif isinstance(node, ast.keyword) and node.arg in _SWITCHES and ast.unparse(node.value) != "False":
            found.append(node.arg)
        elif isinstance(node, ast.Attribute) and full_name(node) in _LOADERS:
            found.append(full_name(node))
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
        "import torch as t\nt.load('x')",
        "import torch.serialization as s\ns.load('x')",
        "from torch import jit as j\nj.load('x')",
        "from torch.hub import load",
        "torch.package.PackageImporter('x')",
        "import builtins as b\nb.eval('1')",
        "getattr(torch, 'load')('x')",
        "pandas.read_pickle('x')",
        "yaml.load(x, Loader=yaml.Loader)",
        "yaml.unsafe_load(x)",
        "os.system(x)",
        "import runpy",
    ],
)
def test_the_lint_sees(source):
    assert offences(source)


def test_the_lint_allows_what_only_looks_alike():
    assert _FILES
    assert offences("model.eval()\njson.load(f)\nstore.load(p)\nnp.load(f, allow_pickle=False)\nre.compile(x)") == []
