"""Where rank 0 listens, and who may join."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.platform.environment import RENDEZVOUS_TOKEN, Launcher, RankEnvironment, detect, free_port
from megatron.optimus.platform.process_groups import shutdown
from megatron.optimus.platform.rendezvous import _listen, make_store, stays_on_this_machine

_ROOT = Path(__file__).parents[3]
_LISTENERS = """
    import json, os, socket, struct, sys, torch, torch.distributed as dist
    from datetime import timedelta
    from megatron.optimus.config.schema import DistributedBackend
    from megatron.optimus.platform import environment, process_groups

    def listeners():
        own = set()
        for descriptor in os.listdir("/proc/self/fd"):
            try:
                own.add(os.readlink(f"/proc/self/fd/{descriptor}"))
            except OSError:
                pass
        for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
            for line in open(f"/proc/net/{name}").read().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                    packed = bytes.fromhex(words[1].split(":")[0])
                    words = [packed[i : i + 4][::-1] for i in range(0, len(packed), 4)]
                    yield socket.inet_ntop(family, b"".join(words))

    timeout = timedelta(seconds=60)
    process_groups.init(environment.detect(), torch.device("cpu"), DistributedBackend.AUTO, timeout)
    total = torch.ones(1)
    dist.all_reduce(total)
    found = sorted(set(listeners()))
    dist.barrier()
    print(json.dumps(found), flush=True)
    os._exit(0 if total.item() == dist.get_world_size() else 1)
"""


@pytest.fixture(autouse=True)
def leave() -> Iterator[None]:
    yield
    shutdown()


def listening_addresses(**variables: str) -> list[list[str]]:
    """The addresses at which each of two ranks listens, gloo's included, with these variables beside the rank's."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "LOCAL_WORLD_SIZE", RENDEZVOUS_TOKEN)
    env = {name: value for name, value in os.environ.items() if name not in names}
    env |= {"WORLD_SIZE": "2", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, "-c", textwrap.dedent(_LISTENERS)]
    ranks = [
        subprocess.Popen(
            command, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=_ROOT, stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [json.loads(text.splitlines()[-1]) for text in printed]  # torch 2.8 prints lines of gloo's before it


def own_address() -> str | None:
    """An address of this machine that is not the loopback one; None without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if address.startswith("127.") else address


def test_a_run_on_one_machine_listens_on_loopback_only() -> None:
    found = listening_addresses(MASTER_ADDR="127.0.0.1", LOCAL_WORLD_SIZE="2", **{RENDEZVOUS_TOKEN: "a token"})
    assert found == [["127.0.0.1"], ["127.0.0.1"]]


def test_a_run_on_several_nodes_listens_on_the_address_of_rank_0() -> None:
    address = own_address()
    if address is None:
        pytest.skip("this machine has no address but the loopback one")
    # As two nodes: nothing says that the ranks share this machine.
    found = listening_addresses(MASTER_ADDR=address, GLOO_SOCKET_IFNAME="lo")
    assert found == [["127.0.0.1", address], ["127.0.0.1"]]


def test_a_rank_with_another_token_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    launch = [RankEnvironment(rank, 2, rank, 2, "127.0.0.1", port, Launcher.TORCHRUN) for rank in range(2)]
    monkeypatch.setenv(RENDEZVOUS_TOKEN, "one")
    store = dist.TCPStore("127.0.0.1", port, None, True, timedelta(seconds=20), wait_for_workers=False)
    dist.PrefixStore("one", store).set("world_size", "2")
    assert make_store(launch[1], timedelta(seconds=20)) is not None
    monkeypatch.setenv(RENDEZVOUS_TOKEN, "another")
    with pytest.raises(ConfigError, match=f"does not know this run.*{RENDEZVOUS_TOKEN}"):
        make_store(launch[1], timedelta(seconds=1))
    dist.PrefixStore("another", store).set("world_size", "3")
    with pytest.raises(ConfigError, match="is of a run of b'3' ranks, this one has 2"):
        make_store(launch[1], timedelta(seconds=20))


def test_a_name_that_means_loopback_here_means_another_machine_elsewhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Debian gives a machine's own name the address 127.0.1.1: a run on several nodes must not listen there."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", ("127.0.1.1", port))])
    port = free_port()
    assert _listen(RankEnvironment(0, 2, 0, 2, "node7", port, Launcher.SLURM), None) is None
    assert "is no address of an interface of this machine: rank 0 listens on all of them" in caplog.text
    with contextlib.closing(_listen(RankEnvironment(0, 2, 0, 2, "node7", port, Launcher.SLURM, True), None)) as found:
        assert found.getsockname() == ("127.0.1.1", port)


def test_torchruns_own_store_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    launch = RankEnvironment(0, 2, 0, 2, "127.0.0.1", free_port(), Launcher.TORCHRUN)
    assert make_store(launch, _MINUTE) is None


def test_what_counts_as_one_machine() -> None:
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
    for changes, expected in (
        ({}, False),  # nothing says how many ranks are on this node
        ({"LOCAL_WORLD_SIZE": "1"}, False),
        ({"LOCAL_WORLD_SIZE": "2"}, True),
        ({"MASTER_ADDR": "127.0.0.1"}, True),
        ({"MASTER_ADDR": "localhost"}, True),
        ({"MASTER_ADDR": "::1"}, True),
        ({"MASTER_ADDR": "10.0.0.1"}, False),
    ):
        assert stays_on_this_machine(detect({**torchrun, **changes})) is expected, changes
    assert stays_on_this_machine(detect({}))


_MINUTE = timedelta(minutes=1)
