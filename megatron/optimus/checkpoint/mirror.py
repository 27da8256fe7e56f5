"""A second tier of checkpoints: complete ones are uploaded to an object store or another host, by fsspec.

    URL/step-00000100/node-00000-0.safetensors    and all other files of the checkpoint
    URL/step-00000100/manifest.json               last: an upload without it, or with other sizes than it says, is not
                                                  whole, and is neither listed nor fetched

Rank 0 uploads in the background what has been committed. The files are opened at once, so that they stay readable when
the folder's older checkpoints are deleted meanwhile. At the URL only the manifests of steps that went wrong are deleted
(a rollback, a flipped bit); anything else is for the store's own rules.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from megatron.optimus.checkpoint import commit
from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, parse_manifest
from megatron.optimus.checkpoint.store import load_manifest
from megatron.optimus.checkpoint.tokenizer_files import FOLDER as TOKENIZER_FOLDER
from megatron.optimus.checkpoint.writer import Task
from megatron.optimus.platform import files
from megatron.optimus.platform.log import first_line
from megatron.optimus.platform.ranks import Ranks

_BLOCK_BYTES = 64 << 20  # a part of an upload: S3 takes 10,000 of them, which makes files of up to 640 GB
_COPY_BYTES = 16 << 20
_CLOSING_SECONDS = 300.0  # for the last upload, when training is over
_POLL_SECONDS = 5.0  # far below a collective's time-out
_TOKENIZER_FILE = re.compile(rf"{TOKENIZER_FOLDER}/\w[\w.-]*")

log = logging.getLogger("optimus")


def is_url(location: str | None) -> bool:
    """Whether a location is a URL of fsspec's rather than a folder."""
    return location is not None and "://" in location


class Mirror:
    """The checkpoints at a URL. Local: rank 0 alone uses it.

    Args:
        url: such as s3://bucket/run, file:///other/disk or memory://name.

    Raises:
        CheckpointError: fsspec, or its package for this protocol, is not installed, or the URL makes no sense.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._fs: Any
        self._thread: threading.Thread | None = None
        try:
            import fsspec

            self._fs, self._root = fsspec.core.url_to_fs(self._url)
        except ImportError as error:
            raise CheckpointError(f"{url}: {error}: pip install optimus-megatron[object-store]") from error
        except Exception as error:  # of the protocol's package, whatever it is
            raise CheckpointError(
                f"{url}: {first_line(error)}; use such as s3://bucket/run or file:///folder"
            ) from error

    # ---- uploading

    def start(self, path: Path, on_failure: Callable[[str], None]) -> None:
        """Uploads a committed checkpoint in the background. ``on_failure`` gets a line where it, or this one, fails."""
        if self._thread is not None and self._thread.is_alive():
            on_failure(f"{path.name} is not uploaded to {self._url}, which still receives the one before")
            return
        try:
            opened = _open_all(path)
        except OSError as error:
            on_failure(f"{path.name} cannot be read for {self._url}: {error}")
            return

        def work() -> None:
            try:
                self._upload(path.name, opened)
                log.info("%s is uploaded to %s", path.name, self._url)
            except Exception as error:  # of a service, whatever it is
                on_failure(f"{path.name} could not be uploaded to {self._url}: {first_line(error)}")

        self._thread = threading.Thread(target=work, name="checkpoint mirror", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits for the upload under way, for minutes at most."""
        if self._thread is not None:
            self._thread.join(_CLOSING_SECONDS)
            if self._thread.is_alive():
                log.warning("the upload to %s has not ended within %g s and is left", self._url, _CLOSING_SECONDS)

    def _upload(self, name: str, opened: dict[str, BinaryIO]) -> None:
        target = f"{self._root}/{name}"
        with contextlib.ExitStack() as stack:
            for file in opened.values():
                stack.enter_context(file)
            manifest = opened.pop(MANIFEST_NAME).read()
            place = f"{target}/{MANIFEST_NAME}"
            self._fs.invalidate_cache()
            if self._fs.exists(place):
                with contextlib.suppress(Exception):  # not whole
                    if self._manifest(name)[1] == manifest:
                        return
                self._fs.rm_file(place)  # of another run's step, whose files are replaced now
            for relative, source in opened.items():
                self._fs.makedirs(f"{target}/{relative}".rpartition("/")[0], exist_ok=True)
                with self._fs.open(f"{target}/{relative}", "wb", block_size=_BLOCK_BYTES) as out:
                    shutil.copyfileobj(source, out, _COPY_BYTES)
                size, sent = os.fstat(source.fileno()).st_size, self._fs.info(f"{target}/{relative}")["size"]
                if sent != size:
                    raise OSError(f"{relative} has {sent} bytes there, {size} here")
            self._fs.pipe_file(place, manifest)

    # ---- fetching

    def newest(self) -> str | None:
        """Finds the newest whole checkpoint; returns its name, None where there is none.

        Raises CheckpointError where the URL cannot be listed.
        """
        for item in reversed(self._listed()):
            try:
                self._manifest(item.name)
            except Exception as error:  # of the service too
                log.warning("%s/%s is not whole and is passed over: %s", self._url, item.name, first_line(error))
            else:
                return item.name
        return None

    def withdraw_after(self, step: int) -> None:
        """Deletes the manifests of checkpoints of steps after ``step``: nothing must resume from them.

        Raises CheckpointError where that fails.
        """
        self.close()
        for item in self._listed():
            place = f"{self._root}/{item.name}/{MANIFEST_NAME}"
            try:
                if item.step > step and self._fs.exists(place):
                    self._fs.rm_file(place)
                    log.warning("%s/%s is withdrawn: it was saved in steps that went wrong", self._url, item.name)
            except Exception as error:  # of the service, whatever it is
                text = f"{self._url}/{item.name} was saved in steps that went wrong and cannot be withdrawn"
                raise CheckpointError(f"{text}: {first_line(error)}; delete its {MANIFEST_NAME}") from error

    def _listed(self) -> list[commit.Committed]:
        """The full checkpoints at the URL, whole or not, the oldest first."""
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(self._root, detail=False) if self._fs.exists(self._root) else []
        except Exception as error:
            raise CheckpointError(f"{self._url} cannot be listed: {first_line(error)}") from error
        found = (commit.parse_name(str(entry).rstrip("/").rpartition("/")[2]) for entry in entries)
        return sorted(one for one in found if one is not None and one.kind == "full")

    def _manifest(self, name: str) -> tuple[Manifest, bytes]:
        """Reads a manifest, and checks that it is of this name and its files have the sizes that it says."""
        place = f"{self._root}/{name}/{MANIFEST_NAME}"
        if self._fs.info(place)["size"] > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{place}: larger than {MAX_MANIFEST_BYTES} bytes")
        data = self._fs.cat_file(place)
        manifest = parse_manifest(data, place)
        if commit.Committed(manifest.step, 0, manifest.kind).name != name.partition(".")[0]:
            raise CheckpointError(f"{place}: is of a {manifest.kind!r} checkpoint of step {manifest.step}")
        for file, size in manifest.files.items():
            if (sent := self._fs.info(f"{self._root}/{name}/{file}")["size"]) != size:
                raise CheckpointError(f"{file} has {sent} bytes, the manifest says {size}")
        return manifest, data

    def fetch(self, name: str, folder: Path) -> Path:
        """Downloads a checkpoint into a folder of checkpoints; returns its directory, committed there as a save is.

        Raises CheckpointError where it cannot be downloaded. Its hashes are checked when it is loaded.
        """
        item = commit.parse_name(name)
        assert item is not None
        temporary = commit.temporary_path(folder, item.step, secrets.randbits(62))
        try:
            manifest, data = self._manifest(name)
            files.make_directory(temporary)
            for relative in [*manifest.files, *self._tokenizer_files(name)]:
                target = temporary / relative
                target.parent.mkdir(exist_ok=True)
                with self._fs.open(f"{self._root}/{name}/{relative}", "rb") as source, open(target, "xb") as out:
                    shutil.copyfileobj(source, out, _COPY_BYTES)
                    out.flush()
                    os.fsync(out.fileno())
            files.write_new(temporary / MANIFEST_NAME, data)
            load_manifest(temporary)  # what is committed is whole: the run would not look at the URL again
            path = folder / commit.commit(folder, temporary, item.step).name
        except Exception as error:  # of the service too
            with contextlib.suppress(OSError):
                files.delete_tree(temporary)
            raise CheckpointError(f"{self._url}/{name} cannot be downloaded: {first_line(error)}") from error
        return path

    def _tokenizer_files(self, name: str) -> Iterator[str]:
        """Names of the copy of the tokenizer, no others: what is listed there is not trusted."""
        place = f"{self._root}/{name}/{TOKENIZER_FOLDER}"
        for entry in self._fs.ls(place, detail=False) if self._fs.exists(place) else []:
            relative = f"{TOKENIZER_FOLDER}/{str(entry).rpartition('/')[2]}"
            if _TOKENIZER_FILE.fullmatch(relative):
                yield relative


def fetch_newest(url: str, folder: Path, ranks: Ranks) -> str | None:
    """Downloads the newest whole checkpoint of a URL, if ``folder`` has no full one. Collective.

    Rank 0 downloads; the others wait in short collectives, so that a download may take longer than their time-out.

    Returns:
        The directory of the checkpoint; None where there is none at the URL, or ``folder`` has one.

    Raises:
        CheckpointError: on every rank, where the URL cannot be listed or the download fails.
    """
    found: list[Path] = []

    def work() -> None:
        if not commit.list_committed(folder):
            mirror = Mirror(url)
            if (name := mirror.newest()) is not None:
                log.info("downloading %s from %s", name, url)
                found.append(mirror.fetch(name, folder))

    task = Task(work) if ranks.rank == 0 else None
    is_done = 0
    while not is_done:
        if task is not None:
            task.join(_POLL_SECONDS)
        [is_done] = ranks.broadcast([int(task is not None and task.is_done)])

    def result() -> bytes:
        if task is not None and task.error is not None:
            raise task.error
        return str(found[0]).encode() if found else b""

    return ranks.broadcast_bytes(ranks.run_on_all_ranks(result, f"fetching {url}", CheckpointError)).decode() or None


def _open_all(path: Path) -> dict[str, BinaryIO]:
    """Opens the files of a checkpoint, by their names relative to it."""
    opened: dict[str, BinaryIO] = {}
    try:
        for file in sorted(each for each in path.rglob("*") if each.is_file()):
            opened[file.relative_to(path).as_posix()] = os.fdopen(files.open_regular(file, os.O_RDONLY), "rb")
    except OSError:
        for one in opened.values():
            one.close()
        raise
    return opened
