"""BPE by the ``fastokens`` package, which encodes 18 times as fast as the ``tokenizers`` library (docs/performance.md).

It is a second implementation of what the ``tokenizers`` library does, so it is taken only where both give the same ids
for a sample: for texts that are hard to cut, and for documents of the corpus itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron.optimus.data.tokenize.pretoken_cache import Ids
from megatron.optimus.platform.log import first_line

logger = logging.getLogger("optimus")

Encode = Callable[[list[str]], list[Ids]]

# What implementations of pre-tokenizers and normalizers disagree on: spaces and line ends, contractions, long numbers,
# scripts without spaces, joined and composed characters, controls, names of special tokens, bytes that are no text.
HARD_TEXTS = [
    *("", " ", "  a", "a  ", "\n\n \n", "a\n\n\n b\r\n\tc \t", "I'll we've I'LL 'S ''s", "1234567890 3.14159e-10"),
    *("naïve café Å Å ﬁ ①", "北京大学ﾊﾝｶｸ 한국어", "👩‍👩‍👧‍👦🇩🇪 ok", "مرحبا שלום", "\x00\x01\x7f\x85\xa0\u2028\u3000x"),
    *("<|endoftext|> <s></s> <|im_start|>user", "\ufeff\ufffd\u200b", "x" * 300, " " * 200 + "y", "a_b-c==d!=e//f"),
    *("def f(x):\n    return x ** 2  # squared\n", "\u017fK; ;`", "ǅ ß ẞ İ", "٣٤٥ ⅷ ²³"),
]


def load(state: dict[str, Any], *, parse_special: bool) -> Encode | None:
    """Makes a function that encodes texts as ``tokenizers`` does, by fastokens.

    Args:
        state: the content of a tokenizer.json.
        parse_special: whether the name of a special token in a text is its id, and not letters.

    Returns:
        The function; None where the package is missing or cannot carry this tokenizer.
    """
    if state["model"].get("type") != "BPE":
        return None
    try:
        from fastokens import _native
    except ImportError:
        return None
    try:
        native = _native.Tokenizer.from_json_str(json.dumps(state | {"truncation": None, "padding": None}))
    except Exception as error:  # of its own kinds, for what it does not know
        logger.info("fastokens cannot carry this tokenizer (%s)", first_line(error))
        return None

    def encode(texts: list[str]) -> list[Ids]:
        flat, offsets = native.encode_batch_flat(texts, split_special_tokens=not parse_special)
        ids, cuts = np.frombuffer(flat, np.uint32), np.frombuffer(offsets, np.uint64)
        return [ids[start:stop] for start, stop in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)]

    return encode


def agrees(encode: Encode, reference: Encode, texts: Sequence[str]) -> bool:
    """Whether both give the same ids for HARD_TEXTS and ``texts``; logs the first text that they differ on."""
    sample = [*HARD_TEXTS, *texts]
    for text, ours, theirs in zip(sample, encode(sample), reference(sample), strict=True):
        if not np.array_equal(ours, theirs):
            logger.warning("fastokens is not used: it gives other ids than the tokenizers library for %.80r", text)
            return False
    return True
