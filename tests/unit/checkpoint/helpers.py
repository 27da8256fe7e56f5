"""A small state with every kind of tensor, spread over ranks in any layout."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from megatron.optimus.checkpoint import TensorSlice, global_ranges, load_newest, save, store

DENSE_SHAPE = (7, 5)
EXPERT_SHAPE = (4, 3, 5)
CONFIG = {"model": {"num_layers": 1}}


def whole_state(seed: int = 0) -> dict[tuple[str, str], torch.Tensor]:
    """(name, kind) -> global tensor, a function of the seed."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in (("dense.weight", DENSE_SHAPE), ("experts.weight", EXPERT_SHAPE)):
        for kind in ("master", "exp_avg"):
            state[name, kind] = torch.randn(shape, generator=generator)
        state[name, "weight"] = state[name, "master"].bfloat16()
    state["router.expert_bias", "buffer"] = torch.randn(4, generator=generator)
    state["seen", "buffer"] = torch.arange(3) + seed
    state["flag", "buffer"] = torch.tensor(True)
    return state


def _share(numel: int, index: int, count: int) -> tuple[int, int]:
    """Uneven on purpose: shares differ in size and may be empty."""
    bounds = [numel * i // count - (i % 2 if 0 < i < count else 0) for i in range(count + 1)]
    return bounds[index], bounds[index + 1]


def layout_slices(
    state: dict[tuple[str, str], torch.Tensor], rank: int, world: int, ep: int, *, interleaved: bool, loading: bool
) -> list[TensorSlice]:
    """Rank's part under ZeRO-1: dense states over all ranks, expert states over the replicas of its experts.

    ``loading``: fresh storage of the same ranges instead of the state's values, and buffers on every rank.
    """
    slices = []
    for (name, kind), whole in state.items():
        shape, ids = tuple(whole.shape), None
        local = whole
        if kind == "buffer":
            start, stop = (0, whole.numel()) if rank == 0 or loading else (0, 0)
        elif name.startswith("experts"):
            index, per_rank = rank % ep, shape[0] // ep
            ids = list(range(index, shape[0], ep) if interleaved else range(index * per_rank, (index + 1) * per_rank))
            local = whole[ids]
            start, stop = _share(local.numel(), rank // ep, world // ep)
        else:
            start, stop = _share(whole.numel(), rank, world)
        flat = local.reshape(-1)
        for low, high, at in global_ranges(shape, ids, start, stop):
            values = flat[at : at + high - low].clone()
            slices.append(TensorSlice(name, kind, shape, low, high, torch.zeros_like(values) if loading else values))
    return slices


def whole_requests(state: dict[tuple[str, str], torch.Tensor]) -> list[TensorSlice]:
    """Requests for everything, filled with zeros."""
    return [
        TensorSlice(name, kind, tuple(t.shape), 0, t.numel(), torch.zeros_like(t).view(-1))
        for (name, kind), t in state.items()
    ]


def assert_holds(requests: list[TensorSlice], state: dict[tuple[str, str], torch.Tensor]) -> None:
    """Every request equals the state bit for bit."""
    assert requests
    for request in requests:
        expected = state[request.name, request.kind].reshape(-1)[request.start : request.stop]
        assert torch.equal(request.tensor, expected), (request.name, request.kind)


def owned(state: dict[tuple[str, str], torch.Tensor]) -> list[TensorSlice]:
    return layout_slices(state, 0, 1, 1, interleaved=False, loading=False)


def find_loadable(root: Path) -> Path | None:
    """The newest checkpoint of which every byte is good, as a resuming run finds it."""
    found = load_newest(root, store.everything)
    return None if found is None else found[0]


def lose_acknowledgements(monkeypatch, name):
    """``os.NAME(...)`` is done, and asked for once more: what a network disk does when the answer is lost."""
    call = getattr(os, name)

    def twice(*arguments):
        call(*arguments)
        call(*arguments)

    monkeypatch.setattr(os, name, twice)


def two_checkpoints(folder):
    """Saves steps 1 and 2 with the same content, written at different layouts, but for one element."""
    state = whole_state(1)
    options = dict(kind="full", consumed_samples=8, config=CONFIG, metadata={})
    first = save(folder, 1, owned(state), **options)
    state["dense.weight", "master"][3, 2] += 0.5
    every = [s for rank in range(4) for s in layout_slices(state, rank, 4, 2, interleaved=True, loading=False)]
    return first, save(folder, 2, every, **options)


def damage(path, *names):
    """Flips a bit of each tensor of a checkpoint of ``whole_state(1)`` in one file."""
    data = bytearray((path / "node-00000-0.safetensors").read_bytes())
    for name in names:
        state = whole_state(1)[name]
        position = data.find(bytes(state.flatten().view(torch.uint8).numpy()))
        assert position > 0
        data[position + 1] ^= 8
    (path / "node-00000-0.safetensors").write_bytes(data)
