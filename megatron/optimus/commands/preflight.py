"""Check devices, links, folder and versions of all ranks before a run.

    optimus preflight --nproc-per-node 8 --save /lustre/checkpoints --preset mula-7b-a1b --data-path corpus
    optimus launch --preflight --nodes 8 ...      the same on every node of a job; bad nodes are exchanged for spares

Each rank tests its device: products with known results, a memory pattern, bandwidths. One rank of each node writes and
reads a file in the folder of checkpoints. Then all ranks exchange tensors and compare clocks, versions and, on
accelerators, speeds. Rank 0 compares the free space with the checkpoints that the run will write.

Exit code: 0, 1 after a line for each problem, or 2 after one line that says what is wrong with the command line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import secrets
import shutil
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from megatron.optimus.checkpoint import commit
from megatron.optimus.config.duration import last_step
from megatron.optimus.config.load import Parser, load, whole_number
from megatron.optimus.config.schema import ConfigError, RunConfig
from megatron.optimus.planner.reliability import checkpoint_bytes
from megatron.optimus.platform import environment, files
from megatron.optimus.platform.exit_codes import STALLED
from megatron.optimus.platform.log import printable, prints_errors
from megatron.optimus.version import __version__

MODULE = "megatron.optimus.commands.preflight"
LIMIT_SECONDS = 120  # of a rank, imports left out: four times what a node is allowed to take
# Time stamps of logs must be in order to be read together, and the lock of a run is renewed every 10 s.
CLOCK_SECONDS = 1.0
FILE_BYTES = 64 << 20  # that a node writes to the folder of checkpoints: more than a network disk's caches on the way
# The usual rate over a rank's, from which on it is bad. Copies to the host differ by the socket that they come from.
SLOWEST = {"bfloat16_tflops": 1.1, "float32_tflops": 1.1, "memory_gb_s": 1.1, "to_device_gb_s": 2, "to_host_gb_s": 2}

Finding = tuple[int, str]  # rank, -1 for none of them; what was found


@prints_errors(ConfigError)
def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``optimus preflight``: as one rank where a launcher has started this process, else starts the ranks."""
    parser = Parser("preflight", __doc__ or "")
    parser.add_argument("--nproc-per-node", type=whole_number(), metavar="N", default=1, help="ranks to start here [1]")
    args, words = parser.parse_known(argv)
    launch = environment.detect()
    config = load(words, "preflight", other_flags=parser.flags).config
    if launch.launcher is environment.Launcher.ALONE and args.nproc_per_node > 1:
        from megatron.optimus.launcher.agent import run_local_ranks

        return run_local_ranks([sys.executable, "-m", MODULE, *words], args.nproc_per_node)
    return run_rank(config, launch)


def run_rank(config: RunConfig, launch: environment.RankEnvironment) -> int:
    """Checks as one rank, and prints what this rank alone knows; rank 0 also what all know. Collective.

    Returns:
        0; 1 on every rank where any has found a problem.
    """
    began, phase = time.monotonic(), ["its device"]

    def end() -> None:
        _print(launch.rank, f"FAILED: {phase[0]}: no end within {LIMIT_SECONDS} s; take this node out of use")
        os._exit(STALLED)

    watch = threading.Timer(LIMIT_SECONDS, end)
    watch.daemon = True
    watch.start()
    from megatron.optimus.platform import device as devices
    from megatron.optimus.platform import process_groups
    from megatron.optimus.platform.device_checks import check_bandwidth, check_memory, check_products
    from megatron.optimus.platform.ranks import Ranks

    device = devices.device_for_rank(config.parallel.device, launch.local_rank)
    devices.set_device(device)
    devices.set_cpu_threads(launch)
    figures: dict[str, float] = {}
    problems: list[str] = []
    checks = [partial(check, device) for check in (check_products, check_memory, check_bandwidth)]
    if launch.local_rank == 0:
        checks.append(partial(check_folder, config.checkpoint_folder))
    for check in checks:
        try:
            figures |= check()
        except Exception as error:  # of a device or disk, whatever it is
            problems.append(f"{error}")
    for problem in problems:
        _print(launch.rank, f"FAILED: {problem}")
    if not problems:
        _print(launch.rank, ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in figures.items()))
    phase[0] = "meeting the other ranks"
    process_groups.init(launch, device, config.parallel.distributed_backend, timedelta(seconds=LIMIT_SECONDS))
    phase[0] = "exchanging with the other ranks"
    ranks = Ranks(None, device)
    own = {"figures": figures, "has_failed": bool(problems), "versions": versions(device.type)}
    own["exchange"] = exchange(launch.rank, launch.world_size, device)
    ranks.first_failure(None)  # all ranks are here now, within the time of a small collective
    own["time"] = time.time()
    everyone = [json.loads(part) for part in ranks.all_gather_bytes(json.dumps(own).encode())]
    found = compare(everyone, is_accelerator=device.type != "cpu")
    if launch.rank == 0:
        found += [(-1, text) for text in check_space(config)]
        for rank, text in found:
            _print(rank, f"FAILED: {text}")
        count = len(found) + sum(one["has_failed"] for one in everyone)
        nodes = launch.world_size // launch.local_world_size
        result = "all is well" if not count else f"{count} problems"
        sys.stdout.write(
            f"preflight: {launch.world_size} ranks on {nodes} nodes: {result}, after {time.monotonic() - began:.1f} s\n"
        )
    [code] = ranks.broadcast([int(bool(found) or any(one["has_failed"] for one in everyone))])
    process_groups.shutdown()
    watch.cancel()
    return code


def _print(rank: int, text: str) -> None:
    """Prints a line that launcher/preflight.py reads."""
    where = f"rank {rank} on {socket.gethostname()}: " if rank >= 0 else ""
    sys.stdout.write(printable(f"preflight: {where}{text}") + "\n")
    sys.stdout.flush()


def exchange(rank: int, size: int, device: Any) -> str:
    """Exchanges tensors with the others; returns what is wrong, "" for nothing. Collective."""
    from megatron.optimus.platform.exchange import exchange_numbers

    _, is_right = exchange_numbers(rank, size, device)
    return "" if is_right else "exchange: wrong numbers arrived from other ranks, limit 0; take this node out of use"


def versions(kind: str) -> dict[str, str]:
    """The versions that must be equal on all ranks."""
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__, "optimus": __version__}
    try:
        found["driver"] = Path("/proc/driver/nvidia/version").read_text().splitlines()[0] if kind == "cuda" else ""
    except OSError:
        found["driver"] = "unknown"
    return found


def compare(everyone: list[dict[str, Any]], *, is_accelerator: bool) -> list[Finding]:
    """Finds ranks that differ from the others.

    Args:
        everyone: by rank: "versions", "time" (seconds since 1970 at one moment), "exchange" (a problem or "") and
            "figures" (rates by name).
        is_accelerator: whether rates are compared; ranks on a CPU share its cores.
    """
    found = [(rank, one["exchange"]) for rank, one in enumerate(everyone) if one["exchange"]]
    now = statistics.median_low(one["time"] for one in everyone)
    for name in everyone[0]["versions"]:
        usual = Counter(one["versions"][name] for one in everyone).most_common(1)[0][0]
        for rank, one in enumerate(everyone):
            if (version := one["versions"][name]) != usual:
                found.append((rank, f"versions: {name} {version}, most ranks have {usual}; install the same on all"))
    for rank, one in enumerate(everyone):
        if abs(one["time"] - now) > CLOCK_SECONDS:
            text = f"clock: {one['time'] - now:+.1f} s from the others', limit {CLOCK_SECONDS:g} s; set it by NTP"
            found.append((rank, text))
    for name, factor in SLOWEST.items() if is_accelerator else ():
        rates = {rank: one["figures"][name] for rank, one in enumerate(everyone) if name in one["figures"]}
        usual_rate = statistics.median_high(rates.values()) if rates else 0.0
        for rank, rate in rates.items():
            if rate * factor < usual_rate:
                text = f"{name.replace('_', ' ')}: {rate:.4g}, the usual is {usual_rate:.4g} and the limit 1/{factor:g}"
                found.append((rank, f"{text} of it; take this device out of use"))
    return found


def check_folder(folder: Path) -> dict[str, float]:
    """Writes a file into the folder, syncs it, reads it back and deletes it; returns MB/s. Raises OSError."""
    path = folder / f".preflight-{secrets.token_hex(8)}"
    data = secrets.token_bytes(FILE_BYTES)
    try:
        files.make_directory(folder)
        began = time.perf_counter()
        files.write_new(path, data)
        written = time.perf_counter()
        back = path.read_bytes()
        read = time.perf_counter()
        if back != data:
            raise OSError(
                f"{folder}: a file of {FILE_BYTES} bytes reads back otherwise; name another folder with --save"
            )
        return {
            "folder_write_mb_s": FILE_BYTES / (written - began) / 1e6,
            "read_mb_s": FILE_BYTES / (read - written) / 1e6,
        }
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(f"folder {folder}: {error.strerror}; mend it, or name another one with --save") from error
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def check_space(config: RunConfig) -> list[str]:
    """Compares the folder's free space with what the run's checkpoints will take; returns the problem, if any."""
    options, folder = config.checkpoint, config.checkpoint_folder
    place = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.is_dir())
    full, model = checkpoint_bytes(config)
    steps = last_step(config.training)
    kept = min(options.save_retain, steps // options.save_interval + 1) if options.save_interval else 1
    there = len(commit.list_committed(folder))
    of_models = steps // options.model_only_save_interval if options.model_only_save_interval else 0
    # A new one is written before the oldest is deleted.
    needed = max(1, kept + (kept < steps) - there) * full + of_models * model
    free = shutil.disk_usage(place).free
    if free >= needed:
        return []
    gib = 2**30
    return [
        f"space: {free / gib:.4g} GiB free in {folder}, the checkpoints take {needed / gib:.4g} GiB more (full ones of "
        f"{full / gib:.4g} GiB, {of_models} of weights of {model / gib:.4g}); free it, lower --save-retain, or name "
        "another folder with --save"
    ]


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    sys.exit(main())
