"""Fingerprints of token files: what changes them, what they cost to read, and how changes are told."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from megatron.optimus.data import fingerprint as module
from megatron.optimus.data.files import TokenFiles, summarize
from megatron.optimus.data.fingerprint import UNKNOWN, changes, fingerprint, lines_of
from megatron.optimus.data.indexed import IndexedDatasetWriter


def _write(prefix: Path, seed: int, documents: int = 50, length: int = 100) -> str:
    rng = np.random.default_rng(seed)
    with IndexedDatasetWriter(str(prefix), np.dtype(np.uint16)) as writer:
        for _ in range(documents):
            writer.add_document(rng.integers(0, 1000, length).tolist())
    return str(prefix)


def _lines(*prefixes: str) -> list[str]:
    return lines_of(TokenFiles(prefixes, summaries=summarize(prefixes, fingerprints=True)))


def test_equal_files_are_equal_wherever_they_lie(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    first, second = _write(tmp_path / "a", 1), _write(tmp_path / "b" / "c", 1)
    assert fingerprint(first) == fingerprint(second) != UNKNOWN
    assert 0 < fingerprint(first) < 1 << 63
    assert fingerprint(_write(tmp_path / "d", 2)) != fingerprint(first)
    assert fingerprint(str(tmp_path / "none")) == UNKNOWN
    assert fingerprint(_write(tmp_path / "empty", 1, documents=0)) != UNKNOWN


@pytest.mark.parametrize("size", [1000, 3_000_000])
@pytest.mark.parametrize("part", ["first", "last", "middle"])
def test_tokens_that_are_overwritten_change_it(tmp_path: Path, size: int, part: str) -> None:
    prefix = _write(tmp_path / "a", 1, documents=5, length=size // 5)
    before = fingerprint(prefix)
    data = np.fromfile(f"{prefix}.bin", np.uint16)
    third = size // 3
    where = {"first": slice(0, 1), "last": slice(-1, None), "middle": slice(third, 2 * third)}[part]
    data[where] = (data[where] + 1) % 1000
    data.tofile(f"{prefix}.bin")
    assert fingerprint(prefix) != before


def test_a_document_bound_that_moves_changes_it(tmp_path: Path) -> None:
    prefix = _write(tmp_path / "a", 1)
    before = fingerprint(prefix)
    raw = bytearray(Path(f"{prefix}.idx").read_bytes())
    raw[len(raw) // 2] ^= 1
    Path(f"{prefix}.idx").write_bytes(raw)
    assert fingerprint(prefix) != before


def test_a_large_file_costs_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = _write(tmp_path / "a", 1)
    with open(f"{prefix}.bin", "ab") as file:
        file.truncate(1 << 40)  # a terabyte, without a disk of that size
    with open(f"{prefix}.idx", "ab") as file:
        file.truncate(1 << 32)
    reads: list[int] = []
    pread = os.pread
    monkeypatch.setattr(module.os, "pread", lambda fd, count, at: reads.append(count) or pread(fd, count, at))
    assert fingerprint(prefix) != UNKNOWN
    assert len(reads) == 16 and sum(reads) <= (4 << 20) + (128 << 10)


def test_changes_name_the_file(tmp_path: Path) -> None:
    same, other, grown, new = (_write(tmp_path / name, 1) for name in ("same", "with space", "grown", "new"))
    before = _lines(same, other, grown)
    _write(tmp_path / "with space", 2)
    _write(tmp_path / "grown", 1, documents=60)
    now = _lines(same, other, grown, new)
    first, second = changes(before, now, [same, other, grown, new, "never seen"])
    assert first.startswith(f"{other}.bin or its .idx file holds other data")
    assert second.startswith(f"{grown}.bin had 5000 tokens and now has 6000")
    assert changes(before, now, [same, new]) == changes(now, now, [same, other, grown, new]) == []
    for stored in (None, 7, [], [1, None, "x", "a b"], {"a": 1}):
        assert changes(stored, now, [same, other]) == []


def test_a_file_that_cannot_be_read_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = _write(tmp_path / "a", 1)

    def fail(descriptor: int, count: int, at: int) -> bytes:
        raise OSError(5, "Input/output error")

    summaries = summarize([prefix])
    monkeypatch.setattr(module.os, "pread", fail)
    assert fingerprint(prefix) == UNKNOWN
    assert lines_of(TokenFiles([prefix], summaries=summaries)) == []
