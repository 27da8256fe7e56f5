"""Token files of counting tokens, and loaders over them, shared by the tests of data."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron.optimus.data.dataset import InstanceSet
from megatron.optimus.data.indexed import IndexedDatasetWriter
from megatron.optimus.data.loader import BatchLoader
from megatron.optimus.data.mixture import Mixture

L = 8


def write_tokens(prefix: Path, first: int, count: int) -> str:
    """One file of ``count`` tokens ``first, first + 1, ...`` in documents of uneven length."""
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        tokens = np.arange(first, first + count)
        for start in range(0, count, 7):
            writer.add_document(tokens[start : start + 7])
    return str(prefix)


def window_of(instances: InstanceSet | Mixture, i: int) -> np.ndarray:
    """The tokens of a plain instance and the one after them."""
    [piece] = instances.read(i)
    return np.append(piece.tokens, piece.following)


def make_loader(prefixes: list[str], dp: int = 1, rank: int = 0, mbs: int = 2, gbs: int = 8, **options) -> BatchLoader:
    options = {"seed": 1234, "data_parallel_rank": rank, "data_parallel_size": dp, "seq_length": L} | options
    instances = options.pop("instances", None) or InstanceSet(prefixes, L)
    return BatchLoader(instances, global_batch_size=gbs, micro_batch_size=mbs, **options)
