"""What a context-parallel rank gets of a micro-batch."""

from __future__ import annotations

import pytest
import torch

from megatron.optimus.data.loader import Batch
from megatron.optimus.layers import NO_LABEL
from megatron.optimus.layers.documents import Documents
from megatron.optimus.training.step import own_part


def test_tokens_labels_and_positions_stay_together() -> None:
    tokens, positions = torch.arange(16).view(2, 8), torch.tensor([0, 1, 6, 7])
    part = own_part(Batch(tokens, tokens + 1), positions)
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
    part = own_part(Batch(tokens, labels, documents, places, 7), torch.arange(first, first + 4))
    assert part.documents is documents
    assert part.positions_BS is not None and part.positions_BS.tolist() == [places[0, first : first + 4].tolist()]
    assert part.num_labels == (3 if first == 0 else 4)


def test_the_same_number_of_labels_is_shared_out_without_counting() -> None:
    """Each part has the mean, also that of the last position, so that no rank has to ask; the sum is the whole's."""
    tokens = torch.arange(16).view(2, 8)
    batch = Batch(tokens, tokens + 1, num_labels=14, is_same=True)
    parts = [own_part(batch, positions) for positions in (torch.tensor([0, 1, 6, 7]), torch.arange(2, 6))]
    assert [(part.num_labels, part.is_same) for part in parts] == [(7, True)] * 2


def test_one_rank_keeps_its_batch() -> None:
    batch = Batch(torch.zeros(1, 4), torch.zeros(1, 4))
    assert own_part(batch, None) is batch
