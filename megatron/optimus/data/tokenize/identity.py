"""Which tokenizer made a pair of token files: a small JSON file beside the index, compared before training."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from megatron.optimus.config.schema import TokenizerType
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.index_reader import tokenizer_path
from megatron.optimus.data.tokenize.tokenizer import Tokenizer, build_tokenizer
from megatron.optimus.platform.files import write_atomically

_MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class TokenizerIdentity:
    """A tokenizer as far as its ids go.

    Attributes:
        type: a ``TokenizerType``.
        model: where its file or folder was, for people; None where it has none.
        vocab_size: one more than its largest id.
        fingerprint: SHA-256 of the type and of what defines the ids.
    """

    type: str
    model: str | None
    vocab_size: int
    fingerprint: str

    @classmethod
    def of(cls, kind: TokenizerType, model: str | os.PathLike[str] | None) -> TokenizerIdentity:
        """Reads a tokenizer. Raises DataError."""
        return cls.of_tokenizer(kind, model, build_tokenizer(kind, model))

    @classmethod
    def of_tokenizer(
        cls, kind: TokenizerType, model: str | os.PathLike[str] | None, tokenizer: Tokenizer
    ) -> TokenizerIdentity:
        """Returns the identity of a tokenizer that has been read."""
        definition = tokenizer.definition
        if not isinstance(definition, bytes):
            definition = json.dumps(_without_nulls(definition), sort_keys=True, separators=(",", ":")).encode()
        digest = hashlib.sha256(f"{kind.value}\n".encode() + definition).hexdigest()
        return cls(kind.value, None if model is None else os.path.abspath(model), tokenizer.vocab_size, digest)

    @classmethod
    def from_json(cls, content: Any, source: str) -> TokenizerIdentity:
        """Checks the types of the fields. Raises DataError that begins with ``source``."""
        kinds: dict[str, Any] = {"type": str, "model": (str, type(None)), "vocab_size": int, "fingerprint": str}
        if not isinstance(content, dict) or any(
            not isinstance(content.get(name), kind) for name, kind in kinds.items()
        ):
            raise DataError(f"{source}: does not describe a tokenizer; remove it, and no tokenizer is compared")
        return cls(**{name: content[name] for name in kinds})

    def to_json(self) -> dict[str, Any]:
        """Returns the fields by name."""
        return asdict(self)

    def __str__(self) -> str:
        place = f" {self.model}" if self.model is not None else ""
        return f"{self.type}{place} ({self.vocab_size} ids, fingerprint {self.fingerprint[:12]})"


def write_identity(prefix: str, identity: TokenizerIdentity) -> None:
    """Writes the file beside a pair. Raises DataError."""
    try:
        write_atomically(tokenizer_path(prefix), json.dumps(identity.to_json(), indent=1) + "\n")
    except OSError as error:
        raise DataError(f"{tokenizer_path(prefix)}: cannot be written: {error.strerror}") from error


def read_identity(prefix: str) -> TokenizerIdentity | None:
    """Reads the file beside a pair; None where there is none, as for files of others. Raises DataError."""
    path = tokenizer_path(prefix)
    try:
        with open(path, "rb") as stream:
            content = json.loads(stream.read(_MAX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read ({error}); remove it, and no tokenizer is compared") from error
    return TokenizerIdentity.from_json(content, str(path))


def check_same(own: TokenizerIdentity | None, made_with: Iterable[tuple[str, TokenizerIdentity | None]]) -> str:
    """Compares the tokenizer of a run with those of its token files.

    Args:
        own: the run's; None: it names none, and the files are compared with each other.
        made_with: (prefix, identity) of the files.

    Returns:
        A warning about files that do not say what made them; empty where there is nothing to say.

    Raises:
        DataError: two differ; names both, and the remedy.
    """
    pairs = list(made_with)
    known = [(prefix, identity) for prefix, identity in pairs if identity is not None]
    expected, who = (own, "this run has") if own is not None else (None, "")
    if expected is None and known:
        usual = Counter(identity.fingerprint for _, identity in known).most_common(1)[0][0]
        first, expected = next((prefix, identity) for prefix, identity in known if identity.fingerprint == usual)
        who = f"{first} with"
    for prefix, identity in known:
        assert expected is not None
        if identity.fingerprint != expected.fingerprint:
            raise DataError(
                f"{prefix} was made with the tokenizer {identity}, but {who} {expected}: their ids mean other "
                "words. Name the data's own in --tokenizer-model, or tokenize the data anew; if you know that both "
                f"give the same ids, remove {tokenizer_path(prefix)}"
            )
    without = [prefix for prefix, identity in pairs if identity is None]
    if own is None or not without:
        return ""
    return (
        f"{len(without)} of {len(pairs)} token files, such as {without[0]}, do not say which tokenizer made them; "
        f"whether it is the run's {own} is not known"
    )


def _without_nulls(value: Any) -> Any:
    """Fields of null are those that a later version of the library added."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, (list, tuple)) else value
