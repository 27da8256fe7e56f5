"""Instances, splits and packing over real token files."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.optimus.config.schema import ConfigError, parse_split
from megatron.optimus.data.dataset import (
    WINDOW,
    InstanceSet,
    SampleOptions,
    Split,
    check_contents,
    find_packing_window,
    make_sample,
    num_packed_sequences,
    pack_documents,
    split_range,
)
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.indexed import IndexedDatasetWriter
from megatron.optimus.data.loader import BatchLoader
from megatron.optimus.data.mixture import Mixture
from megatron.optimus.data.sources import Corpus, Sources
from megatron.optimus.layers import NO_LABEL

from .cases import L, make_loader, window_of, write_tokens


def test_instances_are_windows_of_each_file(prefixes: list[str]) -> None:
    instances = InstanceSet(prefixes, L, extra_token=True)
    assert len(instances) == 10 + 0 + 24 + 17  # 25*L tokens lack the last label of a 25th
    for i in range(len(instances)):
        window = window_of(instances, i)
        assert window.dtype == np.int64 and window.shape == (L + 1,)
        assert (np.diff(window) == 1).all()  # never across files
        prefix, [(start, stop)] = instances.locate(i)
        assert window[0] == 10_000 * prefixes.index(prefix) + start and stop == start + L
    assert [window_of(instances, i)[0] for i in (0, 1, 9, 10, 34)] == [0, L, 9 * L, 20_000, 30_000]
    for i in (-1, len(instances)):
        with pytest.raises(IndexError):
            instances.read(i)


@pytest.mark.parametrize("packing", [False, True])
def test_the_extra_token_moves_no_sample(prefixes: list[str], packing: bool) -> None:
    """Also of a file whose last instance would be whole without it: a run may switch at any step."""
    plain, longer = (InstanceSet(prefixes, L, packing=packing, extra_token=extra) for extra in (False, True))
    assert len(plain) == len(longer)
    for i in range(len(plain)):
        assert plain.locate(i) == longer.locate(i)
        spans = plain.read(i)
        assert [p.tokens.tolist() for p in spans] == [p.tokens.tolist() for p in longer.read(i)]
        assert all(span.following == NO_LABEL for span in spans)
    loaders = [make_loader(prefixes, instances=instances) for instances in (plain, longer)]
    for a, b in zip(*(loader.batch(40) for loader in loaders), strict=True):
        assert torch.equal(a.tokens_BS, b.tokens_BS)
        differ = a.labels_BS != b.labels_BS
        assert (a.labels_BS[differ] == NO_LABEL).all() and differ.any()
        assert packing or torch.equal(differ, torch.arange(L).expand(2, L) == L - 1)
        for batch, each in ((a, L - 1), (b, L)):
            assert batch.num_labels == (batch.labels_BS != NO_LABEL).sum()
            assert batch.has_equal_label_counts is not packing and (packing or batch.num_labels == 2 * each)
    for loader in loaders:
        loader.close()


def test_a_plain_sample_is_read_without_a_byte_beyond_it(prefixes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, at: (read.append(count), pread(fd, count, at))[1])
    for extra, size in ((False, 4 * L), (True, 4 * (L + 1))):
        instances = InstanceSet(prefixes, L, extra_token=extra)
        read.clear()
        instances.read(3)
        assert read == [size]
    with pytest.raises(ConfigError, match=r"seq_length=1 leaves nothing to predict; .*--add-extra-token"):
        InstanceSet(prefixes, 1)
    assert InstanceSet(prefixes, 1, extra_token=True).labels_per_sample == 1


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.integers(0, 10**13),
    split=st.tuples(*[st.decimals(0, 1000, places=2)] * 3).filter(lambda shares: sum(shares) > 0),
)
def test_splits_share_out_every_token_once(tokens: int, split: tuple) -> None:
    text = ",".join(map(str, split))
    ranges = [split_range(tokens, text, part) for part in Split]
    assert ranges[0][0] == 0 and ranges[2][1] == tokens
    assert ranges[0][1] == ranges[1][0] and ranges[1][1] == ranges[2][0]
    for (start, stop), share in zip(ranges, split, strict=True):
        assert abs((stop - start) - tokens * float(share) / float(sum(split))) <= 1 + tokens * 1e-12


def test_splits_have_no_token_in_common(prefixes: list[str]) -> None:
    seen: dict[Split, set[int]] = {}
    for part in Split:
        instances = InstanceSet(prefixes, L, split="60,30,10", part=part, extra_token=True)
        seen[part] = {int(token) for i in range(len(instances)) for token in window_of(instances, i)}
        assert len(seen[part]) > L
    assert not seen[Split.TRAIN] & seen[Split.VALID]
    assert not seen[Split.VALID] & seen[Split.TEST]
    assert not seen[Split.TRAIN] & seen[Split.TEST]


def test_splits_that_fit_exactly_touch_but_do_not_overlap(tmp_path: Path) -> None:
    sizes = [6 * L + 1, 3 * L + 1, L + 1]
    prefix = write_tokens(tmp_path / "exact", 0, sum(sizes))
    tokens = []
    for part, size in zip(Split, sizes, strict=True):
        instances = InstanceSet([prefix], L, split=",".join(map(str, sizes)), part=part, extra_token=True)
        windows = [window_of(instances, i) for i in range(len(instances))]
        assert len(windows) == size // L
        tokens += [windows[0][0], *np.concatenate([window[1:] for window in windows])]
    assert tokens == list(range(sum(sizes)))


@pytest.mark.parametrize("text", ["", "1,2,3,4", "a,b", "0,0,0", "-1,2,3", "nan,1,1", "1/0", "1;2", "inf,1,1"])
def test_impossible_split(text: str) -> None:
    with pytest.raises(ConfigError, match="split="):
        parse_split(text)


def test_short_splits() -> None:
    assert parse_split("9, 1") == parse_split("0.9,0.1,0")
    assert [float(share) for share in parse_split("969,30,1")] == [0.969, 0.03, 0.001]


def test_too_little_data(prefixes: list[str], tmp_path: Path) -> None:
    InstanceSet(prefixes, L, split="969,30,1")  # the empty test split is not asked for
    with pytest.raises(DataError, match=r"test split .* of 425 tokens in 4 files .*seq_length\+1=9"):
        InstanceSet(prefixes, L, split="969,30,1", part=Split.TEST)
    with pytest.raises(ConfigError, match="gives the valid split no share"):
        InstanceSet(prefixes, L, split="1,0,0", part=Split.VALID)
    exact = write_tokens(tmp_path / "exact", 0, L)
    with pytest.raises(DataError, match="too little data"):
        InstanceSet([exact], L)
    assert len(InstanceSet([write_tokens(tmp_path / "more", 0, L + 1)], L)) == 1
    with pytest.raises(ConfigError, match="data_path"):
        InstanceSet([], L)


def test_vocabulary_check_over_files(prefixes: list[str]) -> None:
    check_contents(prefixes, 40_000)
    with pytest.raises(DataError, match=r"f3\.bin: token 0 has id 30000"):
        check_contents(prefixes, 30_000)


PACKED_LENGTH = 32


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=120),
    length=st.integers(1, 40),
    spare=st.integers(0, 3),
)
def test_every_token_is_packed_once(lengths: list[int], length: int, spare: int) -> None:
    bounds = np.cumsum([7, *lengths]).tolist()
    sequences = -(-sum(lengths) // length) + spare
    packed = pack_documents(bounds, sequences, length)
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
    packed = pack_documents(np.cumsum([0, *lengths]).tolist(), 64, 4096)
    needed = sum(-(-size // 4096) for size in lengths)
    assert sum(map(len, packed)) == needed
    assert sum(map(len, pack_documents(np.cumsum([0, *lengths]).tolist(), 63, 4096))) > needed  # without it others are


@settings(deadline=None)
@given(instances=st.integers(0, 1000))
def test_windows_cover_the_instances(instances: int) -> None:
    windows = {find_packing_window(i, instances)[:3] for i in range(num_packed_sequences(instances))}
    assert sum(plain for _, plain, _ in windows) == instances
    assert sum(sequences for *_, sequences in windows) == num_packed_sequences(instances)
    assert [find_packing_window(i, instances)[3] for i in range(num_packed_sequences(instances))] == [
        i % WINDOW for i in range(num_packed_sequences(instances))
    ]


def write_documents(prefix: Path, documents: list[list[int]], seed: int = 0) -> str:
    """Documents of random tokens that end with 0, each of sequences of the given lengths."""
    rng = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for lengths in documents:
            tokens = rng.integers(1, 900, sum(lengths))
            tokens[-1:] = 0
            writer.add_document(tokens, lengths)
    return str(prefix)


@pytest.fixture(scope="module")
def packed_prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder, rng = tmp_path_factory.mktemp("packed"), np.random.default_rng(3)
    shapes = [[[int(n)] for n in rng.geometric(0.15, number)] for number in (1400, 40, 800)]
    return [write_documents(folder / f"f{i}", shape, i) for i, shape in enumerate(shapes)]


def test_packed_instances(packed_prefixes: list[str]) -> None:
    plain, packed = (
        InstanceSet(packed_prefixes, PACKED_LENGTH, packing=is_packed, extra_token=True) for is_packed in (False, True)
    )
    assert len(plain) < len(packed) <= len(plain) * 1.02 + 1
    tokens: Counter[tuple[str, int]] = Counter()
    cut = whole = labels = 0
    for i in range(len(packed)):
        prefix, ranges = packed.locate(i)
        tokens.update((prefix, token) for start, stop in ranges for token in range(start, stop))
        spans = packed.read(i)
        sample = make_sample(spans, PACKED_LENGTH, SampleOptions())
        assert sample.tokens_S.shape == sample.labels_S.shape == (PACKED_LENGTH,)
        for span in spans:
            assert (span.tokens[:-1] != 0).all()  # never two documents
            assert (span.tokens[-1] == 0) == (span.following == NO_LABEL)
            cut, whole = cut + (span.following != NO_LABEL), whole + (span.following == NO_LABEL)
        ends = np.cumsum([span.tokens.size for span in spans]).tolist()
        assert sample.starts == [end for end in ends if end < PACKED_LENGTH]
        labels += int((sample.labels_S != NO_LABEL).sum())
    assert set(tokens.values()) == {1} and len(tokens) == len(plain) * PACKED_LENGTH
    plain_cuts = sum(span.following != 0 for i in range(len(plain)) for span in plain.read(i))
    assert 6 * cut < plain_cuts and whole > 1000
    # every token but the first of a document is a label once, and the first of what a cut left is one too
    assert labels == len(tokens) - whole


def test_an_index_that_disappears_under_the_run(tmp_path: Path) -> None:
    data = InstanceSet([write_documents(tmp_path / "f", [[9]] * 3000)], PACKED_LENGTH, packing=True)
    data.read(0)
    (tmp_path / "f.idx").unlink()
    with pytest.raises(DataError, match=r"f\.idx: cannot be read any more \(No such file"):
        data.read(200)


def test_a_blend_of_packed_corpora(packed_prefixes: list[str]) -> None:
    sources = Sources((Corpus("a", (packed_prefixes[0],)), Corpus("b", (packed_prefixes[2],))))
    mixed = Mixture(sources, PACKED_LENGTH, split="1", part=Split.TRAIN, seed=1, packing=True)
    assert len(mixed) == sum(
        len(InstanceSet([corpus.prefixes[0]], PACKED_LENGTH, packing=True)) for corpus in sources.corpora
    )
    drawn = mixed.ids_at(0, len(mixed)).tolist()
    assert sorted(drawn) == list(range(len(mixed)))
    for position, i in enumerate(drawn[:40]):
        prefix, ranges = mixed.locate(i)
        assert mixed.sample(position).ranges == ranges and mixed.sample(position).prefix == prefix
        assert [span.tokens.size for span in mixed.read(i)] == [stop - start for start, stop in ranges]


def test_packing_keeps_splits_apart(packed_prefixes: list[str]) -> None:
    seen = []
    for part in (Split.TRAIN, Split.VALID):
        data = InstanceSet(packed_prefixes, PACKED_LENGTH, split="3,1,0", part=part, packing=True)
        own = [data.locate(i) for i in range(len(data))]
        seen.append({(prefix, token) for prefix, ranges in own for a, b in ranges for token in range(a, b + 1)})
    assert not seen[0] & seen[1] and all(seen)


def test_packed_batches_do_not_depend_on_the_layout_and_resume(packed_prefixes: list[str]) -> None:
    options = SampleOptions(reset_attention_mask=True, reset_position_ids=True)

    def rows(dp: int, mbs: int, consumed: int) -> list[tuple[torch.Tensor, ...]]:
        found = {}
        for rank in range(dp):
            loader = BatchLoader(
                InstanceSet(packed_prefixes, PACKED_LENGTH, packing=True),
                seq_length=PACKED_LENGTH,
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
