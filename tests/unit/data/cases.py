"""Token files of counting tokens, lists of corpora, and loaders over them, shared by the tests of data."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron.optimus.config.schema import DataConfig
from megatron.optimus.data.dataset import InstanceSet
from megatron.optimus.data.indexed import IndexedDatasetWriter
from megatron.optimus.data.loader import BatchLoader
from megatron.optimus.data.mixture import Mixture
from megatron.optimus.data.sources import Sources, read_sources

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
    [span] = instances.read(i)
    return np.append(span.tokens, span.following)


def make_loader(prefixes: list[str], dp: int = 1, rank: int = 0, mbs: int = 2, gbs: int = 8, **options) -> BatchLoader:
    options = {"seed": 1234, "data_parallel_rank": rank, "data_parallel_size": dp, "seq_length": L} | options
    instances = options.pop("instances", None) or InstanceSet(prefixes, L)
    return BatchLoader(instances, global_batch_size=gbs, micro_batch_size=mbs, **options)


def blend(folder: Path, text: str, name: str = "blend.yaml") -> Sources:
    """The sources that a list of corpora of this text names."""
    path = folder / name
    path.write_text(text)
    return read_sources(DataConfig(data_file_list=str(path)))


YAML = """
corpora:
  web: {paths: ["web/*"], weight: 0.6}
  code: {paths: [code/part-0.bin, code/part-1], weight: 0.3}
  wiki: {paths: [wiki/part-0], weight: 0.1}
"""
STAGES = """
stages:
  - {start_samples: 100, weights: {web: 0.2, code: 0.3, wiki: 0.5}}
  - {start_tokens: 1599, weights: {web: 1, code: 0, wiki: 1}}
"""
