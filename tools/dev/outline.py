"""Prints an outline of the source tree: sizes, dependencies, tests and docstrings, each with its place.

    python tools/dev/outline.py
    python tools/dev/outline.py --root ../another_checkout --order order.json

The outline holds the lines of each folder, imports that point against the order of the rooms, circles of imports, the
longest files and functions, modules without a test of their name and tests without a module of theirs, public names
without a docstring, and class names that are used twice. A room is a folder or a module directly below megatron/optimus
or deepspeed_ext. Only the syntax trees are read: nothing of the tree is imported, and the standard library is enough.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("megatron/optimus", "deepspeed_ext")
CODE_SUFFIXES = {".py", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".sycl"}
SHORT_FILE_LINES = 60
NUM_LONGEST = 10

# Room -> rank. A room may import rooms of a lower rank only; rooms of one rank know nothing of each other.
ORDER = {
    **dict.fromkeys(("__init__", "version", "deepspeed_ext"), 0),
    "config": 1,
    "platform": 2,
    "context": 3,
    "ops": 4,
    "layers": 5,
    "moe": 6,
    "models": 7,
    **dict.fromkeys(("parallel", "report"), 8),
    **dict.fromkeys(("data", "checkpoint"), 9),
    "convert": 10,
    **dict.fromkeys(("training", "inference"), 11),
    **dict.fromkeys(("launcher", "planner"), 12),
    "describe": 13,
    **dict.fromkeys(("pretrain", "launch", "commands"), 14),
    "cli": 15,
    "__main__": 16,
}


@dataclass(frozen=True)
class Source:
    """One Python file. ``path`` is relative to the root, ``module`` its dotted name."""

    path: Path
    module: str
    lines: int
    tree: ast.Module

    @property
    def room(self) -> str:
        """The folder or module directly below the package; a room of deepspeed_ext carries that name in front."""
        parts = self.module.split(".")
        if parts[0] == "deepspeed_ext":
            return ".".join(parts[:2])
        return parts[2] if len(parts) > 2 else "__init__"


class Import(NamedTuple):
    """``source`` imports ``target`` at a line; ``is_deferred``: inside a function, so it runs when that is called."""

    source: Source
    target: Source
    line: int
    is_deferred: bool


class Function(NamedTuple):
    """A function or method, its place and its length in lines, decorators left out."""

    name: str
    place: str
    lines: int


def count_lines(path: Path) -> int:
    """The lines of a text file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def read_sources(root: Path) -> list[Source]:
    """Parses every Python file of the two packages below ``root``, in the order of their paths."""
    sources = []
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        relative = path.relative_to(root)
        parts = relative.with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        sources.append(Source(relative, module, len(text.splitlines()), ast.parse(text, str(relative))))
    return sources


def total_lines(sources: Iterable[Source]) -> int:
    """The lines of all Python files together: the size that tests/packaging/test_size.py holds."""
    return sum(source.lines for source in sources)


def folder_lines(root: Path, top: str) -> dict[str, int]:
    """Folder -> lines of code in it and below, for ``top`` and two levels of folders below it."""
    lines: Counter[str] = Counter()
    for path in (root / top).rglob("*"):
        if path.suffix in CODE_SUFFIXES and path.is_file():
            folders = path.relative_to(root / top).parts[:-1]
            for depth in range(min(len(folders), 2) + 1):
                lines["/".join((top, *folders[:depth]))] += count_lines(path)
    return dict(sorted(lines.items()))


def _import_statements(node: ast.AST, is_deferred: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """All import statements below a node but those for type checkers only, each with whether it is in a function."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield node, is_deferred
        return
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If) and getattr(node.test, "attr", getattr(node.test, "id", "")) == "TYPE_CHECKING":
        children = list(node.orelse)
    inside = is_deferred or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    for child in children:
        yield from _import_statements(child, inside)


def imported_names(source: Source, node: ast.Import | ast.ImportFrom) -> list[str]:
    """What a statement imports, as dotted names; relative imports are made absolute."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        package = source.path.parts[:-1]
        base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
    return [f"{base}.{alias.name}" for alias in node.names]


def imports_between(sources: Iterable[Source]) -> list[Import]:
    """All imports of one module of the tree by another; ``from a import b`` is one of a.b where that is a module."""
    by_module = {source.module: source for source in sources}
    found = []
    for source in by_module.values():
        for node, is_deferred in _import_statements(source.tree):
            for name in imported_names(source, node):
                target = by_module.get(name) or by_module.get(name.rpartition(".")[0])
                if target is not None and target is not source:
                    found.append(Import(source, target, node.lineno, is_deferred))
    return found


def rank_of(room: str, order: Mapping[str, int]) -> int | None:
    """The rank of a room, or None for one the order does not know; all of deepspeed_ext is one room there."""
    return order.get(room.partition(".")[0])


def arrows_back(imports: Iterable[Import], order: Mapping[str, int]) -> list[Import]:
    """Imports of another room whose rank is not lower: they point back up the order of dependencies, or sideways."""
    found = []
    for each in imports:
        mine, other = rank_of(each.source.room, order), rank_of(each.target.room, order)
        if mine is None or other is None or mine == other == 0 or each.source.room == each.target.room:
            continue
        if other >= mine:
            found.append(each)
    return found


def circles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """The groups of names that reach each other (strongly connected components), each sorted."""
    graph: dict[str, set[str]] = defaultdict(set)
    for start, end in edges:
        graph[start].add(end)

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for name in graph.get(todo.pop(), set()) - seen:
                seen.add(name)
                todo.append(name)
        return seen

    reach = {name: reachable(name) for name in list(graph)}
    in_circle = [name for name in sorted(reach) if name in reach[name]]
    groups = {
        tuple(other for other in in_circle if other in reach[name] and name in reach[other]) for name in in_circle
    }
    return [list(group) for group in sorted(groups) if len(group) > 1]


def circles_of(imports: Iterable[Import], *, of_rooms: bool) -> list[tuple[list[str], bool]]:
    """Circles of modules or of rooms; the flag says whether one needs an import inside a function to be closed."""
    imports = list(imports)

    def edges(chosen: Iterable[Import]) -> set[tuple[str, str]]:
        if of_rooms:
            pairs = {(each.source.room, each.target.room) for each in chosen}
            return {(start, end) for start, end in pairs if start != end}
        return {(each.source.module, each.target.module) for each in chosen}

    at_start = circles(edges(each for each in imports if not each.is_deferred))
    found = [(group, False) for group in at_start]
    return found + [(group, True) for group in circles(edges(imports)) if group not in at_start]


def functions(sources: Iterable[Source]) -> list[Function]:
    """All functions and methods, the longest first."""
    found = [
        Function(node.name, f"{source.path}:{node.lineno}", (node.end_lineno or node.lineno) - node.lineno + 1)
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return sorted(found, key=lambda function: (-function.lines, function.place))


def places_of_test(path: Path) -> list[Path]:
    """Where a module's test may be: each folder of tests mirrors the package, and tests/ops its room ops."""
    is_ours = path.parts[0] == "megatron"
    folders = path.parts[2:-1] if is_ours else path.parts[:-1]
    name = f"test_{path.name}"
    places = [Path("tests", kind, *folders, name) for kind in ("unit", "distributed", "integration")]
    if is_ours and folders[:1] == ("ops",):
        places += [Path("tests", *folders, name), Path("tests", "ops", name)]
    return places


def only_declares(node: ast.stmt) -> bool:
    """Whether a statement of a module computes nothing: imports, constants, classes without methods, a call of main."""
    if isinstance(node, ast.ClassDef):
        return all(map(only_declares, node.body))
    if isinstance(node, ast.If):  # for type checkers, or of a program
        return "TYPE_CHECKING" in ast.dump(node.test) or "'__name__'" in ast.dump(node.test)
    kinds = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Pass)
    return isinstance(node, kinds) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


class ModulesByTest(NamedTuple):
    """Modules that have a test of their name, and those that have none; ``__init__.py`` files are not asked."""

    tested: list[Path]
    untested: list[Path]
    declarations: list[Path]  # without a test, and with nothing that one could run


def modules_by_test(root: Path, sources: Iterable[Source]) -> ModulesByTest:
    """Looks for the test of each module where the name of the module says."""
    found = ModulesByTest([], [], [])
    for source in sources:
        if source.path.name == "__init__.py":
            continue
        if any((root / place).exists() for place in places_of_test(source.path)):
            found.tested.append(source.path)
        else:
            (found.declarations if all(map(only_declares, source.tree.body)) else found.untested).append(source.path)
    return found


def tests_by_subject(root: Path, sources: Iterable[Source]) -> list[Path]:
    """The tests in mirrored folders that have the name of no module and of no package, but of what they are about."""
    paths = [source.path for source in sources]
    paths += [path.parent.with_suffix(".py") for path in paths if path.name == "__init__.py"]
    places = {place for path in paths for place in places_of_test(path)}
    folders = ("unit", "distributed", "integration", "ops")
    tests = (path.relative_to(root) for folder in folders for path in (root / "tests" / folder).rglob("test_*.py"))
    return sorted(set(tests) - places)


def _base_names(node: ast.ClassDef) -> list[str]:
    """The last words of a class's bases, ``Tracker`` for ``trackers.Tracker``; class names are unique in the tree."""
    return [base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases]


def without_docstring(sources: Iterable[Source]) -> list[str]:
    """Places and names of public functions, classes and methods of public classes that have no docstring.

    As ``help`` shows them: a method has the docstring of the one it overrides, and a property that of its getter.
    """
    sources = list(sources)
    classes = {node.name: node for source in sources for node in source.tree.body if isinstance(node, ast.ClassDef)}
    found = []

    def inherits(name: str, method: str, seen: tuple[str, ...] = ()) -> bool:
        bases = [base for base in _base_names(classes[name]) if base in classes and base not in seen]
        return any(
            any(getattr(node, "name", "") == method and ast.get_docstring(node) for node in classes[base].body)  # type: ignore[arg-type]
            or inherits(base, method, (*seen, name))
            for base in bases
        )

    def look(source: Source, body: list[ast.stmt], owner: str = "") -> None:
        for node in body:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name[0] == "_":
                continue
            is_setter = any(isinstance(each, ast.Attribute) and each.attr == "setter" for each in node.decorator_list)
            if not (ast.get_docstring(node) or is_setter or (owner and inherits(owner, node.name))):
                found.append(f"{source.path}:{node.lineno} {owner}{'.' if owner else ''}{node.name}")
            if isinstance(node, ast.ClassDef) and not owner:
                look(source, node.body, node.name)

    for source in sources:
        look(source, source.tree.body)
    return found


def repeated_classes(sources: Iterable[Source]) -> dict[str, list[str]]:
    """Class name -> places, for names that more than one class of the packages has; a leading underscore counts."""
    places: dict[str, list[str]] = defaultdict(list)
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{source.path}:{node.lineno}")
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def _section(title: str, rows: Iterable[object]) -> list[str]:
    return ["", title, *(f"    {row}" for row in rows)]


def outline(root: Path, order: Mapping[str, int], *, explain: bool = False) -> str:
    """The whole outline as text; with ``explain``, the untested modules and undocumented names one by one."""
    sources = read_sources(root)
    imports = imports_between(sources)
    text = [f"{total_lines(sources):,} lines in {len(sources)} files of {' + '.join(PACKAGES)}"]
    for top in (*PACKAGES, "csrc"):
        lines = folder_lines(root, top)
        text += _section(f"Lines of {top}", (f"{count:7,}  {folder}" for folder, count in lines.items()))
    unknown = sorted({source.room for source in sources if rank_of(source.room, order) is None})
    text += _section(f"Rooms without a place in the order: {len(unknown)}", unknown)
    arrows = arrows_back(imports, order)
    rows = (
        f"{each.source.path}:{each.line} imports {each.target.module}{' inside a function' if each.is_deferred else ''}"
        for each in arrows
    )
    text += _section(f"Imports that point back up, or sideways, in the order of rooms: {len(arrows)}", rows)
    for of_rooms, what in ((False, "modules"), (True, "rooms")):
        found = circles_of(imports, of_rooms=of_rooms)
        rows = (
            f"{'through an import inside a function: ' if is_deferred else ''}{', '.join(group)}"
            for group, is_deferred in found
        )
        text += _section(f"Circles of {what}: {len(found)}", rows)
    longest = sorted(sources, key=lambda source: (-source.lines, source.path))[:NUM_LONGEST]
    text += _section("Longest files", (f"{source.lines:5}  {source.path}" for source in longest))
    longest_functions = functions(sources)[:NUM_LONGEST]
    text += _section("Longest functions", (f"{each.lines:5}  {each.place} {each.name}" for each in longest_functions))
    text += ["", f"Files under {SHORT_FILE_LINES} lines: {sum(each.lines < SHORT_FILE_LINES for each in sources)}"]
    modules = modules_by_test(root, sources)
    title = (
        f"Modules with a test of their name: {len(modules.tested)}; declarations alone, without: "
        f"{len(modules.declarations)}; others without: {len(modules.untested)}"
    )
    text += _section(title, modules.untested * explain)
    by_subject = tests_by_subject(root, sources)
    text += _section(f"Tests that are named by a subject, not by a module: {len(by_subject)}", by_subject * explain)
    undocumented = without_docstring(sources)
    title = f"Public functions, classes and methods without a docstring: {len(undocumented)}"
    text += _section(title, undocumented * explain)
    repeated = repeated_classes(sources)
    rows = (f"{name}: {', '.join(places)}" for name, places in repeated.items())
    text += _section(f"Class names used more than once: {len(repeated)}", rows)
    return "\n".join(text)


def main() -> None:
    """Prints the outline of this checkout or of another one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parents[2]
    parser.add_argument("--root", type=Path, default=here, help="the checkout to read (default: this one)")
    parser.add_argument("--order", type=Path, help="JSON file of room -> rank, for a tree with other rooms")
    parser.add_argument("--explain", action="store_true", help="list the modules without test, names without docstring")
    args = parser.parse_args()
    order = ORDER if args.order is None else json.loads(args.order.read_text(encoding="utf-8"))
    print(outline(args.root, order, explain=args.explain))


if __name__ == "__main__":
    main()
