"""The endpoints: OpenAI's completions and chats, models, health, metrics, and the page at /.

The scheduler's thread computes; here requests are checked, queued and answered, and dropped when their client is gone.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.inference.generate import Limits
from megatron.optimus.inference.load import TextModel
from megatron.optimus.inference.sampling import Sampling
from megatron.optimus.inference.server.answers import Answer, TokenTexts, Usage
from megatron.optimus.inference.server.chat import ChatTemplate
from megatron.optimus.inference.server.metrics import Metrics
from megatron.optimus.inference.server.protocol import ApiError, ChatBody, CompletionBody, StreamOptions, parse_body
from megatron.optimus.inference.server.scheduler import Draining, QueueFull, Scheduler, ServedRequest, Update

_BODY_SECONDS = 60.0
_DISCARD_FACTOR = 16  # a body too large is read up to so many times its limit, so that its client reads the answer
_PAGE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class ServerLimits:
    """What one request may ask for."""

    max_length: int  # tokens of a prompt with its completion
    max_body_bytes: int = 4 << 20
    max_choices: int = 256  # prompts times n


class Service:
    """What the endpoints need, and how they turn a request into those of the scheduler."""

    def __init__(
        self, loaded: TextModel, scheduler: Scheduler, metrics: Metrics, chat: ChatTemplate, name: str,
        limits: ServerLimits,
    ) -> None:  # fmt: skip
        self.loaded, self.scheduler, self.metrics, self.chat = loaded, scheduler, metrics, chat
        self.name, self.limits = name, limits
        self.texts = TokenTexts(loaded.tokenizer)
        self.started = int(time.time())

    async def complete(self, request: Request, kind: type[CompletionBody] | type[ChatBody]) -> Response:
        """Answers a request for completions."""
        if self.scheduler.is_draining:
            raise _draining("the server is shutting down; it finishes what it has")
        content = await self._body(request)
        # In another thread: a long text takes a while to encode, and other clients shall not wait for it.
        body, prompts, echoed = await asyncio.to_thread(self._read, kind, content)
        events: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        made = self._requests(body, prompts, events, asyncio.get_running_loop())
        usage = Usage(prompt=sum(map(len, prompts)))
        echo = [text for text in echoed for _ in range(body.n)]
        answer = Answer(body, self.name, self.texts, echo)
        self._submit(made)
        if body.stream:
            chunks = self._stream(made, events, answer, usage, body.stream_options or StreamOptions())
            return StreamingResponse(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        try:
            updates = await _unless_gone(request, self._collect(made, events, usage))
        finally:
            self.scheduler.cancel(made)
        return JSONResponse(answer.whole(updates, usage))

    async def _body(self, request: Request) -> bytes:
        """Reads the body up to its limit."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # also what a page of another site could send without being asked
            raise ApiError(415, f"content-type {kind or 'is missing'}: send application/json")
        most, content, size = self.limits.max_body_bytes, bytearray(), 0
        too_large = ApiError(413, f"the body has more than {most:,} bytes (--max-body-bytes); send less at a time")

        async def read() -> None:
            nonlocal size
            async for part in request.stream():
                size += len(part)
                if size <= most:
                    content.extend(part)
                elif size > most * _DISCARD_FACTOR:
                    return

        if int(request.headers.get("content-length") or 0) > most * _DISCARD_FACTOR:
            raise too_large
        try:
            await asyncio.wait_for(read(), _BODY_SECONDS)
        except asyncio.TimeoutError:  # another class before Python 3.11
            raise ApiError(408, f"the body did not arrive within {_BODY_SECONDS:.0f} s") from None
        if size > most:
            raise too_large
        return bytes(content)

    def _read(
        self, kind: type[CompletionBody] | type[ChatBody], content: bytes
    ) -> tuple[CompletionBody | ChatBody, list[list[int]], list[str]]:
        """Checks a body; returns it, the token ids of its prompts, and the text that each echoes."""
        body: CompletionBody | ChatBody = parse_body(kind, content)
        if body.model not in (None, self.name):
            message = f"the model {body.model!r} does not exist; this server has {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        if isinstance(body, ChatBody):
            prompts, texts = [self.chat.encode(body.messages)], [""]
        else:
            encode, end = self.loaded.tokenizer.encode, self.loaded.tokenizer.eod_id
            # An empty prompt begins where a document does, as in ``optimus generate``.
            prompts = [encode(one) or [end] if isinstance(one, str) else one for one in body.prompt]
            texts = [""] * len(prompts)
            if body.echo:
                texts = [one if isinstance(one, str) else self.loaded.tokenizer.decode(one) for one in body.prompt]
        if len(prompts) * body.n > self.limits.max_choices:
            raise ApiError(400, f"{len(prompts)} prompts with n={body.n} are more than {self.limits.max_choices} "
                           "completions; send fewer at a time", param="n")  # fmt: skip
        for number, ids in enumerate(prompts):
            self._check(ids, "prompt" if len(prompts) == 1 else f"prompt {number}", completes=body.most_tokens != 0)
        return body, prompts, texts

    def _check(self, ids: Sequence[int], where: str, *, completes: bool) -> None:
        vocabulary, most = self.loaded.config.vocab_size, self.limits.max_length - completes
        if len(ids) > most:
            trained = self.loaded.config.max_position_embeddings
            reason = f"the model was trained on {trained} positions (max_position_embeddings)"
            if self.limits.max_length < trained:
                reason = f"the server takes {self.limits.max_length} (--max-model-len)"
            raise ApiError(400, f"{where} has {len(ids)} tokens, and {reason}; shorten it to {most} tokens or fewer",
                           param="prompt", code="context_length_exceeded")  # fmt: skip
        if wrong := next((token for token in ids if not 0 <= token < vocabulary), None):
            raise ApiError(400, f"{where} has the token id {wrong}; ids are 0 to {vocabulary - 1}", param="prompt")

    def _requests(
        self, body: CompletionBody | ChatBody, prompts: Sequence[list[int]],
        events: asyncio.Queue[tuple[int, Update]], loop: asyncio.AbstractEventLoop,
    ) -> list[ServedRequest]:  # fmt: skip
        """Makes the scheduler's requests: ``n`` of each prompt, numbered as prompts of ``generate`` are."""
        try:
            sampling = Sampling(
                repetition_penalty=body.repetition_penalty,
                temperature=1.0 if body.temperature is None else body.temperature,
                top_k=max(0, body.top_k),  # -1 is vLLM's for all
                top_p=1.0 if body.top_p is None else body.top_p,
                min_p=body.min_p,
                seed=random.SystemRandom().getrandbits(62) if body.seed is None else body.seed,
            )
        except ConfigError as error:
            raise ApiError(400, str(error).removeprefix("--")) from error
        has_logprobs = body.logprobs is not None and body.logprobs is not False
        made: list[ServedRequest] = []
        for ids in prompts:
            room = self.limits.max_length - len(ids)
            most = room if body.most_tokens is None else min(room, body.most_tokens)
            for _ in range(body.n):
                index = len(made)
                made.append(
                    ServedRequest(
                        self.loaded, ids, sampling, Limits(max(1, most), body.stops, body.ignore_eos), index,
                        _into(events, index, loop),
                        top_logprobs=body.top_logprobs or 0 if has_logprobs else 0,
                        scores_prompt=bool(body.echo) and has_logprobs,
                        wants_experts=body.experts,
                        completes=body.most_tokens != 0,
                    )
                )  # fmt: skip
        return made

    def _submit(self, made: Sequence[ServedRequest]) -> None:
        try:
            self.scheduler.submit(made)
        except QueueFull as error:
            raise ApiError(429, str(error), kind="rate_limit_error", code="queue_full") from error
        except Draining as error:
            raise _draining(str(error)) from error

    async def _events(
        self, made: Sequence[ServedRequest], events: asyncio.Queue[tuple[int, Update]], usage: Usage
    ) -> AsyncIterator[tuple[int, Update]]:
        """The updates of all choices until each has ended. Raises ApiError for one that fails."""
        running = len(made)
        while running:
            index, update = await events.get()
            if update.error is not None:
                raise ApiError(500, update.error, kind="server_error")
            usage.completion += len(update.tokens)
            running -= update.finish_reason is not None
            yield index, update

    async def _collect(
        self, made: Sequence[ServedRequest], events: asyncio.Queue[tuple[int, Update]], usage: Usage
    ) -> list[Update]:
        whole = [Update() for _ in made]
        async for index, update in self._events(made, events, usage):
            one = whole[index]
            one.text += update.text
            one.prompt += update.prompt
            one.tokens += update.tokens
            one.experts += update.experts
            one.finish_reason = update.finish_reason
        return whole

    async def _stream(
        self, made: Sequence[ServedRequest], events: asyncio.Queue[tuple[int, Update]], answer: Answer, usage: Usage,
        options: StreamOptions,
    ) -> AsyncIterator[str]:  # fmt: skip
        try:
            for chunk in answer.roles():
                yield _event(chunk)
            async for index, update in self._events(made, events, usage):
                if (one := answer.chunk(index, update)) is not None:
                    yield _event(one | ({"usage": usage.fields()} if options.continuous_usage_stats else {}))
            if options.include_usage:
                yield _event(answer.usage_chunk(usage))
        except ApiError as error:
            yield _event(error.content)
        finally:  # also where the client has gone
            self.scheduler.cancel(made)
        yield "data: [DONE]\n\n"

    def model(self) -> dict[str, Any]:
        """What /v1/models says of the model; the fields of ``optimus`` are for the page."""
        config, moe = self.loaded.config, [i for i, block in enumerate(self.loaded.model.layers) if block.is_moe]
        own = {"layers": config.num_layers, "moe_layers": moe, "has_chat": self.chat.is_there}
        own |= {"experts": config.num_experts, "experts_per_token": config.moe_router_topk} if moe else {}
        return {"id": self.name, "object": "model", "created": self.started, "owned_by": "optimus",
                "max_model_len": self.limits.max_length, "optimus": own}  # fmt: skip


def build_app(service: Service) -> FastAPI:
    """Makes the web application."""
    app = FastAPI(title="Optimus", docs_url=None, redoc_url=None, openapi_url=None)  # their pages need a network
    page = _PAGE.read_text(encoding="utf-8")
    app.add_middleware(_CountAnswers, metrics=service.metrics)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _own_error)

    @app.get("/")
    async def root() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY})

    @app.get("/health")
    async def health() -> Response:
        if service.scheduler.is_draining:
            return JSONResponse({"status": "draining"}, status_code=503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        text = service.metrics.text(*service.scheduler.load, service.scheduler.pages)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [service.model()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != service.name:
            message = f"the model {name!r} does not exist; this server has {service.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return JSONResponse(service.model())

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await service.complete(request, CompletionBody)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await service.complete(request, ChatBody)

    return app


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def _into(
    events: asyncio.Queue[tuple[int, Update]], index: int, loop: asyncio.AbstractEventLoop
) -> Callable[[Update], None]:
    """Returns a function that puts updates of the scheduler's thread into a queue of the event loop."""

    def update(one: Update) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(events.put_nowait, (index, one))

    return update


async def _unless_gone(request: Request, work: Awaitable[list[Update]]) -> list[Update]:
    """Awaits ``work`` and returns its result; cancels it when the client closes the connection."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "the client closed the connection")  # nobody reads it; it is counted
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"


def _draining(message: str) -> ApiError:
    return ApiError(503, message, kind="server_error", code="shutting_down")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return JSONResponse(error.content, status_code=error.status, headers=headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(
        ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").content,
        status_code=error.status_code,
    )


async def _own_error(request: Request, error: Exception) -> Response:
    content = ApiError(500, f"the server failed: {type(error).__name__}: {error}", kind="server_error").content
    return JSONResponse(content, status_code=500)


class _CountAnswers:
    """Counts answers by endpoint and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")  # no name that a client made up
                self._metrics.answered(path, message["status"])
            await send(message)

        await self._app(scope, receive, counting if scope["type"] == "http" else send)
