"""Faults that a rank does to itself on request: each is done once, and nothing without a request."""

from __future__ import annotations

import errno
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron.optimus.platform import environment, files
from megatron.optimus.training import drill
from megatron.optimus.training.drill import DrillFaults, cut_connections, flip_bit


@pytest.fixture
def masters() -> list[torch.Tensor]:
    return [torch.zeros(0), torch.ones(4)]


@pytest.fixture
def faults(tmp_path: Path, masters: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> DrillFaults:
    """Those of rank 3, whose model is two layers."""
    monkeypatch.setenv(environment.DRILL_FOLDER, str(tmp_path))
    buckets = [SimpleNamespace(shard=SimpleNamespace(master=one)) for one in masters]
    optimizer = SimpleNamespace(wait_for_params=lambda: None, flat_buffers=[SimpleNamespace(buckets=buckets)])
    engine: Any = SimpleNamespace(optimizer=optimizer)
    return DrillFaults(3, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), engine)


def ask(faults: DrillFaults, words: str) -> None:
    assert faults._path is not None and faults._path.name == "rank-3"
    faults._path.write_text(words)
    faults.begin_step()
    assert not faults._path.exists(), "the next process must not do it again"


def test_wrong_values(faults: DrillFaults, masters: list[torch.Tensor]) -> None:
    faults.begin_step()
    assert masters[1].tolist() == [1, 1, 1, 1]
    ask(faults, "flip 6 30")
    assert masters[1].isfinite().tolist() == [True, True, False, True]  # 6 modulo 4
    x = torch.ones(1, 2)
    assert faults._model(x).isfinite().all()
    ask(faults, "nan")
    assert faults._model(x).isnan().all()


def test_a_slow_rank_is_slow_for_so_many_steps(faults: DrillFaults, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(drill.time, "sleep", slept.append)
    ask(faults, "slow 0.5 2")
    for _ in range(3):
        faults.begin_step()
    assert slept == [0.5, 0.5]


def test_a_bad_disk_and_its_end(faults: DrillFaults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "write_at", drill._WRITE_AT)  # is set back in the end
    ask(faults, f"disk {errno.ENOSPC}")
    with open(tmp_path / "checkpoint", "w+b") as file:
        with pytest.raises(OSError, match="No space left on device"):
            files.write_at(file.fileno(), b"data", 0)
        assert faults._path is not None
        faults._path.write_text("disk 0")  # asked for while no step begins: the save that is tried again sees it
        files.write_at(file.fileno(), b"data", 0)
        assert file.read() == b"data"
    assert files.write_at is drill._WRITE_AT


def test_the_clock_jumps(faults: DrillFaults, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", real)
    ask(faults, "clock 500")
    assert 499 < time.time() - real() < 501


def test_without_a_folder_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.DRILL_FOLDER, raising=False)
    faults = DrillFaults(0, nn.Linear(2, 2), SimpleNamespace())  # type: ignore[arg-type]
    faults.begin_step()
    assert faults._path is None


def test_one_bit_is_flipped_and_flipped_back() -> None:
    tensor = torch.tensor([1.0, -2.5])
    flip_bit(tensor, 1, 22)
    assert tensor[0] == 1 and tensor[1] == -3.5
    flip_bit(tensor, 1, 22)
    assert tensor.tolist() == [1.0, -2.5]


def test_connections_are_cut_and_other_sockets_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        peer, _ = server.accept()
        pair = socket.socketpair()
        own = {str(one.fileno()) for one in (client, *pair)}
        monkeypatch.setattr(drill.os, "listdir", lambda folder: sorted(own))  # those of pytest stay
        cut_connections()
        assert peer.recv(1) == b"" and client.recv(1) == b""
        pair[0].sendall(b"x")
        assert pair[1].recv(1) == b"x"
        for one in (peer, *pair):
            one.close()
