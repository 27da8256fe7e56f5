"""Batches over real token files: labels, layouts, ramps, epochs, resuming, reading ahead, validation, devices."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.optimus.config.schema import ConfigError, DataConfig
from megatron.optimus.data.dataset import InstanceSet, SampleOptions, Split, TokenSpan, check_contents
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.index_reader import document_starts
from megatron.optimus.data.indexed import IndexedDatasetWriter
from megatron.optimus.data.loader import Batch, BatchLoader, position_after_change
from megatron.optimus.data.mixture import Mixture
from megatron.optimus.data.sources import read_sources
from megatron.optimus.layers import NO_LABEL
from megatron.optimus.layers.documents import Documents

from .cases import L, make_loader, window_of, write_tokens


def test_labels_are_the_next_tokens(prefixes: list[str]) -> None:
    loader = make_loader(prefixes)
    batches = loader.batch(0)
    assert len(batches) == 4
    for batch in batches:
        assert batch.tokens_BS.shape == batch.labels_BS.shape == (2, L)
        assert batch.tokens_BS.dtype == batch.labels_BS.dtype == torch.int64
        assert batch.tokens_BS.is_contiguous() and batch.labels_BS.is_contiguous()
        assert torch.equal(batch.labels_BS[:, :-1], batch.tokens_BS[:, 1:])
        assert torch.equal(batch.tokens_BS[:, 1:], batch.tokens_BS[:, :-1] + 1)
        assert (batch.labels_BS[:, -1] == NO_LABEL).all()
    loader.close()
    loader = make_loader(prefixes, instances=InstanceSet(prefixes, L, extra_token=True))
    assert all(torch.equal(batch.labels_BS, batch.tokens_BS + 1) for batch in loader.batch(0))
    loader.close()


def firsts(prefixes: list[str], step: int, dp: int, mbs: int, gbs: int = 8) -> list[int]:
    """First token of each sample of a step, by position, put together from all ranks."""
    ranks = [make_loader(prefixes, dp, rank, mbs, gbs).batch(step * gbs) for rank in range(dp)]
    rows = [ranks[rank][m].tokens_BS[:, 0] for m in range(len(ranks[0])) for rank in range(dp)]
    return torch.cat(rows).tolist()


def test_samples_do_not_depend_on_the_layout(prefixes: list[str]) -> None:
    for step in (0, 5, 6, 7):  # 51 instances: step 6 crosses into the second epoch
        expected = firsts(prefixes, step, dp=1, mbs=8)
        assert len(set(expected)) >= 7
        for dp in (1, 2, 4):
            for mbs in (1, 2):
                assert firsts(prefixes, step, dp, mbs) == expected
    assert firsts(prefixes, 1, dp=2, mbs=2, gbs=16)[:8] == firsts(prefixes, 2, dp=1, mbs=4)


def test_one_epoch_gives_each_instance_once(prefixes: list[str]) -> None:
    loader = make_loader(prefixes, mbs=1, gbs=17)
    tokens = [b.tokens_BS[0, 0].item() for step in range(3) for b in loader.batch(step * 17)]
    assert len(set(tokens)) == len(tokens) == 51
    assert tokens != sorted(tokens)


@settings(max_examples=20, deadline=None)
@given(start=st.integers(0, 500), seed=st.integers(0, 2**32))
def test_resume_anywhere_continues_at_the_next_sample(fixed_prefixes: list[str], start: int, seed: int) -> None:
    def take(loader: BatchLoader, consumed: int, steps: int) -> list[torch.Tensor]:
        return [b.tokens_BS for s in range(steps) for b in loader.batch(consumed + 8 * s)]

    unbroken = take(make_loader(fixed_prefixes, seed=seed), start, 5)
    resumed = take(make_loader(fixed_prefixes, seed=seed), start + 16, 3)
    assert torch.equal(torch.cat(unbroken[8:]), torch.cat(resumed))


@pytest.fixture(scope="session")
def fixed_prefixes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    folder = tmp_path_factory.mktemp("tokens")
    yield [write_tokens(folder / f"f{i}", 10_000 * i, 13 * L + i) for i in range(2)]


def test_read_ahead_changes_nothing_and_forwards_errors(prefixes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [make_loader(prefixes).batch(8 * step) for step in (0, 1, 2, 9, 3)]  # each with a fresh loader
    loader = make_loader(prefixes)
    for expected, step in zip(plain, (0, 1, 2, 9, 3), strict=True):
        for a, b in zip(expected, loader.batch(8 * step), strict=True):
            assert torch.equal(a.tokens_BS, b.tokens_BS)

    read = InstanceSet.read
    bad = int(loader.sample_ids(80)[3])

    def fail_once_asked(self: InstanceSet, i: int) -> list[TokenSpan]:
        if i == bad:
            raise DataError("the disk is gone")
        return read(self, i)

    monkeypatch.setattr(InstanceSet, "read", fail_once_asked)
    loader.batch(72)  # its read-ahead fails in the thread, later
    with pytest.raises(DataError, match="the disk is gone"):
        loader.batch(80)
    monkeypatch.undo()
    assert len(loader.batch(80)) == 4
    loader.close()


def test_next_batches_are_read_while_the_step_runs(prefixes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    read = InstanceSet.read
    calls: list[int] = []
    monkeypatch.setattr(InstanceSet, "read", lambda self, i: (calls.append(i), read(self, i))[1])
    loader = make_loader(prefixes)
    loader.batch(0)
    deadline = time.monotonic() + 10
    while len(calls) < 40 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(calls) == 40
    loader.batch(8)
    loader.close()
    assert calls[:40] == [i for consumed in (0, 8, 16, 24, 32) for i in loader.sample_ids(consumed)]


def test_a_late_read_is_waited_for_when_its_batch_is_near(prefixes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    late, arrives, read = make_loader(prefixes).sample_ids(24)[0], threading.Event(), InstanceSet.read
    monkeypatch.setattr(InstanceSet, "read", lambda self, i: (i != late or arrives.wait(10), read(self, i))[1])
    loader = make_loader(prefixes)
    loader.batch(0)
    assert loader.failure() is None and not arrives.is_set()  # the batches at 8 and 16 are here
    loader.batch(8)
    threading.Timer(0.2, arrives.set).start()
    assert loader.failure() is None and arrives.is_set()  # that at 24 was waited for
    loader.close()


def test_a_failure_is_known_two_steps_ahead_and_nothing_is_read_beyond_the_end(
    prefixes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = make_loader(prefixes).sample_ids(40)[2]
    read = InstanceSet.read
    calls: list[int] = []

    def fail(self: InstanceSet, i: int) -> list[TokenSpan]:
        calls.append(i)
        if i == bad:
            raise DataError("the disk is gone")
        return read(self, i)

    monkeypatch.setattr(InstanceSet, "read", fail)
    for steps, known in ((5, None), (6, 24)):  # the sixth batch is the bad one
        loader = make_loader(prefixes)
        loader.start(0, steps)
        seen = []
        for consumed in range(0, 40, 8):
            assert len(loader.batch(consumed)) == 4
            if loader.failure() is not None:
                seen.append(consumed)
        assert seen == ([] if known is None else [known, known + 8])
        if known is not None:
            with pytest.raises(DataError, match="the disk is gone"):
                loader.check()
        calls.clear()
        loader.close()
    loader = make_loader(prefixes)
    loader.start(16, 0)
    assert calls == [] and loader.failure() is None
    with pytest.raises(DataError, match="the disk is gone"):
        loader.start(32, 2)
    loader.close()


@pytest.mark.parametrize("bad", [0, 24, 32])
def test_what_is_left_out_is_not_read(prefixes: list[str], monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
    broken, read = make_loader(prefixes).sample_ids(bad)[1], InstanceSet.read
    monkeypatch.setattr(InstanceSet, "read", lambda self, i: 1 // 0 if i == broken else read(self, i))
    loader = make_loader(prefixes)
    left_out = {bad, 48}
    loader.start(0, 8, left_out)
    for consumed in range(0, 64, 8):
        if consumed not in left_out:
            before = [position for position, _ in loader._ahead]
            assert len(loader.batch(consumed)) == 4 and loader.failure() is None, consumed
            assert consumed == before[0], "it was being read already"
    loader.close()


def test_validation_is_sequential_and_ends(prefixes: list[str]) -> None:
    loader = make_loader(prefixes, shuffle=False)
    assert loader.num_batches == 51 // 8 == 6
    rows = torch.cat([b.tokens_BS[:, 0] for step in range(6) for b in loader.batch(8 * step)])
    assert rows.tolist() == [window_of(InstanceSet(prefixes, L), i)[0] for i in range(48)]
    with pytest.raises(DataError, match="no batch at sample 48: this split gives 6 batches of 8"):
        loader.batch(48)
    assert make_loader(prefixes, shuffle=False, max_batches=2).num_batches == 2
    with pytest.raises(DataError, match=r"51 instances .* global batch of 64"):
        make_loader(prefixes, gbs=64, shuffle=False)
    assert make_loader(prefixes).num_batches is None


def test_impossible_batch_sizes(prefixes: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size=10 .* micro_batch_size=2 .* size 4 = 8; use 8 or 16"):
        make_loader(prefixes, dp=4, mbs=2, gbs=10)
    with pytest.raises(ConfigError, match=r"; use 8$"):
        make_loader(prefixes, dp=4, mbs=2, gbs=4)
    for options in ({"mbs": 0}, {"gbs": 0}, {"dp": 2, "rank": 2}, {"seq_length": L + 1}, {"max_batches": 3}):
        with pytest.raises(ConfigError):
            make_loader(prefixes, **options)


def test_another_sequence_length_keeps_the_tokens(prefixes: list[str]) -> None:
    assert position_after_change(100, 8, 8) == 100
    assert position_after_change(100, 8, 16) == 50 and position_after_change(101, 8, 16) == 51
    assert position_after_change(100, 16, 8) == 200 and position_after_change(0, 8, 5) == 0
    with pytest.raises(ConfigError, match="seq_length=0"):
        position_after_change(1, 8, 0)
    # what follows is the order of the new instances from there on; the next whole epoch has each of them once
    instances = InstanceSet(prefixes, 2 * L)
    position = position_after_change(3 * 8, L, 2 * L)
    longer = BatchLoader(
        instances,
        global_batch_size=1,
        micro_batch_size=1,
        data_parallel_rank=0,
        data_parallel_size=1,
        seed=1234,
        seq_length=2 * L,
    )
    assert longer.batch(position)[0].tokens_BS.shape == (1, 2 * L)
    epoch = [int(longer.sample_ids(p)[0]) for p in range(len(instances), 2 * len(instances))]
    assert sorted(epoch) == list(range(len(instances)))
    longer.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_pinned_batches_on_their_way_to_a_device(prefixes: list[str]) -> None:
    device = torch.device(torch.accelerator.current_accelerator().type, 0)
    options = SampleOptions(6, reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=True)
    pinned = make_loader(prefixes, pin_for=device, options=options)
    plain = make_loader(prefixes, options=options)
    for step in (0, 8, 16):  # the first by the caller, the others by the thread
        for a, b in zip(pinned.batch(step), plain.batch(step), strict=True):
            assert all(tensor.is_pinned() for tensor in parts(a)) and not any(tensor.is_pinned() for tensor in parts(b))
            moved = parts(a.to(device))
            assert all(
                x.device.type == device.type and torch.equal(x.cpu(), y) for x, y in zip(moved, parts(b), strict=True)
            )
    pinned.close()
    plain.close()


def parts(batch: Batch) -> list[torch.Tensor]:
    assert batch.documents is not None and batch.positions_BS is not None
    return [batch.tokens_BS, batch.labels_BS, batch.documents.cu_seqlens_N1, batch.positions_BS]


def test_reading_thread_takes_the_rank_s_device(prefixes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device: what is called, where, and that every tensor of a batch is pinned and copied."""
    chosen: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        "megatron.optimus.platform.device.set_device", lambda d: chosen.append((threading.current_thread().name, d))
    )
    pinned: list[int] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: (pinned.append(self.data_ptr()), self)[1])
    options = SampleOptions(6, reset_attention_mask=True, reset_position_ids=True)
    loader = make_loader(prefixes, pin_for=torch.device("cuda", 3), options=options)
    batches = [*loader.batch(0), *loader.batch(8)]
    loader.close()
    assert [device for _, device in chosen] == [torch.device("cuda", 3)] and chosen[0][0].startswith("optimus-data")
    assert {tensor.data_ptr() for batch in batches for tensor in parts(batch)} <= set(pinned)
    copied = batches[0].to(torch.device("meta"))
    assert (
        all(tensor.is_meta for tensor in parts(copied))
        and copied.documents.cu_seqlens_host == batches[0].documents.cu_seqlens_host
    )


def test_documents_within_samples(tmp_path: Path) -> None:
    """Ends of documents are seen in the tokens, where the index says they are."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 12, 60)
    prefix = str(tmp_path / "documents")
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for length in lengths:
            writer.add_document(np.append(rng.integers(1, 90, length - 1), 0))
    check_contents([prefix], 100, eod_id=0)
    with pytest.raises(DataError, match=r"documents\.bin: ends with token 0, not with 7, .* --append-eod"):
        check_contents([prefix], 100, eod_id=7)
    instances = InstanceSet([prefix], L)
    plain = make_loader([prefix], gbs=16, mbs=4)
    marked = make_loader(
        [prefix],
        gbs=16,
        mbs=4,
        options=SampleOptions(0, reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=True),
    )
    ids = iter(marked.sample_ids(16).tolist())
    for a, b in zip(plain.batch(16), marked.batch(16), strict=True):
        assert torch.equal(a.tokens_BS, b.tokens_BS) and (a.documents, a.positions_BS) == (None, None)
        assert (a.num_labels, a.has_equal_label_counts, b.has_equal_label_counts) == (4 * (L - 1), True, False)
        ends = b.tokens_BS == 0
        assert torch.equal(b.labels_BS, torch.where(ends, NO_LABEL, a.labels_BS))
        assert b.num_labels == int((~ends[:, :-1]).sum())
        ranges = [instances.locate(next(ids))[1][0] for _ in range(4)]
        starts = [(document_starts(f"{prefix}.idx", *own) - own[0]).tolist() for own in ranges]
        assert b.documents.cu_seqlens_host == Documents.from_starts(starts, L).cu_seqlens_host
        for row, own in enumerate(starts):
            firsts = [0, *(s for s in own if s), L]
            counted = [place for length in np.diff(firsts) for place in range(length)]
            assert b.positions_BS[row].tolist() == counted
    plain.close()
    marked.close()


def test_a_rank_pins_the_part_of_a_batch_that_it_keeps(prefixes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut after pinning, a context-parallel rank's part would be copied to the device without page-locked memory."""

    def select(batch: Batch) -> Batch:
        return batch._replace(tokens_BS=batch.tokens_BS[:, 1:3], labels_BS=batch.labels_BS[:, 1:3])

    pinned = []
    monkeypatch.setattr(Batch, "pin_memory", lambda batch: pinned.append(batch) or batch)
    monkeypatch.setattr("megatron.optimus.platform.device.set_device", lambda device: None)
    loaders = [make_loader(prefixes), make_loader(prefixes, select=select, pin_for=torch.device("cuda"))]
    whole, own = (loader.batch(0) for loader in loaders)
    for loader in loaders:
        loader.close()  # a thread that still pins while the patches are taken away can crash the interpreter
    assert [batch.tokens_BS.tolist() for batch in own] == [batch.tokens_BS[:, 1:3].tolist() for batch in whole]
    assert len(pinned) >= len(own) and all(a is b for a, b in zip(own, pinned, strict=False))


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
