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
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.manifest import Manifest, parse_manifest
from megatron.optimus.checkpoint.memory_state import (
    PART_BYTES,
    MemoryState,
    StateFile,
    Version,
    describe,
    digests_of,
    layout_of,
)
from megatron.optimus.checkpoint.slices import TensorSlice, tensors_to_copy
from megatron.optimus.checkpoint.writer import Task
from megatron.optimus.platform import memory_slots
from megatron.optimus.platform.environment import node_name
from megatron.optimus.platform.intervals import Interval
from megatron.optimus.platform.memory import GIB, host_memory
from megatron.optimus.platform.memory_slots import GENERATIONS
from megatron.optimus.platform.ranks import Ranks, attempt

log = logging.getLogger("optimus")

WriteOut = Callable[[list[TensorSlice], Manifest], None]


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
        self._own: list[StateFile] = []
        self._copies: list[StateFile] = []
        ranks.run_on_all_ranks(lambda: self._open(folder), f"opening {folder}", CheckpointError)
        self._group = dist.new_group(backend="gloo") if self._source is not None else None
        if len(set(nodes)) > 1 and self._source is None and ranks.rank == 0:
            log.warning("nodes have different numbers of ranks: memory checkpoints have no copy on another node")
        self._newest = 0  # index of the own file that is not written next
        self._task: Task | None = None
        self._stall_s: float | None = None  # since ``take_stall``
        # What the last copy took of training, when it began to run beside it (by ``clock``), and after which step.
        self._cost_s = self._thread_s = self._went_on = 0.0
        self._last_step = -1

    def _open(self, folder: Path) -> None:
        self._folder, self._used = folder, memory_slots.use_folder(folder)
        numbers = range(GENERATIONS)
        self._own = [StateFile(folder / f"rank-{self._ranks.rank}.{n}", self._device) for n in numbers]
        if self._source is not None:
            self._copies = [StateFile(folder / f"copy-{self._source}.{n}", torch.device("cpu")) for n in numbers]

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
        self._pieces = [
            describe(s, is_on_disk=(s.name, s.kind, s.region) in written) for s in slices if s.start < s.stop
        ]
        need = sum(piece.tensor.nbytes for piece in tensors_to_copy(slices))
        files = self._own + self._copies
        total = len(files) * need
        missing = max(0, total - sum(file.free_bytes()[1] for file in files))
        of_ranks = self._all_gather([missing, total])
        of_node = [of_ranks[rank] for rank in self._neighbours]
        self._ranks.run_on_all_ranks(lambda: self._check_room(of_node, need), task, CheckpointError)

        def reserve() -> None:
            for file in self._own:
                file.snapshot.reserve(tensors_to_copy(slices))

        self._ranks.run_on_all_ranks(reserve, task, CheckpointError)
        sizes = self._all_gather(self._own[0].num_bytes)

        def reserve_copies() -> None:
            for file in self._copies:  # none without a source
                file.map(sizes[self._source or 0])

        self._ranks.run_on_all_ranks(reserve_copies, task, CheckpointError)

    def _check_room(self, of_node: list[list[int]], need: int) -> None:
        """Raises CheckpointError where the node lacks memory; ``of_node``: bytes missing and in all, of each rank."""
        missing, total = (sum(numbers) for numbers in zip(*of_node, strict=True))
        files = len(self._own + self._copies)
        free = min(host_memory()[0], self._own[0].free_bytes()[0])
        if missing > free:
            raise CheckpointError(
                f"the {len(of_node)} ranks of this node need {total / GIB:.1f} GiB of host memory, {files} copies of "
                f"{need / GIB:.2f} GiB each, and {free / GIB:.1f} GiB are free; use a smaller optimizer_state_dtype, "
                "more ranks on more nodes, or memory_checkpoint_interval=0"
            )

    def is_due(self, step: int) -> bool:
        """Whether ``step`` is to be copied. Local."""
        return self._interval.is_due(step)

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
            self._interval = Interval(0, "", self._ranks)
            if error is not None or self._ranks.rank == 0:
                reason = error or f"see the message of rank {failure[0]}"
                log.warning("the memory checkpoint failed, and no more are made in this process: %s", reason)
            return
        if self._interval.is_auto and self._last_step >= 0:
            step_s = (began - self._went_on) / max(1, header.step - self._last_step)
            self._interval.choose(self._cost_s, step_s)
        self._newest = 1 - self._newest
        file, manifest = self._own[self._newest], header.to_bytes().decode()
        file.clear()
        views = file.snapshot.take(tensors_to_copy(slices))
        base = file.data(file.num_bytes).data_ptr()
        index = {
            "layout": layout_of(slices),
            "start": self._start,
            "rank": self._ranks.rank,
            "ranks": self._ranks.size,
            "pieces": self._pieces,
            "sizes": file.sizes,
            "offsets": [view.data_ptr() - base for view in views],
            "manifest": manifest,
        }
        copy = self._copies[self._newest] if self._copies else None
        self._task = Task(lambda: self._finish(file, copy, header.step, index))
        self._interval.done(header.step)
        self._last_step, self._went_on = header.step, self.clock()
        self._cost_s = self._went_on - began
        self._stall_s = (self._stall_s or 0.0) + time.perf_counter() - stall_began

    def _finish(self, file: StateFile, copy: StateFile | None, step: int, index: dict[str, Any]) -> None:
        """Completes this rank's file and exchanges it with the buddies; in the background."""
        began = time.thread_time()
        _, error = attempt(lambda: self._complete(file, step, index))
        if copy is not None:  # also after an error: the buddies wait for this rank
            self._exchange(file, self._target, copy, self._source)
        self._thread_s += time.thread_time() - began
        if error is not None:
            raise error

    def _complete(self, file: StateFile, step: int, index: dict[str, Any]) -> None:
        file.snapshot.wait()
        digests, self._thread_s = digests_of(file.data(file.num_bytes))
        file.commit(step, file.num_bytes, index | {"digests": digests})

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
        for file in self._own:
            file.snapshot.before_update()

    def take_stall(self) -> float | None:
        """Returns the seconds that training stood still for copies since the last call; None without one. Local."""
        stall, self._stall_s = self._stall_s, None
        return stall

    def forget(self) -> None:
        """Makes all generations of this rank incomplete, as after wrong numbers. Local."""
        self._join()
        for file in self._own + self._copies:
            file.clear()
        self._interval.restart()
        self._last_step = -1

    def close(self) -> None:
        """Frees the memory; the run is over. Local."""
        self._join()
        for file in self._own + self._copies:
            file.free()
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
        for file in self._own + self._copies:
            state = file.state()
            # Steps that are done again may have other bits.
            if state is not None and (found is None or state.version != found[0]):
                file.clear()
        files = self._files_here()
        self._ranks.first_failure(None)  # nobody reads any more, and all have listed the same files
        self._free_others(files)
        return None if found is None else found[1]

    def _files_here(self) -> list[StateFile]:
        """This rank's share of the files of its node, whoever made them."""
        number, count = self._neighbours.index(self._ranks.rank), len(self._neighbours)
        paths = sorted(path for kind in ("rank", "copy") for path in self._folder.glob(f"{kind}-*"))
        return [StateFile(path, torch.device("cpu")) for path in paths[number::count]]

    def _free_others(self, files: list[StateFile]) -> None:
        """Removes what is left of ranks that this node does not have now."""
        current = {f"rank-{rank}" for rank in self._neighbours} | {f"copy-{source}" for source in self._sources}
        for file in files:
            if file.path.name.partition(".")[0] not in current:
                file.free()
            file.close()

    def _restore(self, slices: Sequence[TensorSlice], at_least: int) -> tuple[Version, Manifest] | None:
        """Fills the slices from the newest generation of which each rank's state is whole on some rank."""
        layout = layout_of(slices)
        states = [state for file in self._own + self._copies if (state := file.state()) is not None]
        held = {(state.version, state.owner): state for state in states if state.version[0] >= at_least}
        listed = [[version, owner, state.index["layout"]] for (version, owner), state in held.items()]
        everyone = self._all_gather([layout, listed])
        layouts = [its_layout for its_layout, _ in everyone]
        owners: dict[Version, set[int]] = {}  # ranks whose state somebody says to have
        for version, owner, its_layout in itertools.chain.from_iterable(entries for _, entries in everyone):
            if its_layout == layouts[owner]:
                owners.setdefault(tuple(version), set()).add(owner)
        for version in sorted(owners, reverse=True):
            if len(owners[version]) < self._ranks.size:
                continue
            own = [state for (its_version, _), state in held.items() if its_version == version]
            good = [state for state in own if state.index["layout"] == layouts[state.owner] and state.is_good()]
            holders = self._holders([state.owner for state in good])
            lost = [rank for rank in range(self._ranks.size) if rank not in holders]
            if lost:
                self._warn_of_damage(version[0], lost[0])
                continue
            missing = {rank for rank in holders if rank not in holders[rank]}
            try:
                found = self._fetch(version[0], {state.owner: state for state in good}, missing)
            except CheckpointError as error:  # on every rank
                if self._ranks.rank == 0:
                    log.warning("the memory checkpoint of step %d is not used: %s", version[0], error)
                continue
            self._newest = self._own.index(found.file)
            self._own[1 - self._newest].clear()  # it may be damaged, and must not be taken for this generation later
            task = "loading the memory checkpoint"
            self._ranks.run_on_all_ranks(partial(found.file.fill, slices, found), task, CheckpointError)
            return version, found.manifest
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

    def _fetch(self, step: int, good: dict[int, MemoryState], missing: set[int]) -> MemoryState:
        """Returns this rank's state; ranks that are ``missing`` theirs get it from a buddy.

        Args:
            step: of the generation.
            good: what this rank has of the generation, by owner.
            missing: ranks.

        Raises:
            CheckpointError: on every rank, where one cannot get its state.
        """
        rank = self._ranks.rank
        if not missing:
            return good[rank]
        sent = good[self._source].file if self._source is not None and self._source in missing else None
        received = self._own[0] if rank in missing else None
        _, failed = attempt(lambda: self._exchange(sent, self._source, received, self._target))

        def check() -> MemoryState:
            if failed is not None:
                raise failed
            state = good[rank] if received is None else received.state()
            if state is None or (received is not None and not state.is_good()):
                raise CheckpointError(f"the state of step {step} from rank {self._target} is damaged")
            return state

        state = self._ranks.run_on_all_ranks(check, "getting a state from another node", CheckpointError)
        if rank == min(missing):
            log.warning("rank %d got its state of step %d from rank %d", rank, step, self._target)
        return state

    # ---- at another layout

    def _write_out(self, templates: Sequence[TensorSlice], after: int, write_out: WriteOut) -> None:
        """Saves the newest generation after step ``after`` that ranks of another layout left, where all of it is there.

        Each rank of a node looks at some of the node's files. Of two that hold the same state one is taken.
        """
        files = self._files_here()
        states = [state for file in files if (state := file.state()) is not None and state.version[0] > after]
        listed = [[*state.version, state.index["ranks"], state.owner] for state in states]
        owners: dict[tuple[int, int, int], set[int]] = {}  # by step, start and number of ranks
        for step, start, size, owner in itertools.chain.from_iterable(self._all_gather(listed)):
            owners.setdefault((step, start, size), set()).add(owner)
        for step, start, size in sorted(owners, reverse=True):
            if len(owners[step, start, size]) < size:
                continue
            good = {state.owner: state for state in states if state.version == (step, start) and state.is_good()}
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
        for file in files:
            file.close()

    def _save(self, mine: list[MemoryState], templates: Sequence[TensorSlice], write_out: WriteOut) -> None:
        """Hands the slices of these states to ``write_out``, with the manifest of any one."""
        encoded = {piece.kind: piece.encoded for piece in templates if piece.encoded is not None}

        def read() -> list[TensorSlice]:
            return [piece for state in mine for piece in state.slices_on_disk(encoded)]

        slices = self._ranks.run_on_all_ranks(read, "reading memory checkpoints", CheckpointError)
        texts = self._ranks.all_gather_bytes(mine[0].index["manifest"].encode() if mine else b"")
        write_out(slices, parse_manifest(next(filter(None, texts)), "memory checkpoint"))

    # ---- between ranks

    def _all_gather(self, value: Any) -> list[Any]:
        return [json.loads(data) for data in self._ranks.all_gather_bytes(json.dumps(value).encode())]

    def _exchange(self, sent: StateFile | None, to: int | None, received: StateFile | None, source: int | None) -> None:
        """Sends a file to one rank and receives one from another. The training's group is not used.

        Of a file that is not complete only that is told. Raises OSError where this rank has no room for what would
        come; the others have gone on then.
        """
        found = None if sent is None else sent.state()
        said = [] if found is None else [found.generation.step, found.generation.num_bytes, found.index]
        text = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
        length, its_length = torch.tensor([len(text)]), torch.tensor([0])
        self._transfer(None if sent is None else length, to, None if received is None else its_length, source)
        its_text = torch.empty(int(its_length), dtype=torch.uint8)
        self._transfer(None if sent is None else text, to, None if received is None else its_text, source)
        its_said = [] if received is None else json.loads(its_text.numpy().tobytes())
        room: torch.Tensor | None = None
        error: Exception | None = None
        if received is not None:
            received.clear()
        if received is not None and its_said:
            room, error = attempt(lambda: received.data(its_said[1]))
        # The other way round: whether there is room. A sender would wait for ever for a receiver that has none.
        has_room, its_has_room = torch.tensor([error is None]), torch.tensor([True])
        self._transfer(None if received is None else has_room, source, None if sent is None else its_has_room, to)
        self._transfer(found.data if found is not None and its_has_room else None, to, room, source)
        if error is not None:
            raise error
        if received is not None and its_said:
            received.commit(*its_said)

    def _transfer(
        self, out: torch.Tensor | None, to: int | None, into: torch.Tensor | None, source: int | None
    ) -> None:
        """Sends one tensor and receives another, in parts side by side; None: nothing."""
        sent = [] if out is None else list(out.split(PART_BYTES))
        received = [] if into is None else list(into.split(PART_BYTES))
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
