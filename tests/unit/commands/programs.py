"""Tools of a source tree as processes, as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def command(script: str, *arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / script), *map(str, arguments)]


def call(script: str, *arguments: object, **options) -> subprocess.CompletedProcess[str]:
    # from another folder and without PYTHONPATH: as a user with a plain checkout
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = {"capture_output": True, "text": True, "timeout": 120, "check": False} | options
    return subprocess.run(command(script, *arguments), cwd="/", env=environment, **options)  # noqa: PLW1510


def failed(result: subprocess.CompletedProcess[str]) -> str:
    """The one error line of a command that failed as it should."""
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    errors = [line for line in result.stderr.splitlines() if "error:" in line]
    assert len(errors) == 1, result.stderr
    return errors[0]
