"""Runs a function on several real ranks of this machine: with gloo on its CPU, or each with a GPU of its own.

Gloo's workers are forked from a server process that has imported torch, deepspeed and the training program once, so a
four-rank test costs less than a second instead of ten. Those with a GPU are started afresh: CUDA does not survive a
fork, and reads some variables once. A rank that raises, dies or hangs fails the test with that rank's traceback.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import multiprocessing as mp
import multiprocessing.forkserver
import os
import pickle
import random
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any

# The fork server says nothing of a module that it cannot import: each rank would import it anew, which takes seconds.
assert importlib.util.find_spec("tests.preload") is not None, "tests/preload.py is missing"
_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preload"])
_SERVER: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]


def start_fork_server() -> str:
    """Starts the fork server, which ends with this process: its address for ``use_fork_server``.

    "" where this Python's servers serve only those that know a key (3.14).
    """
    if hasattr(_SERVER, "_forkserver_authkey"):
        return ""
    before = [os.dup(stream) for stream in (1, 2)]  # pytest's files: what ranks print would come out at the end
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    try:
        _SERVER.ensure_running()
    finally:
        for stream, kept in zip((1, 2), before, strict=True):
            os.dup2(kept, stream)
            os.close(kept)
        os.close(nowhere)
    return str(_SERVER._forkserver_address)


def use_fork_server(address: str) -> None:
    """Has this process fork its ranks from the server of another one, which has imported everything once for all."""
    _SERVER._forkserver_address = address
    _SERVER._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # a request carries one; the server's is its own
    _SERVER.ensure_running = resource_tracker.ensure_running


def _worker(
    fn: Callable[..., Any], rank: int, world_size: int, store: str, args: tuple[Any, ...], pipe: Connection, device: str
) -> None:
    import torch
    import torch.distributed as dist

    from megatron.optimus.platform.process_exit import exit_process
    from megatron.optimus.platform.process_groups import leave_after_error, shutdown

    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
    )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29555")
    torch.set_num_threads(1)
    try:
        if device == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        answer = ("ok", fn(rank, world_size, *args))
    except BaseException:
        answer = ("error", traceback.format_exc())
    try:
        # Plain pickle carries the bytes of tensors; the pipe's own pickler would carry handles of a process that ends.
        pipe.send_bytes(pickle.dumps(answer))
    finally:
        if answer[0] == "ok":
            shutdown()
        else:
            leave_after_error(shutdown)
        pipe.close()
        exit_process(0)  # the answer says how it went


def run_distributed(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Calls ``fn(rank, world_size, *args)`` on ``world_size`` gloo ranks; returns their results in rank order.

    ``fn`` must be a module-level function; arguments and results must pickle (tensors do). Raises AssertionError with
    every failing rank's traceback.
    """
    return _run(_CONTEXT, fn, world_size, args, timeout, "cpu")


def start_program(
    module: str, argv: list[str], world_size: int, timeout: float, stdout: str = ""
) -> subprocess.CompletedProcess[str]:
    """``main(argv)`` of a module on forked ranks, with the variables that torchrun sets: what they printed, and an exit
    code that is not 0, if there is one. Ranks that have not ended in ``timeout`` seconds, or 10 after one that failed,
    are killed. ``stdout``: a device to print to."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        out, err = (os.path.join(folder, name) for name in (stdout or "out", "err"))
        ranks = []
        for rank in range(world_size):
            words = (module, argv, rank_variables(rank, world_size, port), out, err)
            ranks.append(_CONTEXT.Process(target=_program, args=words, daemon=True))
            ranks[-1].start()
        deadline = time.monotonic() + timeout
        while (left := [rank for rank in ranks if rank.is_alive()]) and time.monotonic() < deadline:
            wait([rank.sentinel for rank in left], timeout=max(0.0, deadline - time.monotonic()))
            if any(rank.exitcode for rank in ranks):
                deadline = min(deadline, time.monotonic() + 10)
        codes = [rank.exitcode for rank in ranks]
        for rank in ranks:
            rank.kill()
            rank.join()
        codes += [rank.exitcode for rank in ranks]  # of those that were killed
        printed = (Path(path).read_text() if os.path.isfile(path) else "" for path in (out, err))
        return subprocess.CompletedProcess([module, *argv], next(filter(None, codes), 0), *printed)


def _program(module: str, argv: list[str], variables: dict[str, str], out: str, err: str) -> None:
    os.environ.update(variables)
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
    if not os.path.isfile(out):
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - buffered, even if PYTHONUNBUFFERED was set
    from megatron.optimus.platform.process_exit import run_program

    run_program(lambda: importlib.import_module(module).main(argv))


def rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """As torchrun sets them on one machine, and one thread."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    return {name: str(value) for name, value in (ranks | place).items()}


def free_port() -> int:
    """Below the range from which the kernel gives ports to connections: another process's would take it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def run_on_gpus(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    device: str = "cuda",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[Any]:
    """``run_distributed`` with NCCL, rank r on GPU r, and ``environment`` set before the ranks start. More ranks than
    GPUs share them in turns, for functions that do not communicate: NCCL refuses two ranks on one GPU.

    ``device``: "cpu" takes the same way with gloo. Ranks that do not answer in ``timeout`` seconds are killed.
    """
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        return _run(mp.get_context("spawn"), fn, world_size, args, timeout, device)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _run(
    context: Any, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout: float, device: str
) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        workers, pipes = [], []
        for rank in range(world_size):
            parent, child = context.Pipe(duplex=False)
            words = (fn, rank, world_size, store, args, child, device)
            worker = context.Process(target=_worker, args=words, daemon=True)
            worker.start()
            child.close()
            workers.append(worker)
            pipes.append(parent)
        deadline = time.monotonic() + timeout
        results: list[Any] = [None] * world_size
        failures: list[str] = []
        for rank, pipe in enumerate(pipes):
            try:
                if not pipe.poll(max(0.1, deadline - time.monotonic())):
                    failures.append(f"rank {rank}: no answer within {timeout:.0f} s")
                    continue
                status, value = pickle.loads(pipe.recv_bytes())
                if status == "ok":
                    results[rank] = value
                else:
                    failures.append(f"rank {rank}:\n{value}")
                    deadline = min(deadline, time.monotonic() + 5)  # peers may wait for the failed rank
            except EOFError:
                failures.append(f"rank {rank}: died without an answer")
        for worker in workers:
            worker.join(timeout=10)
            if worker.is_alive():
                worker.kill()
                worker.join()
    if failures:
        raise AssertionError("\n".join(failures))
    return results
