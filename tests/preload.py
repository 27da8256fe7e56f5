"""What the fork server of tests/helpers.py imports, once for all ranks that are forked from it."""

import contextlib
import gc
import importlib
import pkgutil
import weakref

import deepspeed
import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from megatron.optimus.models import families
from megatron.optimus.moe import dispatch
from megatron.optimus.ops.backend import compiled_library_error
from megatron.optimus.training import trackers

MODULES = (
    "pytest",  # of every file whose functions are ranks
    "deepspeed",
    "torch._dynamo",  # this and the next are imported by the first optimizer and the first pipeline of a rank
    "torch.distributed.pipelining",
    "torch._inductor.compile_fx",  # of DeepSpeed's own optimizers
    "megatron.optimus.pretrain",
    "megatron.optimus.training.trainer",
    "megatron.optimus.training.evaluate",
    "megatron.optimus.parallel.pipeline",
    "megatron.optimus.inference.generate",
    "megatron.optimus.inference.score",
    *(
        f"{room.__name__}.{module.name}"
        for room in (families, dispatch, trackers)
        for module in pkgutil.iter_modules(room.__path__)
    ),
    *(("megatron.optimus.ops.cpu",) if compiled_library_error() is None else ()),
)
OTHERS = ("pytorch_optimizer", "deepspeed.module_inject.auto_ep_layer")  # the first imports transformers

for name in MODULES:
    importlib.import_module(name)
for name in OTHERS:
    with contextlib.suppress(ImportError):  # not installed, or not in this version of DeepSpeed
        importlib.import_module(name)
if deepspeed.__version__ < "0.19":  # its step() records gradients, which gloo's all-gather refuses
    DeepSpeedZeroOptimizer.step = torch.no_grad()(DeepSpeedZeroOptimizer.step)
for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    each.atexit = False  # of torch's libraries of operations: each rank would take them apart at its end, in 40 ms
gc.collect()
gc.freeze()  # a collection in a rank would look through all of this, and copy the pages that all share
