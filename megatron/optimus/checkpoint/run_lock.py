"""One writer per folder: a small file says which process that is.

    root/.claim    {"host": ..., "pid": ..., "process": ..., "boot": ..., "nonce": ...}

On the host that wrote it, whether the process still lives is simply looked up (its number and its start, so that a
number used again fools nobody). Elsewhere its heartbeat tells: the owner renews the file's time stamp every few
seconds, and who finds it watches for a while. A claim without a heartbeat is stale and is taken over. The owner looks
before every commit whether the claim is still its own, so even two jobs that mistake each other for dead do not both
commit.
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
from megatron.optimus.checkpoint.shards import parse_json, read_small_file
from megatron.optimus.platform.environment import boot_id

CLAIM_NAME = ".claim"
HEARTBEAT_S = 10.0
TIMEOUT_S = 60.0  # without a heartbeat for this long, the owner counts as dead
_MAX_BYTES = 1 << 16

log = logging.getLogger("optimus")


class Claim:
    """The right to write into ``root``, from construction until ``release``. For one rank of the job.

    ``heartbeat_s``, ``timeout_s``: seconds between renewals, and without one until the owner counts as dead; watching
    takes at most the latter. Raises CheckpointError, naming the owner and the remedy, when another live process has it.
    """

    def __init__(self, root: Path, *, heartbeat_s: float = HEARTBEAT_S, timeout_s: float = TIMEOUT_S) -> None:
        self._path = Path(root).absolute() / CLAIM_NAME
        self._own = _this_process() | {"nonce": secrets.token_hex(8)}
        self._timeout_s = timeout_s
        self._stop = threading.Event()
        commit.make_directory(Path(root))
        while not self._take():
            self._remove_if_stale()
        self._heartbeat = threading.Thread(target=self._renew, args=(heartbeat_s,), name="claim", daemon=True)
        self._heartbeat.start()
        atexit.register(self.release)

    def check(self) -> None:
        """Raises CheckpointError when the claim is another's or gone."""
        owner = _read(self._path)
        if owner != self._own:
            raise CheckpointError(
                f"{self._path}: this job no longer owns the folder ({_text(owner)} does); it must stop"
            )

    def release(self) -> None:
        """Gives the right back, if it is still ours."""
        atexit.unregister(self.release)
        self._stop.set()
        self._heartbeat.join()
        if _read(self._path) == self._own:
            os.unlink(self._path)

    def _take(self) -> bool:
        """Whether the claim is ours now. The file appears with its content, or not at all."""
        fresh = self._path.with_name(f"{CLAIM_NAME}.{self._own['nonce']}")
        commit.write_synced(fresh, json.dumps(self._own).encode())
        try:
            os.link(fresh, self._path)
        except FileExistsError:
            return _read(self._path) == self._own  # a network disk's answer was lost and it asked twice
        finally:
            os.unlink(fresh)
        return True

    def _remove_if_stale(self) -> None:
        """Removes the claim of a dead owner; raises for a live one."""
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
        aside = self._path.with_name(f"{CLAIM_NAME}.{self._own['nonce']}")
        try:
            os.rename(self._path, aside)
        except FileNotFoundError:
            return  # another job was faster
        if _read(aside) != owner:  # it was, and this is its new claim: give it back
            try:
                os.link(aside, self._path)
            except FileExistsError:
                log.warning("%s: two jobs compete for this folder", self._path.parent)
        os.unlink(aside)

    def _is_dead(self, owner: dict[str, Any]) -> bool:
        here = _this_process()
        if here["boot"] and all(owner.get(key) == here[key] for key in ("host", "boot", "space")):
            return _start_of(owner.get("pid")) != owner.get("process")
        log.info("%s belongs to %s: watching for its heartbeat up to %.0f s", self._path, _text(owner), self._timeout_s)
        first, deadline = _heartbeat_of(self._path), time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._timeout_s / 20))
            if _heartbeat_of(self._path) != first:
                return _read(self._path) is None  # gone: the next look decides
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
    """When the process began, in the kernel's ticks; None when it is not alive (a zombie is not)."""
    try:
        fields = Path(f"/proc/{int(str(pid))}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def _read(path: Path) -> dict[str, Any] | None:
    """The claim, None when there is none. One that makes no sense belongs to nobody alive that we could name."""
    try:
        return parse_json(read_small_file(path, _MAX_BYTES), str(path))
    except CheckpointError:
        return {} if path.is_symlink() or path.exists() else None


def _heartbeat_of(path: Path) -> tuple[int, int] | None:
    try:
        descriptor = os.open(path, os.O_RDONLY)  # opening makes network file systems ask the server
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
