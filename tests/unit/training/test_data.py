"""The loaders of a run, a context-parallel rank's part of a batch, and the labels of a step."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.optimus.checkpoint import TensorSlice, store
from megatron.optimus.config.schema import (
    CheckpointConfig,
    ConfigError,
    DataConfig,
    ModelConfig,
    Packing,
    RunConfig,
    SplitBy,
    TokenizerType,
    TrainingConfig,
)
from megatron.optimus.config.serialize import changed_options
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.indexed import IndexedDatasetWriter
from megatron.optimus.data.loader import Batch
from megatron.optimus.data.splits import splits_path
from megatron.optimus.data.tokenize.tokenizer import train_bpe
from megatron.optimus.layers.documents import Documents
from megatron.optimus.layers.loss import NO_LABEL
from megatron.optimus.platform.ranks import Ranks
from megatron.optimus.training.data import _documents, _open, context_parallel_slice, labels_per_micro_batch
from tests.unit.data.cases import write_tokens
from tests.unit.data.test_splits import add_splits

SENTINELS = ["<fim_prefix>", "<fim_middle>", "<mine>"]


def run(vocab_size: int = 300, **data: object) -> RunConfig:
    return RunConfig(model=ModelConfig(vocab_size=vocab_size), data=DataConfig(**data))


def test_documents_of_a_run(tmp_path: Path) -> None:
    options, fim = _documents(run())
    assert fim is None and options.eod_id is None
    options, fim = _documents(run(reset_attention_mask=True, tokenizer_type=TokenizerType.BYTE))
    assert fim is None and options.eod_id == 256 and options.reset_attention_mask and not options.reset_position_ids
    assert _documents(run(reset_attention_mask=True, packing=Packing.BEST_FIT))[0].eod_id is None

    train_bpe(["some text"], 280, tmp_path, SENTINELS)
    own = {"tokenizer_model": str(tmp_path), "fim_rate": 0.3, "fim_suffix_token": "<mine>"}
    options, fim = _documents(run(**own))
    assert fim is not None and (fim.rate, fim.spm_rate, fim.sentinels) == (0.3, 0.5, (1, 2, 3)) and options.eod_id == 0
    with pytest.raises(DataError, match=r"fim_suffix_token='<fim_suffix>': the tokenizer .* has no such token"):
        _documents(run(**own | {"fim_suffix_token": "<fim_suffix>"}))
    with pytest.raises(DataError, match=r"fim_suffix_token='<mine>': .* as 3, outside vocab_size=3"):
        _documents(run(vocab_size=3, **own))


@pytest.mark.parametrize("name", ["fim_rate", "fim_spm_rate"])
def test_shares_are_shares(name: str) -> None:
    for value in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match=f"{name}="):
            DataConfig(**{name: value})


def test_tokens_labels_and_positions_stay_together() -> None:
    tokens, positions = torch.arange(16).view(2, 8), torch.tensor([0, 1, 6, 7])
    part = context_parallel_slice(Batch(tokens, tokens + 1), positions)
    assert part.tokens_BS.tolist() == [[0, 1, 6, 7], [8, 9, 14, 15]]
    assert part.labels_BS.tolist() == [[1, 2, 7, 8], [9, 10, 15, 16]]
    assert part.positions_BS is not None and part.positions_BS.tolist() == [[0, 1, 6, 7]] * 2
    assert part.num_labels is None


@pytest.mark.parametrize("first", [0, 4])
def test_documents_stay_whole_and_own_labels_are_counted(first: int) -> None:
    tokens = torch.arange(8).view(1, 8)
    labels = torch.tensor([[1, NO_LABEL, 3, 4, 5, 6, 7, 8]])
    documents = Documents.from_starts([[3]], 8)
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    part = context_parallel_slice(Batch(tokens, labels, documents, places, 7), torch.arange(first, first + 4))
    assert part.documents is documents
    assert part.positions_BS is not None and part.positions_BS.tolist() == [places[0, first : first + 4].tolist()]
    assert part.num_labels == (3 if first == 0 else 4)


def test_the_same_number_of_labels_is_shared_out_without_counting() -> None:
    """Each part has the mean, also that of the last position, so that no rank has to ask; the sum is the whole's."""
    tokens = torch.arange(16).view(2, 8)
    batch = Batch(tokens, tokens + 1, num_labels=14, has_equal_label_counts=True)
    parts = [context_parallel_slice(batch, positions) for positions in (torch.tensor([0, 1, 6, 7]), torch.arange(2, 6))]
    assert [(part.num_labels, part.has_equal_label_counts) for part in parts] == [(7, True)] * 2


def test_one_rank_keeps_its_batch() -> None:
    batch = Batch(torch.zeros(1, 4), torch.zeros(1, 4))
    assert context_parallel_slice(batch, None) is batch


@pytest.mark.parametrize(("own", "others"), [((3, 5), 16), ((1, 0), 0), ((0, 0), 1), ((0, 0), 0)])
def test_the_mean_over_all_micro_batches_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, own: tuple[int, ...], others: int
) -> None:
    """Also of fewer labels than ranks: losses divided so, averaged over micro-batches and ranks, give the mean loss."""
    ranks, tokens = 4, torch.zeros(1, 8, dtype=torch.int64)
    mesh: Any = SimpleNamespace(group=lambda axis: "group", size=lambda axis: ranks)

    def all_reduce(mean: torch.Tensor, group: object) -> None:
        mean += others / len(own)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    each = labels_per_micro_batch([Batch(tokens, tokens, num_labels=count) for count in own], mesh)
    total = sum(own) + others
    assert float(each) == max(total, 1) / (len(own) * ranks)


def opened(tmp_path: Path, prefixes: list[str], batch: int = 2, **options: object) -> SplitBy:
    """What ``split_by`` is after the data of a run have been opened."""
    checkpoint = {name: options.pop(name) for name in ("load", "finetune") if name in options}
    config = RunConfig(
        data=DataConfig(data_path=prefixes, **options),
        training=TrainingConfig(seq_length=8, global_batch_size=batch, micro_batch_size=1),
        checkpoint=CheckpointConfig(save=str(tmp_path / "saved"), **checkpoint),
    )
    _open(SimpleNamespace(config=config, ranks=Ranks.alone()))  # type: ignore[arg-type]
    return config.data.split_by


def save_checkpoint(root: Path, data: dict[str, object], consumed_samples: int = 4) -> None:
    weight = TensorSlice("w", "weight", (4,), 0, 4, torch.zeros(4))
    options = {"kind": "full", "consumed_samples": consumed_samples, "metadata": {}, "ranks": Ranks.alone()}
    store.save(root, 1, [weight], config={"data": data}, **options)


def test_what_decides_a_split(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prefixes = [write_tokens(tmp_path / "a", 0, 2000), write_tokens(tmp_path / "b", 5000, 1000)]
    assert opened(tmp_path, prefixes) is SplitBy.POSITION and not caplog.text
    add_splits(prefixes[0], 2000, 1900, 1990)
    assert opened(tmp_path, prefixes) is SplitBy.POSITION
    assert "1 of 2 files, such as " in caplog.text and "/b, were not preprocessed" in caplog.text
    add_splits(prefixes[1], 1000, 950, 1000, seed=7)
    caplog.clear()
    assert opened(tmp_path, prefixes) is SplitBy.HASH
    assert "different seeds (7, 1234)" in caplog.text
    add_splits(prefixes[1], 1000, 950, 1000)
    caplog.clear()
    assert opened(tmp_path, prefixes) is SplitBy.HASH and not caplog.text
    assert opened(tmp_path, prefixes, split_by=SplitBy.POSITION) is SplitBy.POSITION
    add_splits(prefixes[0], 2000, 1990, 2000)
    add_splits(prefixes[1], 1000, 990, 1000)
    assert opened(tmp_path, prefixes, batch=2) is SplitBy.HASH
    assert opened(tmp_path, prefixes, batch=3) is SplitBy.POSITION
    assert "by hash, these few documents give 371 samples to training and 2 to validation" in caplog.text


def test_a_resumed_run_keeps_its_split(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What its checkpoint says wins over what the files say today; one from before the option means position."""
    prefixes = [write_tokens(tmp_path / "a", 0, 2000)]
    names = {"data_path": prefixes, "data_file_list": None}
    add_splits(prefixes[0], 2000, 1900, 1990)
    save_checkpoint(tmp_path / "saved", names)
    assert opened(tmp_path, prefixes) is SplitBy.POSITION
    assert opened(tmp_path, prefixes, split_by=SplitBy.HASH) is SplitBy.HASH  # asked for
    save_checkpoint(tmp_path / "saved", {**names, "split_by": "hash"})
    assert opened(tmp_path, prefixes) is SplitBy.HASH
    save_checkpoint(tmp_path / "saved", {**names, "split_by": "position"})
    assert opened(tmp_path, prefixes) is SplitBy.POSITION
    save_checkpoint(tmp_path / "saved", {**names, "split_by": "auto"}, consumed_samples=0)  # an import
    assert opened(tmp_path, prefixes) is SplitBy.HASH

    shutil.move(tmp_path / "saved", tmp_path / "other")
    save_checkpoint(tmp_path / "other", names)
    other = str(tmp_path / "other")
    assert opened(tmp_path, prefixes, load=other) is SplitBy.POSITION
    assert opened(tmp_path, prefixes, load=other, finetune=True) is SplitBy.HASH  # begins anew
    save_checkpoint(tmp_path / "other", {**names, "split_by": "hash"})
    splits_path(prefixes[0]).unlink()
    assert opened(tmp_path, prefixes, load=other) is SplitBy.HASH  # and reading it is then an error, not another split
    further = write_tokens(tmp_path / "further", 0, 500)
    assert opened(tmp_path, [*prefixes, further], load=other) is SplitBy.POSITION  # other data, as named
    assert changed_options({"data": {}}, {"data": {"split_by": "position"}}) == []
    assert changed_options({"data": {}}, {"data": {"split_by": "hash"}}) == ["data.split_by position -> hash"]


def test_an_ordered_file_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prefix = write_tokens(tmp_path / "a", 0, 7000)  # counting tokens: no two documents are alike, so no end is unlike
    opened(tmp_path, [prefix])
    assert "is ordered" not in caplog.text
    with IndexedDatasetWriter(tmp_path / "b", np.int32) as writer:
        for i in range(1000):
            writer.add_document(np.arange(20) % 7 + i // 100 * 10)
    opened(tmp_path, [str(tmp_path / "b")], split="1,0,0")
    assert "is ordered" not in caplog.text  # nothing is validated on
    opened(tmp_path, [str(tmp_path / "b")])
    assert f"{tmp_path}/b is ordered: the documents at an end of it" in caplog.text
