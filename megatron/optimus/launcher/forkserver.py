"""Starts ranks by forking a process that has imported the training program, so that a restart imports nothing.

The launcher starts one such server and keeps it over all attempts. Imports take seconds of CPU time a rank and, on a
cluster, thousands of reads of a shared file system; a fork takes milliseconds. The server opens no device, starts no
thread that a rank needs, and joins no process group: a rank that it forks is as good as a new interpreter. DeepSpeed's
import initialises NVML, which is closed before ranks are forked and opened in each. Where the imports have initialised
an accelerator after all, or a first fork cannot compute on it, it says so and the launcher starts interpreters instead.

Launcher and server speak in lines of JSON over a socket, which is the server's standard input:

                                                       <- {"ready": true} or {"refused": reason}
    -> {"rank": 3, "env": {...}, "argv": [], "cores": []}
                                                       <- {"rank": 3, "pid": 4711}
                                                       <- {"pid": 4711, "status": -9}    exit code, or minus a signal
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from megatron.optimus.launcher.command import FORK_SERVER, PROGRAM
from megatron.optimus.platform import environment, parent_death, signals
from megatron.optimus.platform.process_exit import run_program

logger = logging.getLogger("optimus")

_MODULES = (PROGRAM, "megatron.optimus.training.trainer", "megatron.optimus.training.evaluate")
_DEVICES = ("/dev/nvidia", "/dev/dri/")  # what a process that has initialised CUDA or Level Zero holds open
_PROBE_SECONDS = 60.0  # for a first fork to compute on a device; then it counts as one that cannot


class ForkedRank:
    """A rank that the server has forked, with the methods of ``subprocess.Popen`` that the launcher uses."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code, minus the signal that ended it, or None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.exit_status(self.pid)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the rank has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code. Raises subprocess.TimeoutExpired after ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(f"rank process {self.pid}", timeout or 0.0)
            time.sleep(0.005)
        return code


class ForkServer:
    """The launcher's end: starts the server at once, which imports while the launcher checks the command line.

    Args:
        device: the option ``device``, which decides what DeepSpeed is imported for.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._start_server()

    def _start_server(self) -> None:
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", FORK_SERVER, self._device]
        with theirs:
            before_exec = parent_death.signal_setter(signal.SIGKILL)
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), preexec_fn=before_exec)  # noqa: PLW1509 - C calls
        self._received, self._statuses = b"", dict[int, int]()
        self._is_ready: bool | None = None

    def is_ready(self) -> bool:
        """Waits until the server has imported everything; False where it cannot fork ranks, which is logged."""
        return bool(self._state(wait=True))

    def is_importing(self) -> bool:
        """Whether ``start`` would have to wait for the server's imports."""
        return self._state(wait=False) is None

    def _state(self, *, wait: bool) -> bool | None:
        """Whether the server can fork; None while it imports. One that has died is started again."""
        if self._is_ready and self._process.poll() is not None:
            logger.warning("the process that forks ranks has ended; another one is started")
            self.close()
            self._start_server()
        if self._is_ready is None:
            message = self._receive(wait=wait)
            if message is None and not wait and self._process.poll() is None:
                return None
            self._is_ready = bool(message and message.get("ready"))
            if not self._is_ready:
                reason = message.get("refused") if message else "it has ended"
                logger.info("ranks are new interpreters, not forked from one that has imported all: %s", reason)
        return self._is_ready

    def start(
        self, rank: int, env: dict[str, str], argv: Sequence[str], cores: Sequence[int] = ()
    ) -> ForkedRank | None:
        """Forks a rank that runs ``optimus pretrain argv``, bound to ``cores``; None where the server has died."""
        if not self.is_ready():
            return None
        request = {"rank": rank, "env": env, "argv": list(argv), "cores": list(cores)}
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        except OSError:
            return None
        while (message := self._receive()) is not None:
            if message.get("rank") == rank:
                return ForkedRank(self, message["pid"])
        return None

    def exit_status(self, pid: int) -> int | None:
        """Returns how the rank ended; None while it runs. If the server is gone, its ranks have been killed with it."""
        while pid not in self._statuses and self._receive(wait=False) is not None:
            pass
        if pid not in self._statuses and self._process.poll() is not None:
            return -signal.SIGKILL
        return self._statuses.get(pid)

    def close(self) -> None:
        """Ends the server."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _receive(self, *, wait: bool = True) -> dict[str, Any] | None:
        """Returns the next message; None where there is none (yet)."""
        self._socket.setblocking(wait)
        while b"\n" not in self._received:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                return None
            if not data:
                return None
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        if "status" in message:
            self._statuses[message["pid"]] = message["status"]
        return message


def main(device: str) -> int:
    """The server: imports the training program, then forks a rank for every request until the launcher is gone."""
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in (*signals.STOP_SIGNALS, signal.SIGCHLD)}
    for number in signals.STOP_SIGNALS:  # of the terminal: for the ranks
        signal.signal(number, signal.SIG_IGN)
    link = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    reason = _import_program(device)
    _send(link, {"refused": reason} if reason else {"ready": True})
    if reason:
        return 0
    ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    selector.register(link, selectors.EVENT_READ)
    selector.register(ended, selectors.EVENT_READ)
    received = b""
    while True:
        for key, _ in selector.select():
            if key.fileobj is link:
                data = link.recv(1 << 16)
                if not data:
                    return 0
                *lines, received = (received + data).split(b"\n")
                for line in lines:
                    request = json.loads(line)
                    server, pid = os.getpid(), os.fork()
                    if pid == 0:
                        signal.set_wakeup_fd(-1)
                        for descriptor in (link.detach(), ended, wakeup):
                            os.close(descriptor)
                        selector.close()
                        _run_rank(request, server, handlers)
                    _send(link, {"rank": request["rank"], "pid": pid})
            else:
                os.read(ended, 1 << 12)
        _reap(link)


def _import_program(device: str) -> str:
    """Imports what a rank needs; returns why ranks cannot be forked from this process, "" if they can."""
    importlib.import_module(_MODULES[0])
    from megatron.optimus.config.schema import Device
    from megatron.optimus.platform import device as devices

    kind = device if device != Device.AUTO.value else devices.kind_without_opening()
    environment.set_default("DS_ACCELERATOR", kind)  # DeepSpeed chooses its accelerator when it is imported
    environment.set_default("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # an import that asks whether there is a GPU
    for name in _MODULES[1:]:
        importlib.import_module(name)
    from megatron.optimus.training.engine import import_ahead

    import_ahead()
    gc.freeze()  # a collection in a rank would copy the pages that all share
    return _why_not_fork(kind)


def _why_not_fork(kind: str) -> str:
    """Why ranks that use devices of ``kind`` must not be forked from this process, "" if they can be."""
    from megatron.optimus.platform import device as devices

    devices.close_nvml()
    opened = [path for path in map(_target, os.listdir("/proc/self/fd")) if path.startswith(_DEVICES)]
    if opened:
        return f"the imports have opened {opened[0]}"
    if devices.is_cuda_initialized():  # it does not survive a fork
        return "the imports have initialised CUDA"
    return "" if kind == "cpu" or _fork_computes(kind) else f"a forked process could not compute on a {kind} device"


def _fork_computes(kind: str) -> bool:
    """Whether a fork of this process can use an accelerator. A second on a GPU, while the launcher does other work."""
    from megatron.optimus.platform import device as devices

    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            devices.open_nvml()
            os._exit(0 if devices.computes(kind) else 1)
        finally:
            os._exit(1)
    deadline = time.monotonic() + _PROBE_SECONDS
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return ended[1] == 0


def _target(descriptor: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return ""


def _run_rank(request: dict[str, Any], server: int, handlers: dict[int, Any]) -> NoReturn:
    """Becomes a rank: what a new interpreter would be after its imports."""
    try:
        if (end_with_server := parent_death.signal_setter(signal.SIGTERM, parent=server)) is not None:
            end_with_server()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signals.raise_on_sigint()
        if request["cores"]:
            os.sched_setaffinity(0, request["cores"])
        environment.replace(request["env"])
        importlib.import_module("megatron.optimus.platform.device").open_nvml()
        sys.argv[1:] = request["argv"]
        program = importlib.import_module(PROGRAM)  # as ``python -m`` of a new interpreter
        run_program(lambda: program.main(request["argv"]))
    finally:
        os._exit(1)


def _reap(link: socket.socket) -> None:
    """Tells the launcher which ranks have ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            _send(link, {"pid": ended[0], "status": os.waitstatus_to_exitcode(ended[1])})


def _send(link: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the launcher is gone: the next read says so
        link.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
