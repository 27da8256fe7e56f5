"""The training program, in a part of which memory cannot be had: ``main([part, *options])``.

The parts are those of ``PARTS``, in which torch's error is raised, and "limit:MIB": the process may take so much more
address space than it has. "PART@RANK" fails on one rank alone, "PART+traceback" asks for the traceback.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.optimus import pretrain

# What CUDA's allocator says, in one line of 500 characters.
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.06 GiB is "
    "free. Including non-PyTorch memory, this process has 138.73 GiB memory in use. Of the allocated memory 136.21 GiB "
    "is allocated by PyTorch, and 1.20 GiB is reserved by PyTorch but unallocated."
)
PARTS = {  # part -> (what raises, in the message)
    "model": ("megatron.optimus.training.engine.initialize_weights", "building the model"),
    "optimizer": ("deepspeed_ext.initialize", "building the optimizer's state"),
    "copies": ("megatron.optimus.checkpoint.snapshot.Snapshot.reserve", "taking host memory for copies of checkpoints"),
    "resume": ("megatron.optimus.checkpoint.store.load_newest", "loading the checkpoint"),
    "step": ("deepspeed_ext.EPEngine.step", "a training step"),
    "evaluation": ("megatron.optimus.training.evaluate.num_labels", "an evaluation"),
    "save": ("megatron.optimus.checkpoint.snapshot.Snapshot.take", "saving step 2"),
}


def main(argv: Sequence[str]) -> int:
    """Returns the program's exit code."""
    part, rank = argv[0].removesuffix("+traceback").partition("@")[::2]
    os.environ["OPTIMUS_TRACEBACK"] = str(int(argv[0].endswith("+traceback")))
    patch = pytest.MonkeyPatch()
    if part.startswith("limit:"):
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = now + int(part.removeprefix("limit:")) * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    elif not rank or os.environ["RANK"] == rank:

        def fail(*args: Any, **kwargs: Any) -> None:
            raise torch.OutOfMemoryError(MESSAGE)

        patch.setattr(PARTS[part][0], fail)
    return pretrain.main(argv[1:])
