"""Checkpoints: safetensors shards and a JSON manifest, committed by one rename (docs/checkpoint_format.md)."""

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.manifest import Manifest
from megatron.optimus.checkpoint.slices import TensorSlice, global_ranges
from megatron.optimus.checkpoint.state import load_weights, model_slices, training_slices
from megatron.optimus.checkpoint.store import find_loadable, latest, load, load_manifest, resolve, save, verify

__all__ = [
    "CheckpointError",
    "Manifest",
    "TensorSlice",
    "find_loadable",
    "global_ranges",
    "latest",
    "load",
    "load_manifest",
    "load_weights",
    "model_slices",
    "resolve",
    "save",
    "training_slices",
    "verify",
]
