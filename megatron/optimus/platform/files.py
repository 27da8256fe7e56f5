"""Durable writes: files and directory entries that survive a kill, and a loss of power once they are synced.

Every change of the file system is one call of an ``os`` function, so that a test can stop between any two of them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from megatron.optimus.config.schema import ConfigError


def write_atomically(path: Path, data: bytes | str, *, sync: bool = True) -> None:
    """Writes a file, or replaces it, in one step: readers and a kill at any instant find the old content or the new.

    Args:
        path: the file; its directory must exist.
        data: the whole content; text is encoded as UTF-8.
        sync: also make file and directory entry durable, so that the same holds for a loss of power.

    Raises:
        OSError: the file cannot be written; ``path`` is then as it was.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        write_new(temporary, data.encode() if isinstance(data, str) else data, sync=sync)
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_directory(path.parent)


def write_new(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Writes a new file and syncs it to the disk. Raises FileExistsError where there is one already."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        write_at(descriptor, memoryview(data), 0)
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def naming_write_errors(path: object, remedy: str = "") -> Iterator[None]:
    """Turns an OSError of the work inside into a ConfigError, "PATH cannot be written: REASON" and the remedy."""
    try:
        yield
    except OSError as error:  # whose file name is absent where the disk is full
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}{remedy and '; ' + remedy}") from error


def open_regular(path: str | Path, flags: int) -> int:
    """Opens a file of a folder that others may write to: no link is followed, and no pipe is waited for.

    Args:
        path: the file.
        flags: of os.open.

    Returns:
        Its descriptor.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    refusal = OSError(errno.EINVAL, "not a regular file (links are not followed); move it away", str(path))
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a pipe that nobody reads
            raise refusal from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refusal
    return descriptor


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Writes all of ``data`` at byte ``offset``; one call of the system takes 2 GiB at most, and may take less."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def make_directory(path: Path) -> None:
    """Makes a directory and its missing parents, durably; it may exist."""
    if path.is_dir():
        return
    make_directory(path.parent)
    try:
        os.mkdir(path)
    except FileExistsError:
        return
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Makes the entries of a directory (creations, renames, deletions) durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete_tree(path: Path) -> None:
    """Deletes a directory with all it holds; links in it are removed, not followed."""
    for entry in list(os.scandir(path)):
        if entry.is_dir(follow_symlinks=False):
            delete_tree(Path(entry.path))
        else:
            os.unlink(entry.path)
    os.rmdir(path)
