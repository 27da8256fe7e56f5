"""Fingerprints of token files, by which a resumed run notices that a file holds other tokens than before.

A fingerprint is a hash of evenly spread parts of the .bin file and of the .idx file, whole up to 4 MiB. It costs about
twenty reads, whatever the size: it finds a file that was written anew, and not every token that was changed by itself.
A checkpoint keeps one line a file, "<16 hex digits> <tokens> <prefix>".
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import xxhash

from megatron.optimus.data.index_reader import bin_path, idx_path, spread_ranges

if TYPE_CHECKING:
    from megatron.optimus.data.files import TokenFiles

LINES_FIELD = "data_files"  # in a checkpoint's metadata
UNKNOWN = 0

# (bytes up to which all are hashed, bytes read at a time), see ``spread_ranges``.
_BIN_PARTS = 128 << 10, 16 << 10
_IDX_PARTS = 4 << 20, 512 << 10


def fingerprint(prefix: str) -> int:
    """Returns the fingerprint of a pair, between 1 and 2^63 - 1; UNKNOWN where a part cannot be read."""
    digest = xxhash.xxh3_64()
    try:
        for path, (budget, largest) in ((bin_path(prefix), _BIN_PARTS), (idx_path(prefix), _IDX_PARTS)):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                size = os.fstat(descriptor).st_size
                digest.update(size.to_bytes(8, "little"))
                for start, count in spread_ranges(size, budget, largest):
                    digest.update(os.pread(descriptor, count, start))
            finally:
                os.close(descriptor)
    except OSError:
        return UNKNOWN  # a part that no step may ever need; one that is needed is an error when it is read
    return max(1, digest.intdigest() >> 1)


def lines_of(files: TokenFiles) -> list[str]:
    """Returns the lines that a checkpoint keeps, of the files whose fingerprints are known."""
    known = zip(files.prefixes, files.tokens.tolist(), files.fingerprints.tolist(), strict=True)
    return [f"{found:016x} {tokens} {prefix}" for prefix, tokens, found in known if found != UNKNOWN]


def changes(before: object, now: Sequence[str], prefixes: Iterable[str]) -> list[str]:
    """Describes the files that are not what they were when a checkpoint was saved.

    Args:
        before: the checkpoint's lines; anything else counts as none.
        now: the lines of the files as they are.
        prefixes: of the files to compare.

    Returns:
        A text for each changed file. Files of which either side has no line are left out: a run may add files.
    """
    stored = _by_prefix(before if isinstance(before, list) else [])
    present = _by_prefix(now)
    found = []
    for prefix in prefixes:
        if prefix not in stored or prefix not in present or stored[prefix] == present[prefix]:
            continue
        (_, tokens_before), (_, tokens_now) = stored[prefix], present[prefix]
        if tokens_before != tokens_now:
            found.append(
                f"{bin_path(prefix)} had {tokens_before} tokens and now has {tokens_now}: samples are numbered over "
                "all of them, so some would repeat and some be left out"
            )
        else:
            found.append(f"{bin_path(prefix)} or its .idx file holds other data than when the checkpoint was saved")
    return found


def _by_prefix(lines: Sequence[object]) -> dict[str, tuple[str, str]]:
    """(fingerprint, tokens) by prefix, of the lines that have three parts."""
    parts = [line.split(" ", 2) for line in lines if isinstance(line, str)]
    return {part[2]: (part[0], part[1]) for part in parts if len(part) == 3}
