"""Batches that grow: the samples of each position stay those of a constant batch size, at any layout."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from megatron.optimus.config.schema import ConfigError, DataConfig
from megatron.optimus.data.dataset import InstanceSet, Split
from megatron.optimus.data.loader import BatchLoader
from megatron.optimus.data.mixture import Mixture
from megatron.optimus.data.sources import read_sources
from tests.unit.data.test_loader import L, write_tokens

RAMP, FULL = (4, 4, 24), 16
STARTS = [0, 4, 8, 16, 28, 44, 60, 76]  # of batches of 4, 4, 8, 12, then 16 samples
BLEND = """
corpora: {a: {paths: [a], weight: 0.75}, b: {paths: [b], weight: 0.25}}
stages: [{start_tokens: 240, weights: {a: 0.2, b: 0.8}}]
"""


def batches(instances: InstanceSet | Mixture, dp: int, rank: int, size: int, starts: list[int]) -> list[list[int]]:
    """First tokens of this rank's rows in each of the batches."""
    layout = {"data_parallel_size": dp, "data_parallel_rank": rank, "micro_batch_size": size}
    loader = BatchLoader(instances, seq_length=L, global_batch_size=FULL, ramp=RAMP, seed=3, **layout)
    loader.start(starts[0], len(starts) - 1)
    found = []
    for number, at in enumerate(starts[:-1], start=1):
        found.append([int(t) for batch in loader.batch(at) for t in batch.tokens_BS[:, 0]])
        assert [ahead for ahead, _ in loader._ahead] == starts[number:-1][:4], "what comes next, and nothing beyond"
    loader.close()
    return found


@pytest.mark.parametrize("is_blend", [False, True])
def test_samples_do_not_depend_on_the_ramp(tmp_path: Path, is_blend: bool) -> None:
    for number, name in enumerate("ab"):
        write_tokens(tmp_path / name, 10_000 * number, 40 * L + 1)
    (tmp_path / "blend.yaml").write_text(BLEND)
    instances: InstanceSet | Mixture = InstanceSet([str(tmp_path / "a")], L)
    if is_blend:
        sources = read_sources(DataConfig(data_file_list=str(tmp_path / "blend.yaml")))
        instances = Mixture(sources, L, split="1,0,0", part=Split.TRAIN, seed=3)
    layout = {"data_parallel_size": 1, "data_parallel_rank": 0, "micro_batch_size": 8}
    constant = BatchLoader(instances, seq_length=L, global_batch_size=8, seed=3, **layout)
    order = np.concatenate([constant.sample_ids(at) for at in range(0, 80, 8)])
    expected = [int(instances.read(i)[0].tokens[0]) for i in order]
    if is_blend:
        assert sum(t >= 10_000 for t in expected[:30]) < 10 and sum(t >= 10_000 for t in expected[30:]) > 30
    one = batches(instances, 1, 0, 4, STARTS)
    assert [len(step) for step in one] == np.diff(STARTS).tolist()
    for step, (start, stop) in zip(one, itertools.pairwise(STARTS), strict=True):
        assert sorted(step) == sorted(expected[start:stop])
    for dp, size in ((2, 2), (4, 1), (1, 2)):
        ranks = [batches(instances, dp, rank, size, STARTS) for rank in range(dp)]
        for number, step in enumerate(one):
            assert sorted(t for rank in ranks for t in rank[number]) == sorted(step)
    assert batches(instances, 1, 0, 4, STARTS[3:]) == one[3:], "a run that resumes within the ramp"
    with pytest.raises(ConfigError, match="rampup_batch_size=4 4 24 has a stage of 12 samples"):
        batches(instances, 1, 0, 8, STARTS)
