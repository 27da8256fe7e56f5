"""Memory checkpoints: the training state in host memory that outlives the ranks, and a copy of it on another node.

    main thread                               background thread of each rank
    start: all ranks have finished the        hash the copy, complete the file, send it to the buddy,
      generation before; copy this rank's       the rank with this place on the next node, and
      state over the older one                  receive that of the node before
    before_update: the update waits for
      the copy

A rank keeps two generations in files that its launcher owns (platform/memory_slots.py). It copies what a checkpoint on
disk would hold, from the live tensors, as they are. With ZeRO every state has one owner, which alone copies it: what
data-parallel peers hold is not copied twice, except for buffers and other small tensors that each rank needs back.

A new process of the same rank finds its own file, or asks the buddy. A generation counts when every rank's state is
there, from the rank itself or its buddy, and has the hashes that were written; else the one before counts, else the
disk. Where the run starts again with another layout, the ranks write what the old ones left to a checkpoint on disk,
which loads at any layout; so each file says which tensors it holds.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.manifest import Manifest, parse_manifest
from megatron.optimus.checkpoint.shards import dtype_name, torch_dtype
from megatron.optimus.checkpoint.slices import Encoded, TensorSlice
from megatron.optimus.checkpoint.snapshot import Snapshot
from megatron.optimus.checkpoint.writer import Task
from megatron.optimus.platform import device as devices
from megatron.optimus.platform import memory_slots
from megatron.optimus.platform.environment import node_name
from megatron.optimus.platform.intervals import Interval
from megatron.optimus.platform.memory import GIB, host_memory
from megatron.optimus.platform.memory_slots import DATA_START, GENERATIONS, Generation, MemorySlot
from megatron.optimus.platform.pinned_memory import pin_buffers
from megatron.optimus.platform.ranks import Ranks, attempt

_PAGE = 4096
_PART_BYTES = 64 << 20  # hashed by one thread, sent in one message

log = logging.getLogger("optimus")

Version = tuple[int, int]  # of a generation: its step, and the start of the run that made it
WriteOut = Callable[[list[TensorSlice], Manifest], None]


class _Slot(MemorySlot):
    """A file of one generation as host tensors, with the snapshot that fills it."""

    def __init__(self, path: Path, device: torch.device) -> None:
        super().__init__(path)
        self._sizes: list[int] = []
        self._buffers: list[torch.Tensor] = []
        self.snapshot = Snapshot(device, self.allocate)

    def allocate(self, sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
        """Memory of the file for buffers of these sizes, each from a page on; pinned for ``device``."""
        if self._sizes != list(sizes):
            starts = [0]
            for size in sizes:
                starts.append(starts[-1] + -(-size // _PAGE) * _PAGE)
            whole = self.whole(starts[-1])
            paged = [whole[first:last] for first, last in itertools.pairwise(starts)]
            pin_buffers([part for part in paged if len(part)], device)
            self._sizes = list(sizes)
            self._buffers = [part[:size] for part, size in zip(paged, sizes, strict=True)]
        return self._buffers

    def whole(self, num_bytes: int | None = None) -> torch.Tensor:
        """The file's data, uint8; None: those of ``allocate``."""
        num_bytes = self.num_bytes if num_bytes is None else num_bytes
        return torch.frombuffer(self.map(num_bytes), dtype=torch.uint8)[DATA_START : DATA_START + num_bytes]

    @property
    def num_bytes(self) -> int:
        """Bytes of the data, padding of the buffers included."""
        return sum(-(-size // _PAGE) * _PAGE for size in self._sizes)

    @property
    def sizes(self) -> list[int]:
        return self._sizes


class MemoryCheckpoints:
    """The memory checkpoints of one rank. Building it and every method are collective, except where it says local.

    Args:
        folder: where this node's files are.
        ranks: that train together.
        interval: steps between copies; AUTO: as often as takes a two-hundredth of the steps' time.
        node: ranks that give the same name lose their memory together; None: those of one host and folder.
    """

    def __init__(self, folder: Path, ranks: Ranks, interval: int, node: str | None = None) -> None:
        self._ranks, self._device = ranks, torch.device(ranks.device)
        self._interval = Interval(interval, "memory checkpoints", ranks)
        # Where ranks compute on the CPU, waits for other ranks cost nothing, and the thread takes time from this one.
        self.clock = time.thread_time if self._device.type == "cpu" else time.perf_counter
        self._node = node or f"{node_name()} {folder}"
        nodes = [name.decode() for name in ranks.all_gather_bytes(self._node.encode())]
        self._neighbours = [rank for rank, name in enumerate(nodes) if name == self._node]  # of this node
        self._sources = [_buddies(nodes, rank)[0] for rank in self._neighbours]
        self._source, self._target = _buddies(nodes, ranks.rank)  # whose copy this rank keeps; who keeps its own
        [self._start] = ranks.broadcast([secrets.randbits(62)])  # two starts must not share a generation
        self._pieces: list[list[Any]] = []
        self._own: list[_Slot] = []
        self._copies: list[_Slot] = []
        ranks.run_on_all_ranks(lambda: self._open(folder), f"opening {folder}", CheckpointError)
        self._group = dist.new_group(backend="gloo") if self._source is not None else None
        if len(set(nodes)) > 1 and self._source is None and ranks.rank == 0:
            log.warning("nodes have different numbers of ranks: memory checkpoints have no copy on another node")
        self._newest = 0  # index of the own file that is not written next
        self._task: Task | None = None
        self._has_failed = False
        self._stall_s: float | None = None  # since ``take_stall``
        # What the last copy took of training, when it began to run beside it (by ``clock``), and after which step.
        self._cost_s = self._thread_s = self._went_on = 0.0
        self._last_step = -1

    def _open(self, folder: Path) -> None:
        self._folder, self._used = folder, memory_slots.use_folder(folder)
        numbers = range(GENERATIONS)
        self._own = [_Slot(folder / f"rank-{self._ranks.rank}.{n}", self._device) for n in numbers]
        if self._source is not None:
            self._copies = [_Slot(folder / f"copy-{self._source}.{n}", torch.device("cpu")) for n in numbers]

    # ---- saving

    def prepare(self, slices: Sequence[TensorSlice], on_disk: Sequence[TensorSlice] = ()) -> None:
        """Takes the memory, so that the first ``start`` does not delay training.

        Args:
            slices: as for ``start``.
            on_disk: those that this rank would write to a checkpoint on disk, for ranks of another layout.

        Raises:
            CheckpointError: on every rank, where a node has not so much; the message says how much it has.
        """
        task = "taking host memory for memory checkpoints"
        written = {(piece.name, piece.kind, piece.region) for piece in on_disk}
        self._pieces = [_piece(s, (s.name, s.kind, s.region) in written) for s in slices if s.start < s.stop]
        need = sum(piece.tensor.nbytes for piece in _memory(slices))
        files = len(self._own + self._copies)
        missing = files * need - sum(slot.free_bytes()[1] for slot in self._own + self._copies)
        answer = json.dumps([self._node, max(0, missing), files * need]).encode()
        everyone = [json.loads(data) for data in self._ranks.all_gather_bytes(answer)]
        here = [(new, all_) for node, new, all_ in everyone if node == self._node]
        self._ranks.run_on_all_ranks(lambda: self._check_room(here, files, need), task, CheckpointError)

        def reserve() -> None:
            for slot in self._own:
                slot.snapshot.reserve(_memory(slices))

        self._ranks.run_on_all_ranks(reserve, task, CheckpointError)
        sizes = self._all_gather(self._own[0].num_bytes)
        source = self._source

        def reserve_copies() -> None:
            for slot in self._copies:
                slot.map(sizes[source or 0])

        self._ranks.run_on_all_ranks(reserve_copies, task, CheckpointError)

    def _check_room(self, here: list[tuple[int, int]], files: int, need: int) -> None:
        missing, total = (sum(numbers) for numbers in zip(*here, strict=True))
        free = min(host_memory()[0], self._own[0].free_bytes()[0])
        if missing > free:
            raise CheckpointError(
                f"the {len(here)} ranks of this node need {total / GIB:.1f} GiB of host memory, {files} copies of "
                f"{need / GIB:.2f} GiB each, and {free / GIB:.1f} GiB are free; use a smaller optimizer_state_dtype, "
                "more ranks on more nodes, or memory_checkpoint_interval=0"
            )

    def is_due(self, step: int) -> bool:
        """Whether ``step`` is to be copied. Local."""
        return not self._has_failed and self._interval.is_due(step)

    def start(self, slices: Sequence[TensorSlice], header: Manifest, began: float | None = None) -> None:
        """Begins to copy the state over the older generation, once all ranks have finished the newer one.

        Where a rank could not, memory checkpoints end for this process with a warning; the run goes on.

        Args:
            slices: of all that this rank needs to go on, in the same order every time.
            header: a manifest without files and tensors.
            began: by ``clock``, when the caller began to make the two; None: now.
        """
        stall_began = time.perf_counter()
        began = self.clock() if began is None else began
        error = self._join()
        failure = self._ranks.first_failure(error)
        if failure is not None:
            self._has_failed = True
            if error is not None or self._ranks.rank == 0:
                reason = error or f"see the message of rank {failure[0]}"
                log.warning("the memory checkpoint failed, and no more are made in this process: %s", reason)
            return
        if self._interval.is_auto and self._last_step >= 0:
            step_s = (began - self._went_on) / max(1, header.step - self._last_step)
            self._interval.choose(self._cost_s, step_s)
        self._newest = 1 - self._newest
        slot, manifest = self._own[self._newest], header.to_bytes().decode()
        slot.clear()
        views = slot.snapshot.take(_memory(slices))
        base = slot.whole().data_ptr()
        index = {
            "layout": _layout_of(slices),
            "start": self._start,
            "rank": self._ranks.rank,
            "ranks": self._ranks.size,
            "pieces": self._pieces,
            "sizes": slot.sizes,
            "offsets": [view.data_ptr() - base for view in views],
            "manifest": manifest,
        }
        copy = self._copies[self._newest] if self._copies else None
        self._task = Task(lambda: self._finish(slot, copy, header.step, index))
        self._interval.done(header.step)
        self._last_step, self._went_on = header.step, self.clock()
        self._cost_s = self._went_on - began
        self._stall_s = (self._stall_s or 0.0) + time.perf_counter() - stall_began

    def _finish(self, slot: _Slot, copy: _Slot | None, step: int, index: dict[str, Any]) -> None:
        """Completes this rank's file and exchanges it with the buddies; in the background."""
        began = time.thread_time()
        _, error = attempt(lambda: self._complete(slot, step, index))
        if copy is not None:  # also after an error: the buddies wait for this rank
            self._exchange(slot, self._target, copy, self._source)
        self._thread_s += time.thread_time() - began
        if error is not None:
            raise error

    def _complete(self, slot: _Slot, step: int, index: dict[str, Any]) -> None:
        slot.snapshot.wait()
        digests, self._thread_s = _digests(slot.whole())
        slot.commit(step, slot.num_bytes, index | {"digests": digests})

    def _join(self) -> Exception | None:
        """Waits for the thread; returns its error. Local."""
        if self._task is None:
            return None
        self._task.join()
        error, self._task = self._task.error, None
        stall = self._own[self._newest].snapshot.device_stall_s()
        self._stall_s = (self._stall_s or 0.0) + stall
        # Where ranks compute on the CPU, the thread takes its time from them.
        self._cost_s += stall + (self._thread_s if self._device.type == "cpu" else 0.0)
        return error

    def before_update(self) -> None:
        """Queues the coming update behind a copy that is under way. Call it before every optimizer step. Local."""
        for slot in self._own:
            slot.snapshot.before_update()

    def take_stall(self) -> float | None:
        """Returns the seconds that training stood still for copies since the last call; None without one. Local."""
        stall, self._stall_s = self._stall_s, None
        return stall

    def forget(self) -> None:
        """Makes all generations of this rank incomplete, as after wrong numbers. Local."""
        self._join()
        for slot in self._own + self._copies:
            slot.clear()
        self._interval.restart()
        self._last_step = -1

    def close(self) -> None:
        """Frees the memory; the run is over. Local."""
        self._join()
        for slot in self._own + self._copies:
            slot.free()
        with contextlib.suppress(OSError):  # the last rank of the node
            if sorted(os.listdir(self._folder)) == ["used"]:
                (self._folder / "used").unlink()
                self._folder.rmdir()

    # ---- restoring

    def restore(
        self, slices: Sequence[TensorSlice], at_least: int, write_out: WriteOut | None = None
    ) -> Manifest | None:
        """Fills the slices from the newest generation that all ranks have. Other generations are forgotten.

        Args:
            slices: as for ``start``; their tensors are written into.
            at_least: an older step is not restored.
            write_out: saves these slices, over all ranks a whole checkpoint, to disk; called where there is no such
                generation, but one of ranks of another layout whose step is after ``at_least``.

        Returns:
            The manifest that ``start`` was given; None where there is no such generation.
        """
        found = self._restore(slices, at_least)
        if found is None and write_out is not None:
            self._write_out(slices, at_least, write_out)
        for slot in self._own + self._copies:
            kept = slot.read()
            # Steps that are done again may have other bits.
            if kept is not None and (found is None or _version(kept) != found[0]):
                slot.clear()
        files = self._files_here()
        self._ranks.first_failure(None)  # nobody reads any more, and all have listed the same files
        self._free_others(files)
        return None if found is None else found[1]

    def _files_here(self) -> list[_Slot]:
        """This rank's share of the files of its node, whoever made them."""
        number, count = self._neighbours.index(self._ranks.rank), len(self._neighbours)
        paths = sorted(path for kind in ("rank", "copy") for path in self._folder.glob(f"{kind}-*"))
        return [_Slot(path, torch.device("cpu")) for path in paths[number::count]]

    def _free_others(self, files: list[_Slot]) -> None:
        """Removes what is left of ranks that this node does not have now."""
        current = {f"rank-{rank}" for rank in self._neighbours} | {f"copy-{source}" for source in self._sources}
        for slot in files:
            if slot.path.name.partition(".")[0] not in current:
                slot.free()
            slot.close()

    def _restore(self, slices: Sequence[TensorSlice], at_least: int) -> tuple[Version, Manifest] | None:
        own, layout = self._ranks.rank, _layout_of(slices)
        held = {
            (owner, _version(found)): (slot, found)
            for owner, slots in ((own, self._own), (self._source or 0, self._copies))
            for slot in slots
            if (found := slot.read()) is not None and found.step >= at_least
        }
        listed = [[owner, version, found.index["layout"]] for (owner, version), (_, found) in held.items()]
        everyone = self._all_gather([layout, listed])
        layouts = [answer[0] for answer in everyone]
        covered: dict[Version, set[int]] = {}  # ranks whose state somebody says to have
        for _, entries in everyone:
            for owner, (step, start), of in entries:
                if of == layouts[owner]:
                    covered.setdefault((step, start), set()).add(owner)
        for version in sorted(covered, reverse=True):
            if len(covered[version]) < self._ranks.size:
                continue
            good = [
                owner
                for (owner, at), (slot, found) in held.items()
                if at == version and found.index["layout"] == layouts[owner] and _is_good(slot, found)
            ]
            holders = self._holders(good)
            lost = [rank for rank in range(self._ranks.size) if rank not in holders]
            if lost:
                self._warn_of_damage(version[0], lost[0])
                continue
            missing = {rank for rank in holders if rank not in holders[rank]}
            return version, self._load(version, slices, held, missing)
        return None

    def _holders(self, good: list[int]) -> dict[int, list[int]]:
        """The ranks that hold the state of each rank; ``good``: of which ranks this one does."""
        holders: dict[int, list[int]] = {}
        for holder, owners in enumerate(self._all_gather(good)):
            for owner in owners:
                holders.setdefault(owner, []).append(holder)
        return holders

    def _warn_of_damage(self, step: int, owner: int) -> None:
        if self._ranks.rank == 0:
            log.warning("the memory checkpoint of step %d is damaged on rank %d: not used", step, owner)

    def _load(
        self,
        version: Version,
        slices: Sequence[TensorSlice],
        held: dict[tuple[int, Version], tuple[_Slot, Generation]],  # by owner
        missing: set[int],
    ) -> Manifest:
        """Fills the slices from this rank's file; ranks that are ``missing`` theirs get it from a buddy."""
        own, step = self._ranks.rank, version[0]
        if missing:
            slot = held[own, version][0] if own not in missing else self._own[0]
            sent = held[source, version][0] if (source := self._source) in missing and source is not None else None
            self._exchange(sent, self._source, slot if own in missing else None, self._target)
            if own == min(missing):
                log.warning("rank %d got its state of step %d from rank %d", own, step, self._target)
        else:
            slot = held[own, version][0]
        self._newest = self._own.index(slot)

        def fill() -> Manifest:
            found = slot.read()
            if found is None or (own in missing and not _is_good(slot, found)):
                raise CheckpointError(f"the state of step {step} from rank {self._target} is damaged")
            index = found.index
            slot.allocate(index["sizes"], self._device)
            data = slot.whole()
            with torch.no_grad():
                for piece, start in zip(_memory(slices), index["offsets"], strict=True):
                    source = data[start : start + piece.tensor.nbytes].view(piece.tensor.dtype)
                    piece.tensor.copy_(source, non_blocking=devices.pins_memory(piece.tensor.device))
            devices.synchronize(self._device)
            return _manifest_of(found)

        return self._ranks.run_on_all_ranks(fill, "loading the memory checkpoint", CheckpointError)

    # ---- at another layout

    def _write_out(self, templates: Sequence[TensorSlice], after: int, write_out: WriteOut) -> None:
        """Saves the newest generation after step ``after`` that ranks of another layout left, where all of it is there.

        Each rank of a node looks at some of the node's files. Of two that hold the same state one is taken.
        """
        slots = self._files_here()
        held: dict[Version, dict[int, tuple[_Slot, Generation]]] = {}  # by owner
        for slot in slots:
            if (found := slot.read()) is not None and found.step > after:
                held.setdefault(_version(found), {})[found.index["rank"]] = slot, found
        sizes = {version: next(iter(of.values()))[1].index["ranks"] for version, of in held.items()}
        everyone = self._all_gather([[*version, sizes[version], list(of)] for version, of in held.items()])
        owners: dict[tuple[int, int, int], set[int]] = {}  # by version and number of ranks
        for step, start, size, of in itertools.chain.from_iterable(everyone):
            owners.setdefault((step, start, size), set()).update(of)
        for step, start, size in sorted(owners, reverse=True):
            here = held.get((step, start), {})
            if len(owners[step, start, size]) < size:
                continue
            good = {owner: (slot, found) for owner, (slot, found) in here.items() if _is_good(slot, found)}
            holders = self._holders(list(good))
            if lost := [owner for owner in range(size) if owner not in holders]:
                self._warn_of_damage(step, lost[0])
                continue
            mine = [good[owner] for owner in good if holders[owner][0] == self._ranks.rank]
            if self._ranks.rank == 0:
                log.info("the state of step %d that %d ranks left in host memory is written to disk", step, size)
            try:
                self._save(mine, templates, write_out)
            except CheckpointError as error:
                if self._ranks.rank == 0:
                    log.warning("the state in host memory of step %d cannot be used: %s", step, error)
                continue
            break
        for slot in slots:
            slot.close()

    def _save(
        self, mine: list[tuple[_Slot, Generation]], templates: Sequence[TensorSlice], write_out: WriteOut
    ) -> None:
        """Hands the pieces in these files to ``write_out``, with the manifest of any one."""
        encoded = {piece.kind: piece.encoded for piece in templates if piece.encoded is not None}

        def pieces() -> list[TensorSlice]:
            return [one for slot, found in mine for one in _slices_of(slot, found, encoded)]

        slices = self._ranks.run_on_all_ranks(pieces, "reading memory checkpoints", CheckpointError)
        texts = self._ranks.all_gather_bytes(mine[0][1].index["manifest"].encode() if mine else b"")
        write_out(slices, parse_manifest(next(filter(None, texts)), "memory checkpoint"))

    def _all_gather(self, value: Any) -> list[Any]:
        return [json.loads(data) for data in self._ranks.all_gather_bytes(json.dumps(value).encode())]

    def _exchange(self, sent: _Slot | None, to: int | None, received: _Slot | None, source: int | None) -> None:
        """Sends a file to one rank and receives one from another. The training's group is not used.

        Of a file that is not complete only that is told. ``received`` has room for what will come, or makes it.
        """
        found = sent.read() if sent is not None else None
        text = json.dumps(found.index).encode() if found is not None else b""
        out, into = sent is not None, received is not None
        head = torch.tensor([found.step, found.num_bytes, len(text)] if found is not None else [-1, 0, 0])
        own_head = torch.tensor([-1, 0, 0])
        self._transfer(head if out else None, to, own_head if into else None, source)
        step, num_bytes, length = own_head.tolist()
        own_text = torch.empty(length, dtype=torch.uint8)
        message = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else None
        self._transfer(message, to, own_text if length else None, source)
        data = sent.whole(found.num_bytes) if sent is not None and found is not None else None
        if received is not None:
            received.clear()
        self._transfer(data, to, received.whole(num_bytes) if received is not None and num_bytes else None, source)
        if received is not None and step >= 0:
            received.commit(step, num_bytes, json.loads(own_text.numpy().tobytes()))

    def _transfer(
        self, out: torch.Tensor | None, to: int | None, into: torch.Tensor | None, source: int | None
    ) -> None:
        sent = [] if out is None else list(out.split(_PART_BYTES))
        received = [] if into is None else list(into.split(_PART_BYTES))
        for number in range(max(len(sent), len(received))):
            operations = [dist.P2POp(dist.isend, part, to, self._group) for part in sent[number : number + 1]]
            operations += [dist.P2POp(dist.irecv, part, source, self._group) for part in received[number : number + 1]]
            for work in dist.batch_isend_irecv(operations):
                work.wait()


def _buddies(nodes: list[str], rank: int) -> tuple[int | None, int | None]:
    """Returns the ranks with this rank's place on the node before and on the next one; (None, None) on one node.

    ``nodes``: each rank's.
    """
    members: dict[str, list[int]] = {}
    for number, name in enumerate(nodes):
        members.setdefault(name, []).append(number)
    groups = list(members.values())
    if len(groups) == 1 or len({len(group) for group in groups}) > 1:
        return None, None
    own, place = next((n, group.index(rank)) for n, group in enumerate(groups) if rank in group)
    return groups[own - 1][place], groups[(own + 1) % len(groups)][place]


def _memory(slices: Sequence[TensorSlice]) -> list[TensorSlice]:
    return [memory for piece in slices if piece.start < piece.stop for memory in piece.memory()]


def _version(found: Generation) -> Version:
    return found.step, found.index["start"]


def _manifest_of(found: Generation) -> Manifest:
    return parse_manifest(found.index["manifest"].encode(), f"memory checkpoint of step {found.step}")


def _piece(piece: TensorSlice, is_on_disk: bool) -> list[Any]:
    """What a file says of a slice: where it lies, the tensors that hold it, and whether a checkpoint on disk has it."""
    tensors = [[dtype_name(one.tensor.dtype), len(one.tensor)] for one in piece.memory()]
    first = None if piece.encoded is None else piece.encoded.first
    return [piece.name, piece.kind, *piece.region, tensors, dtype_name(piece.dtype), first, is_on_disk]


def _slices_of(slot: _Slot, found: Generation, encoded: dict[str, Encoded]) -> list[TensorSlice]:
    """The slices of a file that belong to a checkpoint on disk; ``encoded``: any state in fewer bits, by kind.

    Raises CheckpointError for states in fewer bits of which this run has none.
    """
    data, offsets, result = slot.whole(found.num_bytes), iter(found.index["offsets"]), []
    for name, kind, shape, start, stop, box, held, dtype, first, is_on_disk in found.index["pieces"]:
        tensors = []
        for of, length in held:
            offset = next(offsets)
            tensors.append(data[offset : offset + length * torch_dtype(of).itemsize].view(torch_dtype(of)))
        if not is_on_disk:
            continue
        state = None
        if first is not None:
            if kind not in encoded:
                raise CheckpointError(f"{name} ({kind}) is kept in fewer bits, and in this run it is not")
            state = encoded[kind].moved(tensors[0], tensors[1] if len(tensors) > 1 else None, first)
        whole_box = None if box is None else tuple((low, high) for low, high in box)
        where = (name, kind, tuple(shape), start, stop, tensors[0], whole_box)
        result.append(TensorSlice(*where, torch_dtype(dtype), state))
    return result


def _layout_of(slices: Sequence[TensorSlice]) -> str:
    """A hash of what the slices are, without their values: equal where one's copy can be another's."""
    parts = [(s.name, s.kind, *s.region, [(str(m.tensor.dtype), len(m.tensor)) for m in s.memory()]) for s in slices]
    return xxhash.xxh3_128_hexdigest(repr(parts).encode())


def _digests(data: torch.Tensor) -> tuple[list[str], float]:
    """The hashes of the parts of a file's data, and the CPU seconds that they took."""

    def digest(part: torch.Tensor) -> tuple[str, float]:
        began = time.thread_time()
        return xxhash.xxh3_128_hexdigest(part.numpy().data), time.thread_time() - began

    with ThreadPoolExecutor(torch.get_num_threads(), "memory checkpoint") as threads:
        found = list(threads.map(digest, data.split(_PART_BYTES)))
    return [text for text, _ in found], sum(seconds for _, seconds in found)


def _is_good(slot: _Slot, found: Generation) -> bool:
    """Whether the data have the hashes that were written."""
    return _digests(slot.whole(found.num_bytes))[0] == found.index["digests"]
