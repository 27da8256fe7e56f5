"""Text of tokens that come one at a time: characters of several tokens, and stop strings.

A token may end inside a character, and a text may end with the beginning of a stop string. Neither is shown before the
next tokens have decided.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.optimus.data.tokenize.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"  # what decoding gives for bytes that are no whole character
_MOST_WAITING = 8  # tokens without a whole character after which the bytes are taken for what no text is


class TextStream:
    """The text of one sequence's generated tokens.

    Attributes:
        text: what the tokens say so far, up to the stop string if there was one.
        stopped: whether a stop string has come.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self.text, self.stopped = "", False
        self._tokenizer, self._stops = tokenizer, stops
        self._ids: list[int] = []
        # Tokens [context, read) are decoded again with the new ones: some tokenizers write a space only after others.
        self._context = self._read = 0
        self._shown = 0  # characters of the text that ``add`` has returned

    def add(self, token: int) -> str:
        """Adds a token; returns the text that it has made certain."""
        self._ids.append(token)
        self._decode(is_last=False)
        return self._take(is_last=False)

    def finish(self) -> str:
        """Ends the text; returns what was held back."""
        if not self.stopped:
            self._decode(is_last=True)
        return self._take(is_last=True)

    def _decode(self, *, is_last: bool) -> None:
        before = self._tokenizer.decode(self._ids[self._context : self._read])
        now = self._tokenizer.decode(self._ids[self._context :])
        if now.endswith(_INCOMPLETE) and not is_last and len(self._ids) - self._read < _MOST_WAITING:
            return
        if len(now) > len(before):  # tokens without text are no context
            self.text += now[len(before) :]
            self._context = self._read
        self._read = len(self._ids)
        found = [place for stop in self._stops if (place := self.text.find(stop, self._shown)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _take(self, *, is_last: bool) -> str:
        held = 0 if self.stopped or is_last else max((self._overlap(stop) for stop in self._stops), default=0)
        end = max(self._shown, len(self.text) - held)
        new, self._shown = self.text[self._shown : end], end
        return new

    def _overlap(self, stop: str) -> int:
        """The number of characters at the end of the text with which ``stop`` begins."""
        sizes = range(min(len(stop) - 1, len(self.text) - self._shown), 0, -1)
        return next((size for size in sizes if self.text.endswith(stop[:size])), 0)
