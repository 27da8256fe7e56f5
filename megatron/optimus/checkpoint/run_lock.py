"""The lock file of a run's checkpoint folder: one job at a time may write there.

    root/.claim    {"host": ..., "pid": ..., "process": ..., "boot": ..., "space": ..., "nonce": ...,
                    "attempt": [...]}

A job that finds a lock of its own host looks up whether the owning process still lives, by its number and its start
time, so that a reused process number is not mistaken for it. On another host it watches the file's time stamp, which
the owner renews every few seconds (the heartbeat). A launcher with agents has ended the ranks of an attempt, or lost
their node, before it starts the next one: a lock of the same launch's earlier attempt is not watched. The lock of a
dead owner is taken over. The owner checks before a commit that the lock is still its own, so two jobs which mistake
each other for dead do not both commit.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from megatron.optimus.checkpoint import commit
from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.untrusted import parse_json, read_small_file
from megatron.optimus.platform import environment, files
from megatron.optimus.platform.environment import boot_id

LOCK_NAME = ".claim"
HEARTBEAT_S = 10.0
TIMEOUT_S = 60.0  # without a heartbeat for this long, the owner counts as dead
_MAX_BYTES = 1 << 16

log = logging.getLogger("optimus")


class RunLock:
    """The right to write into a checkpoint folder, held from construction until ``release``, by one rank.

    Args:
        root: the folder of checkpoints; it is made where it is missing.
        heartbeat_s: seconds between renewals of the file's time stamp.
        timeout_s: seconds without a heartbeat after which an owner on another host counts as dead; construction waits
            that long at most.

    Raises:
        CheckpointError: another live process holds the lock; the message names it and the remedy.
    """

    def __init__(self, root: Path, *, heartbeat_s: float = HEARTBEAT_S, timeout_s: float = TIMEOUT_S) -> None:
        self._path = Path(root).absolute() / LOCK_NAME
        self._own = _this_process() | {"nonce": secrets.token_hex(8)}
        if (attempt := environment.attempt()) is not None:
            self._own["attempt"] = list(attempt)
        self._timeout_s = timeout_s
        self._stop = threading.Event()
        files.make_directory(Path(root))
        while not self._take():
            self._remove_if_stale()
        self._heartbeat = threading.Thread(target=self._renew, args=(heartbeat_s,), name="run-lock", daemon=True)
        self._heartbeat.start()
        atexit.register(self.release)

    def check(self) -> None:
        """Raises CheckpointError when the lock belongs to another process, or is gone and another may have had it.

        It is taken again where the folder has vanished and come back: then there is no checkpoint in it either.
        """
        owner = _read(self._path)
        is_empty = owner is None and not any(
            commit.list_committed(self._path.parent, kind) for kind in ("full", "model")
        )
        if owner != self._own and not (is_empty and self._take()):
            raise CheckpointError(
                f"{self._path}: this job no longer owns the folder ({_text(owner)} does); it must stop"
            )

    def release(self) -> None:
        """Removes the lock file, unless another process has taken it over."""
        atexit.unregister(self.release)
        self._stop.set()
        self._heartbeat.join()
        if _read(self._path) == self._own:
            os.unlink(self._path)

    def _take(self) -> bool:
        """Tries to create the lock file, with all its content at once; True if this process holds it now."""
        fresh = self._path.with_name(f"{LOCK_NAME}.{self._own['nonce']}")
        files.write_new(fresh, json.dumps(self._own).encode())
        try:
            os.link(fresh, self._path)
        except FileExistsError:
            return _read(self._path) == self._own  # a network disk's answer was lost and it asked twice
        finally:
            os.unlink(fresh)
        return True

    def _remove_if_stale(self) -> None:
        """Removes the lock of a dead owner; raises CheckpointError for a live one."""
        owner = _read(self._path)
        if owner is None:
            return  # released meanwhile
        if not self._is_dead(owner):
            raise CheckpointError(
                f"{self._path.parent}: {_text(owner)} is writing its checkpoints there. Two jobs must not write one "
                f"run: wait for it or end it, or choose another folder with --save. If it is certainly dead, delete "
                f"{self._path}"
            )
        log.warning("%s: taking over from %s, which is dead", self._path.parent, _text(owner))
        aside = self._path.with_name(f"{LOCK_NAME}.{self._own['nonce']}")
        try:
            os.rename(self._path, aside)
        except FileNotFoundError:
            return  # another job was faster
        if _read(aside) != owner:  # another job was faster, and this is its new lock: put it back
            try:
                os.link(aside, self._path)
            except FileExistsError:
                log.warning("%s: two jobs compete for this folder", self._path.parent)
        os.unlink(aside)

    def _is_dead(self, owner: dict[str, Any]) -> bool:
        launch, number = self._own.get("attempt", ("", 0))
        if owner.get("attempt") in [[launch, earlier] for earlier in range(number)]:
            return True
        here = _this_process()
        if here["boot"] and all(owner.get(key) == here[key] for key in ("host", "boot", "space")):
            return _start_of(owner.get("pid")) != owner.get("process")
        log.info("%s belongs to %s: watching for its heartbeat up to %.0f s", self._path, _text(owner), self._timeout_s)
        first, deadline = _heartbeat_of(self._path), time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._timeout_s / 20))
            if _heartbeat_of(self._path) != first:
                return _read(self._path) is None  # released: the next try to take it decides
        return True

    def _renew(self, heartbeat_s: float) -> None:
        while not self._stop.wait(heartbeat_s):
            try:
                if _read(self._path) == self._own:
                    os.utime(self._path)
            except (OSError, CheckpointError) as error:
                log.warning("%s could not be renewed: %s", self._path, error)


def _this_process() -> dict[str, Any]:
    boot = boot_id()
    try:
        space = os.readlink("/proc/self/ns/pid")  # process numbers mean something in here only
    except OSError:
        boot = space = ""
    return {
        "host": socket.gethostname(),
        "boot": boot,
        "space": space,
        "pid": os.getpid(),
        "process": _start_of(os.getpid()),
    }


def _start_of(pid: object) -> str | None:
    """Start time of a process in the kernel's ticks; None when it is not alive (a zombie is not)."""
    try:
        fields = Path(f"/proc/{int(str(pid))}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def _read(path: Path) -> dict[str, Any] | None:
    """The owner that the lock file names; None without a file, {} where the content makes no sense."""
    try:
        return parse_json(read_small_file(path, _MAX_BYTES), str(path))
    except CheckpointError:
        return {} if path.is_symlink() or path.exists() else None


def _heartbeat_of(path: Path) -> tuple[int, int] | None:
    try:
        descriptor = files.open_regular(path, os.O_RDONLY)  # opening makes network file systems ask the server
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        return status.st_mtime_ns, status.st_ino
    finally:
        os.close(descriptor)


def _text(owner: dict[str, Any] | None) -> str:
    if not owner:
        return "nobody"
    return f"process {str(owner.get('pid'))[:20]} on {str(owner.get('host'))[:100]}"
