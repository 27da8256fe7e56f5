"""Tokenizes documents into .bin/.idx pairs: Megatron's preprocessing.

Worker processes read ranges of about a megabyte, parse and tokenize them, and convert the ids to the file's element
type. One process hands the ranges out, reads what cannot be read in ranges, and writes tokens. Results are written in
reading order, so the bytes do not depend on the number of workers. At most a few batches per worker are pending: memory
does not grow with the corpus.

The input is cut into partitions (partitions.py): a file, or a range of a large one. Each is written as a pair of its
own, and a finished one is not done again: a killed run continues with the partition it was at. Several processes on
several nodes share the partitions without communicating; the one that finds all of them done joins them, into the same
bytes that one process alone would have written.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.optimus.config.schema import ConfigError, TokenizerType
from megatron.optimus.config.tokenizer_files import settle_tokenizer_type
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.indexed import IndexedDatasetWriter, token_dtype
from megatron.optimus.data.tokenize.corpus import LineBatch, expand_inputs, parse_batch, read_batches
from megatron.optimus.data.tokenize.identity import TokenizerIdentity, write_identity
from megatron.optimus.data.tokenize.partitions import Partition, PartitionPlan, fingerprint
from megatron.optimus.data.tokenize.pretoken_cache import Ids
from megatron.optimus.data.tokenize.tokenizer import Tokenizer, build_tokenizer
from megatron.optimus.platform import environment

logger = logging.getLogger("optimus")

_BATCHES_PER_WORKER = 4
_SHOWN_MALFORMED = 10


@dataclass
class PreprocessReport:
    """What has been written, or so far."""

    tokens: dict[str, int] = field(default_factory=dict)  # by prefix of the output
    documents: int = 0
    empty_documents: int = 0  # they have no sequence and no end-of-document token
    malformed: int = 0  # skipped lines
    input_bytes: int = 0  # uncompressed
    seconds: float = 0.0
    partitions_done: int = 0  # by this process
    partitions_found: int = 0  # done before, or by other processes
    progress: float = 0.0  # fraction of this process's input that has been read
    merged: bool = True  # False: other processes have not finished their partitions

    def add(self, other: PreprocessReport) -> None:
        """Adds the counts of documents, tokens and bytes of another report."""
        for prefix, tokens in other.tokens.items():
            self.tokens[prefix] = self.tokens.get(prefix, 0) + tokens
        self.documents += other.documents
        self.empty_documents += other.empty_documents
        self.malformed += other.malformed
        self.input_bytes += other.input_bytes


@dataclass(frozen=True)
class _Recipe:
    """Options of the workers."""

    tokenizer_type: TokenizerType
    tokenizer_model: str | None
    keys: tuple[str, ...]
    append_eod: bool
    skip_malformed: bool
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class _EncodedBatch:
    """Tokens of a batch."""

    tokens: list[npt.NDArray[Any]]  # for each key, the tokens of all documents back to back
    lengths: list[list[int]]  # for each key, the tokens of each document
    malformed: list[str]
    num_bytes: int


class _Worker:
    """State of a worker process, in which the tokenizer is built once."""

    recipe: _Recipe
    tokenizer: Tokenizer


def _start_worker(recipe: _Recipe) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    # at the end of the process: freeing interpreter and vocabulary, object by object, takes as long as tokenizing a MB
    atexit.register(os._exit, 0)
    # the library's own threads, times the number of workers, would fight for the cores; it reads this from C
    environment.set_default("TOKENIZERS_PARALLELISM", "false")
    _Worker.recipe = recipe
    _Worker.tokenizer = build_tokenizer(recipe.tokenizer_type, recipe.tokenizer_model)


def _leave_with_parent() -> None:
    """Ends the worker when its parent ends: a killed parent cannot stop its workers, which would wait forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_batch(batch: LineBatch) -> _EncodedBatch:
    recipe, tokenizer = _Worker.recipe, _Worker.tokenizer
    parsed = parse_batch(batch, recipe.keys, recipe.skip_malformed)
    tokens, lengths = [], []
    for i in range(len(recipe.keys)):
        documents = tokenizer.encode_batch([texts[i] for texts in parsed.documents])
        joined = _join_documents(documents, tokenizer.eod_id if recipe.append_eod else None, recipe.dtype)
        tokens.append(joined[0])
        lengths.append(joined[1])
    return _EncodedBatch(tokens, lengths, parsed.malformed, parsed.num_bytes)


def _join_documents(
    documents: list[Ids], eod_id: int | None, dtype: np.dtype[Any]
) -> tuple[npt.NDArray[Any], list[int]]:
    """(ids of all documents back to back as ``dtype``, each ended by ``eod_id`` if that is given; their lengths)

    An empty document stays empty, as in Megatron. Raises DataError for an id that ``dtype`` cannot hold.
    """
    lengths = [ids.size for ids in documents]
    if eod_id is not None and documents:
        end = np.array([eod_id], dtype=np.min_scalar_type(eod_id))
        documents = list(chain.from_iterable((ids, end) for ids in documents if ids.size))
        lengths = [length + (length > 0) for length in lengths]
    ids = np.concatenate(documents) if documents else np.empty(0, dtype)
    if ids.size and ids.max() > np.iinfo(dtype).max:  # the cast would wrap it
        raise DataError(
            f"token id {ids.max()} does not fit {dtype.name}, chosen for the tokenizer's vocabulary size; its ids must "
            "lie below that"
        )
    return ids.astype(dtype, copy=False), lengths


def _encode_all(
    pool: ProcessPoolExecutor, partitions: Sequence[Partition], keys: Sequence[str], max_pending: int
) -> Iterator[tuple[Partition, int, _EncodedBatch | None]]:
    """(partition, bytes of it read, result) in reading order, with at most ``max_pending`` batches in the workers.

    The result None ends a partition. The next one begins before that, so that no worker waits at the end of one.
    """
    pending: deque[tuple[Partition, int, Future[_EncodedBatch] | None]] = deque()

    def oldest() -> tuple[Partition, int, _EncodedBatch | None]:
        partition, position, future = pending.popleft()
        return partition, position, None if future is None else future.result()

    for partition in partitions:
        for batch in read_batches([partition.source], keys):
            pending.append((partition, batch.position, pool.submit(_encode_batch, batch)))
            if len(pending) >= max_pending:
                yield oldest()
        pending.append((partition, partition.num_bytes, None))
    while pending:
        yield oldest()


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    *,
    tokenizer_type: TokenizerType | None = None,
    tokenizer_model: str | None = None,
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    workers: int = 1,
    skip_malformed: bool = False,
    log_interval: int = 10000,
    partitions: int | None = None,
    per_file: bool = False,
    rank: int = 0,
    world_size: int = 1,
    overwrite: bool = False,
    show_progress: Callable[[PreprocessReport], None] | None = None,
) -> PreprocessReport:
    """Tokenizes files into ``<output_prefix>_<key>_document.{bin,idx}`` for each key.

    The final files appear only when all went well; till then finished partitions are in ``<output_prefix>.parts``.

    Args:
        inputs: files, globs or folders
        output_prefix: path of the output, without key and suffix
        tokenizer_type: library of the tokenizer; None: as its file says
        tokenizer_model: its file or folder
        json_keys: keys of the texts in each JSON object, or columns; each becomes a pair
        append_eod: whether each document is ended by the tokenizer's end-of-document token
        workers: worker processes
        skip_malformed: whether malformed lines are skipped, instead of being an error
        log_interval: documents between two reports of progress
        partitions: least number of partitions to cut the input into, where it can be cut (uncompressed JSON lines)
        per_file: whether each input file becomes a pair ``<output_prefix>/<file>_<key>_document`` of its own
        rank: of this process, among those that share the work
        world_size: number of these processes
        overwrite: whether pairs of an earlier run are replaced, instead of being an error
        show_progress: called with each report of progress; by default it is logged

    Returns:
        The report on the whole output, or, while other processes are at work, on this process's partitions.

    Raises:
        DataError: names what is wrong with input, tokenizer, earlier output or disk.
        ConfigError: the options are impossible.
    """
    _check_options(workers, rank, world_size, json_keys)
    started = time.monotonic()
    paths, tokenizer_type = expand_inputs(inputs), _settle_type(tokenizer_type, tokenizer_model)
    identity = TokenizerIdentity.of(tokenizer_type, tokenizer_model)
    dtype = token_dtype(identity.vocab_size)
    recipe = _Recipe(tokenizer_type, tokenizer_model, tuple(json_keys), append_eod, skip_malformed, dtype)
    plan = PartitionPlan(
        paths,
        output_prefix,
        keys=json_keys,
        recipe={**vars(recipe), "dtype": dtype.name, "tokenizer_model": fingerprint(tokenizer_model)},
        partitions=partitions,
        per_file=per_file,
        shared=world_size > 1,
    )
    mine = plan.share(rank, world_size)
    if not mine:
        return PreprocessReport(merged=False)
    plan.begin([] if overwrite else mine)
    missing = [partition for partition in mine if not plan.is_done(partition)]
    report = PreprocessReport(partitions_found=len(mine) - len(missing))
    _encode_partitions(plan, missing, recipe, workers, report, started, show_progress or log_progress, log_interval)
    return replace(_finish(plan, mine, report, dtype, identity), seconds=time.monotonic() - started)


def _check_options(workers: int, rank: int, world_size: int, json_keys: Sequence[str]) -> None:
    if workers < 1:
        raise ConfigError(f"workers={workers} must be at least 1")
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} must lie in [0, {world_size})")
    if not json_keys or len(set(json_keys)) != len(json_keys):
        raise ConfigError(f"json_keys={list(json_keys)} must name one or more different keys")


def _settle_type(kind: TokenizerType | None, model: str | None) -> TokenizerType:
    """Logs the type where it is guessed."""
    kind, guess = settle_tokenizer_type(kind, model)
    if guess:
        logger.info(guess)
    return kind


def _finish(
    plan: PartitionPlan,
    mine: Sequence[Partition],
    own: PreprocessReport,
    dtype: np.dtype[Any],
    identity: TokenizerIdentity,
) -> PreprocessReport:
    """Joins the partitions if all are done, and reports on the whole output. Raises DataError if it has no tokens."""
    is_joined = plan.uses_folder and not plan.per_file
    if is_joined and not plan.all_done():
        own.merged = False
        return own
    partitions = mine if plan.per_file else plan.partitions
    total = PreprocessReport(partitions_done=own.partitions_done, partitions_found=own.partitions_found)
    for partition in partitions:
        total.add(_load_report(plan, partition))
    _check_tokens(total, plan, partitions)
    if is_joined:
        plan.merge(dtype)
    for prefix in total.tokens:
        write_identity(prefix, identity)
    return total


def _check_tokens(report: PreprocessReport, plan: PartitionPlan, partitions: Sequence[Partition]) -> None:
    """Raises DataError unless there are tokens for every key; a single file of many may have none."""
    for key in plan.keys:
        prefixes = [plan.final_prefix(partition, key) for partition in partitions]
        if not any(report.tokens[prefix] for prefix in prefixes):
            raise DataError(
                f"{prefixes[0]}: the input gives no tokens ({report.documents} documents, {report.empty_documents} of "
                f"them empty, {report.malformed} malformed lines skipped)"
            )


def _load_report(plan: PartitionPlan, partition: Partition) -> PreprocessReport:
    counts = plan.counts(partition)
    tokens = {plan.final_prefix(partition, key): number for key, number in counts["tokens"].items()}
    names = ("documents", "empty_documents", "malformed", "input_bytes")
    return PreprocessReport(tokens=tokens, **{name: counts[name] for name in names})


def _encode_partitions(
    plan: PartitionPlan,
    partitions: Sequence[Partition],
    recipe: _Recipe,
    workers: int,
    report: PreprocessReport,
    started: float,
    show_progress: Callable[[PreprocessReport], None],
    log_interval: int,
) -> None:
    """Writes the pairs of ``partitions``, one after the other, and adds their counts to ``report``."""
    if not partitions:
        return
    to_read, read = sum(partition.num_bytes for partition in partitions), 0
    # spawned, not forked: the tokenizer library's threads do not survive a fork
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (recipe,))
    with ExitStack() as stack:
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        output: _PartitionOutput | None = None
        try:
            for partition, position, encoded in _encode_all(
                pool, partitions, recipe.keys, _BATCHES_PER_WORKER * workers
            ):
                if output is None:
                    output = stack.enter_context(_PartitionOutput(plan, partition, recipe))
                if encoded is None:
                    output.commit(report)
                    read += partition.num_bytes
                    output = None
                    continue
                before = report.documents + output.report.documents
                output.write(encoded, report.malformed)
                after = report.documents + output.report.documents
                if after // log_interval > before // log_interval:
                    now = replace(report, tokens=dict(report.tokens), seconds=time.monotonic() - started)
                    now.add(output.report)
                    now.progress = (read + position) / max(1, to_read)
                    show_progress(now)
        except BrokenProcessPool as error:
            raise DataError(
                f"{plan.output_prefix}: a worker process died, most likely for lack of memory; use fewer --workers"
            ) from error


class _PartitionOutput(ExitStack):
    """Writes the pairs of one partition, one per key. At the end those that are not committed are removed."""

    def __init__(self, plan: PartitionPlan, partition: Partition, recipe: _Recipe) -> None:
        super().__init__()
        self._plan, self._partition = plan, partition
        self.report = PreprocessReport(tokens={plan.final_prefix(partition, key): 0 for key in recipe.keys})
        self._writers = {}
        for key in recipe.keys:
            writer = IndexedDatasetWriter(plan.prefix(partition, key), recipe.dtype)
            self.callback(writer.abort)
            self._writers[key] = writer

    def write(self, encoded: _EncodedBatch, malformed_before: int) -> None:
        """Appends one batch."""
        report = self.report
        for prefix, writer, tokens, lengths in zip(
            report.tokens, self._writers.values(), encoded.tokens, encoded.lengths, strict=True
        ):
            writer.add_documents(tokens, lengths)
            report.tokens[prefix] += tokens.size
            report.empty_documents += lengths.count(0)
        for message in encoded.malformed[: max(0, _SHOWN_MALFORMED - report.malformed - malformed_before)]:
            logger.warning("skipped: %s", message)
        report.malformed += len(encoded.malformed)
        report.documents += len(encoded.lengths[0])
        report.input_bytes += encoded.num_bytes

    def commit(self, total: PreprocessReport) -> None:
        """Makes the pairs final and adds their counts to ``total``."""
        if not self._plan.uses_folder:
            _check_tokens(self.report, self._plan, [self._partition])  # a single partition is the whole output
        for writer in self._writers.values():
            writer.commit()
        counts = {name: getattr(self.report, name) for name in ("documents", "empty_documents", "malformed")}
        counts |= {"input_bytes": self.report.input_bytes}
        tokens = dict(zip(self._writers, self.report.tokens.values(), strict=True))
        self._plan.mark_done(self._partition, {**counts, "tokens": tokens})
        total.add(self.report)
        total.partitions_done += 1


def log_progress(report: PreprocessReport) -> None:
    """Logs documents, tokens and uncompressed bytes of input, their rates since the start, and the remaining time."""
    seconds = max(report.seconds, 1e-9)
    rest = seconds * (1 - report.progress) / report.progress if 0 < report.progress <= 1 else 0.0
    logger.info(
        "documents=%d tokens=%d input_mb=%.1f documents_per_s=%.0f mb_per_s=%.2f malformed=%d eta_s=%.0f",
        report.documents,
        sum(report.tokens.values()),
        report.input_bytes / 1e6,
        report.documents / seconds,
        report.input_bytes / 1e6 / seconds,
        report.malformed,
        rest,
    )
