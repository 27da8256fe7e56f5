"""tools/dev/outline.py finds what it looks for in a small tree made to break every rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.dev import outline

LONG_FUNCTION = "def long():\n" + "    x = 1\n" * 80
FILES = {
    "megatron/optimus/__init__.py": "",
    "megatron/optimus/config/__init__.py": "",
    "megatron/optimus/config/schema.py": "from megatron.optimus.training import loop\n",  # back up
    "megatron/optimus/data/__init__.py": "",
    "megatron/optimus/data/reader.py": "from ..checkpoint.store import Part\n",  # sideways
    "megatron/optimus/checkpoint/__init__.py": "",
    "megatron/optimus/data/index.py": (
        'class Index:\n    """An index."""\n    def read(self):\n        """Reads."""\n'
        '    @property\n    def size(self):\n        """A size."""\n    @size.setter\n    def size(self, value): ...\n'
        'class Inner(Index):\n    """Between them."""\n    def close(self): ...\n'
        'class MappedIndex(index.Inner):\n    """Has the docstring of Index.read, not of close."""\n'
        "    def read(self): ...\n    def close(self): ...\n"
    ),
    "megatron/optimus/checkpoint/store.py": (
        'class Part:\n    """A part."""\n    def read(self): ...\n    def _open(self): ...\n'
    ),
    "megatron/optimus/ops/__init__.py": "",
    "megatron/optimus/ops/mlp.py": LONG_FUNCTION,
    "megatron/optimus/ops/triton/__init__.py": "",
    "megatron/optimus/ops/triton/gemm.py": "class Part:\n    pass\n",
    "megatron/optimus/training/__init__.py": "",
    "megatron/optimus/training/loop.py": "from megatron.optimus.config import schema\nfrom . import step\n",
    "megatron/optimus/training/step.py": "def run():\n    from megatron.optimus.training import loop\n",
    "megatron/optimus/training/types.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from megatron.optimus.cli import main\n"
    ),
    "megatron/optimus/cli.py": "from megatron.optimus.training import types\nimport deepspeed_ext.engine\n",
    "megatron/optimus/attic/__init__.py": "",
    "megatron/optimus/attic/old.py": "from megatron.optimus.cli import main\n",
    "deepspeed_ext/__init__.py": "from deepspeed_ext.engine import Engine\n",
    "deepspeed_ext/engine.py": "import megatron.optimus.ops.mlp\n\nclass Engine: ...\n",  # back up
    "csrc/cuda/gemm.cuh": "int x;\nint y;\n",
    "csrc/cuda/notes.md": "not code\n",
    "tests/unit/training/test_loop.py": "",
    "tests/distributed/checkpoint/test_store.py": "",
    "tests/integration/test_step.py": "",  # not where training/step.py is
    "tests/unit/deepspeed_ext/test_engine.py": "",
    "tests/ops/test_mlp.py": "",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def test_lines_of_folders_and_in_all(tree: Path) -> None:
    expected = sum(len(text.splitlines()) for name, text in FILES.items() if name.startswith(outline.PACKAGES))
    assert outline.total_lines(outline.read_sources(tree)) == expected
    assert outline.folder_lines(tree, "csrc") == {"csrc": 2, "csrc/cuda": 2}
    lines = outline.folder_lines(tree, "megatron/optimus")
    assert lines["megatron/optimus/ops"] == 83 and lines["megatron/optimus/ops/triton"] == 2


def test_imports_against_the_order(tree: Path) -> None:
    imports = outline.imports_between(outline.read_sources(tree))
    arrows = [(each.source.module, each.target.module) for each in outline.arrows_back(imports, outline.ORDER)]
    assert arrows == [
        ("deepspeed_ext.engine", "megatron.optimus.ops.mlp"),
        ("megatron.optimus.config.schema", "megatron.optimus.training.loop"),
        ("megatron.optimus.data.reader", "megatron.optimus.checkpoint.store"),
    ]
    other_order = {**outline.ORDER, "config": 20}
    assert len(outline.arrows_back(imports, other_order)) == 3  # now that of training, no longer that of config


def test_circles_of_modules_and_rooms(tree: Path) -> None:
    """Those that only an import inside a function closes are told apart; imports for type checkers close none."""
    imports = outline.imports_between(outline.read_sources(tree))
    at_start = ["megatron.optimus.config.schema", "megatron.optimus.training.loop"]
    with_functions = [*at_start, "megatron.optimus.training.step"]
    assert outline.circles_of(imports, of_rooms=False) == [(at_start, False), (with_functions, True)]
    assert outline.circles_of(imports, of_rooms=True) == [(["config", "training"], False)]


def test_long_functions_tests_docstrings_and_class_names(tree: Path) -> None:
    sources = outline.read_sources(tree)
    assert outline.functions(sources)[0] == ("long", "megatron/optimus/ops/mlp.py:1", 81)
    modules = outline.modules_by_test(tree, sources)
    assert sorted(path.name for path in modules.tested) == ["engine.py", "loop.py", "mlp.py", "store.py"]
    assert [str(path) for path in modules.untested] == [
        "megatron/optimus/data/index.py",
        "megatron/optimus/training/step.py",
    ]
    assert Path("megatron/optimus/ops/triton/gemm.py") in modules.declarations  # a class without methods
    assert outline.tests_by_subject(tree, sources) == [Path("tests/integration/test_step.py")]
    assert outline.without_docstring(sources) == [
        "deepspeed_ext/engine.py:3 Engine",
        "megatron/optimus/checkpoint/store.py:3 Part.read",
        "megatron/optimus/data/index.py:12 Inner.close",
        "megatron/optimus/data/index.py:16 MappedIndex.close",
        "megatron/optimus/ops/mlp.py:1 long",
        "megatron/optimus/ops/triton/gemm.py:1 Part",
        "megatron/optimus/training/step.py:1 run",
    ]
    assert outline.repeated_classes(sources) == {
        "Part": ["megatron/optimus/checkpoint/store.py:1", "megatron/optimus/ops/triton/gemm.py:1"]
    }


def test_the_text_names_each_finding_and_its_place(tree: Path) -> None:
    text = outline.outline(tree, outline.ORDER, explain=True)
    for said in (
        "Rooms without a place in the order: 1\n    attic",
        "megatron/optimus/config/schema.py:1 imports megatron.optimus.training.loop\n",
        "Circles of modules: 2",
        "through an import inside a function: megatron.optimus.config.schema, ",
        "   81  megatron/optimus/ops/mlp.py:1 long",
        "Modules with a test of their name: 4; declarations alone, without: 6; others without: 2\n",
        "Tests that are named by a subject, not by a module: 1\n    tests/integration/test_step.py",
        "Class names used more than once: 1\n    Part: ",
    ):
        assert said in text
