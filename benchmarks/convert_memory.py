"""Memory and time of exporting a model of real widths to Hugging Face format.

    python benchmarks/convert_memory.py --preset mula-220b-a10b --num-layers 1

The source is a full checkpoint whose masters are zeros in sparse files, one piece per tensor: the coarsest there can
be. Fewer layers make the file smaller and leave every tensor as large as in the whole model. The export runs in this
process; what is reported is the peak of its anonymous memory and of its resident set (which counts file pages too).
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import xxhash

from megatron.optimus.checkpoint.convert import convert
from megatron.optimus.checkpoint.manifest import MANIFEST_NAME, Manifest, Piece, TensorEntry
from megatron.optimus.checkpoint.shards import shard_header
from megatron.optimus.config.presets import PRESETS
from megatron.optimus.config.schema import RunConfig
from megatron.optimus.config.serialize import from_dict, to_dict
from megatron.optimus.models.hf_map import parameter_shapes


def hash_of_zeros(count: int) -> str:
    digest, block = xxhash.xxh3_128(), bytes(1 << 24)
    while count > 0:
        digest.update(block[:count])
        count -= len(block)
    return digest.hexdigest()


def write_source(folder: Path, run: RunConfig) -> int:
    """A full checkpoint of zeros; returns the bytes of its masters."""
    total, files, tensors = 0, {}, {}
    for index, (name, shape) in enumerate(parameter_shapes(run.model).items()):
        size = math.prod(shape)
        file, header = f"rank-{index:05d}.safetensors", shard_header([("x", "F32", (size,))])
        with open(folder / file, "wb") as sparse:
            sparse.write(header)
            sparse.truncate(len(header) + 4 * size)
        files[file] = len(header) + 4 * size
        piece = Piece(file, "x", 0, size, hash_of_zeros(4 * size))
        tensors[name, "master"] = TensorEntry(name, "master", "F32", shape, (piece,))
        total += 4 * size
    (folder / MANIFEST_NAME).write_bytes(Manifest("full", 1, 0, to_dict(run), {}, files, tensors).to_bytes())
    return total


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), default="mula-220b-a10b")
    parser.add_argument("--num-layers", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON file; default: only print")
    args = parser.parse_args()
    torch.set_num_threads(1)
    run = from_dict(PRESETS[args.preset])
    run.model.num_layers = args.num_layers
    folder = Path(tempfile.mkdtemp())
    try:
        (folder / "source").mkdir()
        read = write_source(folder / "source", run)
        with Memory() as memory:
            start = time.perf_counter()
            done = convert(folder / "source", folder / "hf", to="hf")
            seconds = time.perf_counter() - start
    finally:
        shutil.rmtree(folder)
    shapes = parameter_shapes(run.model)
    result = {
        "preset": args.preset,
        "num_layers": args.num_layers,
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
        "largest_piece_bytes": 4 * max(math.prod(shape) for shape in shapes.values()),
        "source_bytes": read,
        "written_bytes": done.num_bytes,
        "written_tensors": len(done.tensors),
        "seconds": round(seconds, 1),
        "peak_anonymous_bytes": memory.peak_anonymous,
        "peak_resident_bytes": memory.peak_resident,
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    print(json.dumps(result, indent=2))
    if args.output:
        args.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
