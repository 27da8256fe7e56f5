"""One line with the remedy, in place of a traceback, where a program needs a package that is not installed.

Programs are imported before their ``main`` is called, so ``excepthook`` is set before their imports.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

_OURS = ("megatron", "deepspeed_ext", "tools", "examples", "tests")
# Packages that every installation has, by the name of their module: distribution and version, as in pyproject.toml.
REQUIRED = {
    "torch": ("torch", ">=2.8"),
    "deepspeed": ("deepspeed", ">=0.17.6,<=0.19.8"),
    "numpy": ("numpy", ""),
    "safetensors": ("safetensors", ">=0.5"),
    "xxhash": ("xxhash", ">=3.5"),
    "yaml": ("pyyaml", ">=6.0"),
    "tokenizers": ("tokenizers", ">=0.20"),
}


class Extra(NamedTuple):
    """Optional packages of one purpose."""

    purpose: str
    packages: dict[str, str]  # distribution, by the name of the module


# The extras of pyproject.toml.
EXTRAS = {
    "tui": Extra("live progress line", {"rich": "rich"}),
    "tensorboard": Extra("--tensorboard-dir", {"tensorboard": "tensorboard"}),
    "hf": Extra("generation from an export", {"transformers": "transformers"}),
    "eval": Extra("optimus evaluate", {"lm_eval": "lm_eval"}),
    "serve": Extra("optimus serve", {"fastapi": "fastapi", "uvicorn": "uvicorn"}),
    "report": Extra("optimus report, optimus watch", {"matplotlib": "matplotlib", "rich": "rich"}),
    "hub": Extra("--push, hf:// sources", {"huggingface_hub": "huggingface_hub"}),
    "plot": Extra("loss curve", {"matplotlib": "matplotlib"}),
    "sentencepiece": Extra("SentencePiece tokenizers", {"sentencepiece": "sentencepiece"}),
    "fastokens": Extra("BPE at the speed of the disk", {"fastokens": "fastokens"}),
    "tiktoken": Extra(".tiktoken tokenizers", {"tiktoken": "tiktoken"}),
    "parquet": Extra("corpora in parquet files", {"pyarrow": "pyarrow"}),
    "object-store": Extra("--checkpoint-mirror s3://...", {"fsspec": "fsspec", "s3fs": "s3fs"}),
    "zstd": Extra("corpora in .zst files", {"zstandard": "zstandard"}),
    "wandb": Extra("--wandb-project", {"wandb": "wandb"}),
    "mlflow": Extra("--mlflow-uri", {"mlflow": "mlflow-skinny"}),
    "comet": Extra("--comet-project", {"comet_ml": "comet_ml"}),
}
_SOURCE_TREE = Path(__file__).resolve().parents[3]


def explain(error: BaseException) -> str | None:
    """Returns one line that names what is missing and how to install it; None for any other error.

    A missing module of this project, or of a package that is installed, is not explained: its traceback says more.
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    module = error.name.partition(".")[0]
    if module in _OURS or is_installed(module):
        return None
    missing, remedy = [module], f"pip install {module}"
    if module in REQUIRED:
        missing = [name for name in REQUIRED if not is_installed(name)]
        remedy = f"pip install {' '.join(REQUIRED[name][0] for name in missing)}"
        requirements, made = _SOURCE_TREE / "requirements.txt", _SOURCE_TREE / ".venv" / "bin" / "activate"
        if requirements.exists():
            remedy = f"pip install -r {requirements}"
        if made.exists():
            remedy = f"source {made}, or {remedy}"
    return f"error: {', '.join(missing)} not installed for {sys.executable or 'this Python'}: {remedy}"


def require_packages() -> None:
    """Raises ModuleNotFoundError, which ``explain`` knows, where a package of every installation is missing."""
    for module in REQUIRED:
        if not is_installed(module):
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def satisfies(version: str, requirement: str) -> bool:
    """Returns whether a version such as "2.13.0+cpu" satisfies ">=2.10", "==0.19.8" or "" (any)."""
    operator, wanted = requirement[:2], _numbers(requirement[2:])
    found = _numbers(version)
    return not requirement or (found >= wanted if operator == ">=" else found[: len(wanted)] == wanted)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]


def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints a missing package as one line and ends the program with exit code 2; prints the traceback of any other
    error. For ``sys.excepthook``."""
    if (line := explain(error)) is None:
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write(f"{line}\n")
    raise SystemExit(2)


def is_installed(module: str) -> bool:
    """Returns whether a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
