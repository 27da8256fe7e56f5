"""A recorder of every call that changes the file system, and the states a crash after each call can leave.

Calls are replayed on a model of inodes. A file has what was written and what was synced; a directory has its entries
and the changes since it was synced. A killed process leaves everything; a machine that loses power keeps what was
synced and any part of the rest: any subset of the changes to a directory, any part of the unsynced bytes.
"""

from __future__ import annotations

import builtins
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock


@dataclass
class File:
    written: bytes = b""
    synced: bytes = b""


@dataclass
class Directory:
    entries: dict[str, Node] = field(default_factory=dict)
    synced: dict[str, Node] = field(default_factory=dict)
    unsynced: list[tuple[str | None, str | None, Node]] = field(default_factory=list)  # (name gone, name come, what)


Node = File | Directory
Call = tuple[Any, ...]


class Recorder:
    """The calls below ``root``, in order. ``marks``: notes of the test, by the number of calls made before."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[Call] = []
        self.marks: list[tuple[int, int]] = []
        self._open: dict[int, Path] = {}

    def mark(self, note: int) -> None:
        self.marks.append((len(self.calls), note))

    @contextmanager
    def recording(self) -> Iterator[None]:
        def inside(path: Any) -> bool:
            return isinstance(path, str | os.PathLike) and Path(path).is_relative_to(self.root)

        def on_open(path: Any, flags: int, *rest: Any, **options: Any) -> int:
            is_new = inside(path) and bool(flags & os.O_CREAT) and not Path(path).exists()
            descriptor = real["open"](path, flags, *rest, **options)
            if inside(path):
                self._open[descriptor] = Path(path)
                if is_new:
                    self.calls.append(("create", Path(path)))
            return descriptor

        def on_pwrite(descriptor: int, data: Any, offset: int) -> int:
            count = real["pwrite"](descriptor, data, offset)
            self.calls.append(("write", self._open[descriptor], offset, bytes(data[:count])))
            return count

        def on_fsync(descriptor: int) -> None:
            real["fsync"](descriptor)
            self.calls.append(("sync", self._open[descriptor]))

        def simple(name: str) -> Callable[..., Any]:
            def call(*paths: Any, **options: Any) -> None:
                real[name](*paths, **options)
                if inside(paths[0]):
                    self.calls.append((name, *(Path(path) for path in paths if inside(path))))

            return call

        def on_builtin_open(path: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
            assert not inside(path) or not set(mode) & set("wxa+"), f"{path} is written behind the recorder's back"
            return real_open(path, mode, *rest, **options)

        names = ("open", "pwrite", "fsync", "mkdir", "rename", "unlink", "rmdir")
        real = {name: getattr(os, name) for name in names}
        real_open = builtins.open
        replaced = {"open": on_open, "pwrite": on_pwrite, "fsync": on_fsync}
        patches = [mock.patch.object(os, name, replaced.get(name) or simple(name)) for name in names]
        forbidden = ("write", "replace", "link", "symlink", "truncate", "ftruncate", "removedirs", "remove", "writev")
        patches += [mock.patch.object(os, name, _refuse) for name in forbidden]
        patches.append(mock.patch.object(builtins, "open", on_builtin_open))
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()


def _refuse(*args: Any, **options: Any) -> None:
    raise AssertionError(f"a call that the recorder does not know: {args}")


def replay(root: Path, calls: list[Call]) -> Directory:
    """The model after these calls, of an empty synced ``root``."""
    top = Directory()

    def directory(path: Path) -> Directory:
        node: Node = top
        for part in path.relative_to(root).parts:
            assert isinstance(node, Directory)
            node = node.entries[part]
        assert isinstance(node, Directory)
        return node

    def change(folder: Directory, gone: str | None, come: str | None, node: Node) -> None:
        if gone is not None:
            del folder.entries[gone]
        if come is not None:
            folder.entries[come] = node
        folder.unsynced.append((gone, come, node))

    for name, path, *rest in calls:
        folder = top if path == root else directory(path.parent)
        node: Node | None = top if path == root else folder.entries.get(path.name)
        if name in ("create", "mkdir"):
            change(folder, None, path.name, File() if name == "create" else Directory())
        elif name == "write":
            assert isinstance(node, File)
            offset, data = rest
            old = node.written.ljust(offset, b"\0")
            node.written = old[:offset] + data + old[offset + len(data) :]
        elif name == "sync" and isinstance(node, File):
            node.synced = node.written
        elif name == "sync":
            assert isinstance(node, Directory)
            node.synced, node.unsynced = dict(node.entries), []
        elif name == "rename":
            assert node is not None and rest[0].parent == path.parent
            change(folder, path.name, rest[0].name, node)
        else:
            assert name in ("unlink", "rmdir") and node is not None
            change(folder, path.name, None, node)
    return top


def killed(node: Node) -> Node:
    """What a process killed now leaves: all of it."""
    if isinstance(node, File):
        return File(node.written)
    return Directory({name: killed(child) for name, child in node.entries.items()})


def power_lost(node: Node, luck: random.Random | None) -> Node:
    """What a machine that loses power now keeps: what was synced; with ``luck``, some of the rest too."""
    if isinstance(node, File):
        if luck is None or node.written == node.synced:
            return File(node.synced)
        kind = luck.choice(("synced", "written", "zeros", "part"))
        if kind == "part":
            cut = luck.randint(0, len(node.written))
            return File(node.written[:cut] + bytes(len(node.written) - cut))
        return File({"synced": node.synced, "written": node.written, "zeros": bytes(len(node.written))}[kind])
    entries = dict(node.synced)
    for gone, come, child in node.unsynced:
        if luck is not None and luck.random() < 0.5:
            if gone is not None:
                entries.pop(gone, None)
            if come is not None:
                entries[come] = child
    return Directory({name: power_lost(child, luck) for name, child in entries.items()})


def materialise(node: Node, path: Path) -> None:
    """Writes a state of the model as real files."""
    if isinstance(node, File):
        path.write_bytes(node.written)
        return
    path.mkdir()
    for name, child in node.entries.items():
        materialise(child, path / name)
