"""Checkpoints: safetensors shards and a JSON manifest, committed by one rename (docs/checkpoint_format.md)."""

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
