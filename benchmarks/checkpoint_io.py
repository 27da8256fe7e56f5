"""What a checkpoint costs: the stall, writing and loading against the disk's own speed, and the share of hashing.

    python benchmarks/checkpoint_io.py --gib 2 --folder /fast/disk --output benchmarks/results/checkpoint_io.json
    torchrun --nproc-per-node 8 benchmarks/checkpoint_io.py --gib 80 --folder ... (the total of all ranks)

Every round measures in turn the disk (plain 16 MiB writes or reads of as many bytes, one file per rank, new and synced,
and then the file before deleted, as a save does), the synchronous save, the asynchronous one and the load; the page
cache is dropped before reads. Plain reads go with one thread and with as many as the loader has, of which the faster
one counts, into a few blocks used again and again, which stay in the processor's cache; ``memory_read``: into as much
memory as the state has, as a load must. The figures are medians of the rounds' ratios, so that other work on the
machine weighs on both sides alike; ``load_average`` tells how much of it there was; ``*_of_fastest`` divide the fastest
plain access by the fastest save or load of all rounds, which other work disturbs least. On an accelerator the state
lies there, and a matrix product stands for the next forward and backward: ``step_ratio`` is its time beside the copy
over its time alone. ``hash_wait_over_save``: the share of a save in which the writing thread did not write because it
waited for a hash; ``hash_work_over_save``: what the hashes would cost one after the other.
``--seconds`` ends the rounds early, with their true number.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.optimus.checkpoint import Manifest, Saved, Saver, TensorSlice, load_together
from megatron.optimus.checkpoint.chunks import AHEAD
from megatron.optimus.config.schema import Backend, Device
from megatron.optimus.runtime import device as devices

BLOCK = 16 << 20
KINDS = ("master", "exp_avg", "exp_avg_sq")


def build_state(num_bytes: int, rank: int, world: int, device: torch.device) -> list[TensorSlice]:
    """fp32 master and moments in matrices of 16 MiB and vectors of 8 KiB; each rank holds its rows of every matrix."""
    rows, columns = 2048, 2048
    count = max(1, num_bytes // (len(KINDS) * rows * columns * 4))
    low, high = rows * rank // world * columns, rows * (rank + 1) // world * columns
    slices = []
    for number in range(count):
        for kind in KINDS:
            values = torch.randn(high - low, device=device)
            slices.append(TensorSlice(f"layers.{number}.weight", kind, (rows, columns), low, high, values))
            if rank == number % world:
                slices.append(
                    TensorSlice(
                        f"layers.{number}.norm", kind, (columns,), 0, columns, torch.randn(columns, device=device)
                    )
                )
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


def write_plain(path: Path, data: memoryview) -> None:
    fresh = path.with_suffix(".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    for offset in range(0, len(data), BLOCK):
        os.pwrite(descriptor, data[offset : offset + BLOCK], offset)
    os.fsync(descriptor)
    os.close(descriptor)
    os.replace(fresh, path)  # deletes the one before


def read_plain(path: Path, threads: int, memory: memoryview) -> None:
    """Every block of the file once: each thread into a block of its own, again and again, if ``memory`` has no more."""
    descriptor, size = os.open(path, os.O_RDONLY), path.stat().st_size

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
    def __init__(self, folder: Path, num_bytes: int, device: torch.device) -> None:
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.folder, self.device = folder, device
        self.slices = build_state(num_bytes, self.rank, self.world, device)
        self.own_bytes = sum(len(s.tensor) * s.tensor.element_size() for s in self.slices)
        self.buffers = memoryview(bytearray(os.urandom(1) * (AHEAD * BLOCK)))  # touched
        self.plain = memoryview(bytearray(os.urandom(1 << 20)) * max(1, self.own_bytes >> 20))
        self.sync = Saver(folder / "sync", device=device, asynchronous=False)
        self.background = Saver(folder / "async", device=device)
        self.step = 0

    def header(self) -> Manifest:
        self.step += 1
        return Manifest("full", self.step, self.step, {}, {}, {}, {})

    def is_over(self, deadline: float) -> bool:
        """Whether the deadline has passed on any rank."""
        over = torch.tensor([float(time.perf_counter() >= deadline)], device=self.device)
        if dist.is_initialized():
            dist.all_reduce(over)
        return bool(over.item())

    def check_load(self) -> None:
        """Loads the last save into tensors of zeros: what is timed later must be right."""
        path = self.folder / "sync" / sorted(os.listdir(self.folder / "sync"))[-1]
        sums = [one.tensor.view(torch.int32).sum(dtype=torch.int64).item() for one in self.slices]
        for one in self.slices:
            one.tensor.zero_()
        load_together(path, lambda manifest: self.slices, device=self.device)
        found = [one.tensor.view(torch.int32).sum(dtype=torch.int64).item() for one in self.slices]
        if found != sums:
            raise SystemExit(f"rank {self.rank}: {path} was not loaded as it was saved")

    def round(self) -> dict[str, float]:
        result: dict[str, float] = {}
        plain = self.folder / f"plain-{self.rank}"
        result["disk_write_s"] = timed(lambda: write_plain(plain, self.plain))
        saved: list[Saved] = []
        result["save_s"] = timed(lambda: saved.extend(self.sync.start(self.slices, self.header(), retain=1)))
        result["hash_wait_s"] = saved[-1].hash_wait_s
        started = time.perf_counter()
        self.background.start(self.slices, self.header(), retain=1)
        result["stall_s"] = time.perf_counter() - started
        if self.device.type != "cpu":
            result |= self._beside()
        self.background.before_update()
        self.background.drain()
        result["drain_s"] = time.perf_counter() - started
        on_host = [one.tensor.cpu() for one in self.slices]
        started = time.perf_counter()
        for tensor in on_host:
            xxhash.xxh3_128_digest(tensor.numpy().data)
        result["hash_s"] = time.perf_counter() - started
        del on_host
        result["disk_write_again_s"] = timed(lambda: write_plain(plain, self.plain))
        barrier()
        path = self.folder / "sync" / sorted(os.listdir(self.folder / "sync"))[-1]
        forget(self.folder)
        result["disk_read_s"] = self._read_disk(plain)
        forget(self.folder)
        result["load_s"] = timed(lambda: load_together(path, lambda manifest: self.slices, device=self.device))
        forget(self.folder)
        result["disk_read_again_s"] = self._read_disk(plain)
        forget(self.folder)
        result["memory_read_s"] = timed(lambda: read_plain(plain, AHEAD, self.plain))
        return result

    def _read_disk(self, plain: Path) -> float:
        seconds = []
        for threads in (1, AHEAD):
            forget(self.folder)
            seconds.append(timed(partial(read_plain, plain, threads, self.buffers)))
        return min(seconds)

    def _beside(self) -> dict[str, float]:
        """A stand-in for the next step: alone, and beside the copy that has just begun."""
        matrix = torch.randn(8192, 8192, device=self.device, dtype=torch.bfloat16)

        def compute() -> float:
            started = time.perf_counter()
            for _ in range(40):
                matrix @ matrix
            torch.accelerator.current_stream(self.device).synchronize()
            return time.perf_counter() - started

        beside = compute()
        self.background.drain()
        return {"step_beside_s": beside, "step_alone_s": compute()}


def summary(rounds: list[dict[str, float]], num_bytes: int) -> dict[str, Any]:
    def median(value: Callable[[dict[str, float]], float]) -> float:
        return round(statistics.median(map(value, rounds)), 4)

    def disk(r: dict[str, float], what: str) -> float:
        return (r[f"disk_{what}_s"] + r[f"disk_{what}_again_s"]) / 2

    def fastest(what: str) -> float:
        return min(min(r[f"{what}_s"], r[f"{what}_again_s"]) for r in rounds)

    result = {
        "bytes": num_bytes,
        "write_over_disk": median(lambda r: disk(r, "write") / r["save_s"]),
        "load_over_disk": median(lambda r: disk(r, "read") / r["load_s"]),
        "write_over_disk_of_fastest": round(fastest("disk_write") / min(r["save_s"] for r in rounds), 4),
        "load_over_disk_of_fastest": round(fastest("disk_read") / min(r["load_s"] for r in rounds), 4),
        "load_over_memory_read": median(lambda r: r["memory_read_s"] / r["load_s"]),
        "disk_write_gb_s": median(lambda r: num_bytes / disk(r, "write") / 1e9),
        "disk_read_gb_s": median(lambda r: num_bytes / disk(r, "read") / 1e9),
        "save_gb_s": median(lambda r: num_bytes / r["save_s"] / 1e9),
        "load_gb_s": median(lambda r: num_bytes / r["load_s"] / 1e9),
        "stall_s": median(lambda r: r["stall_s"]),
        "drain_s": median(lambda r: r["drain_s"]),
    }
    result["hash_wait_over_save"] = median(lambda r: r["hash_wait_s"] / r["save_s"])
    result["hash_work_over_save"] = median(lambda r: r["hash_s"] / r["save_s"])
    if "step_alone_s" in rounds[0]:
        result["step_ratio"] = median(lambda r: r["step_beside_s"] / r["step_alone_s"])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="of state, over all ranks")
    parser.add_argument("--rounds", type=int, default=5, help="at most")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round after this long")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the temporary folder")
    parser.add_argument("--device", default="auto", choices=[device.value for device in Device])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    began = time.perf_counter()
    device = devices.pick(Device(options.device), int(os.environ.get("LOCAL_RANK", "0")))
    devices.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(devices.backend_for(device, Backend.AUTO))
    rank = dist.get_rank() if dist.is_initialized() else 0
    name: list[Any] = [tempfile.mkdtemp(prefix="checkpoint_io-", dir=options.folder) if rank == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(name)
    folder = Path(name[0])
    try:
        bench = Bench(folder, int(options.gib * (1 << 30)), device)
        bench.round()  # plans, host memory and kernels are made here
        bench.check_load()
        rounds: list[dict[str, float]] = []
        while len(rounds) < options.rounds and not (rounds and bench.is_over(began + options.seconds)):
            rounds.append(bench.round())
        total = bench.own_bytes * bench.world
        result = {
            "command": " ".join(["python", "benchmarks/checkpoint_io.py", *sys.argv[1:]]),
            "device": devices.device_name(device),
            "host": f"{platform.machine()}, {os.cpu_count()} cores",
            "load_average": round(os.getloadavg()[0], 1),
            "ranks": bench.world,
            "torch": torch.__version__,
            **summary(rounds, total),
            "rounds": rounds,
        }
        if rank == 0:
            print(json.dumps({key: value for key, value in result.items() if key != "rounds"}, indent=1))
            if options.output is not None:
                options.output.write_text(json.dumps(result, indent=1) + "\n")
    finally:
        barrier()
        if rank == 0:
            shutil.rmtree(folder)
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
