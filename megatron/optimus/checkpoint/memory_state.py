"""One rank's training state in host memory: the file that holds it, and what the file says of it.

A file (platform/memory_slots.py) has the bytes of the slices' tensors in buffers that begin on pages, and an index:

    layout        a hash of what the slices are, without values: equal where one's copy can be another's
    start         number of the start of the run that made it; step and start tell generations apart
    rank, ranks   whose state it is, of how many ranks
    pieces        each slice's name, kind and region, its tensors, and whether a checkpoint on disk has it
    sizes         bytes of each buffer, without padding
    offsets       byte of the data at which each tensor begins, in the order of the pieces
    manifest      of a checkpoint on disk, as text, without files and tensors
    digests       XXH3-128 of each part of the data
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.manifest import Manifest, parse_manifest
from megatron.optimus.checkpoint.shards import dtype_name, torch_dtype
from megatron.optimus.checkpoint.slices import Encoded, Region, TensorSlice, tensors_to_copy
from megatron.optimus.checkpoint.snapshot import Snapshot
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.memory_slots import DATA_START, Generation, MemorySlot
from megatron.optimus.platform.pinned_memory import pin_buffers
from megatron.optimus.platform.ranks import attempt

PART_BYTES = 64 << 20  # hashed by one thread, sent in one message
_PAGE = 4096

Version = tuple[int, int]  # step and start of a generation


class StateFile(MemorySlot):
    """A file of one generation as host tensors, with the snapshot that fills it.

    Attributes:
        snapshot: copies slices into the file.
        sizes: bytes of each buffer.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        super().__init__(path)
        self._device = device
        self._buffers: list[torch.Tensor] = []
        self.sizes: list[int] = []
        self.snapshot = Snapshot(device, self._allocate)

    def _allocate(self, sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
        """Memory of the file for buffers of these sizes, each from a page on; pinned for ``device``."""
        if self.sizes != list(sizes):
            starts = [0]
            for size in sizes:
                starts.append(starts[-1] + -(-size // _PAGE) * _PAGE)
            whole = self.data(starts[-1])
            paged = [whole[first:last] for first, last in itertools.pairwise(starts)]
            pin_buffers([part for part in paged if len(part)], device)
            self.sizes = list(sizes)
            self._buffers = [part[:size] for part, size in zip(paged, sizes, strict=True)]
        return self._buffers

    @property
    def num_bytes(self) -> int:
        """Bytes of the data, padding of the buffers included."""
        return sum(-(-size // _PAGE) * _PAGE for size in self.sizes)

    def data(self, num_bytes: int) -> torch.Tensor:
        """The first ``num_bytes`` of the file's data, uint8; makes room for them."""
        return torch.frombuffer(self.map(num_bytes), dtype=torch.uint8)[DATA_START : DATA_START + num_bytes]

    def state(self) -> MemoryState | None:
        """The generation that the file holds; None where it is incomplete."""
        found = self.read()
        return None if found is None else MemoryState(self, found)

    def fill(self, slices: Sequence[TensorSlice], state: MemoryState) -> None:
        """Copies a state of this file and of the same layout into the slices' tensors."""
        self._allocate(state.index["sizes"], self._device)
        with torch.no_grad():
            for piece, start in zip(tensors_to_copy(slices), state.index["offsets"], strict=True):
                source = state.data[start : start + piece.tensor.nbytes].view(piece.tensor.dtype)
                piece.tensor.copy_(source, non_blocking=devices.pins_memory(piece.tensor.device))
        devices.synchronize(self._device)


@dataclass(frozen=True)
class MemoryState:
    """A complete generation of one rank's state, and the file that holds it."""

    file: StateFile
    generation: Generation

    @property
    def index(self) -> dict[str, Any]:
        """What the file says of its data, as in the table above."""
        return self.generation.index

    @property
    def version(self) -> Version:
        """Tells generations apart; the newer is the larger one."""
        return self.generation.step, self.index["start"]

    @property
    def owner(self) -> int:
        """The rank whose state it is."""
        return self.index["rank"]

    @property
    def data(self) -> torch.Tensor:
        """The bytes of the state's tensors, uint8."""
        return self.file.data(self.generation.num_bytes)

    def is_good(self) -> bool:
        """Whether the data have the hashes that were written; reads all of them."""
        data, _ = attempt(lambda: self.data)  # a file that has been cut, where there is no room to make it whole
        return data is not None and digests_of(data)[0] == self.index["digests"]

    @property
    def manifest(self) -> Manifest:
        """What ``MemoryCheckpoints.start`` was given."""
        return parse_manifest(self.index["manifest"].encode(), f"memory checkpoint of step {self.generation.step}")

    def slices_on_disk(self, encoded: dict[str, Encoded]) -> list[TensorSlice]:
        """The slices that belong to a checkpoint on disk, with the file's memory for tensors.

        Args:
            encoded: any state in fewer bits of this run, by kind.

        Raises:
            CheckpointError: a state is in fewer bits, and in this run it is not.
        """
        data, offsets, slices = self.data, iter(self.index["offsets"]), []
        for name, kind, shape, start, stop, box, held, dtype, first, is_on_disk in self.index["pieces"]:
            tensors = []
            for its_dtype, length in held:
                begin, of = next(offsets), torch_dtype(its_dtype)
                tensors.append(data[begin : begin + length * of.itemsize].view(of))
            if not is_on_disk:
                continue
            state = None
            if first is not None:
                if kind not in encoded:
                    raise CheckpointError(f"{name} ({kind}) is kept in fewer bits, and in this run it is not")
                state = encoded[kind].moved(tensors[0], tensors[1] if len(tensors) > 1 else None, first)
            where = Region.from_json(shape, start, stop, box)
            slices.append(TensorSlice(name, kind, *where[:3], tensors[0], where.box, torch_dtype(dtype), state))
        return slices


def describe(piece: TensorSlice, *, is_on_disk: bool) -> list[Any]:
    """An entry of ``pieces``; ``is_on_disk``: whether a checkpoint on disk has the slice too."""
    tensors = [[dtype_name(one.tensor.dtype), len(one.tensor)] for one in piece.memory()]
    first = None if piece.encoded is None else piece.encoded.first
    return [piece.name, piece.kind, *piece.region, tensors, dtype_name(piece.dtype), first, is_on_disk]


def layout_of(slices: Sequence[TensorSlice]) -> str:
    """The hash ``layout`` of these slices."""
    parts = [describe(piece, is_on_disk=False) for piece in slices]
    return xxhash.xxh3_128_hexdigest(repr(parts).encode())


def digests_of(data: torch.Tensor) -> tuple[list[str], float]:
    """The hashes of the parts of a file's data, and the CPU seconds that they took."""

    def digest(part: torch.Tensor) -> tuple[str, float]:
        began = time.thread_time()
        return xxhash.xxh3_128_hexdigest(part.numpy().data), time.thread_time() - began

    with ThreadPoolExecutor(torch.get_num_threads(), "memory checkpoint") as threads:
        found = list(threads.map(digest, data.split(PART_BYTES)))
    return [text for text, _ in found], sum(seconds for _, seconds in found)
