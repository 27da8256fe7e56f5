"""Loads the micro-batches of one data-parallel rank.

The state of the data is one integer, the number of samples consumed. The optimizer step that starts there uses the
samples at positions [consumed, consumed + global_batch_size), whatever the layout (with a batch-size ramp, the size
that the ramp has there); a rank's share of them is

    position = consumed + (micro_batch * data_parallel_size + data_parallel_rank) * micro_batch_size + row

so the set of samples of a step depends neither on the data-parallel size nor on the micro-batch size, and a run may
resume with others. global_batch_size may change at a resume too: positions go on where they were, and nothing is
skipped or repeated. Another seq_length cuts the files into other instances: ``position_after_change`` keeps the number
of tokens consumed (and so epochs, stages and schedules), but the rest of the current epoch is drawn from the new
instances without regard to what was read of the old ones; whole epochs after it are exact again.

Shapes: B samples of a micro-batch, S positions.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Container
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.optimus.config.duration import BatchSizes, check_batch_sizes
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.data.dataset import (
    InstanceSet,
    LabelledSample,
    SampleOptions,
    make_sample,
    positions_in_documents,
)
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.fim import FillInTheMiddle
from megatron.optimus.data.mixture import Mixture, shuffled_rows
from megatron.optimus.data.order import samples_at, uniform_numbers
from megatron.optimus.layers import NO_LABEL
from megatron.optimus.layers.documents import Documents
from megatron.optimus.platform import device as devices

_CHECKED_AHEAD = 2  # batches that must have been read before the next step
_MOST_NAMED = 16
_READ_AHEAD = _CHECKED_AHEAD + 2  # batches that are being read while a step runs


class Batch(NamedTuple):
    """One micro-batch, or a context-parallel rank's part of one."""

    tokens_BS: Tensor  # int64
    labels_BS: Tensor  # int64, the token to predict after each token, or NO_LABEL
    documents: Documents | None = None  # attention stays inside these; None: each row is one document
    positions_BS: Tensor | None = None  # int64; None: 0 to S - 1 in each row
    num_labels: float | None = None  # labels other than NO_LABEL; None: all
    # Whether all micro-batches of the run have as many labels (context-parallel parts: on average).
    has_equal_label_counts: bool = False

    def to(self, device: torch.device) -> Batch:
        """Copies the batch to a device without waiting; a pinned batch is copied while the device computes."""
        soon = devices.pins_memory(device)
        tokens, labels = (x.to(device, non_blocking=soon) for x in (self.tokens_BS, self.labels_BS))
        documents = None if self.documents is None else self.documents.to(device)
        positions = None if self.positions_BS is None else self.positions_BS.to(device, non_blocking=soon)
        return self._replace(tokens_BS=tokens, labels_BS=labels, documents=documents, positions_BS=positions)

    def pin_memory(self) -> Batch:
        """Copies the batch to page-locked memory."""
        documents = None if self.documents is None else self.documents.pin_memory()
        positions = None if self.positions_BS is None else self.positions_BS.pin_memory()
        tokens, labels = self.tokens_BS.pin_memory(), self.labels_BS.pin_memory()
        return self._replace(tokens_BS=tokens, labels_BS=labels, documents=documents, positions_BS=positions)


class BatchLoader:
    """Loads the micro-batches of one data-parallel rank and reads the next ones in a thread.

    What the thread reads depends on positions only, so reading ahead changes no result. An error in it is raised by the
    call that asks for that batch; ``failure`` returns it earlier.

    Args:
        instances: what samples are drawn from. A ``Mixture`` brings its own order, also without ``shuffle``: each
            corpus has its share of every batch, and one that is too small for its share is repeated.
        seq_length: that of the instances
        global_batch_size: samples of an optimizer step, over all ranks
        micro_batch_size: samples of a micro-batch
        data_parallel_rank: this rank
        data_parallel_size: number of data-parallel ranks
        seed: of the order of samples, and of fill in the middle
        shuffle: True: samples come in the order of order.py, epoch after epoch, without end. False, for validation:
            they come in file order, once, in ``num_batches`` whole global batches.
        max_batches: upper limit of ``num_batches``; None: as many as there are
        ramp: batch-size ramp as ``BatchSizes`` takes it; the batch at a position has the size that the ramp has there
        options: what is made of documents within a sample
        fim: reorders some documents, by seed and position alone
        select: applied to each batch before it is pinned, to take a context-parallel rank's part of it
        pin_for: accelerator that copies batches while it computes: batches are put into page-locked memory; None: not

    Attributes:
        num_batches: global batches without ``shuffle``; None with it

    Raises:
        ConfigError: the batch sizes do not divide.
        DataError: without ``shuffle`` there is not even one batch.
    """

    def __init__(
        self,
        instances: InstanceSet | Mixture,
        *,
        seq_length: int,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        seed: int,
        shuffle: bool = True,
        max_batches: int | None = None,
        ramp: tuple[int, ...] = (),
        options: SampleOptions = SampleOptions(),  # noqa: B008  # frozen
        fim: FillInTheMiddle | None = None,
        select: Callable[[Batch], Batch] = lambda batch: batch,
        pin_for: torch.device | None = None,
    ) -> None:
        if seq_length != instances.seq_length:
            raise ConfigError(f"seq_length={seq_length} differs from the instances' {instances.seq_length}")
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ConfigError(f"data_parallel_rank={data_parallel_rank} must lie in [0, {data_parallel_size})")
        self._sizes = BatchSizes(global_batch_size, ramp)
        check_batch_sizes(self._sizes, micro_batch_size, data_parallel_size)
        self._instances = instances
        self._rank, self._layout = data_parallel_rank, (data_parallel_size, micro_batch_size)
        self._seed = seed
        self._shuffle = shuffle
        self._options, self._fim, self._select = options, fim, select
        self._pinned = pin_for is not None and devices.pins_memory(pin_for)
        self.num_batches: int | None = None
        if not shuffle:
            available = len(instances) // global_batch_size
            if not available:
                raise DataError(
                    f"too little data: {len(instances)} instances of seq_length={seq_length} do not fill one global "
                    f"batch of {global_batch_size}; give this split a larger share, or use smaller batches"
                )
            self.num_batches = available if max_batches is None else min(available, max_batches)
        elif max_batches is not None:
            raise ConfigError("max_batches needs shuffle=False")
        # A thread's current device is the first one: pinning there would take memory of another rank's device.
        self._executor = ThreadPoolExecutor(
            1,
            thread_name_prefix="optimus-data",
            initializer=devices.set_device,
            initargs=(pin_for or torch.device("cpu"),),
        )
        self._ahead: deque[tuple[int, Future[list[Batch]]]] = deque()  # (position, batch that is being read)
        self._end: int | None = None  # position at which the run ends, where that is known
        self._skipped: Container[int] = ()  # positions of batches that will not be asked for

    def sample_ids(self, consumed: int) -> npt.NDArray[np.int64]:
        """Finds the instances of the global batch that starts at position ``consumed``: int64 [size of that batch].

        Raises:
            ValueError: the position is negative.
            DataError: without ``shuffle``, the position lies past the last whole batch.
        """
        size = self._sizes.at(consumed)
        if self._shuffle and isinstance(self._instances, InstanceSet):
            return samples_at(consumed, size, len(self._instances), self._seed)
        if consumed < 0:
            raise ValueError(f"position={consumed} must not be negative")
        if not self._has(consumed):
            raise DataError(
                f"no batch at sample {consumed}: this split gives {self.num_batches} batches of {size} samples"
            )
        if isinstance(self._instances, Mixture):
            return self._instances.ids_at(consumed, size)
        return np.arange(consumed, consumed + size)

    def describe(self, consumed: int, micro_batch: int) -> str:
        """Names the samples of one of this rank's micro-batches of the step that starts at position ``consumed``."""
        positions, ids = (own[micro_batch].tolist() for own in self._own(consumed))
        return f"micro-batch {micro_batch}: samples {_listed(positions)} of the order, instances {_listed(ids)}"

    def batch(self, consumed: int) -> list[Batch]:
        """Returns this rank's micro-batches of the optimizer step that starts at position ``consumed``.

        Each has contiguous int64 [micro_batch_size, seq_length] tokens and labels, or what ``select`` takes of them.
        Ask for positions in the order of the run: a call for another one drops what was read ahead. Raises the errors
        of ``sample_ids``, and DataError if files cannot be read.
        """
        self._read_ahead(consumed, 1 + _READ_AHEAD)
        _, batches = self._ahead.popleft()
        return batches.result()

    def batch_of_rank(self, consumed: int, data_parallel_rank: int, count: int) -> list[Batch]:
        """Reads the first ``count`` micro-batches that another data-parallel rank has in the step at ``consumed``."""
        return self._executor.submit(self._read, consumed, data_parallel_rank, count).result()

    def start(self, consumed: int, steps: int, skipped: Container[int] = ()) -> None:
        """Tells the loader which batches the run will ask for, so that it reads no others, and reads the first of them.

        Args:
            consumed: position of the first batch
            steps: number of batches
            skipped: positions of those among them that will not be asked for

        Raises:
            DataError: the first batches cannot be read.
        """
        self._end, self._skipped = self._sizes.after(consumed, steps), skipped
        while consumed in skipped:
            consumed += self._sizes.at(consumed)
        if self._has(consumed):
            self._read_ahead(consumed, _READ_AHEAD)
        self.check()

    def failure(self) -> BaseException | None:
        """Returns the first error in reading the next two batches, or None; waits until they are read.

        Two, because ranks on accelerators learn of another rank's error only after they have queued the next step. A
        later batch may still be read without a step waiting for it.
        """
        near = itertools.islice(self._ahead, _CHECKED_AHEAD)
        return next(filter(None, (batches.exception() for _, batches in near)), None)

    def check(self) -> None:
        """Raises the error that ``failure`` returns, if any."""
        if (error := self.failure()) is not None:
            raise error

    def _read_ahead(self, consumed: int, count: int) -> None:
        """Starts reading up to ``count`` batches from position ``consumed`` on, the first of them in any case."""
        if not self._ahead or self._ahead[0][0] != consumed:
            self._ahead.clear()
            self._ahead.append((consumed, self._executor.submit(self._read, consumed)))
        position = self._ahead[-1][0] + self._sizes.at(self._ahead[-1][0])
        while len(self._ahead) < count and self._has(position):
            if position not in self._skipped:
                self._ahead.append((position, self._executor.submit(self._read, position)))
            position += self._sizes.at(position)

    def close(self) -> None:
        """Ends the reading thread. The loader cannot be used after that."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _has(self, consumed: int) -> bool:
        if self.num_batches is None:
            return self._end is None or consumed < self._end
        return consumed + self._sizes.full <= self.num_batches * self._sizes.full

    def _read(self, consumed: int, rank: int | None = None, count: int | None = None) -> list[Batch]:
        batches = []
        length, read = self._instances.seq_length, self._instances.read
        for positions, ids in itertools.islice(zip(*self._own(consumed, rank), strict=True), count):
            samples = []
            for position, i in zip(positions.tolist(), ids.tolist(), strict=True):
                transform = None
                if self._fim is not None:
                    transform = partial(self._fim.apply, uniform=uniform_numbers(self._seed, position))
                samples.append(make_sample(read(i), length, self._options, transform))
            batch = self._select(self._collate(samples))
            batches.append(batch.pin_memory() if self._pinned else batch)
        return batches

    def _collate(self, samples: list[LabelledSample]) -> Batch:
        options, length = self._options, self._instances.seq_length
        tokens_BS = torch.from_numpy(np.stack([sample.tokens_S for sample in samples]))
        labels_BS = torch.from_numpy(np.stack([sample.labels_S for sample in samples]))
        starts = [sample.starts for sample in samples]
        documents = Documents.from_starts(starts, length) if options.reset_attention_mask else None
        positions_BS = None
        if options.reset_position_ids:
            positions_BS = torch.from_numpy(np.stack([positions_in_documents(own, length) for own in starts]))
        each = self._instances.labels_per_sample
        if each is None or options.eod_mask_loss or self._fim is not None:
            return Batch(tokens_BS, labels_BS, documents, positions_BS, int((labels_BS != NO_LABEL).sum()))
        return Batch(tokens_BS, labels_BS, documents, positions_BS, each * len(samples), has_equal_label_counts=True)

    def _own(self, consumed: int, rank: int | None = None) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Positions and instances of a rank's samples, None: this one's: int64 [micro-batches, micro_batch_size]."""
        ids, size = self.sample_ids(consumed), self._sizes.at(consumed)
        order = shuffled_rows(size, consumed) if isinstance(self._instances, Mixture) else np.arange(size)
        own = order.reshape(-1, *self._layout)[:, self._rank if rank is None else rank]
        return consumed + own, ids[own]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:_MOST_NAMED])) + ", ..." * (len(numbers) > _MOST_NAMED)


def position_after_change(consumed: int, old_seq_length: int, new_seq_length: int) -> int:
    """Converts a number of consumed samples to another sequence length, so that at least the same tokens are consumed.

    Args:
        consumed: samples consumed so far
        old_seq_length: their tokens each
        new_seq_length: tokens of a sample from now on

    Returns:
        Samples of ``new_seq_length`` tokens.

    Raises:
        ConfigError: a length is below 1.
    """
    if min(old_seq_length, new_seq_length) < 1 or consumed < 0:
        raise ConfigError(f"seq_length={new_seq_length} after {consumed} samples of {old_seq_length}: must be above 0")
    return -(-consumed * old_seq_length // new_seq_length)
