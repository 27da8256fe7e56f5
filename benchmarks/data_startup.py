#!/usr/bin/env python3
"""From the start to the first batch, over thousands of token files of trillions of tokens (sparse: no disk is filled).

    python benchmarks/data_startup.py --output benchmarks/results/data_startup.json

Every measurement is a process of its own that does what one rank of 256 does: it reads the list of files, checks index
entries and token ids of its share of them, looks at the headers, plans the blend and reads one batch. ``seconds`` are
those of a rank that is alone and looks at every header; ``seconds_headers_share`` is what a 256th of them takes, as a
rank of 256 does. ``processor_seconds`` hardly depend on what else the machine does. ``together`` is the exchange: four
gloo processes that open the files with each other. Seconds exclude Python's and torch's imports, which every training
program has; both memory figures are given. ``anonymous`` memory is the rank's own, file pages excluded.

``memory_of_ranks`` starts as many ranks at a time on this machine, each of which does all of that, and asks each when
all are there (/proc/self/smaps_rollup): ``private`` is memory that no other process has mapped; ``proportional``
divides what several have mapped (torch's libraries) among them, so that the sum over ranks is what they take of the
node. What other programs on the machine map as well counts as theirs too.

``without_torch`` is a whole process that does the same up to the batch's rows in numpy and never imports torch: what
the data path takes by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CASES = [("2T", 2_419, 2_000_000_000_000), ("15T", 20_000, 15_000_000_000_000)]
CORPORA = 10
SEQ_LENGTH, GLOBAL_BATCH, RANKS = 4096, 1024, 256
VOCABULARY = 50304
TOGETHER = 4
TOKENS_PER_DOCUMENT = 1000


def write_sparse_pair(prefix: Path, tokens: int, *, entries: bool = False) -> None:
    """Sizes, header and ends of a pair of ``tokens`` uint16 tokens; between is a hole, or the index's true entries."""
    from megatron.optimus.data.index_reader import HEADER, MAGIC, VERSION

    documents = tokens // TOKENS_PER_DOCUMENT
    last = tokens - (documents - 1) * TOKENS_PER_DOCUMENT
    with open(f"{prefix}.bin", "wb") as stream:
        stream.truncate(2 * tokens)
    with open(f"{prefix}.idx", "wb") as stream:
        stream.write(HEADER.pack(MAGIC, VERSION, 8, documents, documents + 1))
        if entries:
            sizes = np.full(documents, TOKENS_PER_DOCUMENT, np.int32)
            sizes[-1] = last
            sizes.tofile(stream)
            np.arange(0, 2 * TOKENS_PER_DOCUMENT * documents, 2 * TOKENS_PER_DOCUMENT).tofile(stream)
            np.arange(documents + 1).tofile(stream)
            return
        for offset, size, value in (
            (34 + 4 * (documents - 1), 4, last),
            (34 + 12 * documents - 8, 8, 2 * (tokens - last)),
            (34 + 20 * documents, 8, documents),
        ):
            stream.seek(offset)
            stream.write(value.to_bytes(size, "little"))


def make_files(folder: Path, files: int, tokens: int) -> tuple[Path, int]:
    """A list of ``files`` pairs of uneven size in corpora of uneven size; (its path, tokens in all)."""
    lines, total = [], 0
    for i in range(files):
        size = tokens * (i % 7 + 1) // (4 * files)
        corpus = min(CORPORA - 1, i * 40 // files)  # the last one has most of the files
        write_sparse_pair(folder / f"part-{i:05}", size, entries=i % RANKS == RANKS // 2)  # which the rank looks into
        lines.append(f"{size / tokens:.12f} part-{i:05} corpus-{corpus}")
        total += size
    path = folder / "list.txt"
    path.write_text("\n".join(lines) + "\n")
    return path, total


def memory() -> dict[str, float]:
    """MB: peak resident, and resident now by kind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    lines += Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    fields = {
        key: int(value.split()[0]) / 1024 for key, value in (line.split(":", 1) for line in lines) if "kB" in value
    }
    names = {"peak": "VmHWM", "resident": "Rss", "anonymous": "Anonymous", "proportional": "Pss"}
    private = fields["Private_Clean"] + fields["Private_Dirty"]
    return {name: fields[key] for name, key in names.items()} | {"private": private}


def measure(path: str, position: int, *, together: bool = False) -> dict[str, object]:
    """One rank's start. ``together``: at a sign from the parent it prints its memory, at another it goes on."""
    from megatron.optimus.config.schema import DataConfig
    from megatron.optimus.data.dataset import Split, check_contents
    from megatron.optimus.data.files import TokenFiles, summarize
    from megatron.optimus.data.loader import BatchLoader
    from megatron.optimus.data.mixture import Mixture
    from megatron.optimus.data.sources import read_sources

    before = memory()
    started, started_cpu = time.perf_counter(), time.process_time()
    sources = read_sources(DataConfig(data_file_list=path))
    check_contents(sources.prefixes[RANKS // 2 :: RANKS], VOCABULARY)
    before_share = time.perf_counter()
    summarize(sources.prefixes[RANKS // 3 :: RANKS])
    share = time.perf_counter() - before_share
    started += share  # done again below
    checked = time.perf_counter()
    files = TokenFiles(sources.prefixes)
    opened = time.perf_counter()
    train = Mixture(sources, SEQ_LENGTH, split="969,30,1", part=Split.TRAIN, seed=1, files=files, vocab_size=VOCABULARY)
    loader = BatchLoader(
        train,
        seq_length=SEQ_LENGTH,
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=1,
        data_parallel_rank=RANKS // 2,
        data_parallel_size=RANKS,
        seed=1,
    )
    batches = loader.batch(position)
    if together:
        print("ready", flush=True)
        sys.stdin.readline()  # all ranks are there
        print(json.dumps(memory()), flush=True)
        sys.stdin.readline()  # all have looked
    seconds, processor = time.perf_counter() - started, time.process_time() - started_cpu
    after = memory()
    loader.close()
    return {
        "seconds": round(seconds, 3),
        "processor_seconds": round(processor, 3),
        "seconds_contents_check": round(checked - started, 3),
        "seconds_headers": round(opened - checked, 3),
        "seconds_headers_share": round(share, 4),
        "instances": len(train),
        "micro_batches": len(batches),
        "peak_mb_above_imports": round(after["peak"] - before["peak"], 1),
        "anonymous_mb_above_imports": round(after["anonymous"] - before["anonymous"], 1),
        "peak_mb_with_python_and_torch": round(after["peak"], 1),
        "peak_mb_of_imports_alone": round(before["peak"], 1),
    }


def measure_alone(path: str, position: int) -> dict[str, object]:
    """One rank's start in a process without torch: all of its memory, the interpreter and numpy included."""
    from megatron.optimus.config.schema import DataConfig
    from megatron.optimus.data.dataset import SampleOptions, Split, check_contents, make_sample
    from megatron.optimus.data.files import TokenFiles
    from megatron.optimus.data.mixture import Mixture, shuffled_rows
    from megatron.optimus.data.sources import read_sources

    before, started = memory(), time.perf_counter()
    sources = read_sources(DataConfig(data_file_list=path))
    check_contents(sources.prefixes[RANKS // 2 :: RANKS], VOCABULARY)
    files = TokenFiles(sources.prefixes)
    train = Mixture(sources, SEQ_LENGTH, split="969,30,1", part=Split.TRAIN, seed=1, files=files, vocab_size=VOCABULARY)
    own = train.ids_at(position, GLOBAL_BATCH)[shuffled_rows(GLOBAL_BATCH, position)[RANKS // 2 :: RANKS]]
    rows = [make_sample(train.read(i), SEQ_LENGTH, SampleOptions()) for i in own.tolist()]
    assert len(rows) == GLOBAL_BATCH // RANKS and "torch" not in sys.modules
    after = memory()
    return {
        "seconds_without_torch": round(time.perf_counter() - started, 3),
        "peak_mb_without_torch": round(after["peak"], 1),
        "anonymous_mb_without_torch": round(after["anonymous"], 1),
        "peak_mb_of_imports_without_torch": round(before["peak"], 1),
    }


def open_with_others(path: str, rank: int, store: str) -> dict[str, object]:
    """One of ``TOGETHER`` processes that share the headers."""
    import torch.distributed as dist

    from megatron.optimus.config.schema import DataConfig
    from megatron.optimus.data.files import open_on_all_ranks
    from megatron.optimus.data.sources import read_sources
    from megatron.optimus.platform.ranks import Ranks

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=TOGETHER)
    prefixes, ranks = read_sources(DataConfig(data_file_list=path)).prefixes, Ranks(None, "cpu")
    ranks.broadcast([0])  # everybody is here
    started = time.perf_counter()
    files = open_on_all_ranks(prefixes, ranks)
    return {"seconds_open_together": round(time.perf_counter() - started, 3), "tokens": int(files.tokens.sum())}


def run_together(path: Path, folder: Path) -> float:
    """Seconds of the slowest."""
    command = [sys.executable, __file__, "--together", str(path)]
    processes = [
        subprocess.Popen([*command, str(rank), str(folder / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(TOGETHER)
    ]
    return max(json.loads(process.communicate()[0])["seconds_open_together"] for process in processes)


def memory_of_ranks(path: Path, ranks: int) -> dict[str, object]:
    """MB of a rank, on average, while ``ranks`` of them hold their files and first batches."""
    command = [sys.executable, __file__, "--child", str(path), "0", "--wait"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(ranks)]  # type: ignore[call-overload]
    found = []
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
        found.append(json.loads(process.stdout.readline()))
    for process in processes:
        process.communicate("\n")
    names = ("resident", "proportional", "private", "anonymous")
    mean = {f"{name}_mb": round(sum(one[name] for one in found) / ranks, 1) for name in names}
    return {"ranks_on_node": ranks, **mean}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", help="JSON file for the results")
    parser.add_argument("--folder", help="where the sparse files go; default: a temporary folder")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--node", type=int, nargs="+", default=[1, 12], help="ranks that share a node's memory")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--wait", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--together", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.together:
        path, rank, store = args.together
        print(json.dumps(open_with_others(path, int(rank), store)))
        return 0
    if args.child:
        print(json.dumps(measure(args.child[0], int(args.child[1]), together=args.wait)))
        return 0
    if args.alone:
        print(json.dumps(measure_alone(args.alone[0], int(args.alone[1]))))
        return 0
    results: list[dict[str, object]] = []
    for name, files, tokens in CASES:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            path, total = make_files(Path(folder), files, tokens)
            seconds = run_together(path, Path(folder))
            results.append({"case": name, "files": files, "together": TOGETHER, "seconds_open_together": seconds})
            print(json.dumps(results[-1]), flush=True)
            for ranks in args.node:
                results.append({"case": name, "files": files} | memory_of_ranks(path, ranks))
                print(json.dumps(results[-1]), flush=True)
            for where, position in (("first step", 0), ("resume late", total // SEQ_LENGTH * 9 // 10)):
                for _ in range(args.repeat):
                    result: dict[str, object] = {"case": name, "files": files, "tokens": total, "start": where}
                    for kind in ("--child", "--alone"):
                        command = [sys.executable, __file__, kind, str(path), str(position)]
                        run = subprocess.run(command, check=True, capture_output=True, text=True)
                        result |= json.loads(run.stdout)
                    results.append(result)
                    print(json.dumps(results[-1]), flush=True)
    if args.output:
        host = {"cores": os.cpu_count(), "load_average": os.getloadavg(), "python": sys.version.split()[0]}
        settings = {"seq_length": SEQ_LENGTH, "global_batch_size": GLOBAL_BATCH, "data_parallel_size": RANKS}
        Path(args.output).write_text(
            json.dumps({"host": host, "settings": settings, "results": results}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    from megatron.optimus.platform.process_exit import run_program

    run_program(main)
