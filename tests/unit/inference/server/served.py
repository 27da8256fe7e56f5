"""A server in a thread of the test, over a small model with a tokenizer of Hugging Face."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from megatron.optimus.config.schema import ParallelConfig, TokenizerType
from megatron.optimus.data.tokenize.tokenizer import train_bpe
from megatron.optimus.inference.generate import Completion, Limits, generate
from megatron.optimus.inference.load import TextModel, load_text_model
from megatron.optimus.inference.sampling import Sampling
from megatron.optimus.inference.server.app import ServerLimits, Service, build_app
from megatron.optimus.inference.server.chat import ChatTemplate
from megatron.optimus.inference.server.engine import Engine
from megatron.optimus.inference.server.lifetime import Server, bind
from megatron.optimus.inference.server.metrics import Metrics
from megatron.optimus.inference.server.scheduler import Scheduler
from megatron.optimus.platform.ranks import Ranks
from tests.unit.inference import cases

NAME, POSITIONS = "small", 512
WORDS = "the cat sat on a mat and looked at naïve birds 🙂 in 12 trees <|im_start|> user".split()


@dataclass
class Served:
    """A running server: where it is, and its parts."""

    url: str
    model: TextModel
    scheduler: Scheduler
    server: Server

    def post(self, path: str = "completions", **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/{path}", json=body, timeout=60)

    def metric(self, line: str) -> float:
        """The value of a line of /metrics, 0 where it is not there yet."""
        for found in httpx.get(f"{self.url}/metrics").text.splitlines():
            if found.startswith(f"{line} "):
                return float(found.rpartition(" ")[2])
        return 0.0

    def wait_until_idle(self, seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.scheduler.is_idle:
            assert time.monotonic() < deadline, "requests are left"
            time.sleep(0.02)
        assert self.scheduler.load == (0, 0, 0)


def small_model(folder: Path, name: str = "moe") -> tuple[TextModel, Path]:
    """A model in memory, and the folder of its tokenizer."""
    tokenizer = folder / "tokenizer"
    train_bpe([" ".join(WORDS)] * 20, 264, tokenizer)
    shape = cases.MODELS[name]
    cases.MODELS["long"] = shape | dict(max_position_embeddings=POSITIONS)
    try:
        path = cases.checkpoint(folder / "ours", "long")
    finally:
        del cases.MODELS["long"]
    options = dict(tokenizer_type=TokenizerType.HF, tokenizer_model=str(tokenizer))
    return load_text_model(path, ParallelConfig(), Ranks.alone(), **options), tokenizer


@contextlib.contextmanager
def serving(
    model: TextModel, *, template: Path | None = None, limits: ServerLimits | None = None, **options: int
) -> Iterator[Served]:
    """Serves a model until the block ends."""
    metrics = Metrics()
    settings = dict(max_batch=16, max_step_tokens=256, max_waiting=256) | options
    scheduler = Scheduler(Engine(model, Ranks.alone(), 16 * POSITIONS // 16), metrics, **settings)
    chat = ChatTemplate(model.tokenizer_path, template)
    service = Service(model, scheduler, metrics, chat, NAME, limits or ServerLimits(POSITIONS))
    server = Server(build_app(service), scheduler, drain_seconds=20)
    listening = bind("127.0.0.1", 0)
    thread = threading.Thread(target=lambda: server.run(sockets=[listening]), daemon=True)
    scheduler.start()
    thread.start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    while not server.started:
        time.sleep(0.01)
    try:
        yield Served(url, model, scheduler, server)
    finally:
        server.should_exit = True
        thread.join(20)
        scheduler.stop()
        assert not thread.is_alive(), "the server did not end"


def expected(served: Served, prompts: list[str], sampling: Sampling, limits: Limits) -> list[Completion]:
    """What ``generate`` gives for the prompts."""
    ids = [served.model.tokenizer.encode(prompt) for prompt in prompts]
    return list(generate(served.model, ids, sampling, limits))
