"""Who writes what where: the files of a node, the places in them, and what ranks must agree on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.optimus.checkpoint import CheckpointError, TensorSlice
from megatron.optimus.checkpoint.save_plan import PIECE_VALUE, make_plan, pieces_of
from megatron.optimus.checkpoint.shards import ShardFile
from megatron.optimus.platform.ranks import Ranks
from tests.helpers import run_distributed


def rows(rank: int, world: int, dtype: torch.dtype = torch.float32) -> list[TensorSlice]:
    """Row ``rank`` of a matrix, with its weight in bf16, and an empty slice."""
    values = torch.full((5,), float(rank), dtype=dtype)
    return [
        TensorSlice("w", "weight", (world, 5), 5 * rank, 5 * rank + 5, values.bfloat16()),
        TensorSlice("w", "master", (world, 5), 0, 5, values, ((rank, rank + 1), (0, 5))),
        TensorSlice("w", "exp_avg", (world, 5), 0, 0, values[:0]),
    ]


def test_pieces_have_unique_keys_and_empty_slices_none() -> None:
    pieces = pieces_of(rows(1, 2))
    assert [piece.key for piece in pieces] == ["w/weight/5", "w/master/0/1:2,0:5"]
    assert [(piece.dtype, piece.numel, piece.num_bytes) for piece in pieces] == [("BF16", 5, 10), ("F32", 5, 20)]


def test_a_plan_of_one_rank_is_a_valid_file(tmp_path: Path) -> None:
    plan = make_plan(pieces_of(rows(0, 1)), Ranks.alone(), "node", "saving")
    file = plan.file
    assert (file.name, file.hashes_name) == ("node-00000-0.safetensors", "node-00000-0.hashes")
    (tmp_path / file.name).write_bytes(file.header + bytes(file.num_bytes - len(file.header)))
    opened = ShardFile(tmp_path / file.name, file.num_bytes, 1 << 16)
    assert {key: entry.offset for key, entry in opened.tensors.items()} == {p.key: at for p, at in plan.own()}
    opened.close()
    assert plan.own()[1][1] < plan.own()[0][1], "wide dtypes come first"
    with pytest.raises(CheckpointError, match="all ranks must see one file system"):
        plan.entries(tmp_path)
    record = bytes(range(16)) + PIECE_VALUE.pack(2.5)
    (tmp_path / file.hashes_name).write_bytes(record * 2)
    sizes, tensors, largest = plan.entries(tmp_path)
    assert largest == {("w", "weight"): [2.5], ("w", "master"): [2.5]}
    assert sizes == {file.name: file.num_bytes} and set(tensors) == {("w", "weight"), ("w", "master")}
    assert tensors["w", "master"].pieces[0].xxh3_128 == bytes(range(16)).hex()
    plan.remove_hashes(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def _plan(rank: int, world: int, odd_dtype: bool) -> tuple[str, int, bool, bool, list[str]] | str:
    dtype = torch.float64 if odd_dtype and rank == 2 else torch.float32
    try:
        plan = make_plan(pieces_of(rows(rank, world, dtype)), Ranks(None, "cpu"), f"node {rank // 3}", "saving", 2)
    except CheckpointError as error:
        return str(error)
    return plan.file.name, plan.first, plan.writes_header, plan.cleans_local_disk, [file.name for file in plan.files]


def test_neighbouring_ranks_of_a_node_share_a_file() -> None:
    names = [f"node-0000{where}.safetensors" for where in ("0-0", "0-1", "1-0")]
    assert run_distributed(_plan, 4, False) == [
        (names[0], 0, True, True, names),
        (names[0], 2, False, False, []),
        (names[1], 0, True, False, []),
        (names[2], 0, True, True, []),
    ]


def test_ranks_that_disagree_about_a_dtype_are_refused() -> None:
    for message in run_distributed(_plan, 4, True):
        assert isinstance(message, str) and message.startswith("saving failed on rank 0")
    assert "w (master) is F64 (4, 5) on rank 2, F32 (4, 5) on a rank before" in run_distributed(_plan, 4, True)[0]
