"""Saving beside training: a snapshot, background writing, and a commit that all ranks agree on without waiting.

    main thread                          background threads (which never communicate)
    start: snapshot of this rank's       every rank: hash and write its own pieces, sync
      slices                             rank 0, when all have written: manifest, rename, prune
    poll at each step boundary: one
      tiny all-reduce whose result is
      read at the next boundary

Every decision follows from a reduced number, so all ranks take it at the same boundary. A save that finds the previous
one unfinished waits for it: no checkpoint is left out that the interval promised. An error in any rank's thread is
known to every rank at the same boundary, where the unfinished directory is removed. With ``retry_seconds`` an error of
the file system is followed by further attempts, with pauses that grow, from the copy that is still in host memory; a
newer save takes the place of one that still fails. Any other error, and one after that time, is raised on every rank.

With a disk of its own on each node, the pieces are written there first, which frees the host memory for the next save,
and are then copied, verified, to the folder that all ranks see.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import xxhash

from megatron.optimus.checkpoint import commit
from megatron.optimus.checkpoint.errors import CheckpointError, SaveError
from megatron.optimus.checkpoint.manifest import MANIFEST_NAME, Manifest, StoredPiece
from megatron.optimus.checkpoint.save_plan import FILES_PER_NODE, SavePlan, make_plan, pieces_of
from megatron.optimus.checkpoint.slices import TensorSlice, tensors_to_copy
from megatron.optimus.checkpoint.snapshot import Snapshot
from megatron.optimus.checkpoint.tokenizer_files import FOLDER as TOKENIZER_FOLDER
from megatron.optimus.checkpoint.untrusted import check_regular
from megatron.optimus.checkpoint.values import WARNINGS_FIELD, describe_values, warnings_of
from megatron.optimus.checkpoint.writer import Job, Task, copy, write
from megatron.optimus.platform import device as devices
from megatron.optimus.platform import files, heartbeat
from megatron.optimus.platform.environment import node_name
from megatron.optimus.platform.ranks import NO_FAILURE, Ranks, attempt

# Each rank sends one number and all take the minimum: numbers below NO_FAILURE are failures, and _WORKING on any rank
# hides _DONE on the others. When all are done, the minimum is rank 0's number, _DONE plus the revision that it has
# committed, because the other ranks add _NOT_RANK_0.
_WORKING, _DONE, _NOT_RANK_0 = NO_FAILURE, NO_FAILURE + 1, 1 << 32
_OTHER, _SAME = NO_FAILURE, NO_FAILURE + 1  # the slices of this save, compared with those of the previous one
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0  # before an attempt to save again; each is twice the one before

log = logging.getLogger("optimus")


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint."""

    path: Path
    kind: str
    step: int
    stall_s: float  # in which training stood still on this rank: the host in ``start``, the device before its update
    drain_s: float  # from the start of the save until all ranks knew that it was committed
    hash_wait_s: float  # in which this rank wrote nothing because it was hashing
    warnings: tuple[str, ...] = ()  # of values in it that are not finite or far too large; rank 0 alone knows


class Saver:
    """Writes the checkpoints of one run. Every method is collective over ``ranks``, except where it says local.

    Args:
        root: the folder of checkpoints, seen by all ranks.
        ranks: None: all ranks, on the CPU. ``ranks.device`` is where the slices are.
        asynchronous: False saves inside ``start``, from the live tensors, without a copy in memory.
        node: ranks that give the same name share ``files_per_node`` files; None: the ranks of one host.
        files_per_node: at most.
        local: a folder on a disk of each node that is written first; it is empty when a save is over.
        check_lock: rank 0 calls it before every commit; it raises when the folder belongs to another job now.
        tokenizer: files of the run's tokenizer by name, which rank 0 puts into every checkpoint.
        retry_seconds: how long saves may fail, from the first that did, before the error is raised; 0: at once.
        on_failure: called on every rank with step and text of a failure that is not raised.
    """

    def __init__(
        self,
        root: Path,
        *,
        ranks: Ranks | None = None,
        asynchronous: bool = True,
        node: str | None = None,
        files_per_node: int = FILES_PER_NODE,
        local: Path | str | None = None,
        check_lock: Callable[[], None] = lambda: None,
        tokenizer: Mapping[str, bytes] | None = None,
        retry_seconds: float = 0.0,
        on_failure: Callable[[int, str], None] = lambda step, text: None,
    ) -> None:
        self._named = Path(root)
        self._root = self._named.absolute()  # the threads go on, whatever folder the program moves to
        self._ranks = ranks or Ranks(None, "cpu")
        self._device = self._ranks.device
        self._asynchronous = asynchronous
        self._node, self._files_per_node = node or node_name(), files_per_node
        self._local = None
        if local is not None:  # two runs may share the disk, not the folder
            folder = f"{xxhash.xxh3_64_hexdigest(str(self._root).encode())}-{node or socket.gethostname()}"
            self._local = Path(local).absolute() / folder
        self._check_lock, self._tokenizer = check_lock, dict(tokenizer or {})
        self._retry_seconds, self._on_failure = retry_seconds, on_failure
        self._failing_since: float | None = None  # time.monotonic of the first failure since a save that succeeded
        self._plans: dict[str, tuple[list[StoredPiece], SavePlan]] = {}
        self._snapshots: dict[str, Snapshot] = {}
        self._jobs: deque[Job] = deque()
        self._first_nonce, self._num_saves = 0, 0  # of temporary directories; drawn with the first plan
        self._stall_s: float | None = None
        self._read_min_code: Callable[[], int] | None = None  # result of the all-reduce begun at the previous boundary

    # ---- what a training loop calls

    def prepare(self, slices: Sequence[TensorSlice], header: Manifest) -> None:
        """Prepares the first ``start`` with such arguments, so that it does not delay training. Optional.

        Makes the plan of which rank writes what, and allocates the host memory for the copy and the folder on the
        node's disk. Raises as ``start`` does.
        """
        self._plan(slices, header)
        local = self._local
        if local is not None:
            self._ranks.run_on_all_ranks(lambda: files.make_directory(local), f"making {local}", CheckpointError)
        if self._asynchronous:
            snapshot = self._snapshots.setdefault(header.kind, Snapshot(self._device))
            task = "taking host memory for copies of checkpoints (--no-async-save needs none)"
            self._ranks.run_on_all_ranks(lambda: snapshot.reserve(tensors_to_copy(slices)), task, CheckpointError)

    def start(
        self, slices: Sequence[TensorSlice], header: Manifest, *, retain: int | None, began: float | None = None
    ) -> list[Saved]:
        """Begins a save. Waits first until earlier ones of the same kind or of another step have been written.

        Args:
            slices: what this rank writes. Over all ranks they cover every element of every tensor exactly once.
            header: a manifest without files and tensors; that of rank 0 is used.
            retain: how many of the newest checkpoints of this kind stay, this one included; None keeps all.
            began: ``time.perf_counter`` when training began to stand still for this save; None: now.

        Returns:
            Earlier checkpoints that were committed meanwhile, and without ``asynchronous`` this one too.

        Raises:
            CheckpointError: on every rank when any rank refuses its arguments or has failed to write; the message names
                the rank. With ``asynchronous``, errors in writing are raised by a later ``poll``, ``start`` or
                ``drain``. The unfinished directory is removed and the earlier checkpoints stay as they were.
        """
        began = time.perf_counter() if began is None else began
        if retain is not None and retain < 1:
            raise CheckpointError(f"save_retain={retain}: must be at least 1")
        finished: list[Saved] = []
        self._drop_failing(header)
        called, drained_s = time.perf_counter(), 0.0
        while any(
            job.phase == 0 and (job.header.step != header.step or job.header.kind == header.kind) for job in self._jobs
        ):
            if not drained_s:
                log.warning(
                    "step %d: waiting for the checkpoint of step %d to be written; a larger save_interval avoids this",
                    header.step,
                    self._jobs[0].header.step,
                )
            finished += self._advance(wait=True)
            self._drop_failing(header)
            drained_s = time.perf_counter() - called
        plan = self._plan(slices, header)
        temporary = self._new_directory(header)
        job = Job(header, plan, [], None, temporary, retain, began)
        job.local = self._local_directory(temporary)
        job.phases = self._phases(job)
        _, error = attempt(lambda: self._attach_tensors(job, _with_values(slices)))
        if error is not None:
            # Reported with this rank's writing; an exchange now would wait for the other ranks' copies.
            job.phases[0] = partial(_fail, error)
        self._jobs.append(job)
        if len(self._jobs) == 1:
            self._begin(job)
        job.stall_s = time.perf_counter() - began
        self._stall_s = (self._stall_s or 0.0) + time.perf_counter() - began - drained_s
        return finished if self._asynchronous else finished + self.drain()

    def _new_directory(self, header: Manifest) -> Path:
        self._num_saves += 1
        nonce = (self._first_nonce + self._num_saves) % (1 << 62)
        return commit.temporary_path(self._root, header.step, nonce, header.kind)

    def _local_directory(self, temporary: Path) -> Path | None:
        return None if self._local is None else self._local / temporary.name

    def _attach_tensors(self, job: Job, slices: list[TensorSlice]) -> None:
        """Gives the job the tensors to write: a copy to host memory that has been started, or the live ones."""
        if self._asynchronous:
            job.snapshot = self._snapshots.setdefault(job.header.kind, Snapshot(self._device))
            copies = iter(job.snapshot.take(tensors_to_copy(slices)))
            job.slices = [piece.moved(copies) for piece in slices]
        else:
            job.slices = slices
            devices.synchronize(torch.device(self._device))  # the writing thread uses another stream

    def before_update(self) -> None:
        """Queues the coming update behind copies that are under way. Call it before every optimizer step. Local."""
        for snapshot in self._snapshots.values():
            snapshot.before_update()

    def poll(self) -> list[Saved]:
        """Returns what has been committed since; does not wait. Call it at every step boundary. Raises as ``start``."""
        return self._advance(wait=False)

    def take_stall(self) -> float | None:
        """Returns the seconds spent in here since the last call; None where no save was in flight. Local."""
        stall, self._stall_s = self._stall_s, None
        return stall

    def drain(self) -> list[Saved]:
        """Waits until no save is in flight; returns those that were. Raises as ``start`` does."""
        finished = []
        while self._jobs:
            finished += self._advance(wait=True)
        return finished

    # ---- one boundary

    def _advance(self, *, wait: bool) -> list[Saved]:
        if not self._jobs:
            return []
        began = time.perf_counter()
        try:
            return self._advance_first(self._jobs[0], wait=wait)
        finally:
            self._stall_s = (self._stall_s or 0.0) + time.perf_counter() - began

    def _advance_first(self, job: Job, *, wait: bool) -> list[Saved]:
        code = _WORKING if self._read_min_code is None else self._read_min_code()
        if code == _WORKING:
            if wait and job.task is not None:
                job.task.join()
            self._read_min_code = self._ranks.start_all_reduce_min(self._state(job))
            if not wait:
                return []
            code = self._read_min_code()
        self._read_min_code = None
        if code < NO_FAILURE:
            self._after_failure(job, code)
            return []
        if code == _WORKING:
            return []
        return self._next_phase(job, code - _DONE)

    def _state(self, job: Job) -> int:
        if job.task is not None and not job.task.is_done:
            return _WORKING
        error = job.task.error if job.task is not None else None
        if error is not None:
            return self._ranks.encode_failure(_os_error(error) or error)
        return _DONE + (job.revision if self._ranks.rank == 0 else _NOT_RANK_0)

    def _next_phase(self, job: Job, revision: int) -> list[Saved]:
        """Goes on when all ranks have finished a phase: written -> (copied ->) committed, under ``revision``.

        It exchanges nothing, because an exchange would wait behind the step that has been queued.
        """
        job.phase += 1
        if job.phase == 1 and job.snapshot is not None:
            device_stall_s = job.snapshot.device_stall_s()
            job.stall_s += device_stall_s
            self._stall_s = (self._stall_s or 0.0) + device_stall_s
        if job.phase < len(job.phases):
            self._begin(job)
            return []
        self._jobs.popleft()
        self._failing_since = None
        if self._jobs:
            self._begin(self._jobs[0])
        name = commit.Committed(job.header.step, revision, job.header.kind).name
        drain_s = time.perf_counter() - job.started
        stall_s = job.stall_s if self._asynchronous else drain_s
        saved = Saved(
            path=self._root / name,
            kind=job.header.kind,
            step=job.header.step,
            stall_s=stall_s,
            drain_s=drain_s,
            hash_wait_s=job.hash_wait_s,
            warnings=job.warnings,
        )
        log.info("saved %s in %.1f s, of which training waited %.2f s", self._named / name, drain_s, stall_s)
        return [saved]

    def _after_failure(self, job: Job, code: int) -> None:
        """Tries a save again in which some rank failed, or raises. All ranks know of it at the same boundary."""
        failure = self._ranks.decode_failure(code)
        assert failure is not None
        self._end_writing(job)
        cause = job.task.error if job.task is not None else None
        error = self._ranks.failure_error(failure, cause, self._task(job.header), SaveError)
        is_of_files = failure[1] != 0
        now = time.monotonic()
        self._failing_since = now if self._failing_since is None else self._failing_since
        # By rank 0's clock: all ranks must go on, or none.
        failing_s = self._ranks.broadcast([int(now - self._failing_since)])[0] if is_of_files else 0
        if not is_of_files or failing_s >= self._retry_seconds:
            self._jobs.clear()
            self._remove(job, job.local)
            if is_of_files and self._retry_seconds:
                error.args = (f"{error}; nothing could be saved for {failing_s / 60:.1f} minutes",)
            raise error from cause
        heartbeat.beat("saving a checkpoint")
        # The copy in host memory is gone once the node's disk has it, which is then copied from again.
        job.phase = min(job.phase, 1) if job.local is not None else 0
        self._remove(job, job.local if job.phase == 0 else None)
        job.temporary, job.attempts = self._new_directory(job.header), job.attempts + 1
        if job.phase == 0:  # not where another rank may still be removing the first attempt
            job.local = self._local_directory(job.temporary)
        pause = min(FIRST_PAUSE_S * 2 ** (job.attempts - 1), LONGEST_PAUSE_S)
        # Its copy in host memory may belong to a later save now.
        is_lost = job.phase == 0 and any(later.header.kind == job.header.kind for later in list(self._jobs)[1:])
        outlook = "a later step is saved in its place" if is_lost else f"the next attempt is in {pause:g} s"
        self._on_failure(job.header.step, f"{error}; {outlook}, training goes on")
        if is_lost:
            self._jobs.popleft()
            self._begin(self._jobs[0])
        else:
            self._begin(job, pause)

    def _drop_failing(self, header: Manifest) -> None:
        """Gives up a save that has failed and is tried again, and what waits behind it, for a newer one. Collective."""
        if not self._jobs or not self._jobs[0].attempts:
            return
        job = self._jobs[0]
        if job.header.step == header.step and job.header.kind != header.kind:
            return  # the two kinds of one step go one after the other
        if self._read_min_code is not None:
            self._read_min_code()
            self._read_min_code = None
        job.is_dropped.set()
        self._end_writing(job)
        self._remove(job, job.local)
        for dropped in self._jobs:
            words = dropped.header.step, dropped.header.kind, header.step
            log.warning("step %d could not be saved (%s checkpoint): step %d is saved now", *words)
        self._jobs.clear()

    def _end_writing(self, job: Job) -> None:
        """Waits until no rank writes this save any more. Collective."""
        if job.task is not None:
            job.task.join()
        self._ranks.first_failure(None)

    def _remove(self, job: Job, local: Path | None) -> None:
        """Removes what a failed save has written, on the node's disk too if that is given."""
        unfinished = [job.temporary] if self._ranks.rank == 0 else []
        unfinished += [local] if local is not None and job.plan.cleans_local_disk else []
        for directory in unfinished:
            try:
                if directory.is_dir():
                    files.delete_tree(directory)
            except OSError as reason:
                log.warning("%s could not be removed: %s", directory, reason)

    def _task(self, header: Manifest) -> str:
        return f"saving step {header.step} to {self._named}"

    # ---- planning

    def _plan(self, slices: Sequence[TensorSlice], header: Manifest) -> SavePlan:
        """Returns the previous save's plan if the slices are the same on every rank, else makes a new one.

        One exchange of one number tells both that and whether any rank refuses its arguments.
        """
        task = self._task(header)
        own, error = attempt(lambda: self._check(slices, header))
        known = self._plans.get(header.kind)
        answer = _SAME if known is not None and known[0] == own else _OTHER
        if error is not None:
            answer = self._ranks.encode_failure(error)
        answer = self._ranks.start_all_reduce_min(answer)()
        failure = self._ranks.decode_failure(answer)
        if failure is not None:
            raise self._ranks.failure_error(failure, error, task, CheckpointError) from error
        if answer == _SAME:
            assert known is not None
            return known[1]
        assert own is not None
        plan = make_plan(own, self._ranks, self._node, task, self._files_per_node)
        self._plans[header.kind] = own, plan
        if not self._first_nonce:
            [self._first_nonce] = self._ranks.broadcast([secrets.randbits(62)])
        return plan

    def _check(self, slices: Sequence[TensorSlice], header: Manifest) -> list[StoredPiece]:
        if header.kind not in ("full", "model"):
            raise CheckpointError(f"kind={header.kind!r}: must be 'full' or 'model'")
        if not 0 <= header.step < 10**12:
            raise CheckpointError(f"step={header.step}: must be in 0 ... 10^12-1")
        if self._ranks.rank == 0:
            header.to_bytes()  # raises unless config and metadata are plain JSON
        return pieces_of(slices)

    # ---- background threads

    def _begin(self, job: Job, pause_s: float = 0.0) -> None:
        action = job.phases[job.phase]

        def after_pause() -> None:
            if action is not None and not job.is_dropped.wait(pause_s):
                action()

        job.task = Task(after_pause if pause_s else action) if action is not None else None

    def _phases(self, job: Job) -> list[Callable[[], None] | None]:
        is_first, local = self._ranks.rank == 0, self._local
        if local is None:
            return [lambda: write(job, job.first_directory), (lambda: self._commit(job)) if is_first else None]

        def end() -> None:
            if is_first:
                self._commit(job)
            if job.plan.cleans_local_disk:
                for leftover in list(local.iterdir()):  # also those of killed saves
                    files.delete_tree(leftover)

        # A later attempt has other directories.
        return [lambda: write(job, job.first_directory), lambda: copy(job, job.first_directory), end]

    def _commit(self, job: Job) -> None:
        """Commits a save whose pieces are all written, on rank 0: manifest, rename, deletion of older checkpoints."""
        sizes, tensors, largest = job.plan.entries(job.temporary)
        header, job.warnings = _marked(job.header, describe_values(largest))
        for file, size in sizes.items():
            check_regular(job.temporary / file, size)
        data = replace(header, files=sizes, tensors=tensors).to_bytes()
        job.plan.remove_hashes(job.temporary)
        if self._tokenizer:
            files.make_directory(job.temporary / TOKENIZER_FOLDER)
            for name, content in self._tokenizer.items():
                files.write_new(job.temporary / TOKENIZER_FOLDER / name, content)
            files.sync_directory(job.temporary / TOKENIZER_FOLDER)
        files.write_new(job.temporary / MANIFEST_NAME, data)
        self._check_lock()
        saved = commit.commit(self._root, job.temporary, job.header.step, job.header.kind)
        job.revision = saved.revision
        commit.prune(self._root, saved, job.retain)
        newest = max([saved, *commit.list_committed(self._root, saved.kind)])  # the folder may have vanished since
        if newest > saved:
            log.warning(
                "%s also holds the newer %s, from which an automatic resume would continue; move it away if this run "
                "should replace it",
                self._root,
                newest.name,
            )


def _marked(header: Manifest, found: list[str]) -> tuple[Manifest, tuple[str, ...]]:
    """Adds what was found in the values to the warnings that the header has. Returns the header and all of them."""
    lines = [*warnings_of(header.metadata), *found]
    for line in found:
        log.warning("step %d is saved, but %s; resume from an earlier checkpoint", header.step, line)
    metadata = header.metadata | ({WARNINGS_FIELD: lines} if lines else {})
    return replace(header, metadata=metadata), tuple(found)


def _fail(error: Exception) -> None:
    raise error


def _os_error(error: BaseException | None) -> OSError | None:
    """The error of the file system that is behind this one, if there is one."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error


def _with_values(slices: Sequence[TensorSlice]) -> list[TensorSlice]:
    return [piece for piece in slices if piece.start < piece.stop]
