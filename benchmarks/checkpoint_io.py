"""What a checkpoint costs: the stall, writing and loading against the disk's own speed, and the share of hashing.

    python benchmarks/checkpoint_io.py --gib 2 --folder /fast/disk --output benchmarks/results/checkpoint_io.json
    torchrun --nproc-per-node 8 benchmarks/checkpoint_io.py --gib 80 --folder ... (the total of all ranks)
    torchrun ... --gib 24 --rounds 0 --seconds 200 --parts async write async write load read hash   # bounded

A round measures ``--parts`` in their order: ``write`` and ``read`` the disk (plain 16 MiB writes or reads of as many
bytes, or of ``--plain-gib``; one file per rank, new and synced, and then the file before deleted, as a save does;
through the page cache and past it, ``disk_*_buffered_*`` and ``disk_*_direct_*``, of which the faster one counts),
``save`` the synchronous save, ``async`` the asynchronous one, ``load`` the load of the newest save, compared with what
was saved; ``hash`` one thread hashing the rank's state, ``memory`` reads into as much memory as the state has, as a
load must. The page cache is dropped before reads. Plain reads go with as many threads as the loader has, into a few
blocks used again and again, which stay in the processor's cache. The figures are medians of the rounds' ratios, so that
other work on the machine weighs on both sides alike; ``load_average`` tells how much of it there was;
``*_of_fastest`` divide the fastest plain access by the fastest save or load of all rounds, which other work disturbs
least. On an accelerator the state lies there, and matrix products stand for the next forward and backward:
``step_ratio`` is their time beside the copy over their time alone,
``read_beside_s`` how long reading one number takes that is ready when they begin (``read_alone_s`` without the copy),
``copied_s`` when all were done. ``hash_wait_over_save``, ``hash_wait_over_drain``: the share of a save in which
nothing was written because a block was being hashed; ``hash_work_over_save``: what the hashes would cost one after the
other. ``stall_s``: how long ``async`` stood still; the first of the first round follows ``prepare_s``. ``tensors``,
``copies``: rank 0's slices, and the copies that they are. They lie in buffers as long as a rank's share of the
optimizer's, or with ``--scattered`` each in memory of its own.

``prepare_s``: what the asynchronous save does before the first step, taking host memory above all. Plans of the others,
page cache and kernels come with a first round, which counts only where no other was measured (``--rounds
0``): then the last measurement of each of its parts does. ``--seconds`` begins no part that would end later if it took
as long as the longest one so far; nor is one begun without room for it on the disk: ``stopped`` says why, and what was
measured is reported. The result is written after every part.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from megatron.optimus.platform.ranks import Ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from checkpoint_io_summary import summary
from provenance import commit

from megatron.optimus.checkpoint import Manifest, Saved, Saver, TensorSlice, load_together
from megatron.optimus.checkpoint.reader import AHEAD
from megatron.optimus.checkpoint.save_plan import FILES_PER_NODE
from megatron.optimus.checkpoint.shards import ALIGNED, O_DIRECT
from megatron.optimus.checkpoint.snapshot import coalesce
from megatron.optimus.config.schema import Device, DistributedBackend
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.process_exit import run_program

BLOCK = 16 << 20
KINDS = ("master", "exp_avg", "exp_avg_sq")
BUCKET_NUMEL = 67_108_864  # of the optimizer, by default
PARTS = ("write", "save", "async", "hash", "read", "load", "memory")
ROUND = ("write", "save", "async", "hash", "write", "read", "load", "read", "memory")


def build_state(num_bytes: int, rank: int, world: int, device: torch.device, scattered: bool) -> list[TensorSlice]:
    """fp32 master and moments in matrices of 16 MiB and vectors of 8 KiB; each rank holds its rows of every matrix."""
    rows, columns = 2048, 2048
    count = max(1, num_bytes // (len(KINDS) * rows * columns * 4))
    low, high = rows * rank // world * columns, rows * (rank + 1) // world * columns
    per_bucket = 1 if scattered else BUCKET_NUMEL // (rows * columns)
    slices = []
    for first in range(0, count, per_bucket):
        places = []  # name, global shape, start, stop
        for number in range(first, min(first + per_bucket, count)):
            places.append((f"layers.{number}.weight", (rows, columns), low, high))
            if rank == number % world:
                places.append((f"layers.{number}.norm", (columns,), 0, columns))
        lengths = [stop - start for _, _, start, stop in places]
        for kind in KINDS:
            parts = torch.randn(sum(lengths), device=device).split(lengths)
            for (name, shape, start, stop), part in zip(places, parts, strict=True):
                slices.append(TensorSlice(name, kind, shape, start, stop, part.clone() if scattered else part))
    return slices


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def timed(action: Callable[[], object]) -> float:
    """Seconds until every rank is done."""
    barrier()
    started = time.perf_counter()
    action()
    barrier()
    return time.perf_counter() - started


def pages(size: int) -> memoryview:
    """Memory that begins on a page, touched."""
    memory = mmap.mmap(-1, size)
    block = os.urandom(1 << 20)
    for _ in range(0, size, len(block)):
        memory.write(block[: size - memory.tell()])
    return memoryview(memory)


def accepts_direct(folder: Path) -> bool:
    """Whether files there can be written past the page cache."""
    path = folder / f"direct-{os.getpid()}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | O_DIRECT, 0o666)
        try:
            os.pwrite(descriptor, pages(ALIGNED), 0)
        finally:
            os.close(descriptor)
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return bool(O_DIRECT)


def write_plain(path: Path, data: memoryview, size: int, flags: int) -> None:
    """``size`` bytes, of ``data`` again and again."""
    fresh = path.with_suffix(".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o666)
    for offset in range(0, size, BLOCK):
        place = offset % len(data)
        os.pwrite(descriptor, data[place : place + min(BLOCK, size - offset)], offset)
    os.fsync(descriptor)
    os.close(descriptor)
    os.replace(fresh, path)  # deletes the one before


def read_plain(path: Path, threads: int, memory: memoryview, flags: int = 0) -> None:
    """Every block of the file once: each thread into a block of its own, again and again, if ``memory`` has no more."""
    descriptor, size = os.open(path, os.O_RDONLY | flags), path.stat().st_size

    def read(thread: int) -> None:
        for offset in range(thread * BLOCK, size, threads * BLOCK):
            place = offset if len(memory) >= size else thread * BLOCK
            os.preadv(descriptor, [memory[place : place + BLOCK]], offset)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))
    os.close(descriptor)


def forget(folder: Path) -> None:
    """Drops the folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class Bench:
    def __init__(self, folder: Path, options: argparse.Namespace, device: torch.device, began: float) -> None:
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.folder, self.device = folder, device
        self.deadline, self.longest_s = began + options.seconds, 0.0
        self.slices = build_state(int(options.gib * (1 << 30)), self.rank, self.world, device, options.scattered)
        self.own_bytes = sum(len(s.tensor) * s.tensor.element_size() for s in self.slices)
        self.plain_bytes = int(min(self.own_bytes, options.plain_gib * (1 << 30) / self.world))
        self.plain_bytes -= self.plain_bytes % ALIGNED
        self.all_bytes, self.all_plain_bytes = self._over_ranks([self.own_bytes, self.plain_bytes])
        self.buffers = pages(AHEAD * BLOCK)
        self.source = pages((min(self.plain_bytes >> 24, 63) + 1) * BLOCK)
        self.ways = {"buffered": 0} | ({"direct": O_DIRECT} if accepts_direct(folder) else {})
        self.plain = folder / f"plain-{self.rank}"
        files = options.files_per_node
        self.foreground = Saver(folder / "saved", ranks=Ranks(None, device), asynchronous=False, files_per_node=files)
        self.background = Saver(folder / "saved", ranks=Ranks(None, device), files_per_node=files)
        self.step = 0
        self.number = torch.ones((), device=device)
        self.prepare_s = timed(lambda: self.background.prepare(self.slices, self._header()))
        self.stopped: str | None = None
        self.parts: dict[str, Callable[[], dict[str, float]]] = {
            "write": self._write,
            "save": self._save,
            "async": self._async,
            "hash": self._hash,
            "read": self._read,
            "load": self._load,
            "memory": self._memory,
        }

    def _over_ranks(self, values: list[int]) -> list[int]:
        total = torch.tensor(values, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(total)
        return total.tolist()

    def round(self, parts: list[str], result: dict[str, list[float]], report: Callable[[], None]) -> None:
        """Adds what each part measures to ``result``, until ``stopped`` gives a reason."""
        for part in parts:
            self.stopped = self._reason_to_stop(part)
            if self.stopped is not None:
                return
            began = time.perf_counter()
            for name, value in self.parts[part]().items():
                result.setdefault(name, []).append(value)
            self.longest_s = max(self.longest_s, time.perf_counter() - began)
            report()

    def _reason_to_stop(self, part: str) -> str | None:
        """The same on all ranks: rank 0's."""
        reason: list[str | None] = [None]
        free = shutil.disk_usage(self.folder).free
        if time.perf_counter() + self.longest_s > self.deadline:
            reason = [f"before {part}: no time for a part as long as the longest, {self.longest_s:.0f} s"]
        elif part in ("write", "save", "async") and free < 1.02 * self.all_bytes:
            reason = [f"before {part}: {free / 1e9:.0f} GB are free, of {self.all_bytes / 1e9:.0f} GB needed"]
        if dist.is_initialized():
            dist.broadcast_object_list(reason, device=self.device)
        return reason[0]

    def _header(self) -> Manifest:
        self.step += 1
        return Manifest("full", self.step, self.step, {}, {}, {}, {})

    def _write(self) -> dict[str, float]:
        result = {}
        for way, flags in self.ways.items():
            action = partial(write_plain, self.plain, self.source, self.plain_bytes, flags)
            result[f"disk_write_{way}_s"] = timed(action)
        return result | {"disk_write_s": min(result.values())}

    def _save(self) -> dict[str, float]:
        saved: list[Saved] = []
        header = self._header()
        seconds = timed(lambda: saved.extend(self.foreground.start(self.slices, header, retain=1)))
        return {"save_s": seconds, "hash_wait_s": saved[-1].hash_wait_s}

    def _async(self) -> dict[str, float]:
        header = self._header()
        barrier()
        started = time.perf_counter()
        self.background.start(self.slices, header, retain=1)
        result = {"stall_s": time.perf_counter() - started}
        if self.device.type != "cpu":
            result["read_beside_s"] = self._read_number()
            result["step_beside_s"] = self._compute()
        self.background.before_update()
        if self.device.type != "cpu":
            torch.accelerator.current_stream(self.device).synchronize()
            result["copied_s"] = time.perf_counter() - started
        [saved] = self.background.drain()
        result |= {"drain_s": time.perf_counter() - started, "async_hash_wait_s": saved.hash_wait_s}
        if self.device.type != "cpu":
            result["read_alone_s"] = self._read_number()
            result["step_alone_s"] = self._compute()
        return result

    def _read_number(self) -> float:
        """What a training loop does with a loss."""
        started = time.perf_counter()
        self.number.item()
        return time.perf_counter() - started

    def _compute(self) -> float:
        """A stand-in for the next step, longer with more state."""
        matrix = torch.randn(8192, 8192, device=self.device, dtype=torch.bfloat16)
        torch.accelerator.current_stream(self.device).synchronize()
        started = time.perf_counter()
        for _ in range(max(40, self.own_bytes >> 25)):
            matrix @ matrix
        torch.accelerator.current_stream(self.device).synchronize()
        return time.perf_counter() - started

    def _hash(self) -> dict[str, float]:
        on_host = [one.tensor.cpu() for one in self.slices]
        started = time.perf_counter()
        for tensor in on_host:
            xxhash.xxh3_128_digest(tensor.numpy().data)
        return {"hash_s": time.perf_counter() - started}

    def _read(self) -> dict[str, float]:
        result = {}
        for way, flags in self.ways.items():
            forget(self.folder)
            result[f"disk_read_{way}_s"] = timed(partial(read_plain, self.plain, AHEAD, self.buffers, flags))
        return result | {"disk_read_s": min(result.values())}

    def _load(self) -> dict[str, float]:
        path = self.folder / "saved" / sorted(os.listdir(self.folder / "saved"))[-1]
        sums = self._sums()
        for one in self.slices:
            one.tensor.zero_()
        forget(self.folder)
        seconds = timed(lambda: load_together(path, lambda manifest: self.slices, ranks=Ranks(None, self.device)))
        if self._over_ranks([self._sums() != sums]) != [0]:
            raise SystemExit(f"{path} was not loaded as it was saved")
        return {"load_s": seconds}

    def _sums(self) -> list[int]:
        return torch.stack([one.tensor.view(torch.int32).sum(dtype=torch.int64) for one in self.slices]).tolist()

    def _memory(self) -> dict[str, float]:
        memory = pages(self.plain_bytes)
        forget(self.folder)
        return {"memory_read_s": timed(lambda: read_plain(self.plain, AHEAD, memory))}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="of state, over all ranks")
    parser.add_argument("--rounds", type=int, default=5, help="at most, after the first")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(ROUND), metavar="PART", help="of a round")
    parser.add_argument("--plain-gib", type=float, default=float("inf"), help="of plain files; default: as the state")
    parser.add_argument("--files-per-node", type=int, default=FILES_PER_NODE, help="that saves write to")
    parser.add_argument("--scattered", action="store_true", help="no two tensors side by side")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for everything, see above")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the temporary folder")
    parser.add_argument("--device", default="auto", choices=[device.value for device in Device])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    for part, sources in (("load", {"save", "async"}), ("read", {"write"}), ("memory", {"write"})):
        if part in options.parts and not sources & set(options.parts[: options.parts.index(part)]):
            parser.error(f"--parts: {part} needs {' or '.join(sorted(sources))} before it")
    return options


def report(bench: Bench, rounds: list[dict[str, list[float]]], options: argparse.Namespace) -> dict[str, Any]:
    """What was measured so far; rank 0 writes it."""
    counted = [one for one in rounds[1:] if one]
    counted = counted or [{name: values[-1:] for name, values in rounds[0].items()}]
    result = {
        "command": " ".join(["python", "benchmarks/checkpoint_io.py", *sys.argv[1:]]),
        "device": devices.device_name(bench.device),
        "host": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": round(os.getloadavg()[0], 1),
        "ranks": bench.world,
        "commit": commit(),
        "torch": torch.__version__,
        "stopped": bench.stopped,
        "prepare_s": round(bench.prepare_s, 4),
        "tensors": len(bench.slices),
        "copies": len(coalesce(bench.slices)),
        **summary(counted, bench.all_bytes, bench.all_plain_bytes),
        "first_round": rounds[0],
        "rounds": rounds[1:],
    }
    if bench.rank == 0 and options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return result


def main() -> None:
    options = parse_args()
    began = time.perf_counter()
    device = devices.device_for_rank(Device(options.device), int(os.environ.get("LOCAL_RANK", "0")))
    devices.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(devices.backend_for(device, DistributedBackend.AUTO))
    rank = dist.get_rank() if dist.is_initialized() else 0
    name: list[Any] = [tempfile.mkdtemp(prefix="checkpoint_io-", dir=options.folder) if rank == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(name)
    folder = Path(name[0])
    try:
        bench = Bench(folder, options, device, began)
        rounds: list[dict[str, list[float]]] = []
        while len(rounds) <= options.rounds and bench.stopped is None:
            rounds.append({})
            bench.round(options.parts, rounds[-1], lambda: report(bench, rounds, options))
        result = report(bench, rounds, options)
        if rank == 0:
            print(json.dumps({key: value for key, value in result.items() if key != "rounds"}, indent=1))
        barrier()
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # after an error the others may still be writing
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    run_program(main)
