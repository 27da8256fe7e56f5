"""Packing of documents, where they begin according to the index, and what a run then reads."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.optimus.data import index_reader as module
from megatron.optimus.data.dataset import InstanceSet, Split
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.index_reader import document_starts
from megatron.optimus.data.indexed import IndexedDatasetWriter
from megatron.optimus.data.loader import BatchLoader
from megatron.optimus.data.mixture import Mixture
from megatron.optimus.data.packing import WINDOW, num_packed, pack, window_of
from megatron.optimus.data.samples import SampleOptions, make_sample
from megatron.optimus.data.sources import Corpus, Sources
from megatron.optimus.layers import NO_LABEL

L = 32


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=120),
    length=st.integers(1, 40),
    spare=st.integers(0, 3),
)
def test_every_token_is_packed_once(lengths: list[int], length: int, spare: int) -> None:
    bounds = np.cumsum([7, *lengths]).tolist()
    sequences = -(-sum(lengths) // length) + spare
    packed = pack(bounds, sequences, length)
    assert len(packed) == sequences
    ranges = [one for ranges in packed for one in ranges]
    assert all(sum(stop - start for start, stop in ranges) <= length for ranges in packed)
    tokens = sorted(token for start, stop in ranges for token in range(start, stop))
    assert tokens == list(range(7, bounds[-1]))
    assert all(start >= low and stop <= high for start, stop in ranges for low, high in [document_of(bounds, start)])


def document_of(bounds: list[int], token: int) -> tuple[int, int]:
    place = int(np.searchsorted(bounds, token, side="right"))
    return bounds[place - 1], bounds[place]


def test_with_room_to_spare_only_long_documents_are_cut() -> None:
    rng = np.random.default_rng(0)
    lengths, total = [], 63 * 4096
    while total > 0:  # the lengths of web pages, roughly
        lengths.append(min(total, max(1, int(rng.lognormal(6.2, 1.2)))))
        total -= lengths[-1]
    packed = pack(np.cumsum([0, *lengths]).tolist(), 64, 4096)
    needed = sum(-(-size // 4096) for size in lengths)
    assert sum(map(len, packed)) == needed
    assert sum(map(len, pack(np.cumsum([0, *lengths]).tolist(), 63, 4096))) > needed  # without it others are


@settings(deadline=None)
@given(instances=st.integers(0, 1000))
def test_windows_cover_the_instances(instances: int) -> None:
    windows = {window_of(i, instances)[:3] for i in range(num_packed(instances))}
    assert sum(plain for _, plain, _ in windows) == instances
    assert sum(sequences for *_, sequences in windows) == num_packed(instances)
    assert [window_of(i, instances)[3] for i in range(num_packed(instances))] == [
        i % WINDOW for i in range(num_packed(instances))
    ]


def write(prefix: Path, documents: list[list[int]], seed: int = 0) -> str:
    """Documents of random tokens that end with 0, each of sequences of the given lengths."""
    rng = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for lengths in documents:
            tokens = rng.integers(1, 900, sum(lengths))
            tokens[-1:] = 0
            writer.add_document(tokens, lengths)
    return str(prefix)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_starts_of_documents_equal_the_whole_index(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Empty documents and sequences, several sequences a document; pages of two entries, so that searches are long."""
    lengths = st.lists(st.sampled_from([0, 1, 2, 3, 50]), max_size=3)
    documents = data.draw(st.lists(lengths, min_size=1, max_size=60))
    prefix = write(tmp_path_factory.mktemp("starts") / "x", documents)
    ends = np.cumsum([0, *(sum(own) for own in documents)])
    expected = sorted({int(a) for a, b in itertools.pairwise(ends) if a < b})
    total = int(ends[-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PAGE", data.draw(st.sampled_from([1, 2, 512])))
        patch.setattr(module, "_STRETCH", 3)
        for _ in range(5):
            start = data.draw(st.integers(0, total))
            stop = data.draw(st.integers(start, total))
            found = document_starts(f"{prefix}.idx", 2, start, stop).tolist()
            assert found == [token for token in expected if start <= token < stop]


def test_starts_cost_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write(tmp_path / "many", [[int(n)] for n in np.random.default_rng(0).geometric(0.02, 100_000)])
    reads: list[int] = []
    reader = module._reader

    def counted(descriptor: int, position: int, dtype: str = "<i8") -> module.Read:
        read = reader(descriptor, position, dtype)
        return lambda first, count: (reads.append(count), read(first, count))[1]

    monkeypatch.setattr(module, "_reader", counted)
    for start in range(0, 5_000_000, 250_000):
        document_starts(f"{prefix}.idx", 2, start, start + 2000)
    assert len(reads) <= 20 * 10 and sum(reads) <= 20 * 5000  # of 200,000 entries


@settings(max_examples=100, deadline=None)
@given(flips=st.lists(st.tuples(st.integers(34, 34 + 20 * 40 + 7), st.integers(0, 255)), min_size=1, max_size=8))
def test_damaged_index_ends(tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]]) -> None:
    """No crash, hang or foreign error whatever the entries are: starts within the stretch's sequences, or DataError."""
    folder = tmp_path_factory.mktemp("flipped")
    path = Path(write(folder / "x", [[5]] * 40) + ".idx")
    raw = bytearray(path.read_bytes())
    for place, value in flips:
        raw[place] = value
    path.write_bytes(raw)
    try:
        found = document_starts(str(path), 2, 20, 90)
    except DataError:
        return
    assert found.size <= 41 and (np.diff(found) > 0).all()


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder, rng = tmp_path_factory.mktemp("packed"), np.random.default_rng(3)
    shapes = [[[int(n)] for n in rng.geometric(0.15, number)] for number in (1400, 40, 800)]
    return [write(folder / f"f{i}", shape, i) for i, shape in enumerate(shapes)]


def test_packed_instances(prefixes: list[str]) -> None:
    plain, packed = (InstanceSet(prefixes, L, packing=is_packed, extra_token=True) for is_packed in (False, True))
    assert len(plain) < len(packed) <= len(plain) * 1.02 + 1
    tokens: Counter[tuple[str, int]] = Counter()
    cut = whole = labels = 0
    for i in range(len(packed)):
        prefix, ranges = packed.locate(i)
        tokens.update((prefix, token) for start, stop in ranges for token in range(start, stop))
        pieces = packed.read(i)
        sample = make_sample(pieces, L, SampleOptions())
        assert sample.tokens_S.shape == sample.labels_S.shape == (L,)
        for piece in pieces:
            assert (piece.tokens[:-1] != 0).all()  # never two documents
            assert (piece.tokens[-1] == 0) == (piece.following == NO_LABEL)
            cut, whole = cut + (piece.following != NO_LABEL), whole + (piece.following == NO_LABEL)
        ends = np.cumsum([piece.tokens.size for piece in pieces]).tolist()
        assert sample.starts == [end for end in ends if end < L]
        labels += int((sample.labels_S != NO_LABEL).sum())
    assert set(tokens.values()) == {1} and len(tokens) == len(plain) * L
    plain_cuts = sum(piece.following != 0 for i in range(len(plain)) for piece in plain.read(i))
    assert 6 * cut < plain_cuts and whole > 1000
    # every token but the first of a document is a label once, and the first of what a cut left is one too
    assert labels == len(tokens) - whole


def test_an_index_that_disappears_under_the_run(tmp_path: Path) -> None:
    data = InstanceSet([write(tmp_path / "f", [[9]] * 3000)], L, packing=True)
    data.read(0)
    (tmp_path / "f.idx").unlink()
    with pytest.raises(DataError, match=r"f\.idx: cannot be read any more \(No such file"):
        data.read(200)


def test_a_blend_of_packed_corpora(prefixes: list[str]) -> None:
    sources = Sources((Corpus("a", (prefixes[0],)), Corpus("b", (prefixes[2],))))
    mixed = Mixture(sources, L, split="1", part=Split.TRAIN, seed=1, packing=True)
    assert len(mixed) == sum(len(InstanceSet([corpus.prefixes[0]], L, packing=True)) for corpus in sources.corpora)
    drawn = mixed.ids_at(0, len(mixed)).tolist()
    assert sorted(drawn) == list(range(len(mixed)))
    for position, i in enumerate(drawn[:40]):
        prefix, ranges = mixed.locate(i)
        assert mixed.sample(position).ranges == ranges and mixed.sample(position).prefix == prefix
        assert [piece.tokens.size for piece in mixed.read(i)] == [stop - start for start, stop in ranges]


def test_packing_keeps_splits_apart(prefixes: list[str]) -> None:
    seen = []
    for part in (Split.TRAIN, Split.VALID):
        data = InstanceSet(prefixes, L, split="3,1,0", part=part, packing=True)
        own = [data.locate(i) for i in range(len(data))]
        seen.append({(prefix, token) for prefix, ranges in own for a, b in ranges for token in range(a, b + 1)})
    assert not seen[0] & seen[1] and all(seen)


def test_packed_batches_do_not_depend_on_the_layout_and_resume(prefixes: list[str]) -> None:
    options = SampleOptions(reset_attention_mask=True, reset_position_ids=True)

    def rows(dp: int, mbs: int, consumed: int) -> list[tuple[torch.Tensor, ...]]:
        found = {}
        for rank in range(dp):
            loader = BatchLoader(
                InstanceSet(prefixes, L, packing=True),
                seq_length=L,
                global_batch_size=8,
                micro_batch_size=mbs,
                data_parallel_rank=rank,
                data_parallel_size=dp,
                seed=5,
                options=options,
            )
            for m, batch in enumerate(loader.batch(consumed)):
                assert batch.num_labels == int((batch.labels_BS != NO_LABEL).sum())
                for r in range(mbs):
                    found[(m * dp + rank) * mbs + r] = (batch.tokens_BS[r], batch.labels_BS[r], batch.positions_BS[r])
            loader.close()
        return [found[i] for i in range(8)]

    for consumed in (0, 80):
        expected = rows(1, 8, consumed)
        for dp, mbs in ((2, 2), (4, 1), (1, 1)):
            for a, b in zip(rows(dp, mbs, consumed), expected, strict=True):
                assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
