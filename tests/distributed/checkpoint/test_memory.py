"""Memory checkpoints on gloo ranks: generations, hashes, the copy on another node, and the interval they choose."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ext.optimizers import states
from megatron.optimus.checkpoint import memory, store
from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.manifest import Manifest
from megatron.optimus.checkpoint.memory import MemoryCheckpoints
from megatron.optimus.checkpoint.saver import Saver
from megatron.optimus.checkpoint.slices import TensorSlice
from megatron.optimus.platform.intervals import AUTO
from megatron.optimus.platform.memory_slots import DATA_START, MemorySlot
from megatron.optimus.platform.ranks import Ranks
from tests.helpers import run_distributed


def slices_of(rank: int, world: int, value: float) -> list[TensorSlice]:
    """A state of two tensors, sharded over ranks in parts of different sizes, whose values tell rank and step."""
    sizes = [1000 + 10 * r for r in range(world)]
    start = sum(sizes[:rank])
    data = torch.arange(sizes[rank], dtype=torch.float32) + 10_000 * rank + value
    half = torch.full((7,), rank + value, dtype=torch.bfloat16)
    return [
        TensorSlice("w", "master", (sum(sizes),), start, start + sizes[rank], data),
        TensorSlice("v", "exp_avg", (7 * world,), 7 * rank, 7 * rank + 7, half),
    ]


def header(step: int) -> Manifest:
    return Manifest("full", step, 8 * step, {}, {"step": step}, {}, {})


def folder_of(root: Path, rank: int, ranks_per_node: int) -> Path:
    return root / f"node-{rank // ranks_per_node}"


def opened(root: Path, rank: int, world: int, per_node: int = 4, interval: int = 1) -> MemoryCheckpoints:
    folder = folder_of(root, rank, per_node)
    return MemoryCheckpoints(folder, Ranks(None, "cpu"), interval, node=folder.name)


def save(rank: int, world: int, root: Path, per_node: int, steps: int, unfinished: tuple[int, ...] = ()) -> None:
    """Saves steps 1, 2, ...; ranks in ``unfinished`` die while they write the last one."""
    own = opened(root, rank, world, per_node)
    own.prepare(slices_of(rank, world, 0))
    for step in range(1, steps + 1):
        state = slices_of(rank, world, step)
        if step == steps and rank in unfinished:
            own._finish = lambda *words: None  # type: ignore[method-assign]
        own.start(state, header(step))
        for piece in state:
            piece.tensor.fill_(-1)  # the update that follows
    own._join()
    Ranks(None, "cpu").first_failure(None)


def restore(rank: int, world: int, root: Path, per_node: int, at_least: int = 0) -> tuple[int | None, bool]:
    """The step that was restored, and whether all values are those of that step and rank."""
    state = slices_of(rank, world, -7)
    manifest = opened(root, rank, world, per_node).restore(state, at_least)
    if manifest is None:
        return None, True
    assert manifest.metadata == {"step": manifest.step} and manifest.consumed_samples == 8 * manifest.step
    expected = slices_of(rank, world, manifest.step)
    return manifest.step, all(torch.equal(a.tensor, b.tensor) for a, b in zip(state, expected, strict=True))


def damage(root: Path, per_node: int, rank: int, step: int, name: str = "rank") -> None:
    """Flips one bit of the data of a generation."""
    for path in folder_of(root, rank, per_node).glob(f"{name}-*"):
        found = MemorySlot(path).read()
        if found is not None and found.step == step and (name == "copy" or path.name.startswith(f"rank-{rank}.")):
            with path.open("r+b") as file:
                file.seek(DATA_START + 401)
                byte = file.read(1)[0]
                file.seek(DATA_START + 401)
                file.write(bytes([byte ^ 4]))
            return
    raise AssertionError("no such generation")


def one_node(rank: int, world: int, root: Path) -> dict[str, Any]:
    """Several crashes after one another, on the same ranks: each ``opened`` is what a new process does."""
    ranks, found = Ranks(None, "cpu"), {}
    save(rank, world, root, 4, 3)
    if rank == 0:  # left by another number of ranks
        MemorySlot(root / "node-0/rank-7.1").commit(9, 0, {"start": 0, "rank": 7, "ranks": 8, "layout": ""})
    ranks.first_failure(None)
    found["newest"] = restore(rank, world, root, 4)
    ranks.first_failure(None)
    assert not (root / "node-0/rank-7.1").exists()
    found["disk is newer"] = restore(rank, world, root, 4, at_least=4)
    save(rank, world, root, 4, 5, unfinished=(1,))
    found["killed while it writes"] = restore(rank, world, root, 4)
    save(rank, world, root, 4, 5)
    if rank == 0:
        damage(root, 4, 1, 5)
    ranks.first_failure(None)
    found["newest is damaged"] = restore(rank, world, root, 4)
    save(rank, world, root, 4, 5)
    if rank == 0:
        damage(root, 4, 1, 5)
        damage(root, 4, 0, 4)
    ranks.first_failure(None)
    found["both are damaged"] = restore(rank, world, root, 4)
    last = opened(root, rank, world)
    last.prepare(slices_of(rank, world, 0))
    finish = last._finish
    if rank == 1:  # is slow
        last._finish = lambda *words: (time.sleep(0.3), finish(*words))[1]  # type: ignore[method-assign]
    for step in (1, 2, 3):
        last.start(slices_of(rank, world, step), header(step))
        # A generation is overwritten when that after it is complete on all ranks.
        held = [MemorySlot(root / f"node-0/rank-1.{n}").read() for n in (0, 1)]
        assert step - 1 in [0, *(one.step for one in held if one)], (
            "a generation is overwritten while that after it is not complete"
        )
    last.forget()
    found["forgotten"] = restore(rank, world, root, 4)
    last.close()
    return found


def test_the_newest_generation_that_all_ranks_have_is_restored(tmp_path: Path) -> None:
    for found in run_distributed(one_node, 2, tmp_path):
        assert found == {
            "newest": (3, True),
            "disk is newer": (None, True),
            "killed while it writes": (4, True),
            "newest is damaged": (4, True),
            "both are damaged": (None, True),
            "forgotten": (None, True),
        }
    assert not (tmp_path / "node-0").exists()


def lose_node(root: Path, node: int) -> None:
    for path in (root / f"node-{node}").iterdir():
        path.unlink()


def failing_disk(*words: Any) -> None:
    raise OSError(28, "No space left on device")


def two_nodes(rank: int, world: int, root: Path) -> dict[str, Any]:
    ranks, found = Ranks(None, "cpu"), {}
    save(rank, world, root, 2, 3)
    if rank == 0:
        lose_node(root, 1)
    ranks.first_failure(None)
    found["node lost"] = restore(rank, world, root, 2)
    found["and again, from its own memory"] = restore(rank, world, root, 2)
    save(rank, world, root, 2, 3)
    if rank == 0:
        damage(root, 2, 3, 3)
    ranks.first_failure(None)
    found["own is damaged, the buddy's is good"] = restore(rank, world, root, 2)
    if rank == 0:
        lose_node(root, 0)
    ranks.first_failure(None)
    found["then the buddy's is lost"] = restore(rank, world, root, 2)
    save(rank, world, root, 2, 2)
    if rank == 0:
        lose_node(root, 1)
        damage(root, 2, 0, 2, name="copy")
    ranks.first_failure(None)
    found["the buddy's is damaged"] = restore(rank, world, root, 2)
    own = opened(root, rank, world, 2)
    own.prepare(slices_of(rank, world, 0))
    own.start(slices_of(rank, world, 2), header(2))
    own._join()
    if rank == 3:  # cannot complete its own: its buddies must not wait for ever
        own._complete = failing_disk  # type: ignore[method-assign]
    own.start(slices_of(rank, world, 3), header(3))
    own.start(slices_of(rank, world, 4), header(4))
    assert own._task is None and not own.is_due(4)  # no more of them
    found["a rank cannot write"] = restore(rank, world, root, 2)
    if rank == 0:
        lose_node(root, 0)
        lose_node(root, 1)
    ranks.first_failure(None)
    found["both nodes lost"] = restore(rank, world, root, 2)
    save(rank, world, root, 2, 3)
    if rank == 0:
        lose_node(root, 1)
    ranks.first_failure(None)
    own = opened(root, rank, world, 2)
    if rank == 2:
        own._own[0].data = failing_disk  # type: ignore[method-assign]
    state = slices_of(rank, world, -7)
    untouched = own.restore(state, 0) is None and all(
        torch.equal(a.tensor, b.tensor) for a, b in zip(state, slices_of(rank, world, -7), strict=True)
    )
    found["a new node has no room"] = (None, untouched)
    return found


def test_a_lost_node_gets_its_state_from_the_buddy(tmp_path: Path) -> None:
    for found in run_distributed(two_nodes, 4, tmp_path):
        assert found == {
            "node lost": (3, True),
            "and again, from its own memory": (3, True),
            "own is damaged, the buddy's is good": (3, True),
            "then the buddy's is lost": (3, True),
            "the buddy's is damaged": (1, True),
            "a rank cannot write": (2, True),
            "both nodes lost": (None, True),
            "a new node has no room": (None, True),
        }


def other_layout(rank: int, world: int, root: Path) -> Any:
    save(rank, world, root, 4, 2)
    own = opened(root, rank, world)
    assert own.restore(slices_of(rank, world, 0)[:1], 0) is None  # a state of one tensor
    return True


def work(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def slowly(take: Callable[..., Any], slices: Any) -> Any:
    work(0.02)
    return take(slices)


def costly(rank: int, world: int, root: Path) -> list[int]:
    """Steps of 10 ms, and copies of about 20 ms on rank 1: once in 400 steps is 0.5%. The wait of rank 0 costs nothing.

    Then making what is copied takes 40 ms on rank 0.
    """
    chosen = []
    for name, slow in (("copy", 1), ("making", 0)):
        (root / name).mkdir(exist_ok=True)
        own = opened(root / name, rank, world, interval=AUTO)
        state = slices_of(rank, world, 0)
        own.prepare(state)
        for slot in own._own if name == "copy" and rank == slow else []:
            slot.snapshot.take = partial(slowly, slot.snapshot.take)  # type: ignore[method-assign]
        done = []
        for step in range(1, 12):
            work(0.01)
            if rank != slow:
                time.sleep(0.05)
            if own.is_due(step):
                began = own.clock()
                work(0.04 if name == "making" and rank == slow else 0.0)
                own.start(state, header(step), began)
                done.append(step)
        chosen += [done, own._interval._next]
    return chosen


def both(rank: int, world: int, root: Path) -> Any:
    return other_layout(rank, world, root / "layout"), costly(rank, world, root / "auto")


def test_another_layout_is_not_restored_and_auto_takes_a_two_hundredth_of_the_time(tmp_path: Path) -> None:
    for name in ("layout", "auto"):
        (tmp_path / name).mkdir()
    (_, first), (_, second) = run_distributed(both, 2, tmp_path)
    assert first == second  # the rank whose copies cost most decides
    copies, next_copy, makings, next_making = first
    assert copies == makings == [3, 6, 9]
    assert 9 + 100 < next_copy < 9 + 2 * 400 and 9 + 400 < next_making < 9 + 2 * 800


def too_much(rank: int, world: int, root: Path) -> str:
    memory.host_memory = lambda: (1000, 0)  # type: ignore[assignment]
    with pytest.raises(CheckpointError) as caught:
        opened(root, rank, world).prepare(slices_of(rank, world, 0))
    return str(caught.value)


def test_more_than_the_node_has_is_refused_in_one_line(tmp_path: Path) -> None:
    for rank, message in enumerate(run_distributed(too_much, 2, tmp_path)):
        assert "the 2 ranks of this node need" in message and "memory_checkpoint_interval=0" in message
        assert f"on rank {rank}" in message and "\n" not in message
    assert os.listdir(tmp_path / "node-0")


NUMEL = 700  # of each rank's share of a state in 8 bits


def mixed_slices(rank: int, world: int, value: float) -> list[TensorSlice]:
    """``slices_of``, a state in 8 bits whose shares begin inside of a block, and a buffer that all ranks hold alike."""
    numbers = torch.linspace(0, 1 + value, 1200) + rank
    codes = dict(zip(("q", "q.scale"), states.encode(numbers, signed=False), strict=True))
    part = states.stored_part(codes, "q", slice(300 + rank, 300 + rank + NUMEL))
    assert isinstance(part, states.StoredState) and part.first > 0
    where = ("w", "exp_avg_sq", (NUMEL * world,), NUMEL * rank, NUMEL * (rank + 1))
    eight_bits = TensorSlice(*where, part.values, None, torch.float32, part)
    buffer = TensorSlice("b", "buffer", (5,), 0, 5, torch.full((5,), value))
    return [*slices_of(rank, world, value), eight_bits, buffer]


def save_mixed(rank: int, world: int, root: Path) -> None:
    own = opened(root, rank, world, 2)
    first = mixed_slices(rank, world, 0)
    own.prepare(first, first if rank == 0 else first[:-1])
    for step in (1, 2, 3):
        own.start(mixed_slices(rank, world, step), header(step))
    own._join()
    Ranks(None, "cpu").first_failure(None)


def failing(slices: list[TensorSlice], found: Manifest) -> None:
    raise CheckpointError("the disk is full")


def on_fewer_ranks(rank: int, world: int, root: Path) -> dict[str, int | None]:
    """The step that two ranks find on disk after they have looked at what four ranks left on the node that is left."""
    ranks, written = Ranks(None, "cpu"), {}
    for case in sorted(root.glob("case *")):
        saver = Saver(case / "checkpoints", asynchronous=False)
        own = MemoryCheckpoints(case / "node-0", ranks, 1, node="node-0")
        name, after = case.name.removeprefix("case "), 3 if "disk" in case.name else 0
        out = failing if "full" in case.name else partial(saver.start, retain=1)
        assert own.restore(mixed_slices(rank, world, -7), after, out) is None  # type: ignore[arg-type]
        found = store.load_newest(case / "checkpoints", store.everything)
        written[name] = None if found is None else found[1].step
        ranks.first_failure(None)
        assert {path.name.partition(".")[0] for path in (case / "node-0").iterdir()} == {"rank-0", "rank-1", "used"}
        assert all(slot.read() is None for slot in own._own)
    return written


def test_fewer_ranks_write_what_others_left_to_disk(tmp_path: Path) -> None:
    """Four ranks on two nodes, of which one is lost; then two ranks on the other one."""
    for start in ("a", "b"):
        (tmp_path / start).mkdir()
        run_distributed(save_mixed, 4, tmp_path / start)
    names = ["whole", "newest damaged", "missing", "of two starts", "disk is newer", "full"]
    folders = {name: shutil.copytree(tmp_path / "a/node-0", tmp_path / f"case {name}/node-0") for name in names}
    damage(tmp_path / "case newest damaged", 2, 1, 3)
    for path in folders["missing"].glob("copy-3.*"):
        path.unlink()
    for path in (tmp_path / "b/node-0").glob("copy-3.*"):
        shutil.copy(path, folders["of two starts"])
    expected = {"whole": 3, "newest damaged": 2}
    for found in run_distributed(on_fewer_ranks, 2, tmp_path):
        assert found == dict.fromkeys(names) | expected
    for name, step in expected.items():
        path = tmp_path / f"case {name}/checkpoints/step-{step:08}"
        tensors = store.everything(store.load_manifest(path))
        store.load(path, tensors)
        of = {(one.name, one.kind): one.tensor for one in tensors}
        parts = [mixed_slices(rank, 4, step) for rank in range(4)]
        for number in (0, 1):
            whole = torch.cat([part[number].tensor for part in parts])
            assert torch.equal(of.pop((parts[0][number].name, parts[0][number].kind)), whole)
        decoded = torch.cat([part[2].encoded.read() for part in parts if part[2].encoded is not None])
        assert torch.equal(of.pop(("w", "exp_avg_sq")), decoded)
        assert torch.equal(of.pop(("b", "buffer")), parts[0][3].tensor) and not of
        assert store.load_manifest(path).consumed_samples == 8 * step
