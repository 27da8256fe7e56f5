"""Updates of the scheduler as OpenAI's responses: whole ones and streams, of completions and of chats."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("fastapi")

from megatron.optimus.data.tokenize.tokenizer import ByteLevelTokenizer
from megatron.optimus.inference.server.answers import Answer, TokenTexts, Usage
from megatron.optimus.inference.server.protocol import ChatBody, CompletionBody
from megatron.optimus.inference.server.scheduler import Token, Update


class Bytes(ByteLevelTokenizer):
    """Knows the bytes of its tokens, as those of Hugging Face do."""

    token_bytes = {byte: bytes([byte]) for byte in range(256)}  # noqa: RUF012


TEXTS = TokenTexts(Bytes())
A, B, HALF = ord("a"), ord("b"), 0xE2  # the last one begins a character
USAGE = Usage(prompt=3, completion=2)


def completion(**fields: object) -> CompletionBody:
    return CompletionBody(prompt="x", **fields)  # type: ignore[arg-type]


def chat(**fields: object) -> ChatBody:
    return ChatBody(messages=[{"role": "user", "content": "x"}], **fields)  # type: ignore[list-item,arg-type]


def test_a_token_has_a_text_and_bytes() -> None:
    assert (TEXTS.text(A), TEXTS.bytes_of(A)) == ("a", [A])
    assert (TEXTS.text(HALF), TEXTS.bytes_of(HALF)) == ("bytes:\\xe2", [HALF])
    unknown = TokenTexts(ByteLevelTokenizer())  # the bytes of a whole text follow from it
    assert (unknown.text(A), unknown.bytes_of(A)) == ("a", [A])
    assert (unknown.text(HALF), unknown.bytes_of(HALF)) == (f"token_id:{HALF}", None)


def test_whole_completions_have_probabilities_and_offsets() -> None:
    answer = Answer(completion(logprobs=1, echo=True), "small", TEXTS, ["", ">"])
    tokens = [Token(A, -0.5, ((A, -0.5),)), Token(B, -2.0, ((A, -0.25),))]
    first = Update("ab", prompt=[Token(HALF)], tokens=tokens, finish_reason="stop")
    found = answer.whole([first, Update("c", finish_reason="length")], USAGE)
    assert found["object"] == "text_completion" and found["model"] == "small" and found["id"].startswith("cmpl-")
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    one, other = found["choices"]
    assert (one["text"], one["finish_reason"], other["text"]) == ("ab", "stop", ">c")
    assert one["logprobs"] == {
        "tokens": ["bytes:\\xe2", "a", "b"],
        "token_logprobs": [None, -0.5, -2.0],
        "top_logprobs": [None, {"a": -0.5}, {"a": -0.25, "b": -2.0}],
        "text_offset": [0, 10, 11],
    }
    assert other["logprobs"] is None


def test_a_stream_of_a_chat_names_the_role_and_ends_with_a_reason() -> None:
    answer = Answer(chat(logprobs=True, top_logprobs=1, stream=True, experts=True), "small", TEXTS, [""])
    [role] = answer.roles()
    assert role["object"] == "chat.completion.chunk" and role["id"].startswith("chatcmpl-")
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert answer.chunk(0, Update()) is None, "nothing to say"
    update = Update("a", tokens=[Token(A, -0.5, ((B, math.log(0.5)),))], experts=[[[1, 2]]])
    part = answer.chunk(0, update)
    assert part is not None and part["id"] == role["id"]
    [choice] = part["choices"]
    assert choice["delta"] == {"content": "a"} and choice["experts"] == [[[1, 2]]] and choice["finish_reason"] is None
    [token] = choice["logprobs"]["content"]
    assert token == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [A],
        "top_logprobs": [{"token": "b", "logprob": math.log(0.5), "bytes": [B]}],
    }
    last = answer.chunk(0, Update(finish_reason="length"))
    assert last is not None and last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "length"
    assert answer.usage_chunk(USAGE)["choices"] == [] and answer.usage_chunk(USAGE)["usage"]["total_tokens"] == 5


def test_completions_stream_what_is_echoed_once() -> None:
    answer = Answer(completion(stream=True), "small", TEXTS, ["x"])
    assert answer.roles() == []
    texts = [answer.chunk(0, Update(text))["choices"][0]["text"] for text in "ab"]  # type: ignore[index]
    assert texts == ["xa", "b"]
