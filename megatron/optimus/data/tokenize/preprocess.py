"""Tokenizes documents into .bin/.idx pairs: Megatron's preprocessing.

Worker processes read ranges of about a megabyte, parse and tokenize them, and convert the ids to the file's element
type. One process hands the ranges out, reads what cannot be read in ranges, and writes tokens. Results are written in
reading order, so the bytes do not depend on the number of workers. At most a few batches per worker are pending: memory
does not grow with the corpus.

The input is cut into partitions (partitions.py): a file, or a range of a large one. Each is written as a pair of its
own, and a finished one is not done again: a killed run continues with the partition it was at. Several processes on
several nodes share the partitions without communicating; the one that finds all of them done joins them, into the same
bytes that one process alone would have written.

Where documents are shuffled, a partition is written as sorted runs instead of a pair (shuffle.py), and joining merges
them.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.optimus.config.schema import ConfigError, SplitBy, TokenizerType
from megatron.optimus.config.tokenizer_files import settle_tokenizer_type
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.indexed import IndexedDatasetWriter, token_dtype
from megatron.optimus.data.tokenize.corpus import (
    MAX_LINE_BYTES,
    LineBatch,
    expand_inputs,
    parse_batch,
    read_batches,
)
from megatron.optimus.data.tokenize.identity import TokenizerIdentity, write_identity
from megatron.optimus.data.tokenize.partitions import Partition, PartitionPlan, hash_tokenizer
from megatron.optimus.data.tokenize.pretoken_cache import Ids
from megatron.optimus.data.tokenize.shuffle import RunWriter, text_hashes
from megatron.optimus.data.tokenize.tokenizer import HuggingFaceTokenizer, Tokenizer, build_tokenizer
from megatron.optimus.platform import environment
from megatron.optimus.platform.log import counted

logger = logging.getLogger("optimus")

_BATCHES_PER_WORKER = 4
_SHOWN_MALFORMED = 10
_SAMPLE_CHARACTERS = 1 << 18  # of the corpus that fastokens is compared on: a fraction of a second of the library


@dataclass
class PreprocessReport:
    """What has been written, or so far."""

    tokens: dict[str, int] = field(default_factory=dict)  # by prefix of the output
    documents: int = 0
    empty_documents: int = 0  # they have no sequence and no end-of-document token
    malformed: int = 0  # skipped lines
    empty_files: int = 0  # skipped files without any content
    input_bytes: int = 0  # uncompressed
    seconds: float = 0.0
    partitions_done: int = 0  # by this process
    partitions_found: int = 0  # done before, or by other processes
    progress: float = 0.0  # fraction of this process's input that has been read
    merging: bool = False  # all has been read; ``progress`` is that of joining the partitions
    merged: bool = True  # False: other processes have not finished their partitions

    def add(self, other: PreprocessReport) -> None:
        """Adds the counts of documents, tokens and bytes of another report."""
        for prefix, tokens in other.tokens.items():
            self.tokens[prefix] = self.tokens.get(prefix, 0) + tokens
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_COUNTS = ("documents", "empty_documents", "malformed", "empty_files", "input_bytes")  # that a partition's mark keeps


@dataclass(frozen=True)
class _WorkerOptions:
    """Options of the workers."""

    tokenizer_type: TokenizerType
    tokenizer_model: str | None
    keys: tuple[str, ...]
    append_eod: bool
    skip_malformed: bool
    dtype: np.dtype[Any]
    max_line_bytes: int
    shuffle_seed: int | None  # None: documents keep the order of the input
    parse_special_tokens: bool = False
    uses_fastokens: bool = False  # it gave the library's ids for a sample of the corpus


@dataclass(frozen=True)
class _EncodedBatch:
    """Tokens of a batch."""

    tokens: list[npt.NDArray[Any]]  # for each key, the tokens of all documents back to back
    lengths: list[list[int]]  # for each key, the tokens of each document
    malformed: list[str]
    num_bytes: int
    hashes: npt.NDArray[np.uint64] | None = None  # of each document's first text, where documents are shuffled


class _Worker:
    """State of a worker process, in which the tokenizer is built once."""

    options: _WorkerOptions
    tokenizer: Tokenizer


def _start_worker(options: _WorkerOptions) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    # at the end of the process: freeing interpreter and vocabulary, object by object, takes as long as tokenizing a MB
    atexit.register(os._exit, 0)
    # the library's own threads, times the number of workers, would fight for the cores; it reads this from C
    environment.set_default("TOKENIZERS_PARALLELISM", "false")
    environment.set_default("RAYON_NUM_THREADS", "1")  # fastokens'
    _Worker.options = options
    parse = options.parse_special_tokens
    tokenizer = build_tokenizer(options.tokenizer_type, options.tokenizer_model, parse_special=parse)
    if options.uses_fastokens and isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer.use_fastokens(None)
    _Worker.tokenizer = tokenizer


def _leave_with_parent() -> None:
    """Ends the worker when its parent ends: a killed parent cannot stop its workers, which would wait forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_batch(batch: LineBatch) -> _EncodedBatch:
    options, tokenizer = _Worker.options, _Worker.tokenizer
    parsed = parse_batch(batch, options.keys, options.skip_malformed)
    tokens, lengths = [], []
    for i in range(len(options.keys)):
        documents = tokenizer.encode_batch([texts[i] for texts in parsed.documents])
        joined = _join_documents(documents, tokenizer.eod_id if options.append_eod else None, options.dtype)
        tokens.append(joined[0])
        lengths.append(joined[1])
    hashes = None
    if options.shuffle_seed is not None:
        hashes = text_hashes([texts[0] for texts in parsed.documents], options.shuffle_seed)
    return _EncodedBatch(tokens, lengths, parsed.malformed, parsed.num_bytes, hashes)


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
    pool: ProcessPoolExecutor, partitions: Sequence[Partition], options: _WorkerOptions, max_pending: int
) -> Iterator[tuple[Partition, int, _EncodedBatch | None]]:
    """(partition, bytes of it read, result) in reading order, with at most ``max_pending`` batches in the workers.

    The result None ends a partition. The next one begins before that, so that no worker waits at the end of one.
    """
    pending: deque[tuple[Partition, int, Future[_EncodedBatch] | None]] = deque()

    def oldest() -> tuple[Partition, int, _EncodedBatch | None]:
        partition, position, future = pending.popleft()
        return partition, position, None if future is None else future.result()

    for partition in partitions:
        for batch in read_batches([partition.source], options.keys, options.max_line_bytes):
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
    log_interval: int | None = None,
    partitions: int | None = None,
    per_file: bool = False,
    split_by: SplitBy = SplitBy.POSITION,
    shuffle: bool = False,
    seed: int = 1234,
    max_line_bytes: int = MAX_LINE_BYTES,
    rank: int = 0,
    world_size: int = 1,
    overwrite: bool = False,
    parse_special_tokens: bool = False,
    show_progress: Callable[[PreprocessReport], None] | None = None,
) -> PreprocessReport:
    """Tokenizes files into ``<output_prefix>_<key>_document.{bin,idx}`` for each key, which appear when all went well.

    Args:
        inputs: files, globs or folders
        output_prefix: path of the output, without key and suffix
        tokenizer_type: library of the tokenizer; None: as its file says
        tokenizer_model: its file or folder
        json_keys: keys of the texts in each JSON object, or columns; each becomes a pair
        append_eod: whether each document is ended by the tokenizer's end-of-document token
        workers: worker processes
        skip_malformed: whether malformed lines are skipped, instead of being an error
        log_interval: documents between two lines of the log; None: no lines
        partitions: least number of parts (``<output_prefix>.parts``) of what can be cut: uncompressed JSON lines
        per_file: whether each input file becomes a pair ``<output_prefix>/<file>_<key>_document`` of its own
        split_by: HASH: shuffle, and write where splits by document hash begin (data/splits.py); POSITION: neither
        shuffle: whether documents are shuffled with POSITION too
        seed: of the shuffled order, from 0
        max_line_bytes: longest line, or text that is a file, in uncompressed bytes
        rank: of this process, among those that share the work
        world_size: number of these processes
        overwrite: whether pairs of an earlier run are replaced, instead of being an error
        parse_special_tokens: whether the name of a special token in a text is its id, and not letters
        show_progress: called with the report so far whenever a batch has been written

    Returns:
        The report on the whole output, or, while other processes are at work, on this process's partitions.

    Raises:
        DataError: names what is wrong with input, tokenizer, earlier output or disk.
        ConfigError: the options are impossible.
    """
    _check_options(workers, rank, world_size, json_keys, seed)
    shuffle_seed = seed if shuffle or split_by is SplitBy.HASH else None
    paths, tokenizer_type = expand_inputs(inputs), _settle_type(tokenizer_type, tokenizer_model)
    tokenizer, identity = _read_tokenizer(tokenizer_type, tokenizer_model, parse_special_tokens)
    options = _WorkerOptions(
        *(tokenizer_type, tokenizer_model, tuple(json_keys), append_eod, skip_malformed),
        *(token_dtype(identity.vocab_size), max_line_bytes, shuffle_seed, parse_special_tokens),
    )
    hash_splits, shared = split_by is SplitBy.HASH, world_size > 1
    plan = _plan(options, paths, output_prefix, partitions, hash_splits=hash_splits, per_file=per_file, shared=shared)
    if not (mine := plan.share(rank, world_size)):
        return PreprocessReport(merged=False)
    plan.begin([] if overwrite else mine)
    work = _Preprocessing(plan, mine, _with_fastokens(options, tokenizer, mine[0]), show_progress, log_interval)
    return work.run(workers, identity)


def _read_tokenizer(kind: TokenizerType, model: str | None, parse_special: bool) -> tuple[Tokenizer, TokenizerIdentity]:
    """Reads the tokenizer as the workers will, so that what is wrong with it is said here."""
    tokenizer = build_tokenizer(kind, model, parse_special=parse_special)
    return tokenizer, TokenizerIdentity.of_tokenizer(kind, model, tokenizer)


def _with_fastokens(options: _WorkerOptions, tokenizer: Tokenizer, partition: Partition) -> _WorkerOptions:
    """The options with ``uses_fastokens`` where that package gives the ids of the library for the first texts."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return options
    texts: list[str] = []
    with contextlib.suppress(DataError):  # of what cannot be read, which the workers will say
        batch = next(read_batches([partition.source], options.keys, options.max_line_bytes), None)
        documents = [] if batch is None else parse_batch(batch, options.keys, skip_malformed=True).documents
        sizes = accumulate(len(document[0]) for document in documents)
        texts = [document[0] for document, size in zip(documents, sizes, strict=True) if size <= _SAMPLE_CHARACTERS]
    if not tokenizer.use_fastokens(texts):
        return options
    logger.info("fastokens %s encodes: its ids are those of the tokenizers library", version("fastokens"))
    return replace(options, uses_fastokens=True)


def _plan(
    options: _WorkerOptions, paths: Sequence[Path], output_prefix: str, partitions: int | None, **flags: bool
) -> PartitionPlan:
    """The partitions of the input, with what their tokens depend on; ``flags`` are those of ``PartitionPlan``."""
    recipe = {
        "tokenizer_type": options.tokenizer_type,
        "tokenizer_model": hash_tokenizer(options.tokenizer_type, options.tokenizer_model),
        "keys": options.keys,
        "append_eod": options.append_eod,  # but not skip_malformed: a part without malformed lines is the same with it
        "dtype": options.dtype.name,
        **({} if options.shuffle_seed is None else {"shuffle": options.shuffle_seed}),
        **({"parse_special_tokens": True} if options.parse_special_tokens else {}),
    }
    kept = {"keys": options.keys, "skip_malformed": options.skip_malformed, "shuffle_seed": options.shuffle_seed}
    return PartitionPlan(paths, output_prefix, recipe=recipe, partitions=partitions, **kept, **flags)  # type: ignore[arg-type]


def _check_options(workers: int, rank: int, world_size: int, json_keys: Sequence[str], seed: int) -> None:
    if not 0 <= seed < 1 << 63:
        raise ConfigError(f"seed={seed} must lie in [0, 2^63)")
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


def _check_tokens(report: PreprocessReport, plan: PartitionPlan, partitions: Sequence[Partition]) -> None:
    """Raises DataError unless there are tokens for every key; a single file of many may have none."""
    for key in plan.keys:
        prefixes = [plan.final_prefix(partition, key) for partition in partitions]
        if not any(report.tokens[prefix] for prefix in prefixes):
            raise DataError(
                f"{prefixes[0]}: the input gives no tokens ({report.documents} documents, {report.empty_documents} of "
                f"them empty, {report.malformed} malformed lines and {counted(report.empty_files, 'empty file')} "
                "skipped)"
            )


class _Preprocessing:
    """The work of this process: encodes its partitions that are not done, and joins all if it is the last."""

    def __init__(
        self,
        plan: PartitionPlan,
        partitions: Sequence[Partition],
        options: _WorkerOptions,
        show_progress: Callable[[PreprocessReport], None] | None,
        log_interval: int | None,
    ) -> None:
        self._plan, self._partitions, self._options = plan, partitions, options
        self._show_progress, self._log_interval = show_progress or (lambda report: None), log_interval
        self._started = time.monotonic()
        self._report = PreprocessReport()  # on the partitions of this process

    def run(self, workers: int, identity: TokenizerIdentity) -> PreprocessReport:
        """Does it all, in so many worker processes; returns what ``preprocess`` does."""
        missing = [partition for partition in self._partitions if not self._plan.is_done(partition)]
        self._report.partitions_found = len(self._partitions) - len(missing)
        try:
            if missing:
                self._encode(missing, workers)
            report = self._finish()
        except BaseException:
            self._plan.abandon()
            raise
        if report.merged:
            for prefix in report.tokens:
                write_identity(prefix, identity)
        return replace(report, seconds=time.monotonic() - self._started)

    def _encode(self, partitions: Sequence[Partition], workers: int) -> None:
        """Writes the pairs of ``partitions``, one after the other."""
        to_read, read = sum(partition.num_bytes for partition in partitions), 0
        # spawned, not forked: the tokenizer library's threads do not survive a fork
        context, options = multiprocessing.get_context("spawn"), self._options
        pool = ProcessPoolExecutor(workers, context, _start_worker, (options,))
        with ExitStack() as stack:
            stack.callback(pool.shutdown, wait=True, cancel_futures=True)
            output: _PartitionOutput | None = None
            try:
                for partition, position, encoded in _encode_all(
                    pool, partitions, options, _BATCHES_PER_WORKER * workers
                ):
                    if output is None:
                        output = stack.enter_context(_PartitionOutput(self._plan, partition, options))
                    if encoded is None:
                        output.report.empty_files += output.is_empty
                        output.commit(self._report)
                        read += partition.num_bytes
                        output = None
                        continue
                    before = self._report.documents + output.report.documents
                    output.write(encoded, self._report.malformed)
                    self._show(output.report, before, (read + position) / max(1, to_read))
            except BrokenProcessPool as error:
                raise DataError(
                    f"{self._plan.output_prefix}: a worker process died, most likely for lack of memory; use fewer "
                    "--workers"
                ) from error

    def _show(self, partition: PreprocessReport, before: int, progress: float) -> None:
        """Tells of a batch of the partition in hand; ``before``: documents before it."""
        now = replace(self._report, tokens=dict(self._report.tokens), seconds=time.monotonic() - self._started)
        now.add(partition)
        now.progress = progress
        self._show_progress(now)
        if self._log_interval is not None and now.documents // self._log_interval > before // self._log_interval:
            log_progress(now)

    def _finish(self) -> PreprocessReport:
        """Joins the partitions if all are done; reports on the whole output. Raises DataError if it has no tokens."""
        plan, own = self._plan, self._report
        is_joined = plan.uses_folder and not plan.per_file
        if is_joined and not plan.all_done():
            own.merged = False
            return own
        partitions = self._partitions if plan.per_file else plan.partitions
        total = PreprocessReport(partitions_done=own.partitions_done, partitions_found=own.partitions_found)
        for partition in partitions:
            total.add(_load_report(plan, partition))
        _check_tokens(total, plan, partitions)
        if is_joined:
            show = self._show_progress
            plan.merge(self._options.dtype, lambda fraction: show(replace(total, progress=fraction, merging=True)))
        return total


def _load_report(plan: PartitionPlan, partition: Partition) -> PreprocessReport:
    counts = {"empty_files": 0, **plan.counts(partition)}
    tokens = {plan.final_prefix(partition, key): number for key, number in counts["tokens"].items()}
    return PreprocessReport(tokens=tokens, **{name: counts[name] for name in _COUNTS})


class _PartitionOutput(ExitStack):
    """Writes the pairs of one partition, one per key. At the end those that are not committed are removed."""

    def __init__(self, plan: PartitionPlan, partition: Partition, options: _WorkerOptions) -> None:
        super().__init__()
        self._plan, self._partition, self._dtype = plan, partition, options.dtype
        self.is_empty = True  # no batch has come
        self.report = PreprocessReport(tokens={plan.final_prefix(partition, key): 0 for key in options.keys})
        self._writers: dict[str, IndexedDatasetWriter] = {}
        self._runs: RunWriter | None = None
        if options.shuffle_seed is not None:
            self._runs = RunWriter(plan.runs_folder(partition), len(options.keys), options.dtype)
            self.callback(self._remove_runs)
        for key in options.keys if self._runs is None else ():
            writer = IndexedDatasetWriter(plan.prefix(partition, key), options.dtype)
            self.callback(writer.abort)
            self._writers[key] = writer

    def write(self, encoded: _EncodedBatch, malformed_before: int) -> None:
        """Appends one batch."""
        report, self.is_empty = self.report, False
        if self._runs is not None and encoded.hashes is not None:
            self._runs.add(encoded.hashes, encoded.tokens, encoded.lengths)
        for writer, tokens, lengths in zip(self._writers.values(), encoded.tokens, encoded.lengths, strict=False):
            writer.add_documents(tokens, lengths)
        for prefix, tokens, lengths in zip(report.tokens, encoded.tokens, encoded.lengths, strict=True):
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
        runs = {}
        if self._runs is not None:
            self._runs.flush()
            runs = {"runs": self._runs.num_runs}
        counts = {name: getattr(self.report, name) for name in _COUNTS}
        tokens = dict(zip(self._plan.keys, self.report.tokens.values(), strict=True))
        counts |= {"tokens": tokens, **runs}
        if self._runs is not None and self._plan.per_file:
            self._plan.merge_shuffled([self._partition], [self._runs.num_runs], self._dtype)
            shutil.rmtree(self._plan.runs_folder(self._partition), ignore_errors=True)
        self._plan.mark_done(self._partition, counts)
        self._runs = None
        total.add(self.report)
        total.partitions_done += 1

    def _remove_runs(self) -> None:
        """Removes the runs of a partition that is not done."""
        if self._runs is not None:
            shutil.rmtree(self._plan.runs_folder(self._partition), ignore_errors=True)


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
