"""Splits by document hash: buckets of hashes, and instances of the ranges that they give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.optimus.config.schema import SplitBy
from megatron.optimus.data.dataset import InstanceSet, Split
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.mixture import Mixture
from megatron.optimus.data.sources import Corpus, Sources
from megatron.optimus.data.splits import NUM_BUCKETS, bucket_bounds, bucket_of, first_hashes, splits_path, to_json
from tests.unit.data.cases import L, window_of, write_tokens


def add_splits(prefix: str, tokens: int, valid: int, test: int, seed: int = 1234) -> None:
    """Gives a pair a split file for the shares 969,30,1."""
    starts = np.zeros(NUM_BUCKETS + 1, dtype=np.int64)
    starts[969:], starts[999:], starts[1000:] = valid, test, tokens
    splits_path(prefix).write_text(to_json(seed, starts))


def test_buckets_are_equal_ranges_of_hashes() -> None:
    firsts = first_hashes()
    assert bucket_of(firsts).tolist() == list(range(1, NUM_BUCKETS))
    assert bucket_of(firsts - np.uint64(1)).tolist() == list(range(NUM_BUCKETS - 1))
    assert bucket_of(np.array([0, 2**64 - 1], dtype=np.uint64)).tolist() == [0, NUM_BUCKETS - 1]
    assert np.ptp(np.diff(firsts.astype(np.float64))) < 2**33  # of 1.8e16


def test_shares_in_buckets() -> None:
    assert bucket_bounds("969,30,1") == (969, 999) and bucket_bounds("1") == (1000, 1000)
    assert bucket_bounds("1,1,1") == (333, 667) and bucket_bounds("0,1,0") == (0, 1000)


def test_instances_of_a_split(tmp_path: Path) -> None:
    prefixes = [write_tokens(tmp_path / "a", 0, 1000), write_tokens(tmp_path / "b", 5000, 100)]
    add_splits(prefixes[0], 1000, 700, 903)
    add_splits(prefixes[1], 100, 49, 49)
    options = {"split": "969,30,1", "split_by": SplitBy.HASH}
    train, valid, test = (InstanceSet(prefixes, L, part=part, **options) for part in Split)
    assert [len(part) for part in (train, valid, test)] == [87 + 6, 25, 12 + 6]
    assert window_of(valid, 0)[0] == 700 and window_of(test, 0)[0] == 903 and window_of(test, 12)[0] == 5049
    seen = [set(np.concatenate([window_of(part, i)[:-1] for i in range(len(part))])) for part in (train, valid, test)]
    assert not (seen[0] & seen[1] or seen[1] & seen[2] or seen[0] & seen[2])
    mixture = Mixture(Sources(tuple(Corpus(p, (p,)) for p in prefixes)), L, part=Split.TRAIN, seed=1, **options)
    assert [len(corpus) for corpus in mixture.corpora] == [87, 6]
    by_position = InstanceSet(prefixes, L, part=Split.VALID, split="969,30,1")
    assert window_of(by_position, 0)[0] == 969
    splits_path(prefixes[1]).unlink()
    with pytest.raises(DataError, match=r"b\.splits\.json: no such file, which a split by hash needs"):
        InstanceSet(prefixes, L, part=Split.VALID, **options)
