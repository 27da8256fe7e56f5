"""One line with the remedy, in place of a traceback, where a program needs a package that is not installed.

Programs are imported before their ``main`` is called, so ``excepthook`` is set before their imports.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import TracebackType

_OURS = ("megatron", "deepspeed_ext", "tools", "examples", "tests")
# Packages that every installation has (pyproject.toml), by the name of their module.
_REQUIRED = {name: name for name in ("torch", "deepspeed", "numpy", "safetensors", "xxhash", "tokenizers")}
_REQUIRED |= {"yaml": "pyyaml"}
_SOURCE_TREE = Path(__file__).resolve().parents[3]


def explain(error: BaseException) -> str | None:
    """Returns one line that names what is missing and how to install it; None for any other error.

    A missing module of this project, or of a package that is installed, is not explained: its traceback says more.
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    module = error.name.partition(".")[0]
    if module in _OURS or _is_installed(module):
        return None
    missing, remedy = [module], f"pip install {module}"
    if module in _REQUIRED:
        missing = [name for name in _REQUIRED if not _is_installed(name)]
        remedy = f"pip install {' '.join(_REQUIRED[name] for name in missing)}"
        requirements, made = _SOURCE_TREE / "requirements.txt", _SOURCE_TREE / ".venv" / "bin" / "activate"
        if requirements.exists():
            remedy = f"pip install -r {requirements}"
        if made.exists():
            remedy = f"source {made}, or {remedy}"
    return f"error: {', '.join(missing)} not installed for {sys.executable or 'this Python'}: {remedy}"


def require_packages() -> None:
    """Raises ModuleNotFoundError, which ``explain`` knows, where a package of every installation is missing."""
    for module in _REQUIRED:
        if not _is_installed(module):
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints a missing package as one line and ends the program with exit code 2; prints the traceback of any other
    error. For ``sys.excepthook``."""
    if (line := explain(error)) is None:
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write(f"{line}\n")
    raise SystemExit(2)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
