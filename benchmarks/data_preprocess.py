#!/usr/bin/env python3
"""Throughput of `optimus preprocess` against the tokenizer library alone, and against a plain loop over a pool.

    python benchmarks/data_preprocess.py --output benchmarks/results/data_preprocess.json

``--tokenizer``: "gpt2" and "llama3" are byte-level BPEs of the ``tokenizers`` library behind those pre-tokenizers,
"tiktoken" is the former as a .tiktoken file, "bpe" and "unigram" are SentencePiece models; all are trained here, on a
part of the corpus. Three ways over the same file with the same tokenizer and the same number of processes:

- library: the tokenizer library on texts that lie in memory, nothing read, nothing written: as many processes as cores,
  each with its share of the texts, in the library's fastest call; the time is that of the slowest, without its start;
- ours: ``preprocess``, from JSON lines to .bin/.idx on disk, timed from a fifth of the file on, when all workers run
  (with ``--with-start`` all of it);
- loop: what Megatron's tools/preprocess_data.py does, by megatron-core's own classes: its tokenizers, one document at a
  time through ``multiprocessing.Pool.imap`` in chunks of 32 lines, ids back as lists, and its
  ``IndexedDatasetBuilder``, which the parent hands document after document. Of its two ways to call a Hugging Face
  tokenizer it is the faster one (``include_special_tokens``). The files must be the same, byte for byte; so that they
  can be, the corpus has no text that its tokenizers take for a special token.

They take turns, ``--repeat`` times; the medians count. ``mb_per_processor_s`` is by the processor time of all processes
of a way, which other programs on the machine change less than they change the clock. ``library_over_loop`` is the
ceiling of a program that gives every text to the library; ours can be above it where pieces come from a table.
"""

from __future__ import annotations

import argparse
import base64
import json
import multiprocessing
import os
import re
import resource
import site
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sized
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.optimus.config.schema import TokenizerType
from megatron.optimus.data.tokenize.corpus import read_documents
from megatron.optimus.data.tokenize.preprocess import PreprocessReport, preprocess
from megatron.optimus.data.tokenize.pretoken_cache import SPLIT_PATTERNS
from megatron.optimus.data.tokenize.tokenizer import build_tokenizer, train_bpe
from megatron.optimus.platform import environment

CONTEXT = multiprocessing.get_context("spawn")
TICKS = os.sysconf("SC_CLK_TCK")
TRAINED_ON = 1500  # documents
SPECIAL = 1000  # tokens that Megatron's tiktoken class puts before the others
SPECIAL_NAMES = re.compile(r"<(unk|s|/s|mask|pad|cls|sep|SPECIAL_\d+|\|endoftext\|)>")
_tokenizer: Any = None


class Model(NamedTuple):
    kind: TokenizerType
    path: str


class Run(NamedTuple):
    seconds: float
    processor_seconds: float
    tokens: int


def hugging_face(folder: Path, texts: list[str], vocab_size: int, split: str) -> Model:
    train_bpe(texts, vocab_size, folder)
    if split == "llama3":
        split_like_llama3(folder)
    return Model(TokenizerType.HF, str(folder))


def split_like_llama3(model: Path) -> None:
    """Replaces the pre-tokenizer."""
    state = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    [pattern] = [pattern for pattern in SPLIT_PATTERNS if "{1,3}" in pattern]
    rule = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    own = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [rule, own]}
    (model / "tokenizer.json").write_text(json.dumps(state), encoding="utf-8")


def tiktoken_file(folder: Path, texts: list[str], vocab_size: int) -> Model:
    """The byte-level BPE again: its ids are the ranks of its merges. As Megatron has them: the bytes in their order,
    after 1,000 special tokens, of which the third ends documents; and its file, a JSON list.
    """
    from megatron.core.tokenizers.text.libraries import tiktoken_tokenizer as megatron

    train_bpe(texts, vocab_size, folder)
    tokenizer: Any = build_tokenizer(TokenizerType.HF, folder)
    tokens = [token for _, token in sorted(tokenizer._bytes.items()) if token]
    tokens = sorted(tokens[:256]) + tokens[256:]
    lines = [b"%s %d" % (base64.b64encode(token), SPECIAL + i) for i, token in enumerate(tokens)]
    (folder / "v.tiktoken").write_bytes(b"\n".join(lines))
    names = megatron.SPECIAL_TOKENS + [f"<SPECIAL_{i}>" for i in range(len(megatron.SPECIAL_TOKENS), SPECIAL)]
    options = {"pattern": megatron._PATTERN_TIKTOKEN_V2, "special_tokens": {name: i for i, name in enumerate(names)}}
    (folder / "v.tiktoken.json").write_text(json.dumps(options | {"end_of_text": names.index("</s>")}))
    entries = [{"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": ""} for i, t in enumerate(tokens)]
    (folder / "megatron.json").write_text(json.dumps(entries))
    return Model(TokenizerType.TIKTOKEN, str(folder / "v.tiktoken"))


def sentencepiece_model(folder: Path, texts: list[str], vocab_size: int, kind: str) -> Model:
    """With Llama 2's settings: unknown characters as bytes, digits apart, nothing normalized."""
    import sentencepiece

    folder.mkdir()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.splitlines() if line),
        model_prefix=str(folder / "sp"),
        model_type=kind,
        vocab_size=vocab_size,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return Model(TokenizerType.SENTENCEPIECE, str(folder / "sp.model"))


def train(name: str, folder: Path, texts: list[str], vocab_size: int) -> Model:
    if name == "tiktoken":
        return tiktoken_file(folder, texts, vocab_size)
    if name in ("bpe", "unigram"):
        return sentencepiece_model(folder, texts, vocab_size, name)
    return hugging_face(folder, texts, vocab_size, name)


TOKENIZERS = ("gpt2", "llama3", "tiktoken", "bpe", "unigram")


def start(model: Model) -> None:
    global _tokenizer  # noqa: PLW0603  one per worker process
    environment.set_default("TOKENIZERS_PARALLELISM", "false")
    _tokenizer = build_tokenizer(model.kind, model.path)


def library_call(kind: TokenizerType) -> Callable[[list[str]], Iterable[Sized]]:
    """The fastest way of the library alone, in one thread."""
    if kind is TokenizerType.TIKTOKEN:
        return lambda batch: [_tokenizer._encoding.encode_to_numpy(text, disallowed_special=()) for text in batch]
    if kind is TokenizerType.SENTENCEPIECE:
        return lambda batch: _tokenizer.processor.encode(batch, num_threads=1, out_type="numpy")
    return lambda batch: _tokenizer._tokenizer.encode_batch_fast(batch, add_special_tokens=False)


def library_worker(model: Model, path: str, number: int, workers: int, barrier: Any, results: Any) -> None:
    start(model)
    texts, encode = list(read_documents([Path(path)]))[number::workers], library_call(model.kind)
    batches = [texts[i : i + 256] for i in range(0, len(texts), 256)]
    barrier.wait()
    started, processor = time.perf_counter(), time.process_time()
    tokens = sum(len(ids) for batch in batches for ids in encode(batch))
    results.put(Run(time.perf_counter() - started, time.process_time() - processor, tokens))


def library(model: Model, path: Path, workers: int) -> Run:
    barrier, results = CONTEXT.Barrier(workers), CONTEXT.Queue()
    processes = [
        CONTEXT.Process(target=library_worker, args=(model, str(path), i, workers, barrier, results))
        for i in range(workers)
    ]
    [process.start() for process in processes]
    done = [results.get() for _ in processes]
    [process.join() for process in processes]
    processor, tokens = sum(run.processor_seconds for run in done), sum(run.tokens for run in done)
    return Run(max(run.seconds for run in done), processor, tokens)


def processor_seconds() -> float:
    """Of this process and all that it has started, whether they are still there or not."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for child in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
        fields = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / TICKS
    return total


def megatron_tokenizer(model: Model) -> Any:
    """megatron-core's object for the same tokenizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about libraries for GPUs
        from megatron.core.tokenizers import MegatronTokenizer

    path, folder = model.path, Path(model.path).parent
    if model.kind is TokenizerType.TIKTOKEN:
        path, library = str(folder / "megatron.json"), "tiktoken"
        options: dict[str, Any] = {"num_special_tokens": SPECIAL}
        options["vocab_size"] = SPECIAL + len(Path(model.path).read_text().splitlines())
    elif model.kind is TokenizerType.SENTENCEPIECE:
        library, options = "sentencepiece", {"legacy": False}
    else:
        library, options = "huggingface", {"use_fast": True, "include_special_tokens": True}
    return MegatronTokenizer.from_pretrained(tokenizer_path=path, metadata_path={"library": library}, **options)


def start_loop(model: Model) -> None:
    global _tokenizer  # noqa: PLW0603  one per worker process
    environment.set_default("TOKENIZERS_PARALLELISM", "false")
    _tokenizer = megatron_tokenizer(model)


def loop_encode(line: str) -> tuple[dict[str, list[int]], dict[str, list[int]], int]:
    ids: list[int] = []
    ids.extend(_tokenizer.tokenize(json.loads(line)["text"]))
    if ids:
        ids.append(_tokenizer.eod)
    return {"text": ids}, {"text": [len(ids)] if ids else []}, len(line)


def loop(model: Model, path: Path, workers: int, prefix: Path) -> Run:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    tokens, vocab_size = 0, megatron_tokenizer(model).vocab_size
    with CONTEXT.Pool(workers, start_loop, (model,)) as pool:
        list(pool.imap(loop_encode, ['{"text": "x"}'] * workers * 32, 32))  # all have started
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocab_size))
        started, processor = time.perf_counter(), processor_seconds()
        with open(path, encoding="utf-8") as lines:
            for documents, lengths, _ in pool.imap(loop_encode, lines, 32):
                builder.add_document(documents["text"], lengths["text"])
                tokens += len(documents["text"])
        builder.finalize(f"{prefix}.idx")
        return Run(time.perf_counter() - started, processor_seconds() - processor, tokens)


def ours(model: Model, path: Path, workers: int, prefix: Path, with_start: bool) -> Run:
    """Without the start: from the first report after a fifth of the file, scaled to the whole."""
    first: list[tuple[float, float, int]] = []

    def note(report: PreprocessReport) -> None:
        if not first and report.progress >= 0.2:
            first.append((time.perf_counter(), processor_seconds(), report.input_bytes))

    started = time.perf_counter(), processor_seconds()
    report = preprocess(
        [str(path)],
        str(prefix),
        tokenizer_type=model.kind,
        tokenizer_model=model.path,
        append_eod=True,
        workers=workers,
        show_progress=note,
        log_interval=100,
    )
    ended, share = (time.perf_counter(), processor_seconds()), 1.0
    if not with_start:
        started, share = first[0][:2], (report.input_bytes - first[0][2]) / report.input_bytes
    seconds, processor = ((b - a) / share for a, b in zip(started, ended, strict=True))
    return Run(seconds, processor, sum(report.tokens.values()))


def measure(name: str, model: Model, path: Path, folder: Path, args: argparse.Namespace) -> dict[str, object]:
    """One tokenizer, all three ways."""
    size = path.stat().st_size / 1e6
    runs: dict[str, list[Run]] = {"library": [], "ours": [], "loop": []}
    for i in range(args.repeat):
        prefixes = [folder / f"{name}-{way}{i}" for way in ("ours", "loop")]
        runs["library"].append(library(model, path, args.workers))
        runs["ours"].append(ours(model, path, args.workers, prefixes[0], args.with_start))
        runs["loop"].append(loop(model, path, args.workers, prefixes[1]))
        assert runs["ours"][-1].tokens == runs["loop"][-1].tokens
        for suffix in (".bin", ".idx"):
            written = Path(f"{prefixes[0]}_text_document{suffix}"), Path(f"{prefixes[1]}{suffix}")
            assert written[0].read_bytes() == written[1].read_bytes()
            for file in written:
                file.unlink()
        print(name, {way: round(size / of_way[-1].seconds, 2) for way, of_way in runs.items()}, flush=True)
    clock = {way: [round(size / run.seconds, 3) for run in of_way] for way, of_way in runs.items()}
    processor = {way: [round(size / run.processor_seconds, 3) for run in of_way] for way, of_way in runs.items()}
    result: dict[str, object] = {"tokenizer": name, "tokens": runs["ours"][-1].tokens}
    result |= {"load_average": os.getloadavg(), "mb_per_s": clock, "mb_per_processor_s": processor}
    for kind, rates in (("", clock), ("_by_processor_time", processor)):
        median = {way: statistics.median(values) for way, values in rates.items()}
        result[f"ours_over_library{kind}"] = round(median["ours"] / median["library"], 3)
        result[f"ours_over_loop{kind}"] = round(median["ours"] / median["loop"], 3)
        result[f"library_over_loop{kind}"] = round(median["library"] / median["loop"], 3)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", help="JSON lines; default: Python sources and texts installed here")
    parser.add_argument("--megabytes", type=float, default=20)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--tokenizer", nargs="+", choices=TOKENIZERS, default=list(TOKENIZERS))
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--with-start", action="store_true")
    parser.add_argument("--output")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = Path(args.input) if args.input else make_corpus(folder / "corpus.jsonl", args.megabytes)
        texts = list(read_documents([path]))[:TRAINED_ON]
        for tokenizer in args.tokenizer:
            model = train(tokenizer, folder / tokenizer, texts, args.vocab_size)
            results.append(measure(tokenizer, model, path, folder, args))
            print(json.dumps(results[-1]), flush=True)
        megabytes = path.stat().st_size / 1e6
    host = {"cores": os.cpu_count(), "python": sys.version.split()[0]}
    settings = {"megabytes": megabytes, "workers": args.workers, "vocab_size": args.vocab_size}
    if args.output:
        text = json.dumps({"host": host, "settings": settings, "results": results}, indent=1)
        Path(args.output).write_text(text + "\n")
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
                document = text[start : start + length]
                if not SPECIAL_NAMES.search(document):
                    size += stream.write(json.dumps({"text": document}) + "\n")
                start += length
    return path


if __name__ == "__main__":
    sys.exit(main())
