"""Many token files, opened lazily: few descriptors, exact reads, and errors instead of noise when files change."""

from __future__ import annotations

import os
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.optimus.data.dataset import InstanceSet, check_contents
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.files import TokenFiles
from megatron.optimus.data.index_reader import DTYPES, summarize_pair
from megatron.optimus.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron.optimus.data.splits import NO_HASH_SPLITS

FIXTURES = {"suppress_health_check": [HealthCheck.function_scoped_fixture], "deadline": None}


def write(prefix: Path, tokens: np.ndarray, dtype: object = np.uint16) -> str:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for start in range(0, len(tokens), 5):
            writer.add_document(tokens[start : start + 5])
    return str(prefix)


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    return [write(tmp_path / f"f{i}", np.arange(100 * i, 100 * i + 40)) for i in range(6)]


def open_descriptors() -> int:
    return sum(os.path.realpath(f"/proc/self/fd/{fd}").endswith(".bin") for fd in os.listdir("/proc/self/fd"))


def test_few_files_are_open_at_a_time(prefixes: list[str]) -> None:
    files = TokenFiles(prefixes, max_open=2)
    assert files.tokens.tolist() == [40] * 6 and open_descriptors() == 0
    for file in [0, 1, 2, 3, 4, 5, 0, 5, 0, 3]:
        assert files.read(file, 7, 3).tolist() == [100 * file + 7, 100 * file + 8, 100 * file + 9]
        assert open_descriptors() <= 2
    files.close()
    assert open_descriptors() == 0


def test_threads_share_the_files(prefixes: list[str]) -> None:
    files = TokenFiles(prefixes, max_open=1)
    wrong: list[object] = []

    def work(seed: int) -> None:
        for file in np.random.default_rng(seed).integers(0, 6, 300).tolist():
            if files.read(file, 0, 40)[0] != 100 * file:
                wrong.append(file)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert wrong == []


@pytest.mark.parametrize("code", [code for code in DTYPES if DTYPES[code].kind != "f"])
def test_every_element_type(tmp_path: Path, code: int) -> None:
    prefix = write(tmp_path / "f", np.arange(20), DTYPES[code])
    files = TokenFiles([prefix])
    assert files.read(0, 3, 4).dtype == DTYPES[code] and files.read(0, 3, 4).tolist() == [3, 4, 5, 6]
    assert summarize_pair(prefix) == (code, 20, 0, NO_HASH_SPLITS)


def test_floats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"f\.idx: dtype code says float32"):
        TokenFiles([write(tmp_path / "f", np.arange(20), np.float32)])


def test_files_that_change_under_the_run(prefixes: list[str], tmp_path: Path) -> None:
    instances = InstanceSet(prefixes, 8)
    instances.read(0)
    with open(tmp_path / "f0.bin", "ab") as stream:
        stream.write(b"\0\0")
    with pytest.raises(DataError, match=r"f0\.bin: has grown from 80 to 82 bytes since the run started"):
        instances.read(0)
    os.truncate(tmp_path / "f1.bin", 10)
    with pytest.raises(DataError, match=r"f1\.bin: has shrunk from 80 to 10 bytes"):
        instances.read(4)  # a memory map would have killed the process
    os.unlink(tmp_path / "f2.bin")
    with pytest.raises(DataError, match=r"f2\.bin: cannot be read any more \(No such file"):
        instances.read(8)
    instances.read(12)  # of the file that stays open
    (tmp_path / "other").write_bytes((tmp_path / "f3.bin").read_bytes())
    os.replace(tmp_path / "other", tmp_path / "f3.bin")
    with pytest.raises(DataError, match=r"f3\.bin: has been replaced since the run started"):
        instances.read(12)
    os.unlink(tmp_path / "f3.bin")
    with pytest.raises(DataError, match=r"f3\.bin: cannot be read any more \(No such file"):
        instances.read(12)


@settings(max_examples=150, **FIXTURES)
@given(data=st.data())
def test_damaged_headers_never_crash_hang_or_allocate(tmp_path: Path, data: st.DataObject) -> None:
    """What the quick look accepts has the right size, and reading it stays inside the file."""
    prefix = write(tmp_path / "f", np.arange(20))
    for suffix in (".idx", ".bin"):
        raw = bytearray(Path(prefix + suffix).read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            position = data.draw(st.integers(0, len(raw) - 1))
            raw[position : position + 8] = data.draw(st.binary(min_size=1, max_size=8))
        Path(prefix + suffix).write_bytes(raw[: data.draw(st.sampled_from([len(raw), len(raw), 0, 33, 34, 35]))])
    tracemalloc.start()
    try:
        summary = summarize_pair(prefix)
        assert summary.tokens * DTYPES[summary.code].itemsize == os.path.getsize(f"{prefix}.bin")
        assert TokenFiles([prefix]).read(0, 0, summary.tokens).size == summary.tokens
    except DataError as error:
        assert prefix in str(error)
        with pytest.raises(DataError):  # the full check refuses whatever the quick one does, floats aside
            IndexedDataset(prefix).check_token_ids(1 << 62)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20


def test_swapped_and_missing_halves(tmp_path: Path, prefixes: list[str]) -> None:
    other = write(tmp_path / "other", np.arange(41))
    Path(f"{other}.idx").replace(f"{prefixes[0]}.idx")
    with pytest.raises(DataError, match=r"f0\.bin: truncated.*belongs to another index"):
        InstanceSet(prefixes, 8)
    for suffix in (".idx", ".bin"):
        Path(prefixes[5] + suffix).unlink(missing_ok=True)
        with pytest.raises(DataError, match=rf"f5\{suffix}: no such file"):
            TokenFiles(prefixes[1:])
        write(tmp_path / "f5", np.arange(500, 540))


def test_ids_over_the_vocabulary_are_found_when_read(prefixes: list[str]) -> None:
    instances = InstanceSet(prefixes, 8, vocab_size=505)
    assert instances.read(0)[0].tokens[0] == 0
    with pytest.raises(DataError, match=r"f5\.bin: token 5 has id 505, outside the vocabulary of 505"):
        instances.read(len(instances) - 4)


def test_large_files_are_looked_at_in_pieces(tmp_path: Path) -> None:
    tokens = np.zeros(100_000, dtype=np.int32)
    prefix = write(tmp_path / "f", tokens, np.int32)
    check_contents([prefix], 10, max_tokens=8192)
    for position, found in ((0, True), (99_999, True), (30_000, False)):
        changed = tokens.copy()
        changed[position] = 10
        write(tmp_path / "f", changed, np.int32)
        with pytest.raises(DataError, match=rf"token {position} has id 10"):
            check_contents([prefix], 10)
        if found:
            with pytest.raises(DataError, match=rf"token {position} has id 10"):
                check_contents([prefix], 10, max_tokens=8192)
        else:
            check_contents([prefix], 10, max_tokens=8192)
