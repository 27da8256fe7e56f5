"""One clear line where a benchmark's device is not there."""

from __future__ import annotations

import argparse

import torch


def require_device(parser: argparse.ArgumentParser, name: str, count: int = 1) -> None:
    """Ends the program with the parser's error and exit code 2 unless torch sees ``count`` devices of this kind."""
    module = {"cuda": torch.cuda, "xpu": torch.xpu}.get(name)
    there = module.device_count() if module is not None else count
    if there < count:
        parser.error(f"--device {name}: torch {torch.__version__} sees {there} of the {count} needed; try --device cpu")
