#!/usr/bin/env python3
"""Batches a second of one rank's loader, and what it reads from the disk for them.

    python benchmarks/data_loader.py --output benchmarks/results/data_loader.json

A GPU that trains 60,000 tokens a second at sequence 4,096 wants 14.65 samples a second. The loader is timed alone, its
reading thread included, with a warm page cache: by the clock, and by processor time, which other programs on the
machine hardly change. Then the files are dropped from the page cache and samples are read again: ``read_bytes`` of
/proc/self/io is what came from the device. ``pages`` is what whole pages of 4 KiB make unavoidable. For comparison, the
same with Megatron's extra token: by our reads, through memory maps, and through O_DIRECT in sectors of 512 bytes.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.optimus.data.dataset import InstanceSet, SampleOptions, Split
from megatron.optimus.data.fim import FillInTheMiddle
from megatron.optimus.data.indexed import IndexedDatasetWriter
from megatron.optimus.data.loader import BatchLoader
from megatron.optimus.data.mixture import Mixture
from megatron.optimus.data.sources import Corpus, Sources
from megatron.optimus.data.tokenize.tokenizer import HuggingFaceTokenizer, train_bpe

SEQ_LENGTH, GPU_TOKENS_PER_SECOND = 4096, 60_000
PAGE, SECTOR = 4096, 512
MICRO_BATCH, GLOBAL_BATCH, RANKS = 4, 1024, 64


def io_bytes() -> tuple[int, int]:
    """(bytes asked for by read calls, bytes fetched from the device) of this process so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"]), int(fields["read_bytes"])


def drop(prefixes: list[str]) -> None:
    for path in (f"{prefix}{suffix}" for prefix in prefixes for suffix in (".bin", ".idx")):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def rate(instances: InstanceSet | Mixture, steps: int, **options: Any) -> dict[str, float]:
    loader = BatchLoader(
        instances,
        seq_length=SEQ_LENGTH,
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=MICRO_BATCH,
        data_parallel_rank=3,
        data_parallel_size=RANKS,
        seed=1,
        **options,
    )
    loader.batch(0)
    started, started_cpu = time.perf_counter(), time.process_time()
    for step in range(1, steps + 1):
        loader.batch(step * GLOBAL_BATCH)
    samples = steps * GLOBAL_BATCH // RANKS
    seconds, cpu = time.perf_counter() - started, time.process_time() - started_cpu
    loader.close()
    wanted = GPU_TOKENS_PER_SECOND / SEQ_LENGTH
    return {
        "samples_per_s": round(samples / seconds, 1),
        "micro_batches_per_s": round(samples / MICRO_BATCH / seconds, 1),
        "times_what_the_gpu_uses": round(samples / seconds / wanted, 1),
        "samples_per_processor_s": round(samples / cpu, 1),
        "times_what_the_gpu_uses_by_processor_time": round(samples / cpu / wanted, 1),
    }


def cold_reads(prefixes: list[str], itemsize: int, samples: int, **options: bool) -> dict[str, float]:
    """Bytes of the device per byte used, reading random instances of a cold cache."""
    count = len(InstanceSet(prefixes, SEQ_LENGTH, **options))
    ids = np.random.default_rng(0).permutation(count)[:samples].tolist()
    drop(prefixes)
    instances = InstanceSet(prefixes, SEQ_LENGTH, **options)
    before, used = io_bytes(), 0
    for i in ids:
        used += itemsize * sum(piece.tokens.size + (piece.following >= 0) for piece in instances.read(i))
    after = io_bytes()
    result = {
        "samples": samples,
        "asked_for_over_used": round((after[0] - before[0]) / used, 4),
        "device_over_used": round((after[1] - before[1]) / used, 4),
    }
    places = [(prefix, ranges) for prefix, ranges in map(instances.locate, ids)]
    extra = options.get("extra_token", False)
    pages = {
        (prefix, page)
        for prefix, ranges in places
        for start, stop in ranges
        for page in range(start * itemsize // PAGE, -(-(stop + extra) * itemsize // PAGE))
    }
    result["pages_over_used"] = round(len(pages) * PAGE / used, 4)
    if not extra:
        return result
    drop(prefixes)
    maps = {prefix: np.memmap(f"{prefix}.bin", dtype=f"u{itemsize}", mode="r") for prefix in prefixes}
    mapped = io_bytes()
    for prefix, [(start, stop)] in places:
        maps[prefix][start : stop + 1].astype(np.int64)
    result["device_over_used_memory_maps"] = round((io_bytes()[1] - mapped[1]) / used, 4)
    drop(prefixes)
    result["device_over_used_direct"] = round(direct_reads(places, itemsize) / used, 4)
    return result


def direct_reads(places: list[tuple[str, list[tuple[int, int]]]], itemsize: int) -> int:
    """Bytes that the device gives for the same tokens without a page cache."""
    buffer = mmap.mmap(-1, (SEQ_LENGTH + 1) * itemsize + 2 * PAGE)  # begins at a page, as O_DIRECT wants it
    before = io_bytes()[1]
    for prefix, [(start, stop)] in places:
        descriptor = os.open(f"{prefix}.bin", os.O_RDONLY | os.O_DIRECT)
        first = start * itemsize // SECTOR * SECTOR
        size = -(-((stop + 1) * itemsize - first) // SECTOR) * SECTOR
        os.preadv(descriptor, [memoryview(buffer)[:size]], first)
        os.close(descriptor)
    return io_bytes()[1] - before


def write_corpus(prefix: str, dtype: type[np.integer], tokens: int, seed: int) -> None:
    """Random ids in documents of the lengths of web pages, roughly: log-normal, 1,000 tokens on average."""
    rng = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, dtype) as writer:
        while tokens > 0:
            size = min(tokens, max(2, int(rng.lognormal(6.2, 1.2))))
            ids = rng.integers(1, 50_000, size)
            ids[-1] = 0
            writer.add_document(ids)
            tokens -= size


def fim_rate(folder: str, steps: int) -> dict[str, float]:
    """Half of the documents filled in: the Python files of this checkout, cut in three and tokenized again."""
    root, names = Path(__file__).resolve().parents[1], ("<fim_prefix>", "<fim_middle>", "<fim_suffix>")
    texts = [path.read_text(encoding="utf-8") for path in sorted((root / "megatron").rglob("*.py"))]
    train_bpe(texts, 8192, f"{folder}/tokenizer", names)
    tokenizer = HuggingFaceTokenizer(f"{folder}/tokenizer")
    with IndexedDatasetWriter(f"{folder}/code", np.uint16) as writer:
        for _ in range(20):
            for ids in tokenizer.encode_batch(texts):
                writer.add_document([*ids, tokenizer.eod_id])
    fim = FillInTheMiddle(0.5, 0.5, (1, 2, 3), tokenizer)
    return rate(InstanceSet([f"{folder}/code"], SEQ_LENGTH), steps, fim=fim)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output")
    parser.add_argument("--folder", help="on the disk to measure; default: a temporary folder")
    parser.add_argument("--files", type=int, default=40)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    results = []
    for dtype in (np.uint16, np.int32):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            prefixes = [f"{folder}/part-{i:03}" for i in range(args.files)]
            for i, prefix in enumerate(prefixes):
                write_corpus(prefix, dtype, 4_000_000, i)
            corpora = tuple(Corpus(f"c{i}", tuple(prefixes[i::10])) for i in range(10))
            plain = InstanceSet(prefixes, SEQ_LENGTH, vocab_size=50_304)
            packed = InstanceSet(prefixes, SEQ_LENGTH, vocab_size=50_304, packing=True)
            blend = Mixture(Sources(corpora), SEQ_LENGTH, split="1", part=Split.TRAIN, seed=1, vocab_size=50_304)
            documents = SampleOptions(0, reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=True)
            itemsize = np.dtype(dtype).itemsize
            result: dict[str, Any] = {"dtype": np.dtype(dtype).name}
            result["one_corpus"] = rate(plain, args.steps)
            result["blend_of_10"] = rate(blend, args.steps)
            result["documents"] = rate(plain, args.steps, options=documents)
            result["packing"] = rate(packed, args.steps, options=documents)
            if itemsize == 2:
                result["fill_in_the_middle"] = fim_rate(folder, args.steps)
            result["cold"] = cold_reads(prefixes, itemsize, 1500)
            result["cold_with_extra_token"] = cold_reads(prefixes, itemsize, 1500, extra_token=True)
            result["cold_packing"] = cold_reads(prefixes, itemsize, 1500, packing=True)
            results.append(result)
            print(json.dumps(result), flush=True)
    if args.output:
        host = {"cores": os.cpu_count(), "load_average": os.getloadavg(), "python": sys.version.split()[0]}
        setting = {"seq_length": SEQ_LENGTH, "global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH, "ranks": RANKS}
        Path(args.output).write_text(
            json.dumps({"host": host, "settings": setting, "results": results}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
