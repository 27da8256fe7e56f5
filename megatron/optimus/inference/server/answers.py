"""Formats the scheduler's updates as OpenAI's responses: one whole response, or chunks of a stream."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

from megatron.optimus.data.tokenize.tokenizer import Tokenizer
from megatron.optimus.inference.server.protocol import ChatBody, CompletionBody
from megatron.optimus.inference.server.scheduler import Token, Update


class TokenTexts:
    """The text of single tokens, as log-probabilities name them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = tokenizer.token_bytes or {}
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """Returns a token's text: ``bytes:\\xNN`` for a part of a character, ``token_id:N`` for one without text."""
        if token not in self._texts:
            # After another token, because some tokenizers write no space before the first.
            one, two = self._tokenizer.decode([token]), self._tokenizer.decode([token, token])
            found = two[len(one) :] if two.startswith(one) else one
            if "\ufffd" in found or not found:
                data = self._bytes.get(token)
                found = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data) if data else f"token_id:{token}"
            self._texts[token] = found
        return self._texts[token]

    def bytes_of(self, token: int) -> list[int] | None:
        """Returns a token's bytes in UTF-8; None where they are unknown."""
        if (data := self._bytes.get(token)) is not None:
            return list(data)
        text = self.text(token)
        return None if text.startswith(("bytes:", "token_id:")) else list(text.encode())


@dataclass
class Usage:
    """Counts the tokens of one request of a client."""

    prompt: int = 0
    completion: int = 0

    def fields(self) -> dict[str, int]:
        """Returns the counts under OpenAI's field names."""
        total = self.prompt + self.completion
        return {"prompt_tokens": self.prompt, "completion_tokens": self.completion, "total_tokens": total}


class Answer:
    """The response to one request, with its choices."""

    def __init__(self, body: CompletionBody | ChatBody, model: str, texts: TokenTexts, echoed: list[str]) -> None:
        """Begins an answer.

        Args:
            body: what the client asked for.
            model: its name.
            texts: of tokens.
            echoed: of each choice, the text that comes before the completion.
        """
        self._body, self._texts, self._echoed = body, texts, list(echoed)
        self._is_chat = isinstance(body, ChatBody)
        self._offsets = [0] * len(echoed)  # characters of the tokens that were told, of each choice
        name = "chatcmpl" if self._is_chat else "cmpl"
        self._head = {"id": f"{name}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, updates: list[Update], usage: Usage) -> dict[str, Any]:
        """Returns the whole response, from the joined updates of each choice."""
        choices = [self._choice(index, update, is_chunk=False) for index, update in enumerate(updates)]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._head | {"object": kind, "choices": choices, "usage": usage.fields()}

    def roles(self) -> list[dict[str, Any]]:
        """Returns the first chunk of each choice of a chat, which names the role; nothing for completions."""
        if not self._is_chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
            for index in range(len(self._echoed))
        ]

    def chunk(self, index: int, update: Update) -> dict[str, Any] | None:
        """Returns the chunk of one choice for one step; None if it would be empty."""
        choice = self._choice(index, update, is_chunk=True)
        content = choice["delta"].get("content") if self._is_chat else choice["text"]
        if not (content or choice["logprobs"] or choice["finish_reason"] or choice.get("experts")):
            return None
        return self._chunk([choice])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """Returns the last chunk, with the counts of tokens, for clients that ask for it."""
        return self._chunk([]) | {"usage": usage.fields()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return self._head | {"object": kind, "choices": choices}

    def _choice(self, index: int, update: Update, *, is_chunk: bool) -> dict[str, Any]:
        text = self._echoed[index] + update.text
        self._echoed[index] = ""
        choice: dict[str, Any] = {"index": index}
        if not self._is_chat:
            choice["text"] = text
        elif is_chunk:
            choice["delta"] = {"content": text} if text else {}
        else:
            choice["message"] = {"role": "assistant", "content": text}
        choice |= {"logprobs": self._logprobs(index, update), "finish_reason": update.finish_reason}
        return choice | ({"experts": update.experts} if self._body.experts else {})

    def _logprobs(self, index: int, update: Update) -> dict[str, Any] | None:
        tokens = [*update.prompt, *update.tokens]
        if self._is_chat:
            if not self._body.logprobs or not tokens:
                return None
            return {"content": [self._chat_token(token) for token in tokens]}
        if self._body.logprobs is None or not tokens:
            return None
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            text = self._texts.text(token.id)
            found["tokens"].append(text)
            found["token_logprobs"].append(token.logprob)
            found["top_logprobs"].append(None if token.logprob is None else self._top(token))
            found["text_offset"].append(self._offsets[index])
            self._offsets[index] += len(text)
        return found

    def _top(self, token: Token) -> dict[str, float]:
        """The likeliest tokens and the token itself, by their texts; of equal texts the likelier one."""
        found: dict[str, float] = {}
        for id_, logprob in (*token.top, (token.id, token.logprob)):
            assert logprob is not None
            text = self._texts.text(id_)
            found[text] = max(logprob, found.get(text, logprob))
        return found

    def _chat_token(self, token: Token) -> dict[str, Any]:
        return self._named(token.id, token.logprob) | {"top_logprobs": [self._named(*pair) for pair in token.top]}

    def _named(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self._texts.text(token), "logprob": logprob, "bytes": self._texts.bytes_of(token)}
