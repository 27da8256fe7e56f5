"""The copy in host memory: what it takes, how many copies it is, and that it is the state."""

import itertools
import random
import time

import pytest
import torch

from megatron.optimus.checkpoint import TensorSlice
from megatron.optimus.checkpoint.snapshot import Snapshot, coalesce, pack_into_buffers
from tests.unit.checkpoint.helpers import owned, whole_state


def piece(tensor, stored=None):
    return TensorSlice("x", "m", (len(tensor),), 0, len(tensor), tensor, stored_dtype=stored)


def check(slices, copies, most_bytes=1 << 30):
    """They are copied so, in whatever order they come, and the copies are theirs."""
    assert [copy.indices for copy in coalesce(slices, most_bytes)] == copies
    for seed in range(3):
        order = random.Random(seed).sample(slices, len(slices))
        views = Snapshot("cpu").take(order)
        for view, one in zip(views, order, strict=True):
            assert view.dtype == one.dtype and torch.equal(view, one.tensor.to(one.dtype))
            assert not one.tensor.numel() or view.data_ptr() != one.tensor.data_ptr()


def test_slices_side_by_side_are_one_copy():
    flat, other = torch.randn(1000), torch.randn(50)
    pieces = [piece(flat[250:300]), piece(other), piece(flat[0:100]), piece(flat[100:250]), piece(flat[300:1000])]
    check(pieces, [[2, 3, 0, 4], [1]])


def test_slices_that_do_not_fit_together_are_copies_of_their_own():
    flat = torch.randn(2000)
    check([piece(flat[:10]), piece(flat[11:20]), piece(flat[20:30])], [[0, 1, 2]])  # a gap of an alignment
    check([piece(flat[:10]), piece(flat[1035:1040]), piece(flat[1050:])], [[0], [1, 2]])  # a wider one
    check([piece(flat[:10]), piece(flat[5:20]), piece(flat[:10])], [[0], [1], [2]])  # the same memory again
    check([piece(flat[:10]), piece(flat[10:20].view(torch.int32)), piece(flat[20:30])], [[0], [1], [2]])
    casts = [torch.bfloat16, torch.bfloat16, None, torch.float16]
    check([piece(flat[10 * i : 10 * i + 10], cast) for i, cast in enumerate(casts)], [[0, 1], [2], [3]])
    check([piece(flat[:10]), piece(flat[10:10]), piece(flat[10:20]), piece(torch.empty(0))], [[0, 2], [1, 3]])
    raw = flat.view(torch.uint8)
    check([piece(raw[8 * i : 8 * i + 4].view(torch.float32)) for i in range(3)], [[0, 1, 2]])
    memory = bytearray(random.Random(1).randbytes(400))  # storages that touch are not one
    touching = [torch.frombuffer(memory, dtype=torch.int32, count=10, offset=40 * i) for i in range(3)]
    check([piece(tensor) for tensor in touching], [[0], [1], [2]])
    with pytest.raises(ValueError, match="contiguous"):
        piece(flat[::2])


def test_a_copy_ends_where_it_is_long_enough():
    """The last slice is longer by itself."""
    flat = torch.randn(100)
    bounds = [0, 10, 20, 25, 35, 40, 80, 100]
    pieces = [piece(flat[low:high]) for low, high in itertools.pairwise(bounds)]
    check(pieces, [[0, 1, 2], [3, 4], [5], [6]], most_bytes=100)


def test_the_same_slices_elsewhere_take_the_same_memory():
    """States that are decoded for each save lie in other memory every time; pinning it anew would take seconds."""
    snapshot, flats = Snapshot("cpu"), [torch.randn(numel) for numel in (60, 90, 120)]
    addresses = set()
    for order in itertools.permutations(range(3)):
        moved = sorted((torch.randn(120) for _ in flats), key=torch.Tensor.data_ptr)
        decoded = [moved[order[i]][: len(flat)] for i, flat in enumerate(flats)]
        pieces = [piece(flat[low : low + 30]) for low in (0, 30) for flat in decoded]
        views = snapshot.take(pieces)
        assert all(torch.equal(view, one.tensor) for view, one in zip(views, pieces, strict=True))
        addresses.add(tuple(view.data_ptr() for view in views))
    assert len(addresses) == 1


def test_host_memory_of_a_snapshot_is_hardly_larger_than_the_state():
    """Pinned memory comes in powers of two, so blocks are filled up to one; views are aligned and do not overlap."""
    draw = random.Random(3)
    lengths = [draw.choice([4, 12, draw.randrange(1, 3000), draw.randrange(1, 90_000)]) for _ in range(1000)]
    lengths += [300_000, 7]  # longer than a block: has one of its own
    places, sizes = pack_into_buffers(lengths, buffer_bytes=1 << 17)
    taken: dict[int, list[tuple[int, int]]] = {}
    for (block, start), length in zip(places, lengths, strict=True):
        assert start % 16 == 0
        assert start + length <= sizes[block]
        taken.setdefault(block, []).append((start, start + length))
    for ranges in map(sorted, taken.values()):
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))
    small = [size for size in sizes if size < 300_000]
    assert sorted(taken) == list(range(len(sizes)))
    assert len(small) == len(sizes) - 1
    assert max(small) <= 1 << 17
    assert pinned_bytes(small) <= 1.05 * sum(lengths[:-2]) + (1 << 15)


@pytest.mark.parametrize("share, limit", [(0.51, 1.25), (0.6, 1.15), (0.9, 1.15), (None, 1.15)])
def test_slices_a_little_larger_than_half_a_power_of_two_waste_little(share, limit):
    """Alone in a block, one of 0.51 would waste as much as it holds."""
    draw = random.Random(4)
    lengths = [int((share or draw.uniform(0.5, 1)) * (1 << 15)) for _ in range(40)]
    _, sizes = pack_into_buffers(lengths, buffer_bytes=1 << 17)
    assert pinned_bytes(sizes) <= limit * sum(lengths)


def test_a_snapshot_holds_what_it_was_given_last():
    """Views are made once; slices of other lengths or types get others."""
    snapshot = Snapshot("cpu")

    def check(length, dtype):
        pieces = [torch.randn(length + i) for i in range(3)]
        slices = [TensorSlice(f"{i}", "m", (len(p),), 0, len(p), p, stored_dtype=dtype) for i, p in enumerate(pieces)]
        views = snapshot.take(slices)
        assert all(torch.equal(view, piece.to(dtype)) for view, piece in zip(views, pieces, strict=True))
        return views[0].data_ptr()

    first = check(100, torch.float32)
    assert check(100, torch.float32) == first
    for length, dtype in [(200, torch.float32), (200, torch.bfloat16), (100, torch.float32)]:
        check(length, dtype)


def pinned_bytes(sizes):
    return sum(1 << (size - 1).bit_length() for size in sizes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
def test_snapshot_on_an_accelerator_is_ordered_before_the_update():
    """The copy runs on its own stream: what is queued after before_update must not be seen by it."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    pieces = [piece for piece in owned(whole_state(1)) if piece.kind == "master"]
    large = torch.randn(64 << 20, device=device)

    expected = large.cpu()
    slices = [TensorSlice("large", "master", (len(large),), 0, len(large), large)]
    slices += [TensorSlice(p.name, p.kind, p.global_shape, p.start, p.stop, p.tensor.to(device)) for p in pieces]
    many = torch.randn(4000, 1000, device=device)  # more slices than a stream takes copies
    slices += [piece(row) for row in many]
    slices += [piece(torch.arange(100.0)), piece(torch.arange(7))]  # already on the host
    assert len(coalesce(slices)) == 1 + len(pieces) + 1 + 2
    cast = TensorSlice("cast", "weight", (len(large),), 0, len(large), large, stored_dtype=torch.bfloat16)
    snapshot, held = Snapshot(device), list[float]()
    for _ in range(3):
        large.copy_(expected)
        views = snapshot.take([*slices, cast])
        started = time.perf_counter()
        snapshot.before_update()
        large.zero_()
        assert time.perf_counter() - started < 0.1, "queuing the update must not wait for the copy"
        snapshot.wait()
        held.append(snapshot.device_stall_s())
        assert views[0].is_pinned()
        assert torch.equal(views[0], expected)
        assert torch.equal(views[-1], expected.bfloat16())
        for view, one in zip(views[1:-1], slices[1:], strict=True):
            assert torch.equal(view, one.tensor.cpu())
    assert 0.001 < max(held) < 1, "nothing else was queued: the update waited for 256 MiB"
