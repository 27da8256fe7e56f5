"""Writes our tokenizers as files that ``transformers.AutoTokenizer`` loads, with the same ids.

Byte-level and tiktoken's vocabularies become byte-level BPEs without loss. SentencePiece models become a BPE or a
Unigram model on the whole text; what the library ``tokenizers`` computes in another way is found by comparing the ids
of probe texts, and reported.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, AnyStr

from megatron.optimus.data.errors import DataError
from megatron.optimus.data.tokenize.pretoken_cache import model_fields
from megatron.optimus.data.tokenize.tokenizer import (
    END_OF_TEXT,
    ByteLevelTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TikTokenizer,
    Tokenizer,
    byte_characters,
)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # types of SentencePiece's pieces
_UNIGRAM, _BPE, _CHAR = 1, 2, 4  # its types of models
_SPACE = "\u2581"  # SentencePiece's sign for a space
_NEVER = -1e6  # the score of pieces that no text may be cut into
_WRITTEN_CATEGORIES = "LMNPSZ"  # of Unicode: letters, marks, numbers, punctuation, symbols, separators


@dataclass(frozen=True)
class HuggingFaceFiles:
    """A tokenizer as transformers loads it.

    Attributes:
        files: content by name: tokenizer.json and tokenizer_config.json.
        problems: what makes its ids differ from ours, in words; none where they are the same.
    """

    files: dict[str, bytes]
    problems: list[str] = field(default_factory=list)


def to_huggingface(tokenizer: Tokenizer) -> HuggingFaceFiles:
    """Translates a tokenizer and compares the ids of probe texts.

    Raises:
        DataError: the tokenizer has no equivalent; the message says why.
    """
    problems: list[str] = []
    if isinstance(tokenizer, ByteLevelTokenizer):
        made, names = _from_bytes(tokenizer)
    elif isinstance(tokenizer, TikTokenizer):
        made, names = _from_tiktoken(tokenizer)
    elif isinstance(tokenizer, SentencePieceTokenizer):
        made, names, problems = _from_sentencepiece(tokenizer)
    else:
        assert isinstance(tokenizer, HuggingFaceTokenizer)
        content = json.dumps(tokenizer.state, ensure_ascii=False).encode()
        return HuggingFaceFiles({"tokenizer.json": content} | tokenizer_config(END_OF_TEXT))
    if found := _first_difference(tokenizer, made):
        problems.append(found)
    return HuggingFaceFiles(
        {"tokenizer.json": made.to_str(pretty=True).encode(), **tokenizer_config(**names)}, problems
    )


def tokenizer_config(
    eos: str, bos: str | None = None, pad: str | None = None, unk: str | None = None
) -> dict[str, bytes]:
    """Returns tokenizer_config.json with these special tokens, by its name; missing ones are the end of a text."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": bos or eos,
        "eos_token": eos,
        "pad_token": pad or eos,
        **({"unk_token": unk} if unk else {}),
    }
    return {"tokenizer_config.json": (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()}


# ---- vocabularies of bytes


def _from_bytes(tokenizer: ByteLevelTokenizer) -> tuple[Any, dict[str, Any]]:
    from tokenizers import pre_tokenizers

    vocab = {character: byte for byte, character in byte_characters().items()}
    made = _byte_level_bpe(vocab | {END_OF_TEXT: tokenizer.eod_id}, [], [END_OF_TEXT])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return made, {"eos": END_OF_TEXT}


def _from_tiktoken(tokenizer: TikTokenizer) -> tuple[Any, dict[str, Any]]:
    """Makes a BPE whose merges are, for each token, the last pair that tiktoken merges into it.

    Both merge the pair of the lowest rank first, and of equal ones the leftmost. In any text, what lies between two
    ends of tokens is merged as if it stood alone, so one pair a token is enough. Words that are tokens as they stand
    are not merged by either (``ignore_merges``).
    """
    from tokenizers import Regex, pre_tokenizers

    character_of, ranks = byte_characters(), {token: rank for rank, token in tokenizer.tokens.items()}
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(
            f"its ranks lack the byte {missing[0]:#04x} ({len(missing)} bytes in all), which texts may have"
        )

    def name(token: bytes) -> str:
        return "".join(character_of[byte] for byte in token)

    merges = []
    for _, token in sorted(tokenizer.tokens.items()):
        if (pair := _last_merge(token, ranks)) is not None:
            merges.append((name(pair[0]), name(pair[1])))
    vocab = {name(token): rank for rank, token in tokenizer.tokens.items()}
    taken = [special for special, i in tokenizer.special.items() if special in vocab or i in tokenizer.tokens]
    if taken:
        raise DataError(f"its special token {taken[0]!r} has the name or the id of one of its ranks")
    made = _byte_level_bpe(vocab | tokenizer.special, merges, list(tokenizer.special))
    try:
        pattern = Regex(tokenizer.pattern)
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"the pattern of its words is not understood by tokenizers: {error}") from error
    # What the pattern does not match is no part of tiktoken's words.
    words = pre_tokenizers.Split(pattern, "removed", invert=True)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    end = next(special for special, i in tokenizer.special.items() if i == tokenizer.eod_id)
    return made, {"eos": end}


def _last_merge(token: AnyStr, ranks: Mapping[AnyStr, int]) -> tuple[AnyStr, AnyStr] | None:
    """The pair whose merge gives ``token``, of bytes or of characters; None if merging them never does."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 1:
        costs = [ranks.get(left + right, math.inf) for left, right in itertools.pairwise(parts)]
        at = costs.index(min(costs))
        if costs[at] == math.inf:
            return None
        if len(parts) == 2:
            return parts[0], parts[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return None


def _byte_level_bpe(vocab: dict[str, int], merges: list[tuple[str, str]], special: list[str]) -> Any:
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as LibraryTokenizer

    made = LibraryTokenizer(models.BPE(vocab, merges, ignore_merges=True))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    return made


# ---- SentencePiece


def _from_sentencepiece(tokenizer: SentencePieceTokenizer) -> tuple[Any, dict[str, Any], list[str]]:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as LibraryTokenizer

    pieces, trainer, normalizer = _read_model(tokenizer.definition)
    kind, problems = trainer.get(3, _UNIGRAM), []
    if kind not in (_UNIGRAM, _BPE, _CHAR):
        raise DataError(f"SentencePiece models of type {kind} have no equivalent in tokenizers; train unigram or bpe")
    if trainer.get(24):
        raise DataError("treat_whitespace_as_suffix has no equivalent in tokenizers; train without it")
    kinds = [piece[2] for piece in pieces]
    if _UNUSED in kinds:
        problems.append(f"{kinds.count(_UNUSED)} unused pieces, which SentencePiece alone takes apart again")
    made = LibraryTokenizer(_model(pieces, kind, bool(trainer.get(35))))
    special = [name for name, _, piece_kind in pieces if piece_kind in (_CONTROL, _UNKNOWN)]
    made.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    if kind != _UNIGRAM:  # a Unigram model weighs them as SentencePiece does, by their scores
        own = [name for name, _, piece_kind in pieces if piece_kind == _USER_DEFINED]
        made.add_tokens([AddedToken(name, normalized=False, special=False) for name in own])
    processor = tokenizer.processor
    _set_normalizer(made, normalizer, processor.normalize("x\r\nx").strip(_SPACE)[1:-1].replace(_SPACE, " "))
    names = {
        name: processor.id_to_piece(i)
        for name, i in (
            ("eos", processor.eos_id()),
            ("bos", processor.bos_id()),
            ("pad", processor.pad_id()),
            ("unk", processor.unk_id()),
        )
        if i >= 0
    }
    return made, names, problems


def _read_model(content: bytes) -> tuple[list[tuple[str, float, int]], dict[int, Any], dict[int, Any]]:
    """(pieces as (name, score, type), fields of the trainer, fields of the normalizer) of a serialized model."""
    pieces = []
    specs: dict[int, dict[int, Any]] = {2: {}, 3: {}}
    for number, value in model_fields(content):
        if number == 1:
            one = dict(model_fields(value))
            [score] = struct.unpack("<f", one.get(2, bytes(4)))
            pieces.append((one.get(1, b"").decode(), score, one.get(3, _NORMAL)))
        elif number in specs:
            specs[number] = dict(model_fields(value))
    return pieces, specs[2], specs[3]


def _model(pieces: list[tuple[str, float, int]], kind: int, byte_fallback: bool) -> Any:
    """The pieces as a model of the library; ids are their numbers."""
    from tokenizers import models

    unknown = next((number for number, piece in enumerate(pieces) if piece[2] == _UNKNOWN), None)
    if kind == _UNIGRAM:
        best = max((score for _, score, piece_kind in pieces if piece_kind == _NORMAL), default=0.0)

        def weight(name: str, score: float, piece_kind: int) -> float:
            if piece_kind == _USER_DEFINED:
                return len(name.encode()) * best - 0.1
            return score if piece_kind in (_NORMAL, _UNUSED) else _NEVER

        return models.Unigram([(piece[0], weight(*piece)) for piece in pieces], unknown, byte_fallback)
    scores = {name: score for name, score, piece_kind in pieces if piece_kind == _NORMAL}
    ranks = {name: rank for rank, name in enumerate(sorted(scores, key=lambda name: -scores[name]))}
    pairs = (_last_merge(name, ranks) for name in (ranks if kind == _BPE else ()))  # one a piece, as for tiktoken
    vocab = {name: number for number, (name, _, _) in enumerate(pieces)}
    unk = None if unknown is None else pieces[unknown][0]
    merges = [pair for pair in pairs if pair is not None]
    return models.BPE(vocab, merges, unk_token=unk, fuse_unk=True, byte_fallback=byte_fallback)


def _set_normalizer(made: Any, spec: dict[int, Any], line_end: str) -> None:
    """What SentencePiece makes of the whole text before it cuts it, and the way back.

    ``line_end``: what it makes of a carriage return and line feed, of which the library would look at the first alone.
    """
    from tokenizers import Regex, decoders, normalizers

    has_prefix, is_trimmed, space = spec.get(3, 1), spec.get(4, 1), _SPACE if spec.get(5, 1) else " "
    prefix: list[Any] = [normalizers.Prepend(space)] if has_prefix else []
    steps: list[Any] = []
    if spec.get(2):
        steps += [normalizers.Replace("\r\n", line_end), normalizers.Precompiled(spec[2])]
    if is_trimmed:
        steps += [normalizers.Replace(Regex(rf"\A +|[ {_SPACE}]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    # Only a text that is trimmed to nothing gets no prefix; a text of controls, which normalization removes, does.
    steps = [*steps, *prefix] if is_trimmed else [*prefix, *steps]
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", space)])
    back: list[Any] = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*back, *([decoders.Strip(" ", 1, 0)] if has_prefix else [])])


# ---- comparison


def _first_difference(tokenizer: Tokenizer, made: Any) -> str | None:
    """Compares the ids of probe texts; returns what differs in words, or None."""
    made.encode_special_tokens = True  # as for ours, their names in texts are text
    texts = list(_probes(tokenizer))
    ours = [ids.tolist() for ids in tokenizer.encode_batch(texts)]
    theirs = [encoding.ids for encoding in made.encode_batch_fast(texts, add_special_tokens=False)]
    made.encode_special_tokens = False
    wrong = [text for text, left, right in zip(texts, ours, theirs, strict=True) if left != right]
    if not wrong:
        return None
    examples = ", ".join(ascii(text) for text in wrong[:3])
    return f"{len(wrong)} of {len(texts)} probe texts have other ids, such as {examples}"


def _probes(tokenizer: Tokenizer) -> Iterator[str]:
    """Texts with every assigned character between others, with many spaces, and with every token beside others."""
    yield from ("", " ", "  a  b ", "\n", " \n\n  x\r\n\ty ", "\x00\x01\x7f", "it's WE'LL 1234567 ...!?", "a\u2581 b")
    yield from ("\U0001f469\u200d\U0001f4bb\u200d\U0001f44d\U0001f3fd", "e\u0301\u0301 \u1100\u1161\u11a8", "<0x41>")
    # Of the large blocks of Han and Hangul, whose characters are alike, every sixteenth.
    for code in [*range(0x3400), *range(0x3400, 0xF900, 16), *range(0xF900, 0x20000), *range(0x20000, 0x323B0, 16)]:
        character = chr(code)
        if code < 0xA0 or unicodedata.category(character)[0] in _WRITTEN_CATEGORIES:
            yield f"a{character} {character}{character}b 1{character}'{character}\n"
    step = 7
    names = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    for start in range(0, len(names), step):
        yield "".join(names[start : start + step])
        yield " ".join(names[start :: max(1, len(names) // step)][:step])
