#!/usr/bin/env python3
"""Batches a second of one rank's loader, and what it reads from the disk for them.

    python benchmarks/data_loader.py --output benchmarks/results/data_loader.json

A GPU that trains 60,000 tokens a second at sequence 4,096 wants 14.65 samples a second. The loader is timed alone, its
reading thread included, on one core's worth of work: the page cache is warm. Then the files are dropped from the page
cache and the same samples are read again: ``read_bytes`` of /proc/self/io is what came from the device, for our reads
and, for comparison, through memory maps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.optimus.data.dataset import InstanceSet, Split
from megatron.optimus.data.indexed import IndexedDatasetWriter
from megatron.optimus.data.loader import BatchLoader
from megatron.optimus.data.mixture import Mixture
from megatron.optimus.data.sources import Corpus, Sources

SEQ_LENGTH, GPU_TOKENS_PER_SECOND = 4096, 60_000
MICRO_BATCH, GLOBAL_BATCH, RANKS = 4, 1024, 64


def io_bytes() -> tuple[int, int]:
    """(bytes asked for by read calls, bytes fetched from the device) of this process so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"]), int(fields["read_bytes"])


def drop(prefixes: list[str]) -> None:
    for prefix in prefixes:
        descriptor = os.open(f"{prefix}.bin", os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def rate(instances: InstanceSet | Mixture, steps: int) -> dict[str, float]:
    loader = BatchLoader(
        instances,
        seq_length=SEQ_LENGTH,
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=MICRO_BATCH,
        data_parallel_rank=3,
        data_parallel_size=RANKS,
        seed=1,
    )
    loader.batch(0)
    started = time.perf_counter()
    for step in range(1, steps + 1):
        loader.batch(step * GLOBAL_BATCH)
    seconds = time.perf_counter() - started
    loader.close()
    samples = steps * GLOBAL_BATCH // RANKS / seconds
    wanted = GPU_TOKENS_PER_SECOND / SEQ_LENGTH
    return {
        "samples_per_s": round(samples, 1),
        "micro_batches_per_s": round(samples / MICRO_BATCH, 1),
        "tokens_per_s": round(samples * SEQ_LENGTH),
        "times_what_the_gpu_uses": round(samples / wanted, 1),
    }


def cold_reads(prefixes: list[str], itemsize: int, samples: int) -> dict[str, float]:
    """Bytes per byte used, reading random instances of a cold cache."""
    used = samples * (SEQ_LENGTH + 1) * itemsize
    ids = np.random.default_rng(0).permutation(len(InstanceSet(prefixes, SEQ_LENGTH)))[:samples].tolist()
    instances = InstanceSet(prefixes, SEQ_LENGTH)
    drop(prefixes)
    before = io_bytes()
    for i in ids:
        instances.read(i)
    after = io_bytes()
    places = [instances.locate(i) for i in ids]
    drop(prefixes)
    maps = {prefix: np.memmap(f"{prefix}.bin", dtype=f"u{itemsize}", mode="r") for prefix in prefixes}
    mapped = io_bytes()
    for prefix, start in places:
        maps[prefix][start : start + SEQ_LENGTH + 1].astype(np.int64)
    return {
        "asked_for_over_used": round((after[0] - before[0]) / used, 4),
        "device_over_used": round((after[1] - before[1]) / used, 4),
        "device_over_used_memory_maps": round((io_bytes()[1] - mapped[1]) / used, 4),
    }


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
            tokens = np.random.default_rng(1).integers(0, 50_000, 4_000_000).astype(dtype)
            prefixes = [f"{folder}/part-{i:03}" for i in range(args.files)]
            for prefix in prefixes:
                with IndexedDatasetWriter(prefix, dtype) as writer:
                    for start in range(0, tokens.size, 1000):
                        writer.add_document(tokens[start : start + 1000])
            corpora = tuple(Corpus(f"c{i}", tuple(prefixes[i::10])) for i in range(10))
            plain = InstanceSet(prefixes, SEQ_LENGTH, vocab_size=50_304)
            blend = Mixture(Sources(corpora), SEQ_LENGTH, split="1", part=Split.TRAIN, seed=1, vocab_size=50_304)
            result = {"dtype": np.dtype(dtype).name, "one_corpus": rate(plain, args.steps)}
            result |= {"blend_of_10": rate(blend, args.steps)}
            result |= {"cold": cold_reads(prefixes, np.dtype(dtype).itemsize, 1500)}
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
