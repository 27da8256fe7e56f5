"""Ranks that open the data together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.optimus.data import files as module
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.files import TokenFiles, open_on_all_ranks
from megatron.optimus.data.indexed import IndexedDatasetWriter
from megatron.optimus.platform.ranks import Ranks
from tests.helpers import run_distributed


def write(folder: Path, number: int) -> list[str]:
    for i in range(number):
        with IndexedDatasetWriter(folder / f"f{i}", np.uint16 if i % 3 else np.int64) as writer:
            writer.add_document(np.arange(10 + i))
    return [str(folder / f"f{i}") for i in range(number)]


def opened(rank: int, world: int, prefixes: list[str]) -> tuple[list[int], list[int], list[str]]:
    """(tokens, codes, files that this rank has looked at)"""
    looked: list[str] = []
    summarize = module.summarize_pair
    module.summarize_pair = lambda prefix: (looked.append(prefix), summarize(prefix))[1]
    files = open_on_all_ranks(prefixes, Ranks(None, "cpu"))
    assert files.read(4, 2, 3).tolist() == [2, 3, 4]
    return files.tokens.tolist(), files.codes.tolist(), looked


def test_each_rank_looks_at_its_share_and_all_know_all(tmp_path: Path) -> None:
    prefixes = write(tmp_path, 8)
    alone = TokenFiles(prefixes)
    results = run_distributed(opened, 3, prefixes)
    for rank, (tokens, codes, looked) in enumerate(results):
        assert tokens == alone.tokens.tolist() == list(range(10, 18)) and codes == alone.codes.tolist()
        assert looked == prefixes[rank::3]


def fails(rank: int, world: int, prefixes: list[str], folder: str) -> str:
    if not prefixes:  # another list on rank 1
        prefixes = [f"{folder}/f{i}" for i in range(3 + (rank == 1))]
    with pytest.raises(DataError) as error:
        open_on_all_ranks(prefixes, Ranks(None, "cpu"))
    return str(error.value)


def test_a_bad_file_or_another_list_is_an_error_everywhere(tmp_path: Path) -> None:
    prefixes = write(tmp_path, 8)
    with open(f"{prefixes[5]}.bin", "ab") as stream:
        stream.write(b"more")
    messages = run_distributed(fails, 3, prefixes, str(tmp_path))
    assert "f5.bin: too long" in messages[2] and all("failed on rank 2" in message for message in messages)
    messages = run_distributed(fails, 3, [], str(tmp_path))
    assert "finds other files (4) than rank 0" in messages[1] and all("on rank 1" in message for message in messages)
