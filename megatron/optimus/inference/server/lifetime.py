"""Binds the port, serves until a signal comes, and lets running requests finish."""

from __future__ import annotations

import os
import socket
import time
from types import FrameType
from typing import Any

import uvicorn

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.inference.server.scheduler import Scheduler

_CLOSE_SECONDS = 5  # for answers on their way when nothing is left to compute


def bind(host: str, port: int) -> socket.socket:
    """Takes the port, before anything is loaded. Raises ConfigError where it is in use or the address is not ours."""
    try:
        [(family, *_, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # With the protocol: without it asyncio leaves Nagle's delay on, and each answer waits 40 ms for its last piece.
        made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(2048)
    except (OSError, OverflowError) as error:
        made.close()
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--port {port} on {host}: {reason}; name another with --port (0: any free one)") from error
    return made


class Server(uvicorn.Server):
    """A server that finishes its requests after SIGTERM or SIGINT, while new ones get 503. A second signal ends it."""

    def __init__(self, app: Any, scheduler: Scheduler, drain_seconds: float) -> None:
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=_CLOSE_SECONDS,
        )
        super().__init__(config)
        self._scheduler, self._drain_seconds = scheduler, drain_seconds
        self._deadline: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stops accepting requests; a second signal ends the process. uvicorn's signal handler calls it."""
        if self._deadline is not None:
            os._exit(128 + sig)
        self._deadline = time.monotonic() + self._drain_seconds
        self._scheduler.drain()

    async def on_tick(self, counter: int) -> bool:
        """Ends the server when a stop was asked for and no request is left, or when the scheduler has failed."""
        drained = self._deadline is not None and (self._scheduler.is_idle or time.monotonic() > self._deadline)
        self.should_exit = self.should_exit or drained or self._scheduler.failure is not None
        return await super().on_tick(counter)
