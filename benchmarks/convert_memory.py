"""Exporting a model of real size to Hugging Face format: memory, time, and whether every byte arrives.

    python benchmarks/convert_memory.py --preset mula-7b-a1b --kind model --filled --verify     # all of it on a disk
    python benchmarks/convert_memory.py --preset mula-220b-a10b --kind full --release --folder /dev/shm

The source is a checkpoint with one piece per tensor, the coarsest there can be. ``--filled``: all of it random numbers;
else each matrix that the export writes begins with 1,024 random numbers of its own and is zeros after them, holes in
sparse files, so that 220 B parameters need no disk. ``--release``: each finished file of the export is read back,
compared byte by byte with what the source holds, and its blocks are freed (the file keeps its size), so that the
destination needs room for one file only. On a tmpfs holes cost nothing to read.

The export runs in this process, by the function that `optimus convert` calls. What is reported is the peak of
its anonymous memory and of its resident set (which counts mapped file pages too), the conversion alone; ``read_bytes``:
what it read, from the disk or its cache, mapped files not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import xxhash
from provenance import commit

from megatron.optimus.checkpoint.manifest import MANIFEST_NAME, Manifest, StoredPiece, TensorEntry
from megatron.optimus.checkpoint.shards import shard_header
from megatron.optimus.checkpoint.slices import Region
from megatron.optimus.commands.convert import parse_size
from megatron.optimus.config.presets import PRESETS
from megatron.optimus.config.schema import RunConfig
from megatron.optimus.config.serialize import from_dict, to_dict
from megatron.optimus.convert import Options, convert, hf
from megatron.optimus.models.huggingface.names import HFTensor, to_hf
from megatron.optimus.models.parameters import parameter_shapes

MARK, BLOCK = 1024, 1 << 24
KINDS = {"full": ("master", "F32", 4), "model": ("weight", "BF16", 2)}


def numbers(matrix: HFTensor, filled: bool) -> np.ndarray:
    """The first numbers of a matrix, or all, as bits of bf16: finite, the same whenever they are asked for."""
    count = matrix.stop - matrix.start if filled else min(MARK, matrix.stop - matrix.start)
    seed = xxhash.xxh3_64_intdigest(matrix.name.encode())
    words = np.random.Generator(np.random.SFC64(seed)).integers(0, 1 << 64, -(-count // 4), np.uint64)
    return (words.view(np.uint16) & np.uint16(0xBFFF))[:count]


def source_bytes(matrix: HFTensor, filled: bool, width: int) -> bytes:
    bits = numbers(matrix, filled)
    return (bits if width == 2 else bits.astype(np.uint32) << np.uint32(16)).tobytes()


def write_source(folder: Path, run: RunConfig, kind: str, filled: bool) -> int:
    """The checkpoint; returns the bytes of its tensors."""
    stored, dtype, width = KINDS[kind]
    total, files, tensors = 0, {}, {}
    zeros = memoryview(bytes(BLOCK))
    for index, (name, shape) in enumerate(parameter_shapes(run.model).items()):
        count, digest = math.prod(shape), xxhash.xxh3_128()
        file, header = f"rank-{index:05d}.safetensors", shard_header([("x", dtype, (count,))])
        with open(folder / file, "wb") as sparse:
            sparse.write(header)
            for matrix in to_hf(run.model, name):
                data = source_bytes(matrix, filled, width)
                sparse.seek(len(header) + width * matrix.start)
                sparse.write(data)
                digest.update(data)
                left = width * (matrix.stop - matrix.start) - len(data)
                for offset in range(0, left, BLOCK):
                    digest.update(zeros[: min(BLOCK, left - offset)])
            sparse.truncate(len(header) + width * count)
        files[file] = len(header) + width * count
        piece = StoredPiece(name, stored, dtype, Region(shape, 0, count), "x", file, digest.hexdigest())
        tensors[name, stored] = TensorEntry(name, stored, dtype, shape, (piece,))
        total += width * count
    (folder / MANIFEST_NAME).write_bytes(Manifest(kind, 1, 0, to_dict(run), {}, files, tensors).to_bytes())
    return total


def blocks_of(descriptor: int, start: int, stop: int) -> Iterator[bytes]:
    for offset in range(start, stop, BLOCK):
        yield os.pread(descriptor, min(BLOCK, stop - offset), offset)


class Checked:
    """Compares finished files of an export with the source, and frees their blocks."""

    def __init__(self, run: RunConfig, filled: bool, write: Callable[..., Any]) -> None:
        shapes = parameter_shapes(run.model)
        self._matrices = {matrix.name: matrix for name in shapes for matrix in to_hf(run.model, name)}
        self._filled, self._write = filled, write
        self.num_bytes = self.num_tensors = 0
        self.seconds = 0.0

    def __call__(self, path: Path, *args: Any) -> Any:
        result = self._write(path, *args)
        started = time.perf_counter()
        descriptor = os.open(path, os.O_RDWR)
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        header = json.loads(os.pread(descriptor, length, 8))
        header.pop("__metadata__")
        for name, entry in header.items():
            self._check(descriptor, 8 + length, name, entry)
        whole = os.fstat(descriptor).st_size
        os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, whole)
        os.close(descriptor)
        self.seconds += time.perf_counter() - started
        print(f"{path.name}: {len(header)} tensors as in the source", file=sys.stderr, flush=True)
        return result

    def _check(self, descriptor: int, begin: int, name: str, entry: dict[str, Any]) -> None:
        matrix = self._matrices.pop(name)  # each once
        start, stop = (begin + offset for offset in entry["data_offsets"])
        head = numbers(matrix, self._filled).tobytes()
        good = (entry["dtype"], tuple(entry["shape"])) == ("BF16", matrix.shape)
        good = good and stop - start == 2 * (matrix.stop - matrix.start)
        good = good and os.pread(descriptor, len(head), start) == head
        rest = blocks_of(descriptor, start + len(head), stop)
        if not good or any(np.frombuffer(block, np.uint8).any() for block in rest):
            raise SystemExit(f"{name} is not what the source holds")
        self.num_bytes += stop - start
        self.num_tensors += 1

    def finish(self) -> None:
        if self._matrices:
            raise SystemExit(f"{len(self._matrices)} tensors were not written, such as {next(iter(self._matrices))}")


def bytes_read() -> int:
    """By this process, from the disk or its cache."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


class Memory:
    """Peaks of RssAnon and VmRSS in bytes, sampled every 5 ms."""

    def __init__(self) -> None:
        self.peak_anonymous = self.peak_resident = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            status = Path("/proc/self/status").read_text()
            anonymous, resident = (int(status.split(f"{name}:")[1].split()[0]) << 10 for name in ("RssAnon", "VmRSS"))
            self.peak_anonymous = max(self.peak_anonymous, anonymous)
            self.peak_resident = max(self.peak_resident, resident)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), default="mula-220b-a10b")
    parser.add_argument("--num-layers", type=int, help="default: the preset's; fewer leave every tensor as large")
    parser.add_argument("--kind", choices=sorted(KINDS), default="full", help="fp32 masters, or bf16 weights alone")
    parser.add_argument("--filled", action="store_true", help="random numbers everywhere")
    parser.add_argument("--verify", action="store_true", help="as optimus convert --verify")
    parser.add_argument("--release", action="store_true", help="check each file and free its blocks")
    parser.add_argument("--max-shard-size", type=parse_size, default=parse_size("5GB"))
    parser.add_argument("--folder", type=Path, help="where to work; default: the temporary folder")
    parser.add_argument("--output", type=Path, help="JSON file; default: only print")
    args = parser.parse_args()
    if args.release and args.verify:
        raise SystemExit("--release leaves nothing for --verify to read")
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    run = from_dict(PRESETS[args.preset])
    run.model.num_layers = args.num_layers or run.model.num_layers
    checked = Checked(run, args.filled, hf.write_shard)
    if args.release:
        hf.write_shard = checked
    folder = Path(tempfile.mkdtemp(prefix="convert_memory-", dir=args.folder))
    try:
        (folder / "source").mkdir()
        read = write_source(folder / "source", run, args.kind, args.filled)
        with Memory() as memory:
            start, before = time.perf_counter(), bytes_read()
            options = Options(max_shard_bytes=args.max_shard_size)
            done = convert(folder / "source", folder / "hf", to="hf", options=options, verify=args.verify)
            seconds, total_read = time.perf_counter() - start, bytes_read() - before
        num_files = len(list((folder / "hf").glob("*.safetensors")))
    finally:
        shutil.rmtree(folder)
    if args.release:
        checked.finish()
    shapes = parameter_shapes(run.model)
    result = {
        "command": " ".join(["python", "benchmarks/convert_memory.py", *sys.argv[1:]]),
        "preset": args.preset,
        "num_layers": run.model.num_layers,
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
        "largest_piece_bytes": KINDS[args.kind][2] * max(math.prod(shape) for shape in shapes.values()),
        "source_bytes": read,
        "read_bytes": total_read,
        "written_bytes": done.num_bytes,
        "written_tensors": len(done.tensors),
        "written_files": num_files,
        "tensors_verified_by_the_tool": done.compared,
        "bytes_compared_here": checked.num_bytes,
        "tensors_compared_here": checked.num_tensors,
        "seconds": round(seconds, 1),
        "seconds_of_comparing_here": round(checked.seconds, 1),
        "peak_anonymous_bytes": memory.peak_anonymous,
        "peak_resident_bytes": memory.peak_resident,
        "load_average": round(os.getloadavg()[0], 1),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "commit": commit(),
    }
    print(json.dumps(result, indent=2))
    if args.output:
        args.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
