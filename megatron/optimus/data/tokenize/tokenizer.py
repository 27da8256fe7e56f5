"""Tokenizers of several libraries behind one interface, and the training of a byte-level BPE.

Text is only text: a special token's name inside a document (say "<|endoftext|>" in a page about tokenizers) is encoded
letter by letter, so that no document can fake the end of a document; unless ``parse_special`` asks for its id.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron.optimus.config.schema import TokenizerType
from megatron.optimus.config.tokenizer_files import definition_file, settle_tokenizer_type
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.tokenize import fast_bpe
from megatron.optimus.data.tokenize.pretoken_cache import Ids, SentencePieceCache, encodes_words_alone
from megatron.optimus.platform.files import write_atomically

logger = logging.getLogger("optimus")

END_OF_TEXT = "<|endoftext|>"
_NUM_BYTES = 256
_MAX_BPE_SIZE = 1 << 24


class Tokenizer(Protocol):
    """The tokenizer interface that data preparation, fill in the middle and generation use."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id ``encode`` can give or ``eod_id`` has."""

    @property
    def eod_id(self) -> int:
        """Id that ends a document."""

    @property
    def definition(self) -> Any:
        """What defines the ids, as plain JSON or bytes; equal for files that differ in spacing or unrelated fields."""

    @property
    def token_bytes(self) -> dict[int, bytes] | None:
        """Bytes that each id stands for, of a tokenizer that ``encodes_words_alone``; else None."""

    def encode(self, text: str) -> list[int]:
        """Encodes a text; nothing is added at either end."""

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        """Encodes texts, faster: for each an array [T] of the library's integer type, which may be read-only."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids. Special tokens and ids outside the vocabulary have no text."""

    def token_id(self, name: str) -> int | None:
        """Returns the id of the special token of that name, or None if there is none."""


class HuggingFaceTokenizer:
    """A tokenizer of the ``tokenizers`` library.

    The end of a document is ``eos_token`` of the tokenizer_config.json beside the tokenizer.json, else "<|endoftext|>".

    Args:
        path: a tokenizer.json, or a folder that holds one
        parse_special: whether the name of a special token in a text is its id, as transformers has it

    Raises:
        DataError: there is no such file, or its vocabulary lacks the token that ends documents.
    """

    def __init__(self, path: str | os.PathLike[str], parse_special: bool = False) -> None:
        import tokenizers

        file = _tokenizer_file(Path(path))
        with _naming_errors(file, "a tokenizer.json"):
            if file.name == "vocab.json" and (merges := file.with_name("merges.txt")).is_file():
                self._tokenizer = tokenizers.ByteLevelBPETokenizer(str(file), str(merges))._tokenizer
            else:
                self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        # a saved truncation or padding would silently cut or fill documents
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = not parse_special
        self.vocab_size = _checked_size(self._tokenizer.get_vocab(with_added_tokens=True).values(), file)
        name = _eos_token(file.parent / "tokenizer_config.json")
        eod_id = self._tokenizer.token_to_id(name)
        if eod_id is None:
            raise DataError(
                f"{file}: its vocabulary has no {name!r} to end documents with; name one of its tokens as "
                f'"eos_token" in {file.parent / "tokenizer_config.json"}'
            )
        self.eod_id: int = eod_id
        with _naming_errors(file, "a tokenizer.json"):
            state = self.state
            if parse_special:  # then they are looked for in texts as other added tokens are
                state["added_tokens"] = [token | {"special": False} for token in state["added_tokens"]]
            self._bytes = _bytes_of_tokens(self._tokenizer)
            self.token_bytes = self._bytes if encodes_words_alone(state) else None
        self._fast: fast_bpe.Encode | None = None

    def encode(self, text: str) -> list[int]:
        """Encodes a text by the library; nothing is added at either end."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        """Encodes texts by fastokens where ``use_fastokens`` chose it, else by the library."""
        return self._encode_with_library(texts) if self._fast is None else self._fast(texts)

    def use_fastokens(self, sample: Sequence[str] | None) -> bool:
        """Encodes batches by fastokens from now on, if it is installed and gives the library's ids.

        Args:
            sample: texts that both are compared on, beside fixed ones; None: another process has compared them.

        Returns:
            Whether it is used.
        """
        encode = fast_bpe.load(self.state, parse_special=not self._tokenizer.encode_special_tokens)
        if encode is not None and (sample is None or fast_bpe.agrees(encode, self._encode_with_library, sample)):
            self._fast = encode
        return self._fast is not None

    def _encode_with_library(self, texts: list[str]) -> list[Ids]:
        batch = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in batch]

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids without special tokens; bytes that are no UTF-8 become U+FFFD."""
        if self._bytes is None:
            return self._tokenizer.decode(list(ids), skip_special_tokens=True)
        try:
            text = b"".join(map(self._bytes.__getitem__, ids))
        except KeyError:
            text = b"".join([self._bytes.get(i, b"") for i in ids])
        return text.decode("utf-8", errors="replace")

    def token_id(self, name: str) -> int | None:
        """Returns the id of an entry of the vocabulary, added tokens included; None: there is none."""
        return self._tokenizer.token_to_id(name)

    @property
    def definition(self) -> Any:
        """Model, normalizer, pre-tokenizer and added tokens, in a form that spacing does not change."""
        state = self.state
        model = {name: state["model"].get(name) for name in ("type", "unk_token", "byte_fallback")}
        vocab = state["model"].get("vocab", {})
        model["vocab"] = sorted(vocab.items(), key=lambda item: item[1]) if isinstance(vocab, dict) else vocab
        merges = state["model"].get("merges") or []  # pairs, or in older files their two names with a space between
        model["merges"] = [pair.split(" ") if isinstance(pair, str) else pair for pair in merges]
        added = [[token["id"], token["content"]] for token in state["added_tokens"]]
        return [model, state["normalizer"], state["pre_tokenizer"], added]

    @property
    def state(self) -> dict[str, Any]:
        """The content of its tokenizer.json."""
        found: dict[str, Any] = json.loads(self._tokenizer.to_str())
        return found


class SentencePieceTokenizer:
    """A SentencePiece ``.model`` file. The end of a document is its end-of-sentence piece."""

    token_bytes = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            import sentencepiece
        except ImportError as error:
            raise DataError(
                "SentencePieceTokenizer needs the package sentencepiece: pip install sentencepiece "
                "(extra [sentencepiece])"
            ) from error
        if not hasattr(sentencepiece.SentencePieceProcessor, "EncodeAsNumpy"):
            raise DataError("sentencepiece gives no arrays of ids before 0.2.3: pip install --upgrade sentencepiece")
        file = definition_file(TokenizerType.SENTENCEPIECE, path) or Path(path)
        if not file.is_file():
            what = "is a folder without one" if file.is_dir() else "no such file"
            raise DataError(f"{file}: {what}; --tokenizer-model must be a SentencePiece .model file")
        try:
            self.processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
        except (RuntimeError, OSError) as error:
            raise DataError(f"{file}: not a SentencePiece model: {error}") from error
        self.definition = file.read_bytes()
        self.vocab_size: int = self.processor.get_piece_size()
        self.eod_id: int = self.processor.eos_id()
        if self.eod_id < 0:
            raise DataError(f"{file}: has no end-of-sentence piece to end documents with; train it with eos_id >= 0")
        self._cache = SentencePieceCache.from_processor(self.processor)

    def encode(self, text: str) -> list[int]:
        """Encodes a text; nothing is added at either end."""
        return self.processor.encode(text)

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        """Encodes texts, through the pretoken cache where the model allows one."""
        if self._cache is not None:
            return self._cache.encode_batch(texts)
        return self.processor.encode(texts, num_threads=1, out_type="numpy")

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids; those outside the vocabulary have no text."""
        return self.processor.decode([int(i) for i in ids if 0 <= i < self.vocab_size])

    def token_id(self, name: str) -> int | None:
        """Returns the id of a piece; None: there is none."""
        found = self.processor.piece_to_id(name)
        return found if self.processor.id_to_piece(found) == name else None


class TikTokenizer:
    """A ``.tiktoken`` file, which has a line per token: its bytes in base64 and its rank.

    A file of the same name with ``.json`` appended may hold {"pattern": regular expression of words,
    "end_of_text": id, "special_tokens": {name: id}}; else words are those of GPT-2, and the end of a document is the
    first id after the ranks. With ``parse_special`` the name of a special token in a text is its id.
    """

    token_bytes = None

    def __init__(self, path: str | os.PathLike[str], parse_special: bool = False) -> None:
        try:
            import tiktoken
            from tiktoken_ext.openai_public import r50k_pat_str
        except ImportError as error:
            raise DataError(
                "TikTokenizer needs the package tiktoken: pip install tiktoken (extra [tiktoken])"
            ) from error
        if not hasattr(tiktoken.Encoding, "encode_to_numpy"):
            raise DataError("tiktoken gives no arrays of ids before 0.11: pip install --upgrade tiktoken")
        file = definition_file(TokenizerType.TIKTOKEN, path) or Path(path)
        with _naming_errors(file, "a .tiktoken file"):
            if not file.is_file():
                raise ValueError("no such file")
            pairs = [line.split() for line in file.read_bytes().splitlines() if line]
            if bad := next((number for number, pair in enumerate(pairs, 1) if len(pair) != 2), None):
                raise ValueError(f"line {bad} is no token in base64 and its rank")
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
            extra = Path(f"{file}.json")
            options = json.loads(extra.read_text(encoding="utf-8")) if extra.is_file() else {}
            self.eod_id = int(options.get("end_of_text", max(ranks.values()) + 1))
            names = options.get("special_tokens", {})
            self.special = {END_OF_TEXT: self.eod_id} | {str(name): int(i) for name, i in names.items()}
            self.pattern = options.get("pattern", r50k_pat_str)
            self.vocab_size: int = _checked_size([*self.special.values(), *ranks.values()], file)
            self._encoding = tiktoken.Encoding(
                file.stem, pat_str=self.pattern, mergeable_ranks=ranks, special_tokens=self.special
            )
        self.tokens = {rank: token for token, rank in ranks.items()}
        self._parsed: set[str] = set(self.special) if parse_special else set()

    def encode(self, text: str) -> list[int]:
        """Encodes a text; names of special tokens are text without ``parse_special``."""
        return self._encoding.encode(text, allowed_special=self._parsed, disallowed_special=())

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        """Encodes texts to arrays of uint32."""
        # With nothing disallowed and nothing allowed, the names of special tokens are text, as in ``encode_ordinary``.
        options: dict[str, Any] = {"allowed_special": self._parsed, "disallowed_special": ()}
        return [self._encoding.encode_to_numpy(text, **options) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.tokens.get(i, b"") for i in ids).decode("utf-8", errors="replace")

    def token_id(self, name: str) -> int | None:
        """Returns the id of a special token; None: there is none."""
        return self.special.get(name)

    @property
    def definition(self) -> Any:
        """Pattern of words, ranks of tokens and special tokens."""
        tokens = [[rank, token.hex()] for rank, token in sorted(self.tokens.items())]
        return [self.pattern, tokens, sorted(self.special.items())]


class ByteLevelTokenizer:
    """The 256 bytes of UTF-8 as ids, and id 256 to end a document. Needs no file."""

    vocab_size = _NUM_BYTES + 1
    eod_id = _NUM_BYTES
    token_bytes = None
    definition = "UTF-8"

    def encode(self, text: str) -> list[int]:
        """The bytes of the text in UTF-8."""
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        """The bytes of each text in UTF-8, as read-only uint8 arrays."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes bytes; bytes that are no UTF-8 become U+FFFD."""
        return bytes(i for i in ids if 0 <= i < _NUM_BYTES).decode("utf-8", errors="replace")

    def token_id(self, name: str) -> int | None:
        """Returns None: there are no special tokens."""
        return None


@contextlib.contextmanager
def _naming_errors(file: Path, what: str) -> Iterator[None]:
    """Turns whatever a library raises for a file into a DataError. The libraries in Rust also raise what is no
    Exception: their panics."""
    try:
        yield
    except (DataError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise DataError(f"{file}: not {what} that can be read: {type(error).__name__}: {error}") from error


def _checked_size(ids: Collection[int], file: Path) -> int:
    """Returns the size of a vocabulary with these ids. Raises DataError where tables of that size would not fit."""
    low, high = min(ids, default=0), max(ids, default=-1)
    if low < 0 or not 0 <= high < _MAX_BPE_SIZE:
        raise DataError(f"{file}: its token ids run from {low} to {high}; they must lie in [0, {_MAX_BPE_SIZE})")
    return high + 1


def build_tokenizer(
    kind: TokenizerType | None, path: str | os.PathLike[str] | None, *, parse_special: bool = False
) -> Tokenizer:
    """Builds the tokenizer that ``--tokenizer-type`` (None: by the file) and ``--tokenizer-model`` name.

    Args:
        kind: its type.
        path: its file or folder.
        parse_special: whether the name of a special token in a text is its id, and not letters.

    Raises:
        DataError: the file is missing or cannot be read, or a tokenizer of this type knows no names of special tokens.
        ConfigError: there is no type, and the file is of none that is known.
    """
    if kind is None:
        kind, _ = settle_tokenizer_type(None, None if path is None else os.fspath(path))
    if parse_special and kind not in (TokenizerType.HF, TokenizerType.TIKTOKEN):
        raise DataError(
            f"--parse-special-tokens: {kind.value} finds no names of special tokens in texts; that is for "
            f"{TokenizerType.HF.value} and {TokenizerType.TIKTOKEN.value}"
        )
    if kind is TokenizerType.BYTE:
        return ByteLevelTokenizer()
    if path is None:
        raise DataError(
            f"{kind.value} needs --tokenizer-model, its file or folder; train one with `optimus train-tokenizer`, or "
            f"use --tokenizer-type {TokenizerType.BYTE.value}, which needs none"
        )
    if kind is TokenizerType.TIKTOKEN:
        return TikTokenizer(path, parse_special)
    return HuggingFaceTokenizer(path, parse_special) if kind is TokenizerType.HF else SentencePieceTokenizer(path)


def byte_lengths(tokenizer: Tokenizer) -> dict[int, int] | None:
    """Returns how many bytes of text each id stands for, special tokens none; None where that is not known.

    A SentencePiece or WordPiece token may stand for a space that is not in the text, or for no character of its own. A
    text that the tokenizer normalises counts as it is afterwards.
    """
    if isinstance(tokenizer, ByteLevelTokenizer):
        return dict.fromkeys(range(_NUM_BYTES), 1)
    if isinstance(tokenizer, TikTokenizer):
        return {i: len(token) for i, token in tokenizer.tokens.items()}
    own = tokenizer._bytes if isinstance(tokenizer, HuggingFaceTokenizer) else None
    return None if own is None else {i: len(token) for i, token in own.items()}


def byte_characters() -> dict[int, str]:
    """Returns the character that stands for each byte in the names of byte-level tokens.

    It is the byte's own for most printable Latin-1 characters, and the following ones from U+0100 on for the other
    bytes in their order.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(_NUM_BYTES) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(_NUM_BYTES + i) for i, byte in enumerate(hidden)}


def _bytes_of_tokens(tokenizer: Any) -> dict[int, bytes] | None:
    """Bytes that each id stands for, if decoding only joins the bytes of tokens ("ByteLevel"); else None.

    A token's name has one character for each of its bytes. Special tokens have no text.
    """
    state = json.loads(tokenizer.to_str())
    if (state["decoder"] or {}).get("type") != "ByteLevel":
        return None
    byte_of = {character: byte for byte, character in byte_characters().items()}
    special = {token["id"] for token in state["added_tokens"] if token["special"]}
    names = {i: "" if i in special else name for name, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    if any(character not in byte_of for name in names.values() for character in name):
        return None
    return {i: bytes(byte_of[character] for character in name) for i, name in names.items()}


def _tokenizer_file(path: Path) -> Path:
    file = definition_file(TokenizerType.HF, path)
    if file is None and (path / "tokenizer.json").is_file():  # not JSON: its reader says so
        file = path / "tokenizer.json"
    if file is not None:
        return file
    if path.is_dir():
        raise DataError(
            f"{path}: the folder holds no tokenizer.json; save the tokenizer with transformers' save_pretrained, or "
            f"name a .model file with --tokenizer-type {TokenizerType.SENTENCEPIECE.value}"
        )
    raise DataError(
        f"{path}: no such file or folder; --tokenizer-model must be a local tokenizer.json or a folder that holds one "
        "(nothing is downloaded); train one with `optimus train-tokenizer`"
    )


def _eos_token(config: Path) -> str:
    """``eos_token`` of a tokenizer_config.json, a string or an object with "content"; else "<|endoftext|>"."""
    try:
        if not config.is_file():
            return END_OF_TEXT
        value = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError, OSError, RecursionError) as error:
        raise DataError(f"{config}: not a JSON object that can be read: {error}") from error
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else END_OF_TEXT


def train_bpe(
    texts: Iterable[str], vocab_size: int, out_dir: str | os.PathLike[str], special_tokens: Sequence[str] = ()
) -> None:
    """Trains a byte-level BPE and saves it as a folder that ``transformers`` loads.

    Id 0 is "<|endoftext|>", then come ``special_tokens``, the 256 bytes, and merges; the same texts give the same
    files. A corpus too small for that many merges gives fewer, with a warning.

    Args:
        texts: documents to train on
        vocab_size: entries of the vocabulary
        out_dir: folder to write, made before training
        special_tokens: names of further special tokens

    Raises:
        DataError: ``vocab_size`` does not hold special tokens and bytes or is beyond 2^24, or the folder cannot be
            written.
    """
    if "" in special_tokens:
        raise DataError("a special token is empty; give each a name, for example <fim_prefix>")
    special = [END_OF_TEXT, *(name for name in dict.fromkeys(special_tokens) if name != END_OF_TEXT)]
    if vocab_size < _NUM_BYTES + len(special):
        raise DataError(
            f"vocab_size={vocab_size} is too small: 256 bytes and {', '.join(special)} need {_NUM_BYTES + len(special)}"
        )
    if vocab_size > _MAX_BPE_SIZE:  # the trainer takes memory for all of them at once, and aborts without it
        raise DataError(f"vocab_size={vocab_size} is too large; use at most {_MAX_BPE_SIZE}")
    folder = Path(out_dir)
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder}: cannot write the tokenizer: {error.strerror}; name a folder") from error
    try:
        tokenizer = _trained_bpe(texts, vocab_size, special)
    except BaseException:  # of the texts, or Ctrl-C: nothing stays behind
        if is_new:
            folder.rmdir()
        raise
    if tokenizer.get_vocab_size() < vocab_size:
        logger.warning(
            "the texts gave only %d of %d tokens; use more text or a smaller vocabulary",
            tokenizer.get_vocab_size(),
            vocab_size,
        )
    try:
        _save_bpe(tokenizer, folder, special)
    except OSError as error:
        raise DataError(f"{folder}: cannot write the tokenizer: {error.strerror}") from error


def _trained_bpe(texts: Iterable[str], vocab_size: int, special: list[str]) -> Any:
    from tokenizers import Tokenizer as BPETokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = BPETokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    return tokenizer


def _save_bpe(tokenizer: Any, folder: Path, special: list[str]) -> None:
    names: dict[str, Any] = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    if special[1:]:
        names["additional_special_tokens"] = special[1:]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    _write_json(folder / "special_tokens_map.json", names)
    _write_json(folder / "tokenizer_config.json", config)
    # last: a folder without tokenizer.json counts as none
    write_atomically(folder / "tokenizer.json", tokenizer.to_str(pretty=True), sync=False)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(value, indent=2) + "\n", sync=False)
