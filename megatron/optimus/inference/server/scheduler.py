"""Continuous batching: at every step requests join the batch, get a token each, and leave it when they are done.

A request waits until the batch has room and the cache has pages for its prompt and all tokens that it may get, so that
none has to give way once it runs; requests are admitted in the order in which they came. A step computes one token of
each running completion, and as much of the prompts as its limit of tokens leaves.

What a request gets does not depend on the others: its random numbers are its own, and tokens see their own sequence.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.optimus.inference.generate import Completion, Limits, Request
from megatron.optimus.inference.load import TextModel
from megatron.optimus.inference.sampling import NOT_FINITE, Sampling, choose, tokens_seen
from megatron.optimus.inference.server.engine import IDLE_SECONDS, Engine
from megatron.optimus.inference.server.metrics import Metrics
from megatron.optimus.inference.server.paged_cache import Chunk, num_pages
from megatron.optimus.inference.text import TextStream
from megatron.optimus.platform import device as devices

log = logging.getLogger("optimus")


class QueueFull(Exception):
    """The queue has its largest number of waiting requests."""


class Draining(Exception):
    """The server finishes the requests that it has and accepts no others."""


@dataclass(frozen=True)
class Token:
    """A token, its log-probability in nats, and the likeliest tokens at its position."""

    id: int
    logprob: float | None = None  # of a prompt's first token: none
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Update:
    """What a step gave one request."""

    text: str = ""  # made certain by the step
    prompt: list[Token] = field(default_factory=list)  # of the prompt's own tokens, where their scores are wanted
    tokens: list[Token] = field(default_factory=list)  # generated
    experts: list[list[list[int]]] = field(default_factory=list)  # of the next tokens, by MoE layer and choice
    finish_reason: str | None = None
    error: str | None = None


@dataclass(eq=False)
class ServedRequest:
    """A prompt, the options of its completion, and the state of it.

    Attributes:
        prompt: token ids, at least one.
        number: of the prompt, which its random numbers depend on, as those of ``generate`` do.
        update: called by the scheduler's thread with what each step gave.
        top_logprobs: so many of the likeliest tokens are told for every token.
        scores_prompt: whether the prompt's own tokens are told.
        wants_experts: whether the experts of every token are told.
        completes: False if only the prompt is scored.
    """

    loaded: TextModel
    prompt: list[int]
    sampling: Sampling
    limits: Limits
    number: int
    update: Callable[[Update], None]
    top_logprobs: int = 0
    scores_prompt: bool = False
    wants_experts: bool = False
    completes: bool = True

    def __post_init__(self) -> None:
        self._texts: list[str] = []
        stream = TextStream(self.loaded.tokenizer, self.limits.stops)
        self.request = Request(self.loaded, self.number, self.prompt, self.limits, stream, self._texts.append)
        self.generator = self.sampling.generator(self.number)
        self.seen_V: Tensor | None = None  # with a repetition penalty
        self.computed = 0  # tokens in the cache
        self.pages: list[int] = []
        self.is_cancelled = False
        self.arrived, self.last_token = time.perf_counter(), 0.0

    @property
    def completion(self) -> Completion:
        """The completion so far."""
        return self.request.completion

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the completion so far."""
        return len(self.prompt) + len(self.completion.token_ids)

    def next_tokens(self, most: int) -> list[int]:
        """The next tokens that are not in the cache."""
        if self.computed < len(self.prompt):
            return self.prompt[self.computed : self.computed + max(0, most)]
        return self.completion.token_ids[self.computed - len(self.prompt) :][: max(0, most)]

    @property
    def most_positions(self) -> int:
        """Positions that the cache must have: the last token of a completion is not computed with."""
        return len(self.prompt) + (self.request.most_tokens - 1 if self.completes else 0)

    def seen(self, logits_V: Tensor) -> Tensor:
        """Marks the tokens of prompt and completion, bool [V]; from the first call on."""
        if self.seen_V is None:
            self.seen_V = tokens_seen(self.prompt, logits_V)
        return self.seen_V

    def take_text(self) -> str:
        """Returns the text that has become certain since the last call."""
        text = "".join(self._texts)
        self._texts.clear()
        return text


class Scheduler:
    """Owns the engine; its thread computes, other threads submit and cancel."""

    def __init__(
        self, engine: Engine, metrics: Metrics, *, max_batch: int, max_step_tokens: int, max_waiting: int
    ) -> None:
        """Makes a scheduler, which computes after ``start``.

        Args:
            engine: model and cache.
            metrics: counts.
            max_batch: requests that run at a time.
            max_step_tokens: most tokens of a step, those of prompts included.
            max_waiting: requests that may wait.
        """
        self._engine, self._metrics = engine, metrics
        self._max_batch, self._max_step_tokens, self._max_waiting = max_batch, max_step_tokens, max_waiting
        self._waiting: deque[ServedRequest] = deque()
        self._running: list[ServedRequest] = []
        self._free_pages = list(range(engine.pages))
        self._changed = threading.Condition()
        self._is_draining = self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self.failure: BaseException | None = None  # what ended the thread

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, requests: Sequence[ServedRequest]) -> None:
        """Queues requests, all or none. Raises QueueFull or Draining."""
        with self._changed:
            if self._is_draining:
                raise Draining("the server is shutting down; it finishes what it has")
            if len(self._waiting) + len(requests) > self._max_waiting:
                raise QueueFull(
                    f"{len(self._waiting)} prompts are waiting and {len(requests)} came; at most {self._max_waiting} "
                    "may wait (--max-queue): try again later, or send fewer at a time"
                )
            self._waiting.extend(requests)
            self._changed.notify_all()

    def cancel(self, requests: Sequence[ServedRequest]) -> None:
        """Drops requests whose client has gone; does nothing for those that have ended."""
        with self._changed:
            for request in requests:
                request.is_cancelled = True
            self._changed.notify_all()

    @property
    def load(self) -> tuple[int, int, int]:
        """Numbers of running and waiting requests, and of pages in use."""
        with self._changed:
            return len(self._running), len(self._waiting), self._engine.pages - len(self._free_pages)

    @property
    def pages(self) -> int:
        """Pages of the cache in all."""
        return self._engine.pages

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""
        return self._is_draining

    @property
    def is_idle(self) -> bool:
        """Whether no request runs or waits."""
        running, waiting, _ = self.load
        return not running and not waiting

    def drain(self) -> None:
        """Makes every later ``submit`` raise Draining."""
        with self._changed:
            self._is_draining = True

    def stop(self) -> None:
        """Ends the thread, and requests that have not ended with an error. The other ranks return."""
        with self._changed:
            self._is_draining = self._is_stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(30)

    def _run(self) -> None:
        devices.set_device(self._engine.loaded.device)  # threads choose their device each
        try:
            while not self._is_stopping:
                if not self.step():
                    self._wait()
        except BaseException as error:  # of several ranks, which may have stopped at different places
            self.failure = error
            log.error("the server cannot go on: %s", error)
            raise
        finally:
            self.drain()  # or a request that comes after the next line would wait for ever
            self._fail([*self._running, *self._waiting], "the server is shutting down")
            if self.failure is None:
                self._engine.stop()

    def _wait(self) -> None:
        with self._changed:
            has_work = self._changed.wait_for(
                lambda: self._waiting or self._running or self._is_stopping,
                timeout=None if self._engine.is_alone else IDLE_SECONDS,
            )
        if not has_work:
            self._engine.idle()

    def step(self) -> bool:
        """Computes one step. Returns whether there was anything to compute."""
        with self._changed:
            self._drop_cancelled()
            self._admit()
            planned = self._plan()
        if not planned:
            return False
        try:
            began = time.perf_counter()
            self._compute([request for request, _ in planned], [chunk for _, chunk in planned])
            self._metrics.step(time.perf_counter() - began, sum(len(chunk.tokens) for _, chunk in planned))
        except Exception as error:
            if not self._engine.is_alone:
                raise
            log.exception("a step failed; its requests get an error and the server goes on")
            self._fail([request for request, _ in planned], f"the server failed: {type(error).__name__}: {error}")
        return True

    def _drop_cancelled(self) -> None:
        for request in [one for one in self._running if one.is_cancelled]:
            self._leave(request)
        self._waiting = deque(one for one in self._waiting if not one.is_cancelled)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_batch:
            needed = num_pages(self._waiting[0].most_positions)
            if needed > len(self._free_pages):
                return
            request = self._waiting.popleft()
            request.pages = [self._free_pages.pop() for _ in range(needed)]
            self._running.append(request)

    def _leave(self, request: ServedRequest) -> None:
        self._running.remove(request)
        self._free_pages += request.pages
        request.pages = []

    def _plan(self) -> list[tuple[ServedRequest, Chunk]]:
        """The next tokens of running requests: completions first, then prompts in the order of their arrival."""
        room = self._max_step_tokens
        planned = []
        for request in sorted(self._running, key=lambda one: one.computed < len(one.prompt)):
            if tokens := request.next_tokens(room):
                planned.append((request, Chunk(tokens, request.computed, request.pages)))
                room -= len(tokens)
        return planned

    def _compute(self, requests: Sequence[ServedRequest], chunks: Sequence[Chunk]) -> None:
        """Computes a step and calls ``update`` of every request with its result."""
        wanted = [_wanted(request, chunk) for request, chunk in zip(requests, chunks, strict=True)]
        pieces, experts = self._engine.compute(chunks, wanted, any(one.wants_experts for one in requests))
        rows = [(request, chunk, number) for request, chunk, numbers in zip(requests, chunks, wanted, strict=True)
                for number in numbers]  # fmt: skip
        updates = [Update(experts=found) for found in experts] or [Update() for _ in requests]
        by_request = dict(zip(requests, updates, strict=True))
        for request, update in by_request.items():
            if not request.wants_experts:
                update.experts = []
            if request.scores_prompt and request.computed == 0:
                update.prompt.append(Token(request.prompt[0]))
        done = 0
        for logits_RV in pieces:
            self._take(rows[done : done + len(logits_RV)], logits_RV, by_request)
            done += len(logits_RV)
        for request, chunk in zip(requests, chunks, strict=True):
            self._after_step(request, chunk, by_request[request])

    def _take(
        self, rows: Sequence[tuple[ServedRequest, Chunk, int]], logits_RV: Tensor, updates: dict[ServedRequest, Update]
    ) -> None:
        """Scores prompt tokens and chooses next tokens for one piece of the logits."""
        known_R = [_known_next(request, chunk.start + number) for request, chunk, number in rows]
        open_rows = [row for row, known in enumerate(known_R) if known is None]
        tokens_R = torch.tensor([known or 0 for known in known_R], device=logits_RV.device)
        if open_rows:
            open_logits = logits_RV if len(open_rows) == len(rows) else logits_RV[open_rows]
            tokens_R[open_rows] = _choose([rows[row][0] for row in open_rows], open_logits)
        logprobs_RV = logits_RV.log_softmax(dim=-1)
        own_R = logprobs_RV.gather(1, tokens_R[:, None])[:, 0]
        ids, scores = torch.stack([tokens_R.double(), own_R.double()]).tolist()  # waits for the device once
        most = max(request.top_logprobs for request, _, _ in rows)
        tops = _top(logprobs_RV, most) if most else [()] * len(rows)
        is_open = set(open_rows)
        for row, (request, _, _) in enumerate(rows):
            update, id_, logprob = updates[request], int(ids[row]), scores[row]
            if not math.isfinite(logprob):
                update.error = NOT_FINITE
                continue
            token = Token(id_, logprob, tops[row][: request.top_logprobs])
            if row not in is_open:
                update.prompt.append(token)
                continue
            before = len(request.completion.token_ids)
            request.request.add(id_, logprob)
            if len(request.completion.token_ids) > before:
                update.tokens.append(token)
                if request.seen_V is not None:
                    request.seen_V[id_] = True

    def _after_step(self, request: ServedRequest, chunk: Chunk, update: Update) -> None:
        """Completes a request's update, calls ``update``, and removes the request from the batch if it is done."""
        now = time.perf_counter()
        self._metrics.tokens(prompt=min(chunk.stop, len(request.prompt)) - min(chunk.start, len(request.prompt)),
                             generated=len(update.tokens))  # fmt: skip
        if update.tokens:
            self._metrics.token_after(now - (request.last_token or request.arrived), is_first=not request.last_token)
            request.last_token = now
        request.computed = chunk.stop
        update.text = request.take_text()
        update.finish_reason = request.completion.finish_reason
        if not request.completes and chunk.stop == len(request.prompt):
            update.finish_reason = "length"
        if update.finish_reason is not None or update.error is not None:
            with self._changed:
                self._leave(request)
            self._metrics.finished(update.finish_reason or "error", now - request.arrived)
        request.update(update)

    def _fail(self, requests: Sequence[ServedRequest], message: str) -> None:
        for request in requests:
            with self._changed:
                if request in self._running:
                    self._leave(request)
                if request in self._waiting:
                    self._waiting.remove(request)
            self._metrics.finished("error", time.perf_counter() - request.arrived)
            request.update(Update(error=message))


def _wanted(request: ServedRequest, chunk: Chunk) -> range:
    """The positions in a chunk whose logits are needed."""
    is_last = chunk.stop == request.length
    if request.scores_prompt and chunk.start < len(request.prompt):
        return range(len(chunk.tokens) - (is_last and not request.completes))
    return range(len(chunk.tokens) - (is_last and request.completes), len(chunk.tokens))


def _known_next(request: ServedRequest, position: int) -> int | None:
    """The prompt's token after ``position``; None where it has to be chosen."""
    return request.prompt[position + 1] if position + 1 < len(request.prompt) else None


def _choose(requests: Sequence[ServedRequest], logits_RV: Tensor) -> Tensor:
    """Chooses the next token of each request, int64 [R], those with the same options together."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for row, request in enumerate(requests):
        one = request.sampling
        options = (one.repetition_penalty, one.temperature, one.top_k, one.top_p, one.min_p)
        groups.setdefault(options, []).append(row)
    found = torch.empty(len(requests), dtype=torch.int64, device=logits_RV.device)
    for (penalty, *_), rows in groups.items():
        seen_RV = torch.stack([requests[row].seen(logits_RV[0]) for row in rows]) if penalty != 1 else None
        generators = [requests[row].generator for row in rows]
        of_group = logits_RV if len(groups) == 1 else logits_RV[rows]
        found[rows] = choose(of_group, requests[rows[0]].sampling, generators, seen_RV)
    return found


def _top(logprobs_RV: Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """The likeliest tokens of each row with their log-probabilities."""
    values, ids = logprobs_RV.topk(min(count, logprobs_RV.shape[1]), dim=-1)
    return [tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
