"""Fill in the middle: what becomes of documents, and that it depends on seed and position alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.optimus.data.dataset import InstanceSet, SampleOptions
from megatron.optimus.data.fim import FillInTheMiddle
from megatron.optimus.data.indexed import IndexedDatasetWriter
from megatron.optimus.data.loader import Batch, BatchLoader
from megatron.optimus.data.order import uniform_numbers
from megatron.optimus.data.tokenize.pretoken_cache import SPLIT_PATTERNS
from megatron.optimus.data.tokenize.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, train_bpe

TEXT = "def add(first, second):\n    return first + second  # the sum, naïve but exact\n" * 3
NAMES = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>")
L = 64
LETTERS = st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe([TEXT], 300, folder, NAMES)
    return HuggingFaceTokenizer(folder)


def fim(tokenizer: HuggingFaceTokenizer, rate: float = 1.0, spm_rate: float = 0.5) -> FillInTheMiddle:
    ids = [tokenizer.token_id(name) for name in NAMES]
    assert ids == [1, 2, 3] and tokenizer.token_id("<none>") is None and tokenizer.eod_id == 0
    return FillInTheMiddle(rate, spm_rate, (1, 2, 3), tokenizer)


def undo(tokens: list[int], tokenizer: HuggingFaceTokenizer) -> tuple[str, str, list[str]]:
    """(kind, text, its three parts) of one document without its end."""
    pre, mid, suf = (tokens.index(i) for i in (1, 2, 3))
    assert pre == 0 and pre < suf < mid
    kind = "SPM" if suf == 1 else "PSM"
    before, suffix, after = (
        tokenizer.decode(part) for part in (tokens[1:suf], tokens[suf + 1 : mid], tokens[mid + 1 :])
    )
    parts = [before, after, suffix]
    return kind, before + after + suffix, parts


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text(LETTERS, min_size=1, max_size=60), min_size=1, max_size=4), seed=st.integers(0, 2**40))
def test_a_document_keeps_its_text_and_its_end(tokenizer: HuggingFaceTokenizer, texts: list[str], seed: int) -> None:
    documents = [[*tokenizer.encode(text), 0] for text in texts]
    changed = fim(tokenizer).apply(np.concatenate(documents), uniform_numbers(seed, 0))
    ends = np.flatnonzero(changed == 0) + 1
    assert len(ends) == len(texts) and ends[-1] == changed.size
    for text, own in zip(texts, np.split(changed, ends[:-1]), strict=True):
        assert undo(own[:-1].tolist(), tokenizer)[1] == text


def test_kinds_shares_and_cuts(tokenizer: HuggingFaceTokenizer) -> None:
    ids = np.array([*tokenizer.encode(TEXT), 0])
    kinds, cuts, unchanged = [], [], 0
    for position in range(600):
        changed = fim(tokenizer, 0.75, 0.4).apply(ids, uniform_numbers(7, position))
        if np.array_equal(changed, ids):
            unchanged += 1
            continue
        kind, _, parts = undo(changed[:-1].tolist(), tokenizer)
        kinds.append(kind)
        if kind == "PSM":
            cuts += [len(parts[0]), len(parts[0]) + len(parts[1])]
    assert 110 < unchanged < 190 and 0.3 < kinds.count("SPM") / len(kinds) < 0.5
    assert abs(np.mean(cuts) / len(TEXT) - 0.5) < 0.05 and min(cuts) < 10 and max(cuts) > len(TEXT) - 10
    inside = sum(TEXT[cut - 1].isalpha() and TEXT[cut].isalpha() for cut in cuts if 0 < cut < len(TEXT))
    assert inside > 100  # in the middle of words too
    assert np.array_equal(fim(tokenizer, 0).apply(ids, uniform_numbers(7, 0)), ids)


def test_what_has_no_text_is_cut_between_tokens(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    broken = [*tokenizer.encode("ï")][1:] + tokenizer.encode("ve")  # begins with half a character
    changed = fim(tokenizer).apply(np.array(broken), uniform_numbers(0, 0)).tolist()
    assert sorted(changed) == sorted([*broken, 1, 2, 3])

    import sentencepiece

    (tmp_path / "text").write_text(TEXT)
    options = {"vocab_size": 60, "hard_vocab_limit": False, "user_defined_symbols": list(NAMES), "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(input=str(tmp_path / "text"), model_prefix=str(tmp_path / "sp"), **options)
    spm = SentencePieceTokenizer(tmp_path / "sp.model")
    sentinels = tuple(spm.token_id(name) for name in NAMES)
    assert None not in sentinels and spm.token_id("<none>") is None
    ids = spm.encode("the sum")
    for position in range(20):  # its parts would get a space in front
        changed = FillInTheMiddle(1.0, 0.0, sentinels, spm).apply(np.array(ids), uniform_numbers(0, position)).tolist()
        pre, mid, suf = (changed.index(i) for i in sentinels)
        assert spm.decode([*changed[pre + 1 : suf], *changed[mid + 1 :], *changed[suf + 1 : mid]]) == "the sum"


def test_random_numbers_are_uniform_and_pinned() -> None:
    drawn = [value for position in range(500) for value in islice(uniform_numbers(3, position), 4)]
    counts = np.histogram(drawn, 20, (0, 1))[0]
    assert ((counts - 100) ** 2 / 100).sum() < 50  # chi-square, 19 degrees of freedom
    assert list(islice(uniform_numbers(1234, 5), 2)) == [0.9828567025079288, 0.45933422876046204]
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.1


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory, tokenizer: HuggingFaceTokenizer) -> str:
    prefix = tmp_path_factory.mktemp("code") / "code"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for i in range(300):
            writer.add_document([*tokenizer.encode(TEXT[i % 40 : 40 + i % 97]), 0])
    return str(prefix)


def batches(
    code: str, tokenizer: HuggingFaceTokenizer, dp: int, mbs: int, packing: bool
) -> Iterator[tuple[int, Batch]]:
    """(row within the global batch of its first row, micro-batch)"""
    for rank in range(dp):
        loader = BatchLoader(
            InstanceSet([code], L, packing=packing),
            seq_length=L,
            global_batch_size=8,
            micro_batch_size=mbs,
            data_parallel_rank=rank,
            data_parallel_size=dp,
            seed=11,
            options=SampleOptions(0, reset_attention_mask=True),
            fim=fim(tokenizer, 0.5),
        )
        yield from (((m * dp + rank) * mbs, batch) for m, batch in enumerate(loader.batch(16)))
        loader.close()


@pytest.mark.parametrize("packing", [False, True])
def test_batches_do_not_depend_on_the_layout(code: str, tokenizer: HuggingFaceTokenizer, packing: bool) -> None:
    [(_, whole)] = batches(code, tokenizer, 1, 8, packing)
    sentinels = (whole.tokens_BS == 1).sum()
    assert 4 < sentinels < 40 and whole.tokens_BS.shape == (8, L)
    for first, batch in batches(code, tokenizer, 2, 2, packing):
        assert torch.equal(batch.tokens_BS, whole.tokens_BS[first : first + 2])
        assert torch.equal(batch.labels_BS, whole.labels_BS[first : first + 2])
    assert whole.documents is not None
    shifted, labels = whole.tokens_BS[:, 1:], whole.labels_BS[:, :-1]
    assert torch.equal(labels[labels >= 0], shifted[labels >= 0])
    starts = [start for start in whole.documents.cu_seqlens_host[:-1] if start % L]
    assert all(whole.tokens_BS.flatten()[start - 1] == 0 for start in starts)


def long_texts() -> list[str]:
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(tokenizers.__file__).parent.rglob("*.pyi"))]
    odd = ["l'été n'est pas là  , dit-il…\n\t\tit's 12345 o'clock ï ", "\N{GRINNING FACE} \ufffd a b c" * 9]
    return [*(text[:6000] for text in texts if len(text) > 3000), TEXT, *odd]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("trained")
    train_bpe(long_texts(), 1500, folder, NAMES)
    return (folder / "tokenizer.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("pattern", [None, *sorted(SPLIT_PATTERNS)])
def test_cuts_near_words_are_those_of_the_whole_text(trained: str, tmp_path: Path, pattern: str | None) -> None:
    """Windows of texts, cut anywhere between tokens: what is tokenized around the cuts is what all of it would give."""
    texts, state = long_texts(), json.loads(trained)
    if pattern is not None:
        rule = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        own = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [rule, own]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state), encoding="utf-8")
    fast, slow = HuggingFaceTokenizer(tmp_path), HuggingFaceTokenizer(tmp_path)
    assert fast.token_bytes is not None
    slow.token_bytes = None
    rng = np.random.default_rng(5)
    calls = 0
    for position in range(400):
        text = texts[position % len(texts)]
        first = int(rng.integers(0, max(1, len(text) - 2000)))
        ids = np.array(fast.encode(text[first : first + 2000]))
        start, stop = np.sort(rng.integers(0, ids.size + 1, 2))
        if start == stop:
            continue
        wanted, got = (fim(t).apply(ids[start:stop], uniform_numbers(3, position)) for t in (slow, fast))
        assert got.tolist() == wanted.tolist(), (text[first : first + 2000], start, stop)
        calls += 1
    assert calls > 300
