"""What clients send and get: the fields of OpenAI's API, their limits, and the shape of errors.

A field that would change the result and is not supported is refused rather than ignored. Fields beyond OpenAI's have
the names that vLLM gives them; ``experts`` is our own.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from megatron.optimus.config.options import did_you_mean

MOST_CHOICES, MOST_LOGPROBS, MOST_STOPS = 128, 20, 16
DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's /v1/completions

_Zero = Annotated[float, Field(ge=0, le=0)] | None
Body = TypeVar("Body", bound="CommonBody")


class ApiError(Exception):
    """An answer that says what is wrong, in the shape of OpenAI's errors."""

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None,
        code: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.content = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class StreamOptions(BaseModel):
    """The field ``stream_options``: what a stream of events holds besides the text."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: the usage so far in every chunk


class CommonBody(BaseModel):
    """The fields that both kinds of completion have."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    experts: bool = False
    user: str | None = None  # names the client's user; nothing is done with it
    # What this server has not: only the values that ask for nothing.
    presence_penalty: _Zero = None
    frequency_penalty: _Zero = None
    logit_bias: dict[str, float] | None = Field(None, max_length=0)

    @field_validator("temperature", "repetition_penalty", "min_p")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value == float("inf"):
            raise ValueError("must be finite")
        return value

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MOST_STOPS:
            raise ValueError(f"has {len(stops)} strings, at most {MOST_STOPS} are possible")
        return [stop for stop in stops if stop]

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end a completion."""
        return tuple(self.stop or ())


class CompletionBody(CommonBody):
    """The body of /v1/completions."""

    prompt: Any
    max_tokens: int | None = Field(DEFAULT_COMPLETION_TOKENS, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool | None = False
    suffix: Literal[None] = None
    best_of: Literal[1] | None = None

    @field_validator("prompt")
    @classmethod
    def _prompts(cls, value: Any) -> list[str] | list[list[int]]:
        """A prompt or a list of them, each a text or token ids."""
        if isinstance(value, str):
            return [value]
        if isinstance(value, list) and value:
            if all(_is_id(item) for item in value):
                return [value]
            if all(isinstance(item, str) for item in value):
                return value
            if all(isinstance(item, list) and item and all(map(_is_id, item)) for item in value):
                return value
        raise ValueError("must be a text, a list of texts, a list of token ids, or a list of such lists; none is empty")

    @model_validator(mode="after")
    def _something_is_asked(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens=0 asks for nothing without echo=true")
        return self

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of the completion; None: not given."""
        return self.max_tokens

    @property
    def top_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report for each token; None: no probabilities."""
        return self.logprobs


class Message(BaseModel):
    """One message of a conversation; a list of text parts is joined to one text."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: str
    content: Any
    name: str | None = None

    @field_validator("content")
    @classmethod
    def _text(cls, value: Any) -> str:
        if isinstance(value, str):
            return value
        if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
            return "".join(str(part.get("text", "")) for part in value)
        raise ValueError('must be a text, or a list of parts of type "text"; others are not supported')


class ChatBody(CommonBody):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    response_format: Any = None
    tools: list[Any] | None = Field(None, max_length=0)

    echo: Literal[False] = False

    @field_validator("response_format")
    @classmethod
    def _plain_text(cls, value: Any) -> Any:
        if value not in (None, {"type": "text"}):
            raise ValueError('only {"type": "text"} is supported')
        return value

    @model_validator(mode="after")
    def _logprobs_are_on(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of the completion, by the newer field before the older; None: not given."""
        return self.max_completion_tokens or self.max_tokens


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def parse_body(kind: type[Body], content: bytes) -> Body:
    """Reads the body of a request. Raises ApiError that names the field, the value and the limit."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid UTF-8 at byte {error.start}; send JSON in UTF-8") from error
    try:
        parsed = json.loads(text, parse_constant=_no_constant)
        text.encode()
        json.dumps(parsed, ensure_ascii=False).encode()  # an escape may name half of a surrogate pair
    except UnicodeEncodeError as error:
        raise ApiError(400, "the body has half of a surrogate pair (such as \\ud800), which is no text") from error
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ApiError(400, f"the body is a JSON {type(parsed).__name__}; send an object")
    try:
        return kind.model_validate(parsed)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            hint = did_you_mean(field, kind.model_fields, f"known are {', '.join(kind.model_fields)}")
            raise ApiError(400, f"unknown field {field!r}; {hint}", param=field) from error
        message = first["msg"].removeprefix("Value error, ")
        given = f"={_short(first['input'])}" if field and first["type"] != "missing" else ""
        raise ApiError(400, f"{field}{given}: {message}" if field else message, param=field or None) from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
