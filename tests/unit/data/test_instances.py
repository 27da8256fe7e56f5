"""Instances and splits over real token files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.optimus.config.schema import ConfigError, parse_split
from megatron.optimus.data.dataset import InstanceSet, Split, check_contents, split_range
from megatron.optimus.data.errors import DataError
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
        pieces = plain.read(i)
        assert [p.tokens.tolist() for p in pieces] == [p.tokens.tolist() for p in longer.read(i)]
        assert all(piece.following == NO_LABEL for piece in pieces)
    loaders = [make_loader(prefixes, instances=instances) for instances in (plain, longer)]
    for a, b in zip(*(loader.batch(40) for loader in loaders), strict=True):
        assert torch.equal(a.tokens_BS, b.tokens_BS)
        differ = a.labels_BS != b.labels_BS
        assert (a.labels_BS[differ] == NO_LABEL).all() and differ.any()
        assert packing or torch.equal(differ, torch.arange(L).expand(2, L) == L - 1)
        for batch, each in ((a, L - 1), (b, L)):
            assert batch.num_labels == (batch.labels_BS != NO_LABEL).sum()
            assert batch.is_same is not packing and (packing or batch.num_labels == 2 * each)
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
