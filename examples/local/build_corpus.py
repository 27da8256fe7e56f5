#!/usr/bin/env python3
"""Builds a real corpus without any download: this Python's standard library, as JSON lines.

    python examples/local/build_corpus.py --output corpus.jsonl --max-mb 24

A document is one .py source, or the docstrings of one module that is written in C. (Docstrings of .py modules stand in
their sources already; giving them twice would put text of the training split into the validation split.) The library
proper is taken first, then test suites until --max-mb is reached. The order is shuffled with a fixed seed, so that any
stretch of the file, a held-out tail in particular, is representative. The same interpreter gives the same file.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import random
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

SEED = 1234
# other people's packages; tests of parsers, of which some are meant not to decode
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "_bundled", "tokenizedata", "encodings"}
TEST_FOLDERS = {"test", "tests", "idle_test"}
MIN_CHARACTERS = 64


def source_files(root: Path) -> list[Path]:
    """All .py files below ``root``, sorted, relative to it; the library proper before the test suites."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        files += [Path(folder, name).relative_to(root) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda file: (not TEST_FOLDERS.isdisjoint(file.parts), file.as_posix()))


def extension_docs() -> Iterator[tuple[str, str]]:
    """(name, text) of the modules without a Python source: their docstrings and those of their public members."""
    names = sorted(name for name in sys.builtin_module_names if not name.startswith("_") or name == "_io")
    dynamic = Path(sysconfig.get_path("stdlib"), "lib-dynload")  # "platstdlib" is empty in a virtual environment
    names += sorted({file.name.split(".")[0] for file in dynamic.glob("*.so")} - set(names))
    for name in names:
        if name.startswith(("_test", "xx", "_xx", "_ctypes_test")):
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue  # a module that this machine lacks the library for
        parts = [f"{name}\n\n{inspect.getdoc(module) or ''}"]
        for member_name, member in sorted(vars(module).items()):
            if member_name.startswith("_") or not callable(member):
                continue
            parts.append(f"{name}.{member_name}\n\n{inspect.getdoc(member) or ''}")
            if inspect.isclass(member):
                methods = sorted((n, m) for n, m in vars(member).items() if not n.startswith("_") and callable(m))
                parts += [f"{name}.{member_name}.{n}\n\n{inspect.getdoc(m) or ''}" for n, m in methods]
        yield f"docstrings/{name}", "\n\n".join(parts)


def collect(max_bytes: int) -> tuple[list[dict[str, str]], int]:
    """Documents up to ``max_bytes`` of text, and how many files could not be decoded."""
    root = Path(sysconfig.get_path("stdlib"))
    documents, size, undecodable = [], 0, 0

    def candidates() -> Iterator[tuple[str, str | None]]:
        yield from extension_docs()
        for file in source_files(root):
            try:
                yield file.as_posix(), (root / file).read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                yield file.as_posix(), None

    for source, text in candidates():
        if text is None:
            undecodable += 1
            continue
        if len(text) < MIN_CHARACTERS:
            continue
        size += len(text.encode("utf-8"))
        if size > max_bytes:
            break
        documents.append({"text": text, "source": source})
    random.Random(SEED).shuffle(documents)
    return documents, undecodable


def main() -> int:
    parser = argparse.ArgumentParser(description="Write this Python's standard library as JSON lines")
    parser.add_argument("--output", required=True, help="JSON-lines file to write")
    parser.add_argument("--max-mb", type=float, default=24.0, help="megabytes of text at most")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # deprecated modules say so on import
    documents, undecodable = collect(int(args.max_mb * 1e6))
    if not documents:
        root = sysconfig.get_path("stdlib")
        print(f"build_corpus: error: no document of {args.max_mb} MB or less under {root}", file=sys.stderr)
        return 1
    output = Path(args.output)
    temporary = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "w", encoding="utf-8") as stream:
            for document in documents:
                stream.write(json.dumps(document, ensure_ascii=False) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, output)
    except OSError as error:
        print(f"build_corpus: error: {output}: cannot write: {error.strerror}", file=sys.stderr)
        return 1
    finally:
        temporary.unlink(missing_ok=True)
    size = output.stat().st_size / 1e6
    print(f"{output}: {len(documents)} documents, {size:.1f} MB ({undecodable} files that are not UTF-8 left out)")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # its temporary file is gone
        sys.exit(130)
