"""The loaders of a run, a context-parallel rank's part of a batch, and the labels of a step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.optimus.config.schema import ConfigError, DataConfig, ModelConfig, Packing, RunConfig, TokenizerType
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.loader import Batch
from megatron.optimus.data.tokenize.tokenizer import train_bpe
from megatron.optimus.layers.documents import Documents
from megatron.optimus.layers.loss import NO_LABEL
from megatron.optimus.training.data import _documents, context_parallel_slice, labels_per_micro_batch

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
