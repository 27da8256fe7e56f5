"""Small tokenizers of every type, and texts that try them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from megatron.optimus.config.schema import TokenizerType
from megatron.optimus.data.tokenize.tokenizer import HuggingFaceTokenizer, train_bpe

CORPUS = [
    "the quick brown fox jumps over the lazy dog; it's 1234567 times as quick",
    "def f(x):\n    return x + 1  # größer, 日本語 テキスト 🙂 Καλημέρα мир",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "   leading",
    "trailing  \n",
    "a\r\n\r\n\tb\n \n  c",
    "\x00\x01\x7f\x1b[0m",
    "🙂👩‍💻 é ﬁ Å 日本語",
    "the\u00a0quick\u2028fox\u3000",
    "x" * 300,
    "12 345 6789012345",
    "<0x41> <s> </s> of <|endoftext|>"[:7],
]


def tiktoken_file(path: Path, pattern: str | None = None) -> Path:
    """Ranks of a trained BPE, and a file of options beside them."""
    train_bpe(CORPUS * 20, 330, path.parent / "bpe")
    tokens = [token for _, token in sorted((HuggingFaceTokenizer(path.parent / "bpe")._bytes or {}).items()) if token]
    path.write_bytes(b"\n".join(b"%s %d" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)))
    options: dict[str, Any] = {"special_tokens": {"<|im_start|>": len(tokens) + 9}}
    Path(f"{path}.json").write_text(json.dumps(options | ({} if pattern is None else {"pattern": pattern})))
    return path


def sentencepiece_model(prefix: Path, **options: Any) -> Path:
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    options = {"vocab_size": 400, "hard_vocab_limit": False, "minloglevel": 2} | options
    lines = [line for text in CORPUS for line in text.splitlines()]
    trainer.train(sentence_iterator=iter(lines * 20), model_prefix=str(prefix), **options)
    return prefix.with_suffix(".model")


def tokenizer_of(kind: TokenizerType, folder: Path) -> Path | None:
    """A tokenizer of this type in a new folder; returns its file or folder, None where it has none."""
    folder.mkdir(parents=True)
    if kind is TokenizerType.HF:
        train_bpe(CORPUS * 20, 330, folder / "trained")
        return folder / "trained"
    if kind is TokenizerType.SENTENCEPIECE:
        return sentencepiece_model(
            folder / "sp", model_type="bpe", byte_fallback=True, normalization_rule_name="identity"
        )
    if kind is TokenizerType.TIKTOKEN:
        pytest.importorskip("tiktoken")
        return tiktoken_file(folder / "v.tiktoken")
    return None
