"""Turns a chat into token ids by the template that came with the tokenizer."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.inference.server.protocol import ApiError, Message


class ChatTemplate:
    """The chat template of a tokenizer, applied by transformers, which also encodes the special tokens in it."""

    def __init__(self, tokenizer_path: Path | None, template: Path | None) -> None:
        """Finds a template and loads what applies it.

        Args:
            tokenizer_path: file or folder of the tokenizer.
            template: a Jinja template; None: the one in the tokenizer's folder, if there is one.

        Raises:
            ConfigError: ``template`` cannot be read, or there is no tokenizer of transformers to apply it.
        """
        folder = None
        if tokenizer_path is not None:
            folder = tokenizer_path if tokenizer_path.is_dir() else tokenizer_path.parent
        has_tokenizer = folder is not None and (folder / "tokenizer.json").is_file()
        text = None
        if template is not None:
            try:
                text = template.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"--chat-template {template}: {error}") from error
            if not has_tokenizer:
                raise ConfigError("--chat-template needs a tokenizer with a tokenizer.json; --tokenizer-model names it")
        self._tokenizer: Any = None
        self.missing = (
            "the model's tokenizer has no chat template: it is a base model; use /v1/completions, or start the server "
            "with --chat-template FILE"
        )
        if text is None and not (has_tokenizer and folder is not None and _has_template(folder)):
            return
        if importlib.util.find_spec("transformers") is None:
            self.missing = "chats need the package transformers on the server: pip install optimus-megatron[hf]"
            return
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        if text is not None:
            self._tokenizer.chat_template = text

    @property
    def is_there(self) -> bool:
        """Whether the tokenizer has a template."""
        return self._tokenizer is not None

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Returns the token ids up to where the assistant's answer begins.

        Raises:
            ApiError: there is no template, or it refuses these messages.
        """
        if self._tokenizer is None:
            raise ApiError(400, self.missing)
        turns = [message.model_dump(exclude_none=True) for message in messages]
        try:
            ids = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # of the template's own raise_exception, and whatever else it does with the messages
            raise ApiError(400, f"the chat template refuses these messages: {error}", param="messages") from error
        return [int(token) for token in ids]


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))
