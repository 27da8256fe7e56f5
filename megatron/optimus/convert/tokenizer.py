"""The tokenizer of an export: where it comes from, what may be copied of it, and whether it fits the model."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.tokenizer_files import CopyGuard, files_of
from megatron.optimus.checkpoint.untrusted import parse_json
from megatron.optimus.config.schema import TokenizerType
from megatron.optimus.config.tokenizer_files import settle_tokenizer_type
from megatron.optimus.convert.formats import Options, Source
from megatron.optimus.convert.sidecar import TOKEN_IDS
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.tokenize.huggingface import to_huggingface, tokenizer_config
from megatron.optimus.data.tokenize.identity import TokenizerIdentity
from megatron.optimus.data.tokenize.tokenizer import END_OF_TEXT, build_tokenizer
from megatron.optimus.platform.files import write_new

# Model types whose tokenizer class AutoTokenizer builds in its own way, whatever the files say (transformers 5).
_FORCED_CLASS = {"qwen2": "Qwen2Tokenizer"}

log = logging.getLogger("optimus")


@dataclass(frozen=True)
class ExportedTokenizer:
    """The files of a tokenizer as transformers loads it, by name, among them tokenizer.json."""

    files: dict[str, bytes]

    def token_ids(self) -> dict[str, int]:
        """Finds the ids of the tokens that tokenizer_config.json names, such as {"eos_token_id": 0}."""
        config, content = self._json("tokenizer_config.json"), self._json("tokenizer.json")
        ids = _vocabulary(content) | _added_tokens(content)
        result = {}
        for name in TOKEN_IDS:
            token = config.get(name.removesuffix("_id"))
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and type(ids.get(token)) is int:
                result[name] = ids[token]
        return result

    def check_fits(self, vocab_size: int, model_type: str) -> None:
        """Checks the tokenizer against config.json.

        Warns of added tokens beyond the embedding, and of a model type that AutoTokenizer gives another class.

        Raises:
            CheckpointError: ids of texts are beyond the embedding.
        """
        forced = _FORCED_CLASS.get(model_type)
        if forced is not None and not str(self._json("tokenizer_config.json").get("tokenizer_class")).startswith(
            forced
        ):
            log.warning(
                "AutoTokenizer takes %s for model_type %s, which cuts texts in its own way; load this tokenizer with "
                "transformers.PreTrainedTokenizerFast.from_pretrained",
                forced,
                model_type,
            )
        content = self._json("tokenizer.json")
        largest = max((i for i in _vocabulary(content).values() if type(i) is int), default=-1)
        if largest >= vocab_size:
            raise CheckpointError(
                f"the tokenizer has ids up to {largest}, the model's embedding has vocab_size={vocab_size} rows; name "
                "the tokenizer that the model was trained with in --tokenizer-model"
            )
        beyond = [name for name, i in _added_tokens(content).items() if type(i) is int and i >= vocab_size]
        if beyond:
            log.warning("the tokenizer's token %r is beyond the model's vocab_size=%d", beyond[0], vocab_size)

    def _json(self, name: str) -> dict[str, Any]:
        return parse_json(self.files.get(name, b"{}"), name)


def find_tokenizer(source: Source, options: Options) -> ExportedTokenizer | None:
    """Finds the tokenizer that the options name, else that of the source; warns where there is none.

    Raises:
        CheckpointError: what the options name is no tokenizer, or one that must not be copied.
        ConfigError: it is of another type than the options say.
    """
    location, kind = options.tokenizer, options.tokenizer_type
    data = source.run.data
    if location is not None or kind is TokenizerType.BYTE:
        kind, _ = settle_tokenizer_type(kind, None if location is None else str(location))
        found = read_tokenizer(kind, location, CopyGuard.of_command_line(location or source.path))
        if found is None:
            raise CheckpointError(
                f"--tokenizer-model {location}: neither the file of a {kind.value} nor a folder with one"
            )
        check_same_tokenizer(source, kind, location)
        return found
    try:
        if source.tokenizer is not None:
            kind, _ = settle_tokenizer_type(data.tokenizer_type, str(source.tokenizer))
            found = read_tokenizer(kind, source.tokenizer, CopyGuard(source.path))
        elif data.tokenizer_model is None and data.tokenizer_type is not TokenizerType.BYTE:
            found = None
        else:  # of a checkpoint without a copy: where its configuration says, if the content is what it recorded
            kind, _ = settle_tokenizer_type(data.tokenizer_type, data.tokenizer_model)
            guard = CopyGuard.of_checkpoint(source.path, source.tokenizer_hashes)
            found = read_tokenizer(kind, Path(data.tokenizer_model) if data.tokenizer_model else None, guard)
    except CheckpointError as error:
        log.warning("the export has no tokenizer: %s", error)
        return None
    if found is None:
        what = f"tokenizer_model={data.tokenizer_model} is not there" if data.tokenizer_model else "it names none"
        log.warning(
            "%s carries no tokenizer, and %s; the export has none: name it in --tokenizer-model", source.path, what
        )
    return found


def check_same_tokenizer(source: Source, kind: TokenizerType, location: Path | None) -> None:
    """Raises CheckpointError where the model was trained on ids of another tokenizer than the one that is named."""
    if source.tokenizer_identity is None:
        return
    try:
        recorded = TokenizerIdentity.from_json(source.tokenizer_identity, f"{source.path}: metadata: tokenizer")
        named = TokenizerIdentity.of(kind, location)
    except DataError as error:
        raise CheckpointError(str(error)) from error
    if named.fingerprint != recorded.fingerprint:
        raise CheckpointError(
            f"{source.path} was trained on ids of {recorded}, but --tokenizer-model names {named}: its ids are "
            "other words. Name the run's own, or leave --tokenizer-model out where the checkpoint has it"
        )


def read_tokenizer(kind: TokenizerType, location: Path | None, guard: CopyGuard) -> ExportedTokenizer | None:
    """Reads a tokenizer and makes of it what transformers loads; None where there is no such file.

    Args:
        kind: its type.
        location: its file or folder; None for bytes.
        guard: lets through what may be copied.

    Raises:
        CheckpointError: a file must not be copied, cannot be read, or the tokenizer has no equivalent.
    """
    sources = files_of(kind, location)
    if not sources and kind is not TokenizerType.BYTE:
        return None
    files = {name: guard.read(file) for name, file in sources.items()}
    if "tokenizer.json" in files:
        config = {} if "tokenizer_config.json" in files else _default_config(files["tokenizer.json"])
        return ExportedTokenizer(files | config)
    with tempfile.TemporaryDirectory() as folder:  # of what the guard let through
        for name, content in files.items():
            write_new(Path(folder) / name, content, sync=False)
        try:
            made = to_huggingface(build_tokenizer(kind, folder if files else None))
        except DataError as error:
            reason = str(error).replace(f"{folder}/", "")
            raise CheckpointError(f"{location}: cannot be exported to transformers: {reason}") from error
    for problem in made.problems:
        log.warning("the exported tokenizer is not exactly the run's: %s", problem)
    kept = {name: content for name, content in files.items() if kind is TokenizerType.HF}
    return ExportedTokenizer(made.files | kept)


def _default_config(content: bytes) -> dict[str, bytes]:
    """A tokenizer_config.json for a tokenizer.json alone, whose texts end as ours do if it has that token."""
    parsed = parse_json(content, "tokenizer.json")
    if END_OF_TEXT in _vocabulary(parsed) | _added_tokens(parsed):
        return tokenizer_config(END_OF_TEXT)
    return {"tokenizer_config.json": b'{\n  "tokenizer_class": "PreTrainedTokenizerFast"\n}\n'}


def _vocabulary(content: dict[str, Any]) -> dict[str, Any]:
    """Ids by token of the model of a tokenizer.json; a Unigram model lists [token, score] in the order of ids."""
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):
        return {str(entry[0]): i for i, entry in enumerate(vocab) if isinstance(entry, list) and entry}
    return dict(vocab) if isinstance(vocab, dict) else {}


def _added_tokens(content: dict[str, Any]) -> dict[str, Any]:
    added = content.get("added_tokens")
    tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    return {token["content"]: token.get("id") for token in tokens if isinstance(token.get("content"), str)}
