"""What the fork server of tests/helpers.py imports, once for all ranks that are forked from it."""

import gc
import importlib
import importlib.util

MODULES = (
    "deepspeed",
    "torch._dynamo",  # this and the next are imported by the first optimizer and the first pipeline of a rank
    "torch.distributed.pipelining",
    "torch._inductor.compile_fx",  # of DeepSpeed's own optimizers
    "megatron.optimus.pretrain",
    "megatron.optimus.training.trainer",
    "megatron.optimus.training.evaluate",
    *(("pytorch_optimizer",) if importlib.util.find_spec("pytorch_optimizer") else ()),  # it imports transformers
)

for name in MODULES:
    importlib.import_module(name)
gc.collect()
gc.freeze()  # a collection in a rank would look through all of this, and copy the pages that all share
