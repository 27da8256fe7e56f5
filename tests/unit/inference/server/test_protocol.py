"""What clients send: fields, limits, and one clear error for each mistake."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
import httpx

from tests.unit.inference.server.served import Served


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "Field required"),
        ({"prompt": "a", "temprature": 1}, "unknown field 'temprature'; did you mean temperature?"),
        ({"prompt": "a", "temperature": -1}, "temperature=-1: Input should be greater than or equal to 0"),
        ({"prompt": "a", "top_p": 0}, "top_p=0: Input should be greater than 0"),
        ({"prompt": "a", "max_tokens": "5"}, 'max_tokens="5": Input should be a valid integer'),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens=0 asks for nothing"),
        ({"prompt": "a", "n": 1000}, "n=1000: Input should be less than or equal to 128"),
        ({"prompt": ["a"] * 100, "n": 100}, "100 prompts with n=100 are more than 256 completions"),
        ({"prompt": []}, "prompt=[]: must be a text"),
        ({"prompt": [1, "a"]}, 'prompt=[1, "a"]: must be a text'),
        ({"prompt": [1, 264]}, "prompt has the token id 264; ids are 0 to 263"),
        ({"prompt": [0, 0, -1]}, "prompt has the token id -1"),
        ({"prompt": [1] * 512}, "prompt has 512 tokens, and the model was trained on 512 positions (max_position_"),
        ({"prompt": ["a", "a" * 9999]}, "shorten it to 511 tokens or fewer"),
        ({"prompt": "a", "presence_penalty": 1}, "presence_penalty=1: "),
        ({"prompt": "a", "stop": ["x"] * 17}, "has 17 strings, at most 16"),
        ({"prompt": "a", "seed": -1}, "seed=-1"),
        ({"prompt": "a", "logprobs": 99}, "logprobs=99"),
        ({"prompt": "\ud800"}, "half of a surrogate pair"),
        (b"\xff\xfe{", "not valid UTF-8 at byte 0"),
        (b"{", "the body is not JSON"),
        (b"[1]", "the body is a JSON list; send an object"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN is no JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', "must be finite"),
        (b'{"prompt": ' + b"[" * 100_000, "the body is not JSON"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", ""),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_clear_error(served: Served, body: dict | bytes, message: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = httpx.post(f"{served.url}/v1/completions", content=content, headers={"content-type": "application/json"})
    error = found.json()["error"]
    assert found.status_code == 400 and message in error["message"], found.text
    assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]
    assert served.scheduler.is_idle
