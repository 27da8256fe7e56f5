"""The README's path of one training step follows calls in the code, and is short enough to read in one sitting."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENTRY = re.compile(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`", re.MULTILINE)


class Function(NamedTuple):
    path: str
    name: str  # "function" or "Class.method"

    @property
    def class_name(self) -> str | None:
        return self.name.rpartition(".")[0] or None


@functools.cache
def module(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def definition(path: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    """A function, class or method by its dotted name inside the file."""
    body: list[ast.stmt] = module(path).body
    for part in name.split("."):
        [node] = [n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part]
        body = node.body
    return node


def last_name(node: ast.expr | None) -> str:
    """ "fit" of ``trainer.fit`` and of ``fit``; "" of other expressions."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def called(node: ast.AST) -> set[str]:
    """Names of what is called in a body: ``train_step`` of train_step(...), ``fit`` of trainer.fit(...)."""
    return {last_name(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)} - {""}


@functools.cache
def returned_by(path: str, function: str) -> str:
    """The class that a function of this package, imported by ``path``, says it returns; "" where that is unknown."""
    for node in module(path).body:
        if isinstance(node, ast.ImportFrom) and function in (alias.name for alias in node.names):
            source = f"{(node.module or '').replace('.', '/')}.py"
            if (ROOT / source).exists():
                found = definition(source, function)
                return last_name(found.returns) if isinstance(found, ast.FunctionDef) else ""
    return ""


def classes_of_attributes(path: Sequence[Function]) -> dict[str, set[str]]:
    """Attribute -> classes of the objects in it, from the ``__init__`` of every class on the path.

    ``self.layers = nn.ModuleList(Block(...) for ...)`` gives "layers" the class Block; ``self.model = build_model(x)``
    gives "model" the class that build_model is annotated with, ``self.router: Router = ...`` "router" that class; what
    wraps another attribute, as the engine does the model, gets its classes too.
    """
    found: dict[str, set[str]] = {}
    for entry in dict.fromkeys((entry.path, entry.class_name) for entry in path if entry.class_name):
        owner = definition(entry[0], str(entry[1]))
        if not any(getattr(node, "name", "") == "__init__" for node in owner.body):
            continue  # an interface: its classes hold the attributes
        for node in ast.walk(definition(entry[0], f"{entry[1]}.__init__")):
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = list(ast.walk(node.value))
            classes = called(node.value) | {returned_by(entry[0], name) for name in called(node.value)}
            classes |= {last_name(node.annotation)} if isinstance(node, ast.AnnAssign) else set()
            wrapped = {p.attr for p in parts if isinstance(p, ast.Attribute) and last_name(p.value) == "self"}
            for target in targets:
                if isinstance(target, ast.Attribute):
                    classes |= set().union(*(found.get(name, set()) for name in wrapped))
                    found.setdefault(target.attr, set()).update(classes)
    return found


def leads_to(caller: Function, callee: Function, classes: dict[str, set[str]]) -> bool:
    """Whether the caller's body calls the callee: by its name; a class for its ``__init__``; for a module's ``forward``
    an attribute (or a loop variable over it, or an argument of its name) that holds an object of the class."""
    body = definition(caller.path, caller.name)
    names, method = called(body), callee.name.rpartition(".")[2]
    if method == "__init__":
        return callee.class_name in names
    if method != "forward":
        return method in names
    loops = {last_name(n.target): last_name(n.iter) for n in ast.walk(body) if isinstance(n, ast.For)}
    return any(callee.class_name in classes.get(loops.get(name, name), set()) for name in names)


def path_of_a_step() -> tuple[str, list[Function]]:
    section = (ROOT / "README.md").read_text().split("## Follow one step", 1)[1].split("\n## ", 1)[0]
    return section, [Function(*entry) for entry in ENTRY.findall(section)]


def test_every_function_is_called_by_one_before_it() -> None:
    _, path = path_of_a_step()
    classes = classes_of_attributes(path)
    lost = [
        callee.name
        for place, callee in enumerate(path)
        if place > 0 and not any(leads_to(caller, callee, classes) for caller in path[:place])
    ]
    assert lost == [], "no function listed before calls these"


def test_the_loop_over_steps_is_on_the_path() -> None:
    _, path = path_of_a_step()
    [step] = [entry for entry in path if entry.name == "train_step"]
    loops = [
        entry.name
        for entry in path
        for node in ast.walk(definition(entry.path, entry.name))
        if isinstance(node, ast.While) and step.name in called(node)
    ]
    assert loops != [], "a function on the list must have the loop that calls train_step"


@pytest.mark.parametrize(
    ("caller", "callee"),
    [
        ("train_step", "Trainer._save"),
        ("Block.forward", "Decoder.forward"),
        ("MoE.forward", "Block.forward"),
        ("train_step", "Trainer.__init__"),
    ],
)
def test_a_call_that_is_not_there_is_not_found(caller: str, callee: str) -> None:
    _, path = path_of_a_step()
    [found] = [entry for entry in path if entry.name == caller]
    assert not leads_to(found, Function("", callee), classes_of_attributes(path))


def test_one_step_fits_in_one_sitting() -> None:
    section, path = path_of_a_step()
    lines = 0
    for entry in path:
        node = definition(entry.path, entry.name)
        assert node.end_lineno is not None
        lines += node.end_lineno - node.lineno + 1
    assert 10 <= len(path) <= 15
    assert len({entry.path for entry in path}) <= 12
    assert lines <= 900
    stated = re.search(r"(\d+) functions in (\d+) files, about (\d+) lines", section)
    assert stated is not None
    functions, files, about = (int(number) for number in stated.groups())
    assert (functions, files) == (len(path), len({entry.path for entry in path}))
    assert abs(about - lines) <= 0.1 * lines, f"README says about {about} lines, they are {lines}"
