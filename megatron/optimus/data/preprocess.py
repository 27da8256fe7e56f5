"""JSON lines in, token files out: the work of tools/preprocess_data.py.

One process reads lines and writes tokens; worker processes do the rest (JSON, tokenizer, narrowing to the file's
element type) on batches of about a megabyte. Results are written in reading order, so the bytes do not depend on the
number of workers. At most a few batches per worker are under way: memory does not grow with the corpus.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.optimus.config.schema import ConfigError, TokenizerType
from megatron.optimus.data.corpus import LineBatch, expand_inputs, parse_batch, read_batches
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.indexed import IndexedDatasetWriter, token_dtype
from megatron.optimus.data.tokenizer import Tokenizer, build_tokenizer

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
    # the library's own threads, times the number of workers, would fight for the cores; it reads this from C
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
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
        if recipe.append_eod:
            for ids in documents:
                if ids:  # Megatron's convention: an empty document stays empty
                    ids.append(tokenizer.eod_id)
        lengths.append([len(ids) for ids in documents])
        flat = np.fromiter(chain.from_iterable(documents), dtype=np.int64, count=sum(lengths[-1]))
        tokens.append(flat.astype(recipe.dtype))
    return _EncodedBatch(tokens, lengths, parsed.malformed, batch.num_bytes)


def _encode_all(pool: ProcessPoolExecutor, batches: Iterator[LineBatch], window: int) -> Iterator[_EncodedBatch]:
    """Results in the order of ``batches``, with at most ``window`` of them under way."""
    pending: deque[Future[_EncodedBatch]] = deque()
    for batch in batches:
        pending.append(pool.submit(_encode_batch, batch))
        if len(pending) >= window:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


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
) -> PreprocessReport:
    """Tokenizes JSON-lines files (paths or globs) into ``<output_prefix>_<key>_document.{bin,idx}`` for each key.

    The final files appear only when everything went well. Raises DataError for unusable input (file and line), a
    missing tokenizer, a corpus without tokens, or a disk that refuses; ConfigError for an option that makes no sense.
    """
    if workers < 1:
        raise ConfigError(f"workers={workers} must be at least 1")
    if not json_keys or len(set(json_keys)) != len(json_keys):
        raise ConfigError(f"json_keys={list(json_keys)} must name one or more different keys")
    started = time.monotonic()
    paths = expand_inputs(inputs)
    tokenizer = build_tokenizer(tokenizer_type, tokenizer_model)
    dtype = token_dtype(tokenizer.vocab_size)
    recipe = _Recipe(tokenizer_type, tokenizer_model, tuple(json_keys), append_eod, skip_malformed, dtype)
    prefixes = [f"{output_prefix}_{key}_document" for key in json_keys]
    report = PreprocessReport(tokens=dict.fromkeys(prefixes, 0))
    # spawned, not forked: the tokenizer library's threads do not survive a fork
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (recipe,))
    with ExitStack() as writers:
        try:
            pairs = [(prefix, writers.enter_context(IndexedDatasetWriter(prefix, dtype))) for prefix in prefixes]
            for encoded in _encode_all(pool, read_batches(paths), _BATCHES_PER_WORKER * workers):
                before = report.documents
                _write(encoded, pairs, report)
                report.seconds = time.monotonic() - started
                if report.documents // log_interval > before // log_interval:
                    log_progress(report)
        except BrokenProcessPool as error:
            raise DataError(
                f"{output_prefix}: a worker process died, most likely for lack of memory; use fewer --workers"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        for prefix, tokens in report.tokens.items():
            if not tokens:
                raise DataError(
                    f"{prefix}: the input gives no tokens ({report.documents} documents, {report.empty_documents} of "
                    f"them empty, {report.malformed} malformed lines left out)"
                )
    report.seconds = time.monotonic() - started
    return report


def _write(encoded: _EncodedBatch, pairs: list[tuple[str, IndexedDatasetWriter]], report: PreprocessReport) -> None:
    """Appends one batch to the files and the counts."""
    for (prefix, writer), tokens, lengths in zip(pairs, encoded.tokens, encoded.lengths, strict=True):
        start = 0
        for length in lengths:
            writer.add_document(tokens[start : start + length])
            start += length
        report.tokens[prefix] += start
        report.empty_documents += lengths.count(0)
    for message in encoded.malformed[: max(0, _SHOWN_MALFORMED - report.malformed)]:
        logger.warning("left out: %s", message)
    report.malformed += len(encoded.malformed)
    report.documents += len(encoded.lengths[0])
    report.input_bytes += encoded.num_bytes


def log_progress(report: PreprocessReport) -> None:
    """One line: documents, tokens, bytes of (uncompressed) input, and their rates since the start."""
    seconds = max(report.seconds, 1e-9)
    logger.info(
        "documents=%d tokens=%d input_mb=%.1f documents_per_s=%.0f mb_per_s=%.2f malformed=%d",
        report.documents,
        sum(report.tokens.values()),
        report.input_bytes / 1e6,
        report.documents / seconds,
        report.input_bytes / 1e6 / seconds,
        report.malformed,
    )
