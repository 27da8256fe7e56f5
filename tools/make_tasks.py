#!/usr/bin/env python3
"""The command ``optimus make-tasks`` in a source tree that is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.optimus.cli import run

if __name__ == "__main__":
    run(["make-tasks", *sys.argv[1:]])
