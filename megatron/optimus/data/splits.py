"""Splits by document hash: where in a shuffled .bin file training, validation and test begin.

``optimus preprocess --split-by hash`` gives each document one of ``NUM_BUCKETS`` buckets by a hash of its text, and
writes the documents bucket after bucket, in random order inside each. A split then is a range of buckets, hence a range
of the file's tokens that begins and ends with documents: reading it costs nothing more than a split by position. Equal
documents have the same bucket, in this file and in every other that was made with the same seed, so no two splits share
a document. Any shares can be asked for, in multiples of 1 / ``NUM_BUCKETS``.

The first token of each bucket is in ``<prefix>.splits.json``, beside a pair that is an ordinary one for other programs.
Without that file, or with ``split_by`` "position", a split is a range of the tokens as they lie (dataset.py).
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.optimus.config.schema import parse_split
from megatron.optimus.data.errors import DataError

NUM_BUCKETS = 1000
_FORMAT = 1
_HASH = "xxh3-64 of the text"


class HashSplits(NamedTuple):
    """Where the splits of one pair begin."""

    seed: int  # of the hash; -1: the pair has no splits by hash
    valid_start: int  # first token of the validation split
    test_start: int


NO_HASH_SPLITS = HashSplits(-1, -1, -1)


def splits_path(prefix: str | os.PathLike[str]) -> Path:
    """Path of the file that says where the buckets of a pair begin."""
    return Path(f"{os.fspath(prefix)}.splits.json")


def bucket_of(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Returns the bucket of each hash, in [0, NUM_BUCKETS); it ascends with the hash."""
    return ((hashes >> np.uint64(32)) * np.uint64(NUM_BUCKETS) >> np.uint64(32)).astype(np.int64)


def first_hashes() -> npt.NDArray[np.uint64]:
    """Returns the smallest hash of each bucket but the first: uint64 [NUM_BUCKETS - 1]."""
    return np.array([-(-(b << 32) // NUM_BUCKETS) << 32 for b in range(1, NUM_BUCKETS)], dtype=np.uint64)


def bucket_bounds(split: str) -> tuple[int, int]:
    """Returns the first bucket of the validation and of the test split, for shares as ``parse_split`` takes them."""
    train, valid, _ = parse_split(split)
    return round(train * NUM_BUCKETS), round((train + valid) * NUM_BUCKETS)


def to_json(seed: int, bucket_starts: npt.NDArray[np.int64]) -> str:
    """Returns the content of a pair's split file.

    Args:
        seed: of the hash
        bucket_starts: first token of each bucket, and at the end the tokens of the file: int64 [NUM_BUCKETS + 1]
    """
    content = {"format": _FORMAT, "split_by": "hash", "hash": _HASH, "seed": seed}
    return json.dumps({**content, "bucket_starts": bucket_starts.tolist()}) + "\n"


def read_splits(prefix: str, tokens: int, split: str) -> HashSplits:
    """Reads where the splits of a pair begin; ``NO_HASH_SPLITS`` where it has no split file.

    Args:
        prefix: path of the pair, without suffix
        tokens: tokens of its .bin file
        split: shares of training, validation and test, as ``parse_split`` takes them

    Raises:
        DataError: the split file cannot be read, or is of other tokens.
    """
    path = splits_path(prefix)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        starts, seed = found["bucket_starts"], found["seed"]
        is_known = (found["format"], found["hash"], len(starts)) == (_FORMAT, _HASH, NUM_BUCKETS + 1)
        is_known = is_known and all(type(number) is int for number in (seed, *starts)) and 0 <= seed < 1 << 63
        is_known = is_known and starts[0] == 0 and all(a <= b for a, b in itertools.pairwise(starts))
    except FileNotFoundError:
        return NO_HASH_SPLITS
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError):
        is_known = False
    if not is_known:
        raise DataError(f"{path}: is damaged or of another version; preprocess the corpus again, or remove the file")
    if starts[-1] != tokens:
        raise DataError(
            f"{path}: describes {starts[-1]} tokens, the .bin file has {tokens}: it belongs to another pair; "
            "preprocess the corpus again, or remove the file"
        )
    valid, test = bucket_bounds(split)
    return HashSplits(seed, starts[valid], starts[test])


def hash_range(splits: HashSplits, tokens: int, part: int) -> tuple[int, int]:
    """Returns the tokens [start, stop) of a split: 0 is training, 1 validation, 2 test."""
    bounds = 0, splits.valid_start, splits.test_start, tokens
    return bounds[part], bounds[part + 1]
