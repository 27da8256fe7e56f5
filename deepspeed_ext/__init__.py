"""DeepSpeed's engine with a ZeRO optimizer that knows expert parallelism; usable with any model, see README.md.

Read initialize.py first: it checks the configuration and builds the engine (engine.py), whose optimizer is in zero/
and whose update rules are in optimizers/. config_keys.py says how to add a configuration key.
The parameters' attributes ``allreduce`` and ``group_name`` and the checkpoints' file names are DeepSpeed's: keep them.
"""

import contextlib
import importlib

import deepspeed_ext.lean_import
import deepspeed_ext.versions  # noqa: F401  # refuses versions that cannot work, before their names are missed

# isort: split
from deepspeed.compile.util import is_deepcompile_supported

from deepspeed_ext.engine import EPEngine
from deepspeed_ext.groups import ZeroGroups, init_distributed, run_program, shutdown
from deepspeed_ext.initialize import initialize
from deepspeed_ext.optimizers import Lion, Muon
from deepspeed_ext.zero import gradient_noise
from deepspeed_ext.zero.checksums import StateChecksums, checksum, checksums
from deepspeed_ext.zero.optimizer import EPZeroOptimizer
from deepspeed_ext.zero.options import ZeroOptions
from deepspeed_ext.zero.sharded_state import Stage3States, StateShard

__all__ = [
    "EPEngine",
    "EPZeroOptimizer",
    "Lion",
    "Muon",
    "Stage3States",
    "StateChecksums",
    "StateShard",
    "ZeroGroups",
    "ZeroOptions",
    "checksum",
    "checksums",
    "gradient_noise",
    "import_ahead",
    "init_distributed",
    "initialize",
    "run_program",
    "shutdown",
]


def import_ahead() -> None:
    """Imports what the first optimizer and engine import, torch's compiler, which takes seconds.

    For a thread of a program that has other work meanwhile.
    """
    importlib.import_module("torch._dynamo")
    with contextlib.suppress(ImportError):  # of another version; the engine imports what it needs
        importlib.import_module("deepspeed.module_inject.auto_ep_layer")
    if is_deepcompile_supported():
        importlib.import_module("deepspeed.compile.backend")
