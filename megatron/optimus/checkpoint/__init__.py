"""Checkpoints: safetensors files and a JSON manifest, committed by one rename (docs/checkpoint_format.md).

slices.py      what a range of a tensor is: read it first
store.py       save, find and load
state.py       a model and its optimizer as slices
manifest.py    what a checkpoint holds; shards.py: its safetensors files; untrusted.py: reading small files
saver.py       saving beside training: save_plan.py (who writes what), snapshot.py (the copy in host memory),
               writer.py (one rank's writing), commit.py (names, rename, deletion)
reader.py      loading at any layout, every byte once
verify.py      checking and comparing without loading
run_lock.py    one job at a time may write
memory.py      checkpoints in host memory, with a copy on another node; memory_state.py: one rank's file
mirror.py      upload of complete checkpoints to an object store, and download

There is no interface for storage: a folder is a local or shared POSIX directory. Another back end replaces at least
``writer.SharedFile`` (writes), ``shards.ShardFile`` (reads), untrusted.py (the manifest), commit.py (listing, rename,
deletion) and run_lock.py. Must not change without a new ``manifest.FORMAT_VERSION``: the manifest, the pieces' hashes.
"""

from megatron.optimus.checkpoint.errors import CheckpointError, DamagedError
from megatron.optimus.checkpoint.manifest import Manifest
from megatron.optimus.checkpoint.saver import Saved, Saver
from megatron.optimus.checkpoint.slices import TensorSlice, global_ranges
from megatron.optimus.checkpoint.state import model_slices, training_slices, weight_slices
from megatron.optimus.checkpoint.store import (
    latest,
    load,
    load_manifest,
    load_newest,
    load_together,
    resolve,
    save,
)
from megatron.optimus.checkpoint.verify import verify

__all__ = [
    "CheckpointError",
    "DamagedError",
    "Manifest",
    "Saved",
    "Saver",
    "TensorSlice",
    "global_ranges",
    "latest",
    "load",
    "load_manifest",
    "load_newest",
    "load_together",
    "model_slices",
    "resolve",
    "save",
    "training_slices",
    "verify",
    "weight_slices",
]
