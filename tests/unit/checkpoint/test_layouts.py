"""Any layout to any other: data, expert, tensor and pipeline parallelism, bit for bit there and back.

All ranks of a layout are played by one process: what each would save goes into one checkpoint, what each would ask for
is loaded for itself. Dense weights are cut by columns, rows, and rows of each half of a merged one; norms are not cut.
"""

import itertools
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron.optimus.checkpoint import CheckpointError, TensorSlice, load, load_manifest, save
from megatron.optimus.checkpoint.slices import Region, box_numel, global_ranges, regions_in_boxes
from tests.unit.checkpoint.helpers import CONFIG

D, F, E, LAYERS = 6, 8, 8, 4
# name of one layer's weight -> (global shape, dim cut by tensor parallelism or None, stacked parts)
DENSE = {
    "norm": ((D,), None, 1),
    "qkv": ((3 * 8, D), 0, 3),
    "proj": ((D, 8), 1, 1),
    "gate_up": ((2 * F, D), 0, 2),
    "down": ((D, F), 1, 1),
}
EXPERTS = {"gate_up": ((E, 2 * F, D), 1, 2), "down": ((E, D, F), 2, 1)}
KINDS = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Layout:
    """``etp``: ranks that cut each expert; ``moe`` False leaves the experts out."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    interleaved: bool = False
    moe: bool = True

    def __str__(self) -> str:
        words = [f"{name}{getattr(self, name)}" for name in ("dp", "tp", "pp", "ep", "etp") if getattr(self, name) > 1]
        return "-".join([*words, *(["interleaved"] if self.interleaved else [])]) or "one"


MOE = [
    Layout(),
    Layout(dp=3),
    Layout(dp=8, ep=8),
    Layout(dp=4, ep=2, interleaved=True),
    Layout(dp=2, tp=2, pp=2, ep=4),
    Layout(tp=4, ep=4, interleaved=True),
    Layout(dp=2, tp=2, ep=2, etp=2),
    Layout(dp=5, pp=4),
]
DENSE_ONLY = [
    Layout(moe=False),
    Layout(dp=7, moe=False),
    Layout(tp=2, moe=False),
    Layout(dp=3, tp=4, pp=2, moe=False),
    Layout(tp=8, pp=4, moe=False),
]
PAIRS = [*itertools.combinations(MOE, 2), *itertools.combinations(DENSE_ONLY, 2)]  # each is tested in both directions
assert 2 * len(PAIRS) >= 50


def whole_state(layout, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = {f"layers.{layer}.{name}": spec for layer in range(LAYERS) for name, spec in DENSE.items()}
    if layout.moe:
        weights |= {f"layers.{layer}.experts.{name}": spec for layer in range(LAYERS) for name, spec in EXPERTS.items()}
    return {(n, kind): torch.randn(spec[0], generator=generator) for n, spec in weights.items() for kind in KINDS}


def share(numel, index, count):
    bounds = [numel * i // count for i in range(count + 1)]
    return bounds[index], bounds[index + 1]


def local_boxes(global_shape, dim, rank, size, *, parts=1, expert_ids=None):
    """The boxes that, flattened one after the other, are tensor-parallel rank ``rank``'s own flattened parameter.

    Dim ``dim`` of the global tensor is cut into ``size`` equal shares; with ``parts`` > 1 it is that many equal
    matrices stacked (gate and up, or query, key and value), each cut by itself. ``expert_ids``: as in
    ``global_ranges``, for experts that are cut as well.
    """
    length = global_shape[dim]
    assert length % (parts * size) == 0 and 0 <= rank < size
    share, part_length = length // parts // size, length // parts
    starts = [part * part_length + rank * share for part in range(parts)]
    rows = [(0, global_shape[0])]
    if dim > 0 and expert_ids is not None:
        rows = [(expert, expert + 1) for expert in expert_ids]
    elif dim > 0 and parts > 1:
        rows = [(row, row + 1) for row in range(global_shape[0])]
        assert dim == 1
    boxes = []
    for row in rows if dim > 0 else [(0, 0)]:
        for start in starts:
            box = [(0, extent) for extent in global_shape]
            if dim > 0:
                box[0] = row
            box[dim] = (start, start + share)
            boxes.append(tuple(box))
    return boxes


def all_regions(layout, name, shape):
    """(region, is_first): for every rank of the layout what it holds, and whether it is the replica that saves it."""
    _, _, short = name.split(".", 2)
    stage_size = layout.dp * layout.tp
    if short.startswith("experts"):
        _, dim, parts = EXPERTS[short.split(".")[1]]
        edp = max(1, stage_size // (layout.ep * layout.etp))
        for ep, etp, replica in itertools.product(range(layout.ep), range(layout.etp), range(edp)):
            per_rank = E // layout.ep
            first = ep * per_rank
            ids = list(range(ep, E, layout.ep) if layout.interleaved else range(first, first + per_rank))
            if layout.etp == 1:
                start, stop = share(len(ids) * shape[1] * shape[2], replica, edp)
                for low, high, _ in global_ranges(shape, ids, start, stop):
                    yield Region(shape, low, high), True
            else:
                boxes = local_boxes(shape, dim, etp, layout.etp, parts=parts, expert_ids=ids)
                start, stop = share(sum(map(box_numel, boxes)), replica, edp)
                yield from ((region, True) for region, _ in regions_in_boxes(shape, boxes, start, stop))
        return
    _, dim, parts = DENSE[short]
    for tp, dp in itertools.product(range(layout.tp), range(layout.dp)):
        if dim is None:
            start, stop = share(shape[0], dp, layout.dp)
            yield Region(shape, start, stop), tp == 0
        else:
            boxes = local_boxes(shape, dim, tp, layout.tp, parts=parts)
            start, stop = share(sum(map(box_numel, boxes)), dp, layout.dp)
            yield from ((region, True) for region, _ in regions_in_boxes(shape, boxes, start, stop))


def values_at(whole, region):
    """By the plainest indexing there is."""
    box = region.box or tuple((0, size) for size in region.shape)
    return whole[tuple(slice(*interval) for interval in box)].reshape(-1)[region.start : region.stop]


def slices_of(layout, state, *, saving):
    return [
        TensorSlice(
            name,
            kind,
            region.shape,
            region.start,
            region.stop,
            values_at(whole, region).clone() if saving else torch.full((region.stop - region.start,), float("nan")),
            region.box,
        )
        for (name, kind), whole in state.items()
        for region, saves in all_regions(layout, name, tuple(whole.shape))
        if saves or not saving
    ]


def save_slices(root, slices):
    return save(root, 1, slices, kind="full", consumed_samples=0, config=CONFIG, metadata={})


def as_written(loaded, layout, state):
    """Of the slices that all ranks loaded, those that are saved: the first replica's."""
    keep = [saves for (name, _), whole in state.items() for _, saves in all_regions(layout, name, tuple(whole.shape))]
    return [piece for piece, saves in zip(loaded, keep, strict=True) if saves]


_SAVED: dict[Layout, Path] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    _SAVED.clear()
    return tmp_path_factory.mktemp("layouts")


@pytest.mark.parametrize("first, second", PAIRS, ids=str)
def test_there_and_back(first, second, folder, tmp_path):
    state = whole_state(first)
    if first not in _SAVED:
        _SAVED[first] = save_slices(folder / str(len(_SAVED)), slices_of(first, state, saving=True))
    there = slices_of(second, state, saving=False)
    load(_SAVED[first], there)
    for piece in there:
        assert torch.equal(piece.tensor, values_at(state[piece.name, piece.kind], piece.region)), piece.name
    path = save_slices(tmp_path, as_written(there, second, state))
    back = slices_of(first, state, saving=False)
    load(path, back)
    for piece in back:
        assert torch.equal(piece.tensor, values_at(state[piece.name, piece.kind], piece.region)), piece.name


def test_a_wrong_box_is_seen(tmp_path):
    """The tests above would fail if a column cut were taken for a row cut."""
    whole = torch.arange(24.0).view(4, 6)
    halves = [
        TensorSlice("w", "master", (4, 6), 0, 12, whole[:, i : i + 3].reshape(-1), ((0, 4), (i, i + 3))) for i in (0, 3)
    ]
    path = save_slices(tmp_path, halves)
    assert sorted(piece.region.box for piece in load_manifest(path).tensors["w", "master"].pieces) == [
        ((0, 4), (0, 3)),
        ((0, 4), (3, 6)),
    ]
    row = TensorSlice("w", "master", (4, 6), 6, 12, torch.zeros(6))
    load(path, [row])
    assert torch.equal(row.tensor, whole[1])
    for wrong in (((0, 4), (0, 7)), ((0, 4),), ((2, 2), (0, 6))):
        with pytest.raises(CheckpointError, match="not inside shape"):
            TensorSlice("w", "master", (4, 6), 0, 1, torch.zeros(1), wrong)
    with pytest.raises(CheckpointError, match="no range of its 12 elements"):
        TensorSlice("w", "master", (4, 6), 6, 18, torch.zeros(12), ((0, 4), (0, 3)))


_PEAK = """
import sys, json, torch
from pathlib import Path
from megatron.optimus.checkpoint import TensorSlice, load, load_manifest
path, cut = Path(sys.argv[1]), sys.argv[2]
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int([line for line in lines if line.startswith("VmHWM")][0].split()[1]) * 1024
requests = []
for (name, kind), entry in load_manifest(path).tensors.items():
    rows, columns = entry.shape
    half = columns // 2
    boxes = [None] if cut == "whole" else [((0, rows), (0, half)), ((0, rows), (half, columns))]
    for box in boxes:
        numel = rows * columns if box is None else rows * half
        requests.append(TensorSlice(name, kind, entry.shape, 0, numel, torch.ones(numel), box))
load(path, requests[:0])
Path("/proc/self/clear_refs").write_text("5")
before = peak()
load(path, requests)
print(json.dumps(peak() - before))
assert all((r.tensor == 3).all() for r in requests)
"""


@pytest.mark.parametrize("cut", ["whole", "columns"])
def test_loading_needs_little_memory_beside_what_it_fills(tmp_path, cut):
    """One shard of 256 MiB, loaded at the layout that wrote it and at another."""
    whole = torch.full((4096, 8192), 3.0)
    slices = [TensorSlice(f"w{i}", "master", (4096, 8192), 0, whole.numel(), whole.view(-1)) for i in range(2)]
    path = save_slices(tmp_path, slices)
    shard = (path / "node-00000-0.safetensors").stat().st_size
    command = [sys.executable, "-c", _PEAK, str(path), cut]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    extra = json.loads(done.stdout)
    assert extra < shard / 2, f"{extra >> 20} MiB more for a shard of {shard >> 20} MiB"
