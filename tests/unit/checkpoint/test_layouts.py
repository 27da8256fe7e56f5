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
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.optimus.checkpoint import CheckpointError, TensorSlice, load, load_manifest, save
from megatron.optimus.checkpoint.coverage import check_coverage
from megatron.optimus.checkpoint.slices import (
    Place,
    box_numel,
    common_parts,
    global_boxes,
    global_ranges,
    local_boxes,
    place_in_boxes,
    range_boxes,
)
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
PAIRS = [*itertools.permutations(MOE, 2), *itertools.permutations(DENSE_ONLY, 2)]
assert len(PAIRS) >= 50


def whole_state(layout, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = {f"layers.{layer}.{name}": spec for layer in range(LAYERS) for name, spec in DENSE.items()}
    if layout.moe:
        weights |= {f"layers.{layer}.experts.{name}": spec for layer in range(LAYERS) for name, spec in EXPERTS.items()}
    return {(n, kind): torch.randn(spec[0], generator=generator) for n, spec in weights.items() for kind in KINDS}


def share(numel, index, count):
    bounds = [numel * i // count for i in range(count + 1)]
    return bounds[index], bounds[index + 1]


def all_places(layout, name, shape):
    """(place, is_first): for every rank of the layout what it holds, and whether it is the replica that saves it."""
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
                    yield Place(shape, low, high), True
            else:
                boxes = local_boxes(shape, dim, etp, layout.etp, parts=parts, expert_ids=ids)
                start, stop = share(sum(map(box_numel, boxes)), replica, edp)
                yield from ((place, True) for place, _ in place_in_boxes(shape, boxes, start, stop))
        return
    _, dim, parts = DENSE[short]
    for tp, dp in itertools.product(range(layout.tp), range(layout.dp)):
        if dim is None:
            start, stop = share(shape[0], dp, layout.dp)
            yield Place(shape, start, stop), tp == 0
        else:
            boxes = local_boxes(shape, dim, tp, layout.tp, parts=parts)
            start, stop = share(sum(map(box_numel, boxes)), dp, layout.dp)
            yield from ((place, True) for place, _ in place_in_boxes(shape, boxes, start, stop))


def values_at(whole, place):
    """By the plainest indexing there is."""
    box = place.box or tuple((0, size) for size in place.shape)
    return whole[tuple(slice(*interval) for interval in box)].reshape(-1)[place.start : place.stop]


def slices_of(layout, state, *, saving):
    return [
        TensorSlice(
            name,
            kind,
            place.shape,
            place.start,
            place.stop,
            values_at(whole, place).clone() if saving else torch.full((place.stop - place.start,), float("nan")),
            place.box,
        )
        for (name, kind), whole in state.items()
        for place, saves in all_places(layout, name, tuple(whole.shape))
        if saves or not saving
    ]


def save_slices(root, slices):
    return save(root, 1, slices, kind="full", consumed_samples=0, config=CONFIG, metadata={})


def as_written(loaded, layout, state):
    """Of the slices that all ranks loaded, those that are saved: the first replica's."""
    keep = [saves for (name, _), whole in state.items() for _, saves in all_places(layout, name, tuple(whole.shape))]
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
        assert torch.equal(piece.tensor, values_at(state[piece.name, piece.kind], piece.place)), piece.name
    path = save_slices(tmp_path, as_written(there, second, state))
    back = slices_of(first, state, saving=False)
    load(path, back)
    for piece in back:
        assert torch.equal(piece.tensor, values_at(state[piece.name, piece.kind], piece.place)), piece.name


def test_a_wrong_box_is_seen(tmp_path):
    """The tests above would fail if a column cut were taken for a row cut."""
    whole = torch.arange(24.0).view(4, 6)
    halves = [
        TensorSlice("w", "master", (4, 6), 0, 12, whole[:, i : i + 3].reshape(-1), ((0, 4), (i, i + 3))) for i in (0, 3)
    ]
    path = save_slices(tmp_path, halves)
    assert sorted(piece.box for piece in load_manifest(path).tensors["w", "master"].pieces) == [
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


@st.composite
def places(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    box = tuple(sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape)
    box = tuple((low, high) for low, high in box)
    if draw(st.booleans()) or any(low == high for low, high in box):
        box = None
    numel = torch.zeros(shape).numel() if box is None else box_numel(box)
    start = draw(st.integers(0, numel))
    return Place(shape, start, draw(st.integers(start, numel)), box)


@given(places(), st.data())
def test_common_parts_are_the_common_elements(first, data):
    second = data.draw(places().filter(lambda place: place.shape == first.shape) if first.shape == () else _like(first))
    whole = torch.arange(torch.zeros(first.shape).numel()).view(first.shape)
    a, b = values_at(whole, first), values_at(whole, second)
    found = torch.full_like(b, -1)
    for source, target in common_parts(first, second):
        target.view(found).copy_(source.view(a))
    expected = torch.where(torch.isin(b, a), b, -1)
    assert torch.equal(found, expected)
    parts = [whole[tuple(slice(*i) for i in box)].reshape(-1) for box in global_boxes(first)]
    assert torch.equal(torch.cat(parts) if parts else a[:0], a)
    assert len(range_boxes(first.shape, 0, whole.numel())) == 1


@st.composite
def _like(draw, first):
    box = tuple(tuple(sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))) for n in first.shape)
    if draw(st.booleans()) or any(low == high for low, high in box):
        box = None
    numel = torch.zeros(first.shape).numel() if box is None else box_numel(box)
    start = draw(st.integers(0, numel))
    return Place(first.shape, start, draw(st.integers(start, numel)), box)


@settings(max_examples=200)
@given(st.integers(0, 1000), st.integers(1, 12), st.sampled_from(["nothing", "drop", "double", "shift"]))
def test_coverage_is_checked_exactly(seed, cuts, damage):
    """A tensor cut at random into boxes is accepted; one box less, more or moved is not."""
    generator = torch.Generator().manual_seed(seed)

    def draw(limit):
        return int(torch.randint(limit, (), generator=generator))

    shape = (4, 5, 3)
    boxes = [tuple((0, size) for size in shape)]
    for _ in range(cuts):
        box = boxes.pop(draw(len(boxes)))
        dim = draw(3)
        low, high = box[dim]
        middle = low + draw(high - low + 1)
        boxes += [(*box[:dim], part, *box[dim + 1 :]) for part in ((low, middle), (middle, high)) if part[0] < part[1]]
    wrong = boxes[draw(len(boxes))]
    if damage == "drop":
        boxes.remove(wrong)
    elif damage == "double":
        boxes.append(wrong)
    elif damage == "shift":
        moved = tuple((max(0, a - 1), b) for a, b in wrong)
        if moved == wrong:
            return
        boxes[boxes.index(wrong)] = moved
    pieces = [Place(shape, 0, box_numel(box), box) for box in boxes]
    if damage == "nothing":
        check_coverage("w", shape, pieces)
    else:
        with pytest.raises(CheckpointError, match=r"covered twice|missing"):
            check_coverage("w", shape, pieces)


def test_a_hostile_placement_does_not_keep_the_reader_busy():
    """Boxes that no straight cut separates, and thousands that lie on each other."""
    wheel = [((0, 2), (0, 1)), ((2, 3), (0, 2)), ((1, 3), (2, 3)), ((0, 1), (1, 3)), ((1, 2), (1, 2))]
    check_coverage("w", (3, 3), [Place((3, 3), 0, box_numel(box), box) for box in wheel])
    many = [((i, i + 500), (500 - i, 1000 - i)) for i in range(500)]
    with pytest.raises(CheckpointError, match=r"too irregular|covered twice"):
        check_coverage("w", (1000, 1000), [Place((1000, 1000), 0, box_numel(box), box) for box in many * 4])


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
