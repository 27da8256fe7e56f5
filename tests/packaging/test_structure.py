"""Rules on the source tree that no reviewer has to remember. Each test lists every offender with its place."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.dev import outline

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron" / "optimus"

# What each part of megatron.optimus may import besides itself (and version): only parts to its left.
LAYERS = [
    ["config"],
    ["platform"],
    ["context"],
    ["ops"],
    ["layers"],
    ["moe"],
    ["models"],
    ["parallel", "report"],
    ["data", "checkpoint"],
    ["convert"],
    ["training", "inference"],
    ["launcher", "planner"],
    ["describe"],
    ["pretrain", "launch", "commands"],
    ["cli"],
    ["__main__"],
]
ALLOWED = {
    part: {other for lower in LAYERS[:level] for other in lower} for level, parts in enumerate(LAYERS) for part in parts
}

MAX_FUNCTION_LINES = 70


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def imports(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """Every imported module or name as a dotted path, also inside functions and TYPE_CHECKING blocks."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = path.relative_to(ROOT).parts[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                yield node, f"{base}.{alias.name}"


def dotted(node: ast.AST) -> str:
    """ "os.environ" of the expression os.environ; "" of anything that is not names joined by dots."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def uses(path: Path, *names: str) -> list[str]:
    """Places where one of the dotted names is read or imported."""
    found = [place(path, node) for node in ast.walk(tree_of(path)) if dotted(node) in names]
    for node, name in imports(path):
        if any(name == wanted or name.startswith(wanted + ".") for wanted in names):
            found.append(place(path, node))
    return found


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_the_checks_see_what_they_look_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "megatron" / "optimus" / "ops" / "a.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "from ..moe import router\nimport torch.cuda\nfrom os import environ\ndef f():\n    x = os.environ['A']\n"
    )
    assert [name for _, name in imports(path)] == ["megatron.optimus.moe.router", "torch.cuda", "os.environ"]
    assert uses(path, "os.environ") == ["megatron/optimus/ops/a.py:5", "megatron/optimus/ops/a.py:3"]
    assert uses(path, "torch.cuda") == ["megatron/optimus/ops/a.py:2"]


def test_megatron_is_a_namespace_package() -> None:
    assert not (ROOT / "megatron" / "__init__.py").exists(), "it would hide megatron-core"
    assert [entry.name for entry in (ROOT / "megatron").iterdir() if entry.name != "__pycache__"] == ["optimus"]


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for path in sources("megatron/optimus", "deepspeed_ext")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_every_part_has_its_place_in_the_order() -> None:
    parts = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    parts |= {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "version"}
    assert parts <= set(ALLOWED), f"give {parts - set(ALLOWED)} a place in LAYERS"


def test_dependencies_point_one_way() -> None:
    wrong = []
    for path in sources("megatron/optimus"):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part in ("__init__", "version"):
            continue
        for node, name in imports(path):
            if not is_within(name, "megatron.optimus") or name == "megatron.optimus.__version__":
                continue
            target = name.split(".")[2] if name.count(".") >= 2 else ""
            if target not in {part, "version"} | ALLOWED[part]:
                wrong.append(f"{place(path, node)}: {part} imports {name}")
    assert wrong == []


def test_two_files_import_deepspeed_ext_and_only_deepspeed_ext_imports_deepspeed() -> None:
    """The trainer's engine, and the converters' files of torch.save: what unpickles must be one file for both."""
    importer = PACKAGE / "convert" / "torch_files.py"
    wrong = []
    for path in sources("megatron/optimus"):
        for node, name in imports(path):
            allowed = path == PACKAGE / "training" / "engine.py"
            allowed = allowed or (path == importer and is_within(name, "deepspeed_ext.torch_files"))
            if is_within(name, "deepspeed") or (is_within(name, "deepspeed_ext") and not allowed):
                wrong.append(f"{place(path, node)}: imports {name}")
    assert wrong == []


def test_deepspeed_ext_knows_nothing_of_us() -> None:
    wrong = [
        f"{place(path, node)}: imports {name}"
        for path in sources("deepspeed_ext")
        for node, name in imports(path)
        if is_within(name, "megatron")
    ]
    assert wrong == []


def test_the_environment_is_read_in_one_file() -> None:
    names = ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv")
    files = [path for path in sources("megatron/optimus") if path != PACKAGE / "platform" / "environment.py"]
    assert [found for path in files for found in uses(path, *names)] == []


def test_accelerators_are_named_in_one_file_and_in_kernels() -> None:
    files = [
        path
        for path in sources("megatron/optimus")
        if path != PACKAGE / "platform" / "device.py" and not path.is_relative_to(PACKAGE / "ops")
    ]
    assert [found for path in files for found in uses(path, "torch.cuda", "torch.xpu", "torch.mps")] == []


def test_only_commands_print() -> None:
    wrong = [
        place(path, node)
        for path in sources("megatron/optimus", "deepspeed_ext")
        if path.parent != PACKAGE / "commands"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and dotted(node.func) == "print"
    ]
    assert wrong == []


def test_nothing_on_a_load_path_can_execute_code() -> None:
    names = ("pickle.load", "pickle.loads", "torch.load", "yaml.unsafe_load", "yaml.full_load", "eval", "exec")
    importer = ROOT / "deepspeed_ext" / "torch_files.py"  # weights only: tests/unit/checkpoint proves it
    wrong = [
        place(path, node)
        for path in sources("megatron/optimus", "deepspeed_ext", "tools")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and dotted(node.func) in names
        and not (path == importer and dotted(node.func) == "torch.load")
    ]
    assert wrong == []


def test_every_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for path in sources("megatron/optimus", "deepspeed_ext"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(place(path, node))
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert not shared, shared


def test_public_names_have_docstrings() -> None:
    assert outline.without_docstring(outline.read_sources(ROOT)) == []


def test_functions_stay_small() -> None:
    wrong = []
    for path in sources("megatron/optimus", "deepspeed_ext", "tools", "benchmarks", "examples", "tests"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    wrong.append(f"{place(path, node)}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
    assert wrong == []


def test_every_program_answers_help() -> None:
    """By argparse, before it does any work; tools/ are faces of the subcommands, whose help has a test of its own."""
    wrong = []
    for path in sources("benchmarks", "tools", "examples", "tests/campaigns"):
        nodes = list(ast.walk(tree_of(path)))
        is_program = any(isinstance(node, ast.Constant) and node.value == "__main__" for node in nodes)
        functions = [node.func for node in nodes if isinstance(node, ast.Call)]
        called = {getattr(function, "attr", getattr(function, "id", None)) for function in functions}
        if is_program and not called & {"parse_args", "parse_known_args"} and path.parent != ROOT / "tools":
            wrong.append(str(path.relative_to(ROOT)))
    assert wrong == []


def test_every_module_has_a_test_of_its_name() -> None:
    """Those of declarations alone need none; ``python tools/dev/outline.py --explain`` lists the places."""
    assert outline.modules_by_test(ROOT, outline.read_sources(ROOT)).untested == []
