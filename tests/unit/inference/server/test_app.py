"""The endpoints by OpenAI's own client and by lm-eval, bad input, many clients, and the end of the server."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")
import httpx
import openai

from megatron.optimus.inference.generate import Limits, generate
from megatron.optimus.inference.sampling import Sampling
from megatron.optimus.inference.score import score
from tests.unit.inference.server.served import NAME, POSITIONS, Served, expected, serving

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


def test_the_client_lists_the_model(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == NAME and client.models.retrieve(NAME).id == NAME
    assert model.max_model_len == POSITIONS  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError, match="the model 'other' does not exist; this server has 'small'"):
        client.models.retrieve("other")


def test_completions_are_those_of_generate(served: Served, client: openai.OpenAI) -> None:
    prompts = ["the cat", "birds in 12 trees", "a"]
    options: dict[str, Any] = dict(max_tokens=20, temperature=0.8, top_p=0.9, seed=7)
    found = client.completions.create(model=NAME, prompt=prompts, extra_body={"top_k": 50}, logprobs=3, **options)
    whole = expected(served, prompts, Sampling(temperature=0.8, top_p=0.9, top_k=50, seed=7), Limits(20))
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    for choice, completion in zip(found.choices, whole, strict=True):
        assert (choice.text, choice.finish_reason) == (completion.text, completion.finish_reason)
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs == pytest.approx(completion.logprobs, abs=1e-5)
        assert all(3 <= len(top) <= 4 for top in choice.logprobs.top_logprobs or [])
    assert found.usage is not None
    assert found.usage.completion_tokens == sum(len(one.token_ids) for one in whole)
    assert found.usage.prompt_tokens == sum(len(served.model.tokenizer.encode(prompt)) for prompt in prompts)

    ids = served.model.tokenizer.encode("the cat")
    several = client.completions.create(model=NAME, prompt=[ids, ids], n=2, **options)
    whole = expected(served, ["the cat"] * 4, Sampling(temperature=0.8, top_p=0.9, seed=7), Limits(20))
    assert [choice.text for choice in several.choices] == [one.text for one in whole]
    assert len({choice.text for choice in several.choices}) > 1
    unseeded = [client.completions.create(model=NAME, prompt=ids, max_tokens=20).choices[0].text for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_a_stream_is_the_whole_answer_in_pieces(served: Served, client: openai.OpenAI) -> None:
    options: dict[str, Any] = dict(
        model=NAME, prompt=["the cat", "on a mat"], max_tokens=30, seed=3, temperature=1.3, echo=True, logprobs=2
    )
    whole = client.completions.create(**options, extra_body={"experts": True})
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True},
                                            extra_body={"experts": True}))  # fmt: skip
    assert len(chunks) > 30 and chunks[-1].usage == whole.usage
    for choice in whole.choices:
        own = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert "".join(one.text for one in own) == choice.text
        assert own[-1].finish_reason == choice.finish_reason
        logprobs = [one.logprobs for one in own if one.logprobs]
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            pieces = [value for one in logprobs for value in getattr(one, name)]
            if name in ("tokens", "text_offset"):
                assert pieces == getattr(choice.logprobs, name)
            assert len(pieces) == len(getattr(choice.logprobs, name))
        experts = [token for one in own for token in one.experts]  # type: ignore[attr-defined]
        assert experts == choice.experts and len(experts) == len(choice.logprobs.tokens) - 1  # type: ignore
        assert all(len(layers) == 2 and len(layers[0]) == 2 for layers in experts)
        assert choice.text.startswith(options["prompt"][choice.index])


def test_stop_strings_and_echo(served: Served, client: openai.OpenAI) -> None:
    [whole] = expected(served, ["the cat"], Sampling(seed=1), Limits(40))
    stop = whole.text[5:7]
    [choice] = client.completions.create(model=NAME, prompt="the cat", max_tokens=40, seed=1, stop=[stop]).choices
    assert choice.text == whole.text[: whole.text.index(stop)] and choice.finish_reason == "stop"
    text = "the naïve 🙂 birds"
    [choice] = client.completions.create(model=NAME, prompt=text, max_tokens=0, echo=True, logprobs=1).choices
    assert choice.text == text and choice.logprobs is not None and choice.logprobs.tokens is not None
    ids = served.model.tokenizer.encode(text)
    [scores] = score(served.model, [ids])
    assert choice.logprobs.token_logprobs is not None and choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(scores.logprobs, abs=1e-5)
    assert any(token.startswith("bytes:\\x") for token in choice.logprobs.tokens)  # parts of the emoji


def test_chats(served: Served, client: openai.OpenAI, tmp_path: Path) -> None:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "the cat"}]}]
    options: dict[str, Any] = dict(model=NAME, messages=messages, max_completion_tokens=12, seed=5)
    found = client.chat.completions.create(logprobs=True, top_logprobs=2, **options)
    # The template's end of a turn is one token, and what a user writes is text.
    encode, end = served.model.tokenizer.encode, served.model.tokenizer.eod_id
    ids = [*encode("user: the cat"), end, *encode("assistant:")]
    [whole] = generate(served.model, [ids], Sampling(seed=5), Limits(12))
    [choice] = found.choices
    assert (choice.message.content, choice.finish_reason) == (whole.text, whole.finish_reason)
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [one.logprob for one in choice.logprobs.content] == pytest.approx(whole.logprobs, abs=1e-5)
    assert b"".join(bytes(one.bytes or []) for one in choice.logprobs.content).decode(errors="replace") == whole.text
    assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content)
    chunks = list(client.chat.completions.create(stream=True, **options))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.text
    with pytest.raises(openai.BadRequestError, match="refuses these messages: no tools here"):
        client.chat.completions.create(model=NAME, messages=[{"role": "tool", "content": "x"}])  # type: ignore
    with serving(served.model) as base:
        answer = base.post("chat/completions", messages=[{"role": "user", "content": "x"}])
        assert answer.status_code == 400 and "has no chat template" in answer.json()["error"]["message"]


@pytest.mark.skipif(importlib.util.find_spec("tenacity") is None, reason="needs lm_eval[api]")
def test_lm_eval_gets_what_it_gets_in_process(served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("transformers")
    from lm_eval.tasks import TaskManager

    from megatron.optimus.inference.harness import HarnessModel

    monkeypatch.chdir(ROOT)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    options = dict(
        tasks=["optimus_science", "optimus_text", "optimus_arithmetic"], limit=3, bootstrap_iters=0,
        task_manager=TaskManager(include_path="examples/evaluation", include_defaults=False), log_samples=True,
    )  # fmt: skip
    arguments = dict(
        model=NAME, base_url=f"{served.url}/v1/completions", tokenizer=str(served.model.tokenizer_path),
        tokenizer_backend="huggingface", max_length=POSITIONS, num_concurrent=4,
    )  # fmt: skip
    remote = lm_eval.simple_evaluate("local-completions", model_args=arguments, **options)
    own = lm_eval.simple_evaluate(HarnessModel(served.model, 4), **options)
    for task, samples in own["samples"].items():
        assert len(samples) == 3
        for sample, other in zip(samples, remote["samples"][task], strict=True):
            for [left], [right] in zip(sample["resps"], other["resps"], strict=True):
                values = zip(_flat(left), _flat(right), strict=True)
                assert all(a == b if isinstance(a, str | bool) else a == pytest.approx(b, rel=1e-6) for a, b in values)
        numbers = {key: value for key, value in own["results"][task].items() if isinstance(value, float)}
        assert numbers and numbers == pytest.approx({key: remote["results"][task][key] for key in numbers}, rel=1e-6)


def _flat(answer: Any) -> list[Any]:
    return list(answer) if isinstance(answer, list | tuple) else [answer]


def test_other_answers_that_are_errors(served: Served) -> None:
    large = httpx.post(f"{served.url}/v1/completions", json={"prompt": "a" * 10_000_000}, timeout=60)
    assert large.status_code == 413
    assert large.json()["error"]["message"].startswith("the body has more than 4,194,304 bytes (--max-body-bytes)")
    form = httpx.post(f"{served.url}/v1/completions", data={"prompt": "a"})
    assert form.status_code == 415 and "application/json" in form.json()["error"]["message"]
    assert served.post(prompt="a", model="other").json()["error"]["code"] == "model_not_found"
    assert httpx.get(f"{served.url}/v1/completions").status_code == 405
    assert httpx.get(f"{served.url}/nowhere").json()["error"]["message"] == "GET /nowhere: Not Found"
    assert served.post(prompt="a").status_code == 200
    assert served.metric('optimus_http_requests_total{endpoint="/v1/completions",status="413"}') == 1


@pytest.mark.parametrize("stream", [True, False])
def test_the_work_of_a_client_that_disconnects_is_dropped(served: Served, stream: bool) -> None:
    before = served.metric("optimus_generated_tokens_total")
    body = json.dumps({"prompt": "the", "max_tokens": 500, "ignore_eos": True, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(served.url.removeprefix("http://").split(":")) as connection:
        connection.sendall(f"{head}\r\n\r\n".encode() + body)
        if stream:
            assert b"data: " in connection.recv(4096) + connection.recv(4096)
        else:
            time.sleep(0.1)
    served.wait_until_idle()
    assert 0 < served.metric("optimus_generated_tokens_total") - before < 490
    with socket.create_connection(served.url.removeprefix("http://").split(":")) as connection:
        connection.sendall(f"{head}\r\n\r\n".encode() + body[:10])  # gone in the middle of its body
    assert served.post(prompt="a").status_code == 200


def test_200_clients_at_once_all_get_their_own_answer(served: Served) -> None:
    prompts = [f"the {number} birds" for number in range(200)]

    async def ask(client: httpx.AsyncClient, prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "stream": True, "ignore_eos": True}
        text = ""
        async with client.stream("POST", f"{served.url}/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    async def all_of_them() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60, limits=limits) as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))

    found = asyncio.run(all_of_them())
    assert found == [one.text for one in expected(served, prompts, Sampling(temperature=0), Limits(5, ignore_end=True))]
    served.wait_until_idle()


def test_a_failure_is_an_answer_and_the_server_stays(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(served.scheduler._engine), "compute", lambda *args: 1 / 0)
    answer = served.post(prompt="a")
    assert answer.status_code == 500 and "ZeroDivisionError" in answer.json()["error"]["message"]
    stream = served.post(prompt="a", stream=True)
    assert '"type":"server_error"' in stream.text and stream.text.endswith("data: [DONE]\n\n")
    monkeypatch.undo()
    assert served.post(prompt="a").status_code == 200
