#!/usr/bin/env python3
"""Throughput of tools/preprocess_data.py against the tokenizer library alone, and against a plain loop over a pool.

    python benchmarks/data_preprocess.py --output benchmarks/results/data_preprocess.json

Three ways over the same file with the same tokenizer and the same number of processes:

- library: the tokenizer library on texts that lie in memory, nothing read, nothing written: as many processes as cores,
  each ``encode_batch_fast`` over its share; the time is that of the slowest, without its start;
- ours: ``preprocess``, from JSON lines to .bin/.idx on disk (with ``--with-start`` including the start of the workers);
- loop: one document at a time through ``multiprocessing.Pool.imap`` (chunks of 32), ids back as lists, written by the
  parent document after document: the way of Megatron's script.

They take turns, ``--repeat`` times; the medians count. ``--split llama3`` trains the tokenizer as usual and then puts
the regular expression of Llama 3 before it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import site
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.optimus.config.schema import TokenizerType
from megatron.optimus.data.corpus import read_documents
from megatron.optimus.data.indexed import IndexedDatasetWriter, token_dtype
from megatron.optimus.data.preprocess import PreprocessReport, preprocess
from megatron.optimus.data.tokenizer import HuggingFaceTokenizer, train_bpe
from megatron.optimus.data.words import SPLIT_PATTERNS
from megatron.optimus.runtime import launch_env

CONTEXT = multiprocessing.get_context("spawn")
_tokenizer: Any = None


def split_like_llama3(model: Path) -> None:
    """Replaces the pre-tokenizer."""
    state = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    [pattern] = [pattern for pattern in SPLIT_PATTERNS if "{1,3}" in pattern]
    rule = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    own = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [rule, own]}
    (model / "tokenizer.json").write_text(json.dumps(state), encoding="utf-8")


def start(model: str) -> None:
    global _tokenizer  # noqa: PLW0603  one per worker process
    launch_env.set_default("TOKENIZERS_PARALLELISM", "false")
    _tokenizer = HuggingFaceTokenizer(model)


def library_worker(model: str, path: str, number: int, workers: int, barrier: Any, results: Any) -> None:
    start(model)
    texts = list(read_documents([Path(path)]))[number::workers]
    batches = [texts[i : i + 256] for i in range(0, len(texts), 256)]
    barrier.wait()
    started = time.perf_counter()
    tokens = sum(
        len(e) for batch in batches for e in _tokenizer._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
    )
    results.put((time.perf_counter() - started, tokens))


def library(model: str, path: Path, workers: int) -> tuple[float, int]:
    barrier, results = CONTEXT.Barrier(workers), CONTEXT.Queue()
    processes = [
        CONTEXT.Process(target=library_worker, args=(model, str(path), i, workers, barrier, results))
        for i in range(workers)
    ]
    [process.start() for process in processes]
    done = [results.get() for _ in processes]
    [process.join() for process in processes]
    return max(seconds for seconds, _ in done), sum(tokens for _, tokens in done)


def loop_encode(line: str) -> tuple[dict[str, list[int]], int]:
    ids = _tokenizer.encode(json.loads(line)["text"])
    if ids:
        ids.append(_tokenizer.eod_id)
    return {"text": ids}, len(line)


def loop(model: str, path: Path, workers: int, prefix: Path) -> tuple[float, int]:
    tokenizer, tokens = HuggingFaceTokenizer(model), 0
    dtype = token_dtype(tokenizer.vocab_size)
    with CONTEXT.Pool(workers, start, (model,)) as pool, IndexedDatasetWriter(prefix, dtype) as writer:
        list(pool.imap(loop_encode, ['{"text": "x"}'] * workers * 32, 32))  # all have started
        started = time.perf_counter()
        with open(path, encoding="utf-8") as lines:
            for documents, _ in pool.imap(loop_encode, lines, 32):
                writer.add_document(np.array(documents["text"], dtype=dtype))
                tokens += len(documents["text"])
        seconds = time.perf_counter() - started
    return seconds, tokens


def ours(model: str, path: Path, workers: int, prefix: Path, with_start: bool) -> tuple[float, int]:
    """Without the start: from the first report on (after a hundredth of the file), scaled to the whole."""
    first: list[tuple[float, int]] = []

    def note(report: PreprocessReport) -> None:
        if not first:
            first.append((time.perf_counter(), report.input_bytes))

    started = time.perf_counter()
    report = preprocess(
        [str(path)],
        str(prefix),
        tokenizer_type=TokenizerType.HF,
        tokenizer_model=model,
        append_eod=True,
        workers=workers,
        show_progress=note,
        log_interval=100,
    )
    seconds, tokens = time.perf_counter() - started, sum(report.tokens.values())
    if not with_start:
        at, size = first[0]
        seconds = (started + seconds - at) * report.input_bytes / (report.input_bytes - size)
    return seconds, tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", help="JSON lines; default: Python sources and texts installed here")
    parser.add_argument("--megabytes", type=float, default=30)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--split", choices=["gpt2", "llama3"], default="gpt2", help="pre-tokenizer")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--with-start", action="store_true")
    parser.add_argument("--output")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = Path(args.input) if args.input else make_corpus(folder / "corpus.jsonl", args.megabytes)
        model = str(folder / "tokenizer")
        train_bpe(list(read_documents([path]))[:1500], args.vocab_size, model)
        if args.split == "llama3":
            split_like_llama3(Path(model))
        size = path.stat().st_size / 1e6
        runs: dict[str, list[float]] = {"library": [], "ours": [], "loop": []}
        for i in range(args.repeat):
            timed = {
                "library": library(model, path, args.workers),
                "ours": ours(model, path, args.workers, folder / f"o{i}", args.with_start),
                "loop": loop(model, path, args.workers, folder / f"l{i}"),
            }
            assert timed["ours"][1] == timed["loop"][1]
            names = (f"o{i}_text_document", f"l{i}")
            pairs = [[(folder / f"{n}{kind}").read_bytes() for kind in (".bin", ".idx")] for n in names]
            assert pairs[0] == pairs[1]
            for way, (seconds, _) in timed.items():
                runs[way].append(round(size / seconds, 3))
            print({way: values[-1] for way, values in runs.items()}, flush=True)
        median = {way: statistics.median(values) for way, values in runs.items()}
        result = {
            "host": {"cores": os.cpu_count(), "load_average": os.getloadavg(), "python": sys.version.split()[0]},
            "settings": {
                "split": args.split,
                "megabytes": size,
                "workers": args.workers,
                "vocab_size": args.vocab_size,
            },
            "tokens": timed["ours"][1],
            "mb_per_s": runs,
            "median_mb_per_s": median,
            "ours_over_library": round(median["ours"] / median["library"], 3),
            "ours_over_loop": round(median["ours"] / median["loop"], 3),
        }
    print(json.dumps(result, indent=1))
    if args.output:
        Path(args.output).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def make_corpus(path: Path, megabytes: float) -> Path:
    """Documents of 200 to 8,000 characters, none twice, from the Python sources and texts installed here."""
    size, generator = 0, np.random.default_rng(0)
    roots = [Path(os.__file__).parent, *map(Path, site.getsitepackages())]
    files = sorted(
        {file for root in roots for suffix in (".py", ".txt", ".md", ".rst") for file in root.rglob(f"*{suffix}")}
    )
    generator.shuffle(files)  # type: ignore[arg-type]
    with open(path, "w", encoding="utf-8") as stream:
        for file in files:
            text, start = file.read_text(encoding="utf-8", errors="ignore"), 0
            while start < len(text) and size < megabytes * 1e6:
                length = int(np.exp(generator.uniform(np.log(200), np.log(8000))))
                size += stream.write(json.dumps({"text": text[start : start + length]}) + "\n")
                start += length
    return path


if __name__ == "__main__":
    sys.exit(main())
