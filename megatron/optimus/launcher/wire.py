"""Connections between the coordinator of a job and the agents of its nodes: lines of JSON after a mutual challenge.

    coordinator -> {"challenge": a}
    agent       -> {"challenge": b, "answer": HMAC-SHA256(token, "agent:a:b")}
    coordinator -> {"answer": HMAC-SHA256(token, "coordinator:a:b")}

Either side proves that it knows the token of the job, which is not sent. What follows is not encrypted: it is for the
network of a job, as the collectives are.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
from collections.abc import Iterator
from typing import Any

CONNECT_SECONDS = 5.0
_SEND_SECONDS = 3.0  # a connection that takes nothing for so long is lost
_LONGEST_STRANGER, _LONGEST_LINE = 1 << 10, 1 << 24  # bytes before and after the answer to the challenge
_KEEPALIVE_SECONDS, _LOST_SECONDS = 2, 8  # of silence: the kernel asks; the connection is lost


class AgentLink:
    """One end of a connection. ``is_trusted`` once the other end has proved that it knows the token."""

    def __init__(self, connection: socket.socket, token: str) -> None:
        self._socket, self._token = connection, token
        self._received = b""
        self._challenge = secrets.token_hex(16)
        self.is_trusted = False
        connection.settimeout(_SEND_SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in (
            ("TCP_KEEPIDLE", _KEEPALIVE_SECONDS),
            ("TCP_KEEPINTVL", _KEEPALIVE_SECONDS),
            ("TCP_KEEPCNT", _LOST_SECONDS // _KEEPALIVE_SECONDS - 1),
            ("TCP_USER_TIMEOUT", 1000 * _LOST_SECONDS),
        ):
            if hasattr(socket, name):  # Linux
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """The socket's descriptor, which ``select`` and ``poll`` ask for."""
        return self._socket.fileno()

    def close(self) -> None:
        """Ends the connection; the other end reads its end."""
        self._socket.close()

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message. Raises OSError where the connection is lost."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yields what has arrived, without waiting; messages of the challenge are answered and not yielded.

        Raises:
            OSError: the connection is lost or was closed, or the other end does not speak this protocol.
        """
        with contextlib.suppress(BlockingIOError):
            data = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
            if not data:
                raise ConnectionError("closed by the other end")
            self._received += data
        limit = _LONGEST_LINE if self.is_trusted else _LONGEST_STRANGER
        while b"\n" in self._received:
            line, _, self._received = self._received.partition(b"\n")
            try:
                message = json.loads(line)
                if not isinstance(message, dict):
                    raise ValueError("not an object")
                if not self.is_trusted:
                    self._check_agent(message)
                    continue
            except (ValueError, KeyError, TypeError) as error:
                raise ConnectionError(f"not a message of this protocol: {error}") from None
            yield message
        if len(self._received) > limit:
            raise ConnectionError(f"a line longer than {limit} bytes")

    def challenge(self) -> None:
        """Begins the challenge; for the coordinator."""
        self.send({"challenge": self._challenge})

    def _check_agent(self, message: dict[str, Any]) -> None:
        other = str(message["challenge"])
        if not hmac.compare_digest(str(message["answer"]), self._answer("agent", self._challenge, other)):
            raise ConnectionError("it does not know the token of the job")
        self.send({"answer": self._answer("coordinator", self._challenge, other)})
        self.is_trusted = True

    def meet_coordinator(self) -> None:
        """Answers the challenge and makes one; for an agent. Waits for up to CONNECT_SECONDS.

        Raises:
            OSError: the other end is not the coordinator of this job.
        """
        self._socket.settimeout(CONNECT_SECONDS)
        try:
            theirs = str(self._read_line()["challenge"])
            answer = self._answer("agent", theirs, self._challenge)
            self.send({"challenge": self._challenge, "answer": answer})
            found = str(self._read_line()["answer"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConnectionError(f"not the coordinator of this job: {error}") from None
        if not hmac.compare_digest(found, self._answer("coordinator", theirs, self._challenge)):
            raise ConnectionError("not the coordinator of this job: it does not know the token")
        self.is_trusted = True
        self._socket.settimeout(_SEND_SECONDS)

    def _read_line(self) -> Any:
        line = b""
        while not line.endswith(b"\n"):  # byte by byte: what follows is for ``receive``
            byte = self._socket.recv(1)
            if not byte or len(line) > _LONGEST_STRANGER:
                raise ConnectionError("closed by the other end")
            line += byte
        return json.loads(line)

    def _answer(self, role: str, coordinators: str, agents: str) -> str:
        return hmac.new(self._token.encode(), f"{role}:{coordinators}:{agents}".encode(), "sha256").hexdigest()


def connect(host: str, port: int, token: str) -> AgentLink:
    """Connects an agent to its coordinator. Raises OSError where there is none, or another program listens."""
    link = AgentLink(socket.create_connection((host, port), timeout=CONNECT_SECONDS), token)
    try:
        link.meet_coordinator()
    except BaseException:
        link.close()
        raise
    return link


def listen(host: str, peer: str) -> socket.socket:
    """Listens on one address of this machine, at a free port.

    Args:
        host: name or address; "" for the one from which this machine reaches ``peer``.
        peer: name of another node.

    Raises:
        OSError: the name has no address, or it is not one of this machine.
    """
    if not host:
        family, kind, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: chooses the route
            host = probe.getsockname()[0]
    family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    result = socket.socket(family, kind)
    try:
        if address[0] in ("0.0.0.0", "::"):
            raise OSError(f"{host} is all interfaces")
        result.bind(address)
        result.listen(1024)
    except OSError:
        result.close()
        raise
    return result
