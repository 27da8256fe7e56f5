"""DeepSpeed is imported without MLflow, which a program may have imported before or import later."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[3] / "deepspeed_ext" / "lean_import.py"
# In the places of the packages: what a program's import of DeepSpeed finds.
DEEPSPEED = """
try:
    import mlflow
    found = mlflow.name
except ImportError:
    found = None
"""


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("run(); import deepspeed, mlflow; print(deepspeed.found, mlflow.name)", "None it"),
        ("import mlflow; run(); import deepspeed; print(deepspeed.found, mlflow.name)", "it it"),
    ],
)
def test_mlflow_is_hidden_while_deepspeed_is_imported(tmp_path: Path, program: str, found: str) -> None:
    (tmp_path / "deepspeed.py").write_text(DEEPSPEED)
    (tmp_path / "mlflow.py").write_text("name = 'it'\n")
    head = f"import runpy; run = lambda: runpy.run_path({str(FILE)!r}); "
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", head + program], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == found, done.stderr


def test_an_error_of_deepspeed_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "deepspeed.py").write_text("raise RuntimeError('no compiler')\n")
    program = f"""
import runpy, sys
try:
    runpy.run_path({str(FILE)!r})
except RuntimeError as error:
    print(error, "mlflow" in sys.modules)
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-S", "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "no compiler False", done.stderr
