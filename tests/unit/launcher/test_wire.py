"""Links of agents: strangers are refused on either side, and nobody listens on all interfaces."""

from __future__ import annotations

import threading
import time

import pytest

from megatron.optimus.launcher import wire

TOKEN = "secret"


def test_an_agent_does_not_obey_a_stranger() -> None:
    listener = wire.listen("127.0.0.1", "")

    def answer() -> None:
        link = wire.AgentLink(listener.accept()[0], "another")
        link.challenge()
        link.fileno()
        time.sleep(0.1)
        link._socket.sendall(b'{"answer": "' + b"0" * 64 + b'"}\n{"start": {}}\n')

    threading.Thread(target=answer, daemon=True).start()
    with pytest.raises(ConnectionError, match="it does not know the token"):
        wire.connect(*listener.getsockname(), TOKEN)
    listener.close()


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_never_on_all_interfaces(address: str) -> None:
    with pytest.raises(OSError, match="all interfaces"):
        wire.listen(address, "")
    assert wire.listen("", "127.0.0.1").getsockname()[0] == "127.0.0.1"  # the address on the way to a node
