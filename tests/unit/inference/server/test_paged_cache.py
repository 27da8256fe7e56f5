"""Keys and values in pages: sequences that come in parts and at any time get what one forward gives each."""

from __future__ import annotations

import random

import pytest
import torch

from megatron.optimus.inference.server.paged_cache import PAGE_TOKENS, Chunk, PagedCache, num_pages
from megatron.optimus.layers.attention import causal_attention
from tests.unit.inference.cases import MODELS, decoder

CPU = torch.device("cpu")


def test_pages_of_tokens() -> None:
    assert [num_pages(count) for count in (0, 1, PAGE_TOKENS, PAGE_TOKENS + 1)] == [0, 1, 1, 2]


@pytest.mark.parametrize("name", MODELS)
def test_parts_of_many_sequences_equal_one_forward_of_each(name: str) -> None:
    """Whole prompts, later parts of prompts, and single tokens of sequences of very different lengths in one step."""
    model, draw = decoder(name), random.Random(4)
    sequences = [[draw.randrange(256) for _ in range(length)] for length in (3, 60, 17, 33, 40, 18)]
    numbers = list(range(40))
    draw.shuffle(numbers)  # pages in no order
    pages = [[numbers.pop() for _ in range(num_pages(len(one)))] for one in sequences]
    cache, done = PagedCache(model, 40, CPU), [0] * len(sequences)
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(stop < len(one) for stop, one in zip(done, sequences, strict=True)):
        left = [number for number, one in enumerate(sequences) if done[number] < len(one)]
        chosen = draw.sample(left, draw.randint(1, len(left)))
        chunks = []
        for number in chosen:
            stop = min(len(sequences[number]), done[number] + draw.choice([1, 1, 1, 5, 16, 30]))
            chunks.append(Chunk(sequences[number][done[number] : stop], done[number], pages[number]))
        hidden_TD, rows = cache.forward(chunks)
        assert hidden_TD.shape[0] == sum(len(chunk.tokens) for chunk in chunks), "no padding is computed"
        for number, chunk, own in zip(chosen, chunks, rows, strict=True):
            found[number].append(hidden_TD[own])
            done[number] = chunk.stop
    for sequence, parts in zip(sequences, found, strict=True):
        expected = model(torch.tensor([sequence])).logits_BSV[0]
        torch.testing.assert_close(model.lm_head(torch.cat(parts)), expected, rtol=1e-5, atol=1e-5)
    assert all(block.attention.core_attention is causal_attention for block in model.layers)


def test_pages_that_others_have_left_change_nothing() -> None:
    model, results = decoder("dense"), []
    for before in (None, [7] * 40):
        cache = PagedCache(model, 4, CPU)
        if before is not None:
            cache.forward([Chunk(before, 0, [0, 1, 2])])
        cache.forward([Chunk([1, 2, 3], 0, [1])])
        results.append(cache.forward([Chunk([4], 3, [1]), Chunk([5, 6], 0, [3])])[0])
    torch.testing.assert_close(*results, rtol=0, atol=0)
