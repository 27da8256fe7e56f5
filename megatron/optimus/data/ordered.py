"""Finds token files whose documents are ordered, so that a validation split taken from the end is unlike the rest.

The test compares documents of one end of a file with documents from anywhere in it. Each document gives the shares that
hashed token ids have among its first tokens; the statistic is the squared distance between the two groups' means. Its
distribution in a shuffled file needs no model: documents are exchangeable there, so the same documents dealt into two
groups at random give draws of it. A file is ordered where the distance is far above all of many draws.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron.optimus.data.errors import DataError
from megatron.optimus.data.files import TokenFiles
from megatron.optimus.data.index_reader import IndexReader, idx_path
from megatron.optimus.data.order import mix_many

_GROUP = 64  # documents of a group
_TOKENS = 256  # of each document
_BINS = 256
_END = 32  # an end is this fraction of the documents
_FEWEST = 8 * _GROUP  # documents of a file below which it is not judged
_DRAWS = 199
_FACTOR = 1.5  # times the largest draw; the farthest of 1,800 trials over shuffled files was 1.15


def how_ordered(prefix: str, seed: int = 0) -> float:
    """Measures how unlike its other documents those at the ends of a file are. Reads about 200 documents' beginnings.

    Args:
        prefix: path of the pair, without suffix
        seed: of the documents that are looked at

    Returns:
        The larger of the two ends' distances from documents anywhere, in units of the largest of many random draws:
        about 1 or less in a shuffled file; 0 where there are too few documents to say.

    Raises:
        DataError: the pair cannot be read.
    """
    generator = np.random.default_rng(seed)
    files = TokenFiles([prefix])
    try:
        with IndexReader(str(idx_path(prefix))) as index:
            count = index.header.documents - 1
            if count < _FEWEST:
                return 0.0
            end = max(_GROUP, count // _END)
            spread = np.arange(_GROUP) * end // _GROUP
            anywhere = np.sort(generator.choice(count, _GROUP, replace=False))
            groups = [anywhere, spread, count - 1 - spread]
            shares = [_shares(files, index, documents.tolist()) for documents in groups]
    except OSError as error:
        raise DataError(f"{prefix}: cannot be read: {error.strerror}") from error
    finally:
        files.close()
    return max(_distance(shares[0], other, generator) for other in shares[1:])


def is_ordered(prefix: str) -> bool:
    """Whether the documents at an end of a file are certainly unlike the others. Raises DataError."""
    return how_ordered(prefix) > _FACTOR


def _shares(files: TokenFiles, index: IndexReader, documents: list[int]) -> npt.NDArray[np.float64]:
    """Share of each bin of token ids in the beginning of each document: [documents, _BINS]."""
    rows = []
    for document in documents:
        first, last = index.document_bounds(document, 2).tolist()
        if first == last:  # empty
            continue
        start = int(index.offsets(first, 1)[0]) // index.dtype.itemsize
        size = min(_TOKENS, int(index.lengths(first, last - first).sum(dtype=np.int64)))
        if size:
            ids = files.read(0, start, size).astype(np.uint64)
            rows.append(np.bincount((mix_many(ids) % np.uint64(_BINS)).astype(np.int64), minlength=_BINS) / size)
    return np.sqrt(np.array(rows).reshape(-1, _BINS))  # square roots: rare tokens count too


def _distance(first: npt.NDArray[np.float64], second: npt.NDArray[np.float64], generator: np.random.Generator) -> float:
    """Squared distance of the groups' means over the largest one of random groups; 0 without enough documents."""
    if min(len(first), len(second)) < _GROUP // 2:
        return 0.0
    pooled = np.concatenate([first, second])

    def distance(order: npt.NDArray[np.int64]) -> float:
        difference = pooled[order[: len(first)]].mean(axis=0) - pooled[order[len(first) :]].mean(axis=0)
        return float(difference @ difference)

    draws = [distance(generator.permutation(len(pooled))) for _ in range(_DRAWS)]
    return distance(np.arange(len(pooled))) / max(*draws, 1e-12)
