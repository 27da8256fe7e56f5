"""Batches of token ids for one rank.

The state of the data is one integer, the number of samples consumed. The optimizer step that starts there uses
positions [consumed, consumed + global_batch_size), whatever the layout (of a batch-size ramp, the size that holds
there); a rank's share of them is

    position = consumed + (micro_batch * data_parallel_size + data_parallel_rank) * micro_batch_size + row

so the set of samples of a step depends neither on the data-parallel size nor on the micro-batch size, and a run may
resume with others. Changing global_batch_size at resume is fine too: positions go on where they were, and nothing is
skipped or repeated. Changing seq_length cuts the files into other instances: ``position_after_change`` keeps the number
of tokens consumed (and so epochs, stages and schedules), but the rest of the epoch under way is drawn from the new
instances without regard to what was read of the old ones; whole epochs after it are exact again.
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
from megatron.optimus.data.dataset import InstanceSet
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.fim import FillInTheMiddle
from megatron.optimus.data.mixture import Mixture, mixed_rows
from megatron.optimus.data.order import chances, samples_at
from megatron.optimus.data.samples import Sample, SampleOptions, make_sample, positions
from megatron.optimus.layers import NO_LABEL
from megatron.optimus.layers.documents import Documents
from megatron.optimus.platform import device as devices

_KNOWN = 2  # batches that must have been read before the next step
_AHEAD = _KNOWN + 2  # batches that are being read while a step runs


class Batch(NamedTuple):
    """One micro-batch; label [b, s] is the token that follows token [b, s], or NO_LABEL."""

    tokens_BS: Tensor  # int64
    labels_BS: Tensor  # int64
    documents: Documents | None = None  # what attention must not cross; None: each row is one document
    positions_BS: Tensor | None = None  # int64; None: 0 to S - 1 in each row
    num_labels: float | None = None  # labels that count; None: all
    is_same: bool = False  # all micro-batches of the run have ``num_labels``; context-parallel parts on average

    def to(self, device: torch.device) -> Batch:
        """On the device, without waiting for the copies; a pinned batch is copied while the device computes."""
        tokens, labels = (x.to(device, non_blocking=True) for x in (self.tokens_BS, self.labels_BS))
        documents = None if self.documents is None else self.documents.to(device)
        places = None if self.positions_BS is None else self.positions_BS.to(device, non_blocking=True)
        return self._replace(tokens_BS=tokens, labels_BS=labels, documents=documents, positions_BS=places)

    def pin_memory(self) -> Batch:
        documents = None if self.documents is None else self.documents.pin_memory()
        places = None if self.positions_BS is None else self.positions_BS.pin_memory()
        tokens, labels = self.tokens_BS.pin_memory(), self.labels_BS.pin_memory()
        return self._replace(tokens_BS=tokens, labels_BS=labels, documents=documents, positions_BS=places)


class BatchLoader:
    """Micro-batches of one data-parallel rank.

    With ``shuffle`` the samples come in the seeded order of order.py, epoch after epoch, without end. Without it they
    come in file order, once: for validation. Then only whole global batches are given, ``num_batches`` of them, at most
    ``max_batches`` if that is set. A ``Mixture`` brings its own order, also without ``shuffle``: each corpus has its
    share of every batch, and one that is too small for its share is repeated.

    ``ramp``: as ``BatchSizes`` takes it; the batch at a position then has the size that holds there.
    ``options`` say what is made of documents within a sample; ``fim`` changes some of them, by seed and position alone.
    ``keep`` is applied to each batch, before ``pin_for``, which names an accelerator: batches then lie in page-locked
    memory, from which it copies while it computes.

    A thread reads the ``_AHEAD`` batches after the one just given; what it reads depends on positions only, so this
    changes no result, and an error in it is raised by the call that asks for that batch. ``failure`` tells of it
    before: ``_KNOWN`` steps ahead, as ranks on accelerators learn what one of them met when they have queued the step
    after. What is read beyond those may be late without a step waiting for it.

    Raises ConfigError if the batch sizes do not divide; DataError if there is not even one batch without ``shuffle``.
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
        keep: Callable[[Batch], Batch] = lambda batch: batch,
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
        self._options, self._fim, self._keep = options, fim, keep
        self._pinned = pin_for is not None and pin_for.type != "cpu"
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
        # A thread begins with the first device as its own: pinning there would take memory of another rank's device.
        self._executor = ThreadPoolExecutor(
            1,
            thread_name_prefix="optimus-data",
            initializer=devices.set_device,
            initargs=(pin_for or torch.device("cpu"),),
        )
        self._ahead: deque[tuple[int, Future[list[Batch]]]] = deque()
        self._end: int | None = None  # position at which the run ends, where that is known
        self._left_out: Container[int] = ()  # positions of batches that nobody will ask for

    def sample_ids(self, consumed: int) -> npt.NDArray[np.int64]:
        """Instances of the whole global batch that starts at position ``consumed``: int64 [size of that batch].

        Raises ValueError for a negative position, DataError past the last whole batch when not shuffled.
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

    def batch(self, consumed: int) -> list[Batch]:
        """This rank's micro-batches of the optimizer step that starts at position ``consumed``.

        Each int64 [micro_batch_size, seq_length], contiguous. Errors as ``sample_ids``.
        """
        self._read_ahead(consumed, 1 + _AHEAD)
        _, batches = self._ahead.popleft()
        return batches.result()

    def start(self, consumed: int, steps: int, left_out: Container[int] = ()) -> None:
        """Says that ``steps`` batches will be asked for, from position ``consumed`` on, but those at the positions
        ``left_out``, and reads the first of them.

        Raises DataError if that cannot be done. Nothing beyond them is read, nor what is left out.
        """
        self._end, self._left_out = self._sizes.after(consumed, steps), left_out
        while consumed in left_out:
            consumed += self._sizes.at(consumed)
        if self._has(consumed):
            self._read_ahead(consumed, _AHEAD)
        self.check()

    def failure(self) -> BaseException | None:
        """The first error in the next ``_KNOWN`` batches; waits until they are read."""
        near = itertools.islice(self._ahead, _KNOWN)
        return next(filter(None, (batches.exception() for _, batches in near)), None)

    def check(self) -> None:
        """Raises ``failure``."""
        if (error := self.failure()) is not None:
            raise error

    def _read_ahead(self, consumed: int, count: int) -> None:
        """Up to ``count`` batches from position ``consumed`` on are being read; the first of them in any case."""
        if not self._ahead or self._ahead[0][0] != consumed:
            self._ahead.clear()
            self._ahead.append((consumed, self._executor.submit(self._read, consumed)))
        position = self._ahead[-1][0] + self._sizes.at(self._ahead[-1][0])
        while len(self._ahead) < count and self._has(position):
            if position not in self._left_out:
                self._ahead.append((position, self._executor.submit(self._read, position)))
            position += self._sizes.at(position)

    def close(self) -> None:
        """Ends the reading thread. The loader cannot be used afterwards."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _has(self, consumed: int) -> bool:
        if self.num_batches is None:
            return self._end is None or consumed < self._end
        return consumed + self._sizes.full <= self.num_batches * self._sizes.full

    def _read(self, consumed: int) -> list[Batch]:
        batches = []
        length, read = self._instances.seq_length, self._instances.read
        for row_places, row_ids in zip(*self._own(consumed), strict=True):
            samples = []
            for place, i in zip(row_places.tolist(), row_ids.tolist(), strict=True):
                change = None if self._fim is None else partial(self._fim.apply, chance=chances(self._seed, place))
                samples.append(make_sample(read(i), length, self._options, change))
            batch = self._keep(self._collate(samples))
            batches.append(batch.pin_memory() if self._pinned else batch)
        return batches

    def _collate(self, samples: list[Sample]) -> Batch:
        options, length = self._options, self._instances.seq_length
        tokens_BS, labels_BS = (torch.from_numpy(np.stack([s[part] for s in samples])) for part in (0, 1))
        starts = [sample.starts for sample in samples]
        documents = Documents.from_starts(starts, length) if options.reset_attention_mask else None
        places = None
        if options.reset_position_ids:
            places = torch.from_numpy(np.stack([positions(own, length) for own in starts]))
        each = self._instances.labels_per_sample
        if each is None or options.eod_mask_loss or self._fim is not None:
            return Batch(tokens_BS, labels_BS, documents, places, int((labels_BS != NO_LABEL).sum()))
        return Batch(tokens_BS, labels_BS, documents, places, each * len(samples), is_same=True)

    def _own(self, consumed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Positions and instances of this rank's samples: int64 [micro-batches, micro_batch_size] each."""
        ids, size = self.sample_ids(consumed), self._sizes.at(consumed)
        order = mixed_rows(size, consumed) if isinstance(self._instances, Mixture) else np.arange(size)
        own = order.reshape(-1, *self._layout)[:, self._rank]
        return consumed + own, ids[own]


def position_after_change(consumed: int, old_seq_length: int, new_seq_length: int) -> int:
    """Samples of ``new_seq_length`` that make up at least the tokens of ``consumed`` samples of ``old_seq_length``."""
    if min(old_seq_length, new_seq_length) < 1 or consumed < 0:
        raise ConfigError(f"seq_length={new_seq_length} after {consumed} samples of {old_seq_length}: must be above 0")
    return -(-consumed * old_seq_length // new_seq_length)
