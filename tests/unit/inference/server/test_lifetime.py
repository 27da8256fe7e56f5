"""The port, and the end of the server: running requests finish, new ones are refused."""

from __future__ import annotations

import signal
import socket
import threading
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
import httpx

from megatron.optimus.inference.generate import Limits
from megatron.optimus.inference.sampling import Sampling
from megatron.optimus.inference.server.app import ServerLimits
from megatron.optimus.inference.server.lifetime import bind
from tests.unit.inference.server.served import POSITIONS, Served, expected, serving


def test_a_full_queue_is_an_answer_and_a_signal_lets_requests_finish(served: Served) -> None:
    limits = ServerLimits(POSITIONS)
    with serving(served.model, limits=limits, max_batch=1, max_waiting=2) as small:
        answers: list[httpx.Response] = []
        body = {"prompt": "the cat", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
        threads = [threading.Thread(target=lambda: answers.append(small.post(**body))) for _ in range(2)]
        threads[0].start()
        while small.scheduler.load[0] < 1:
            time.sleep(0.005)
        full = small.post(prompt=["a", "b", "c"])
        assert full.status_code == 429 and full.headers["retry-after"] == "1"
        assert "at most 2 may wait (--max-queue)" in full.json()["error"]["message"]
        threads[1].start()
        while small.scheduler.load[1] < 1:
            time.sleep(0.005)
        small.server.handle_exit(signal.SIGTERM, None)
        refused = small.post(prompt="a")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert httpx.get(f"{small.url}/health").status_code == 503
        for thread in threads:
            thread.join(60)
        [whole] = expected(served, ["the cat"], Sampling(temperature=0), Limits(400, ignore_end=True))
        assert [answer.json()["choices"][0]["text"] for answer in answers] == [whole.text] * 2
        while small.server.started and not small.server.should_exit:
            time.sleep(0.02)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{small.url}/health")


def test_answers_do_not_wait_for_the_next_packet() -> None:
    with bind("127.0.0.1", 0) as listening:
        assert listening.proto == socket.IPPROTO_TCP  # asyncio sets TCP_NODELAY on connections of such sockets alone
