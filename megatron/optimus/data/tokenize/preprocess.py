"""Documents in, token files out: the work of `optimus preprocess`.

Worker processes read ranges of about a megabyte, and do the rest (JSON, tokenizer, narrowing to the file's
element type); one process, which also reads what cannot be read in ranges, hands them out and writes tokens. Results
are written in reading order, so the bytes do not depend on the number of workers. At most a few batches per worker are
under way: memory does not grow with the corpus.

The input is cut into parts (parts.py): a file, or a range of a large one. Each is written as a pair of its own, and a
part that is there is not done again: a killed run goes on with the part it was at. Several processes on several nodes
share the parts without talking to each other; who finds that all are there joins them, byte for byte what one process
would have written in one go.
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
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.indexed import IndexedDatasetWriter, token_dtype
from megatron.optimus.data.tokenize.corpus import LineBatch, expand_inputs, parse_batch, read_batches
from megatron.optimus.data.tokenize.tokenizer import Ids, Tokenizer, build_tokenizer
from megatron.optimus.data.tokenize.work_parts import Part, PartPlan, fingerprint
from megatron.optimus.platform import environment

logger = logging.getLogger("optimus")

_BATCHES_PER_WORKER = 4
_SHOWN_MALFORMED = 10


@dataclass
class PreprocessReport:
    """What was written. ``tokens`` by prefix; an empty document has no sequence and no end-of-document token."""

    tokens: dict[str, int] = field(default_factory=dict)
    documents: int = 0
    empty_documents: int = 0
    malformed: int = 0
    input_bytes: int = 0
    seconds: float = 0.0
    parts: int = 0  # done by this process
    parts_found: int = 0  # done before, or by other processes
    progress: float = 0.0  # share of this process's input that has been read
    merged: bool = True  # False: other processes have not finished their parts

    def add(self, other: PreprocessReport) -> None:
        """Adds the counts of documents and tokens."""
        for prefix, tokens in other.tokens.items():
            self.tokens[prefix] = self.tokens.get(prefix, 0) + tokens
        self.documents += other.documents
        self.empty_documents += other.empty_documents
        self.malformed += other.malformed
        self.input_bytes += other.input_bytes


@dataclass(frozen=True)
class _Recipe:
    """All a worker needs to know."""

    tokenizer_type: TokenizerType
    tokenizer_model: str | None
    keys: tuple[str, ...]
    append_eod: bool
    skip_malformed: bool
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class _EncodedBatch:
    """Per key: tokens of the batch back to back, and tokens of each document."""

    tokens: list[npt.NDArray[Any]]
    lengths: list[list[int]]
    malformed: list[str]
    num_bytes: int


class _Worker:
    """State of a worker process; the tokenizer is built once."""

    recipe: _Recipe
    tokenizer: Tokenizer


def _start_worker(recipe: _Recipe) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    # when all is done: taking interpreter and vocabulary apart, object by object, is as long as tokenizing a megabyte
    atexit.register(os._exit, 0)
    # the library's own threads, times the number of workers, would fight for the cores; it reads this from C
    environment.set_default("TOKENIZERS_PARALLELISM", "false")
    _Worker.recipe = recipe
    _Worker.tokenizer = build_tokenizer(recipe.tokenizer_type, recipe.tokenizer_model)


def _leave_with_parent() -> None:
    """A parent killed outright cannot stop its workers, which would wait for work forever."""
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
        packed = _pack(documents, tokenizer.eod_id if recipe.append_eod else None, recipe.dtype)
        tokens.append(packed[0])
        lengths.append(packed[1])
    return _EncodedBatch(tokens, lengths, parsed.malformed, parsed.num_bytes)


def _pack(documents: list[Ids], eod_id: int | None, dtype: np.dtype[Any]) -> tuple[npt.NDArray[Any], list[int]]:
    """Ids of all documents back to back as ``dtype``, each ended by ``eod_id`` if that is given, and their lengths.

    Megatron's convention: an empty document stays empty. Raises DataError for an id that ``dtype`` cannot hold.
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
    pool: ProcessPoolExecutor, parts: Sequence[Part], keys: Sequence[str], window: int
) -> Iterator[tuple[Part, int, _EncodedBatch | None]]:
    """(part, bytes of it read, result) in reading order, with at most ``window`` batches under way; None ends a part.

    Runs on from one part to the next, so that no worker waits at the end of a part.
    """
    pending: deque[tuple[Part, int, Future[_EncodedBatch] | None]] = deque()

    def oldest() -> tuple[Part, int, _EncodedBatch | None]:
        part, position, future = pending.popleft()
        return part, position, None if future is None else future.result()

    for part in parts:
        for batch in read_batches([part.source], keys):
            pending.append((part, batch.position, pool.submit(_encode_batch, batch)))
            if len(pending) >= window:
                yield oldest()
        pending.append((part, part.num_bytes, None))
    while pending:
        yield oldest()


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    *,
    tokenizer_type: TokenizerType,
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
    show_progress: Callable[[PreprocessReport], None] | None = None,
) -> PreprocessReport:
    """Tokenizes files, globs or folders into ``<output_prefix>_<key>_document.{bin,idx}`` for each key.

    ``partitions``: cut the input into at least so many parts, where it can be cut (uncompressed JSON lines).
    ``per_file``: a pair ``<output_prefix>/<file>_<key>_document`` for each input file instead of one for all.
    ``rank``, ``world_size``: of the processes that share the work; the parts, largest first, go round among them.

    The final files appear only when everything went well; finished parts wait in ``<output_prefix>.parts``. The report
    counts the whole output, or where other processes are still at work this process's parts. Raises DataError for
    unusable input (file and line), a missing tokenizer, a corpus without tokens, or a disk that refuses; ConfigError
    for an option that makes no sense.
    """
    _check_options(workers, rank, world_size, json_keys)
    started = time.monotonic()
    paths = expand_inputs(inputs)
    tokenizer = build_tokenizer(tokenizer_type, tokenizer_model)
    dtype = token_dtype(tokenizer.vocab_size)
    recipe = _Recipe(tokenizer_type, tokenizer_model, tuple(json_keys), append_eod, skip_malformed, dtype)
    plan = PartPlan(
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
    plan.begin()
    missing = [part for part in mine if not plan.is_done(part)]
    report = PreprocessReport(parts_found=len(mine) - len(missing))
    _encode_parts(plan, missing, recipe, workers, report, started, show_progress or log_progress, log_interval)
    if not plan.in_parts or per_file or plan.all_done():
        report = _finish(plan, mine if per_file else plan.parts, report)
        if plan.in_parts and not per_file:
            plan.merge(dtype)
    else:
        report.merged = False
    report.seconds = time.monotonic() - started
    return report


def _check_options(workers: int, rank: int, world_size: int, json_keys: Sequence[str]) -> None:
    if workers < 1:
        raise ConfigError(f"workers={workers} must be at least 1")
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} must lie in [0, {world_size})")
    if not json_keys or len(set(json_keys)) != len(json_keys):
        raise ConfigError(f"json_keys={list(json_keys)} must name one or more different keys")


def _finish(plan: PartPlan, parts: Sequence[Part], own: PreprocessReport) -> PreprocessReport:
    """The report on finished ``parts``, whoever wrote them. Raises DataError where they have no tokens."""
    total = PreprocessReport(parts=own.parts, parts_found=own.parts_found)
    for part in parts:
        total.add(_load_report(plan, part))
    _check_tokens(total, plan, parts)
    return total


def _check_tokens(report: PreprocessReport, plan: PartPlan, parts: Sequence[Part]) -> None:
    """Some tokens for every key; a single file of many may have none."""
    for key in plan.keys:
        prefixes = [plan.final_prefix(part, key) for part in parts]
        if not any(report.tokens[prefix] for prefix in prefixes):
            raise DataError(
                f"{prefixes[0]}: the input gives no tokens ({report.documents} documents, {report.empty_documents} of "
                f"them empty, {report.malformed} malformed lines left out)"
            )


def _load_report(plan: PartPlan, part: Part) -> PreprocessReport:
    counts = plan.counts(part)
    tokens = {plan.final_prefix(part, key): number for key, number in counts["tokens"].items()}
    names = ("documents", "empty_documents", "malformed", "input_bytes")
    return PreprocessReport(tokens=tokens, **{name: counts[name] for name in names})


def _encode_parts(
    plan: PartPlan,
    parts: Sequence[Part],
    recipe: _Recipe,
    workers: int,
    report: PreprocessReport,
    started: float,
    tell: Callable[[PreprocessReport], None],
    log_interval: int,
) -> None:
    """Writes the pairs of ``parts``, one part after the other."""
    if not parts:
        return
    to_read, read = sum(part.num_bytes for part in parts), 0
    # spawned, not forked: the tokenizer library's threads do not survive a fork
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (recipe,))
    with ExitStack() as stack:
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        output: _PartOutput | None = None
        try:
            for part, position, encoded in _encode_all(pool, parts, recipe.keys, _BATCHES_PER_WORKER * workers):
                if output is None:
                    output = stack.enter_context(_PartOutput(plan, part, recipe))
                if encoded is None:
                    output.commit(report)
                    read += part.num_bytes
                    output = None
                    continue
                before = report.documents + output.report.documents
                output.write(encoded, report.malformed)
                after = report.documents + output.report.documents
                if after // log_interval > before // log_interval:
                    now = replace(report, tokens=dict(report.tokens), seconds=time.monotonic() - started)
                    now.add(output.report)
                    now.progress = (read + position) / max(1, to_read)
                    tell(now)
        except BrokenProcessPool as error:
            raise DataError(
                f"{plan.output_prefix}: a worker process died, most likely for lack of memory; use fewer --workers"
            ) from error


class _PartOutput(ExitStack):
    """The pairs of one part, one per key; what has not been committed is removed at the end."""

    def __init__(self, plan: PartPlan, part: Part, recipe: _Recipe) -> None:
        super().__init__()
        self._plan, self._part = plan, part
        self.report = PreprocessReport(tokens={plan.final_prefix(part, key): 0 for key in recipe.keys})
        self._writers = {}
        for key in recipe.keys:
            writer = IndexedDatasetWriter(plan.prefix(part, key), recipe.dtype)
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
            logger.warning("left out: %s", message)
        report.malformed += len(encoded.malformed)
        report.documents += len(encoded.lengths[0])
        report.input_bytes += encoded.num_bytes

    def commit(self, total: PreprocessReport) -> None:
        """Makes the pairs final and adds their counts to ``total``."""
        if not self._plan.in_parts:
            _check_tokens(self.report, self._plan, [self._part])  # a single part is the whole output
        for writer in self._writers.values():
            writer.commit()
        counts = {name: getattr(self.report, name) for name in ("documents", "empty_documents", "malformed")}
        counts |= {"input_bytes": self.report.input_bytes}
        tokens = dict(zip(self._writers, self.report.tokens.values(), strict=True))
        self._plan.mark_done(self._part, {**counts, "tokens": tokens})
        total.add(self.report)
        total.parts += 1


def log_progress(report: PreprocessReport) -> None:
    """One line: documents, tokens, bytes of (uncompressed) input, their rates since the start, and the time to go."""
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
