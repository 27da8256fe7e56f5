"""Tries the collectives of this machine: two ranks, processes of their own, exchange tensors under a time limit."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from megatron.optimus.platform import environment
from megatron.optimus.platform.log import first_line

if TYPE_CHECKING:
    import torch

RANKS = 2
_NUMEL = 1 << 20  # 4 MiB in fp32: more than a message that is sent at once
_GATHERED_NUMEL = 1 << 24  # of all ranks together
_MOST = 512  # numbers below it: fp32 holds their sums over 16,384 ranks exactly


@dataclass(frozen=True)
class Exchange:
    """The result of the trial of ``exchange``."""

    backend: str  # of torch.distributed; "" where the ranks did not come so far
    seconds: float  # of the three collectives, connections included
    error: str | None  # one line; None: every number arrived


def exchange(kind: str, backend: str = "auto", limit_s: float = 60.0) -> Exchange:
    """Starts two ranks on this machine that all-reduce, all-gather and send, and checks every number.

    Args:
        kind: type of their devices, as in ``--device``; rank r takes device r.
        backend: as in ``--distributed-backend``.
        limit_s: seconds after which ranks that have not ended are killed.
    """
    port, token = environment.free_port(), secrets.token_hex(16)
    with contextlib.ExitStack() as files:
        ranks, outputs = [], []
        for rank in range(RANKS):
            variables = environment.for_local_rank(rank, RANKS, port, token) | environment.import_path()
            out, err = (files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
            command = [sys.executable, "-m", __name__, kind, backend, str(limit_s)]
            ranks.append(subprocess.Popen(command, env=variables, stdout=out, stderr=err))
            outputs.append((out, err))
        error = _wait(ranks, limit_s)
        for number, (process, streams) in enumerate(zip(ranks, outputs, strict=True)):
            for stream in streams:
                stream.seek(0)
            if process.returncode > 0:  # else it is well, or was ended here
                lines = streams[1].read().strip().splitlines()
                error = lines[-1] if lines else f"rank {number} ended with code {process.returncode}"
        if error is not None:
            return Exchange("", 0.0, error)
        return Exchange(**json.loads(outputs[0][0].read().splitlines()[-1]))


def _wait(ranks: list[subprocess.Popen[bytes]], limit_s: float) -> str | None:
    """Waits until all ranks have ended well, one has not, or the time is over; leaves none. Returns what went wrong."""
    deadline = time.monotonic() + limit_s
    try:
        while any(rank.poll() is None for rank in ranks):
            failed = next((number for number, rank in enumerate(ranks) if rank.poll()), None)
            if failed is not None:
                return f"rank {failed} ended with code {ranks[failed].returncode}"
            if time.monotonic() > deadline:
                return f"the ranks did not end within {limit_s:g} s"
            time.sleep(0.05)
        return next((f"a rank ended with code {rank.returncode}" for rank in ranks if rank.returncode), None)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()


def exchange_numbers(rank: int, size: int, device: torch.device) -> tuple[float, bool]:
    """All-reduces, all-gathers, and sends to the ranks 1, 2, 4, ... further, as one of ``size`` ranks. Collective.

    Returns the seconds, connections included, and whether every number arrived here as it should.
    """
    import torch
    import torch.distributed as dist

    from megatron.optimus.platform import process_groups

    numel = max(1, min(_NUMEL, _GATHERED_NUMEL // size))
    began = time.perf_counter()
    numbers = torch.arange(numel, dtype=torch.float32, device=device) % _MOST
    own = numbers + rank % _MOST
    total, all_RN = own.clone(), own.new_empty(size * numel)
    dist.all_reduce(total)
    process_groups.all_gather_single(all_RN, own)
    offsets_R = torch.arange(size, device=device) % _MOST
    is_right = torch.equal(total, numbers * size + offsets_R.sum())
    is_right = is_right and torch.equal(all_RN.view(size, numel), numbers + offsets_R[:, None])
    distance = 1
    while distance < size:
        got, source = torch.empty_like(own), (rank - distance) % size
        operations = [
            dist.P2POp(dist.isend, own, (rank + distance) % size),
            dist.P2POp(dist.irecv, got, source),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        is_right = is_right and torch.equal(got, numbers + source % _MOST)
        distance *= 2
    return time.perf_counter() - began, is_right


def _rank(kind: str, backend: str, limit_s: float) -> dict[str, object]:
    """Exchanges as one of the ranks. Collective."""
    import torch.distributed as dist

    from megatron.optimus.config.schema import Device, DistributedBackend
    from megatron.optimus.platform import device as devices
    from megatron.optimus.platform import process_groups

    launch = environment.detect()
    device = devices.device_for_rank(Device(kind), launch.local_rank)
    devices.set_device(device)
    process_groups.init(launch, device, DistributedBackend(backend), timedelta(seconds=limit_s))
    seconds, is_right = exchange_numbers(launch.rank, RANKS, device)
    used = dist.get_backend()
    process_groups.shutdown()
    return {"backend": used, "seconds": seconds, "error": None if is_right else f"{used} delivered wrong numbers"}


if __name__ == "__main__":
    try:
        outcome = _rank(sys.argv[1], sys.argv[2], float(sys.argv[3]))
    except Exception as failure:
        sys.exit(first_line(failure))
    sys.stdout.write(json.dumps(outcome) + "\n")
