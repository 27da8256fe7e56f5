"""Ends ranks in every way a rank can end, and counts those that abort or lose their exit code.

    python -m tests.campaigns.process_endings --endings 200
    python -m tests.campaigns.process_endings --endings 200 --finalize    for comparison: by the interpreter's own exit

Each ending is one pair of gloo ranks; rank 0 ends in the way that is tested, rank 1 is its peer. Two kinds of program
take turns: a few collectives and nothing else, which meets gloo's threads most often, and the training program. Ranks
are forked from this process, which has imported both and has no threads. Unlike a child of multiprocessing, a forked
rank ends as our programs do, or with ``--finalize`` as any Python program does.

A gloo thread aborts the process if it waits for the GIL when the interpreter finalizes. Ranks keep the GIL for longer
than usual (``sys.setswitchinterval``), so that gloo's threads wait for it more often.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron.optimus.config.schema import DistributedBackend
from megatron.optimus.platform import process_groups
from megatron.optimus.platform.environment import Launcher, RankEnvironment
from megatron.optimus.platform.process_exit import exit_process, run_program
from megatron.optimus.platform.signals import StopRequest
from tests.helpers import free_port, rank_variables
from tests.integration.conftest import write_corpus

LIMIT_SECONDS = 60.0  # of one pair; the collectives' own time-out is longer, so waiting for it is a failure
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


@dataclass(frozen=True)
class Ending:
    """One way to end: what a rank runs, the exit codes of both ranks (None: any), and what rank 0 prints."""

    rank: Callable[[int], int | None]
    codes: tuple[int, int | None]
    says: str = ""


# ---- a program of collectives alone


def _reduce_until_error() -> None:
    for _ in range(100_000):
        for work in [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(4)]:
            work.wait()


def clean(rank: int) -> int:
    dist.all_reduce(torch.ones(1))
    process_groups.shutdown()
    return 0


def groups_left_open(rank: int) -> int:
    dist.all_reduce(torch.ones(1))
    return 0


def uncaught_after_failed(rank: int) -> int | None:
    if rank == 1:
        os._exit(0)
    _reduce_until_error()
    return None


def caught_after_failed(rank: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        _reduce_until_error()
    except RuntimeError as error:
        if process_groups.lost_peer_reason(error) is None:
            raise
    return 1


def sys_exit_after_failed(rank: int) -> int | None:
    if rank == 1:
        os._exit(0)
    with contextlib.suppress(RuntimeError):
        _reduce_until_error()
    sys.exit(7)


def left_after_failed(rank: int) -> int:
    if rank == 1:
        os._exit(0)
    with contextlib.suppress(RuntimeError):
        _reduce_until_error()
    process_groups.leave_after_error(process_groups.shutdown)
    return 5


def uncaught_while_pending(rank: int) -> int | None:
    if rank == 1:
        time.sleep(1000)  # killed when rank 0 has ended
    pending = dist.all_reduce(torch.ones(1), async_op=True)
    try:
        raise ValueError("while a collective is pending", pending)
    except ValueError:
        process_groups.leave_after_error(process_groups.shutdown, 0.5)
        raise


def pending_fails_meanwhile(rank: int) -> int | None:
    if rank == 1:
        time.sleep(0.05)
        os._exit(0)
    for _ in range(4):
        dist.all_reduce(torch.ones(1), async_op=True)
    sys.exit(3)


def signal_in_a_step(rank: int) -> int:
    with StopRequest() as stop:
        for step in range(100_000):
            if rank == 0 and step == 20:
                os.kill(os.getpid(), signal.SIGTERM)
            asked = torch.tensor([float(stop.signal is not None)])
            dist.all_reduce(asked)
            if asked.item():
                break
    process_groups.shutdown()
    return TERMINATED


def interrupt_in_a_collective(rank: int) -> int | None:
    with contextlib.suppress(RuntimeError):
        for step in range(100_000):
            if rank == 0 and step == 20:
                os.kill(os.getpid(), signal.SIGINT)
            dist.all_reduce(torch.ones(1))
    return 1


# ---- the training program

_OPTIONS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 32 --vocab-size 64 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --global-batch-size 2 --params-dtype fp32 --device cpu "
    "--data-path corpus --distributed-timeout-minutes 5"
).split()


def _pretrain(rank: int, at_step_3: Callable[[int], None], steps: int = 10_000) -> int:
    """``at_step_3(rank)`` is called when the third step begins."""
    from megatron.optimus import pretrain
    from megatron.optimus.training import trainer

    train_step, calls = trainer.train_step, iter(range(1, 1_000_000))

    @functools.wraps(train_step)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 3:
            at_step_3(rank)
        return train_step(*args, **kwargs)

    trainer.train_step = wrapped
    return pretrain.main([*_OPTIONS, "--train-iters", str(steps), "--run-dir", "run"])


def _only(what: Callable[[], Any], on: int) -> Callable[[int], None]:
    return lambda rank: what() if rank == on else None


def _raise_value_error() -> NoReturn:
    raise ValueError("an error of one rank alone")


def _signal_self(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _exit_9() -> NoReturn:
    sys.exit(9)


ENDINGS = {
    "clean end": Ending(clean, (0, 0)),
    "clean end, groups left open": Ending(groups_left_open, (0, 0)),
    "uncaught error after a failed collective": Ending(uncaught_after_failed, (1, 0), "RuntimeError"),
    "caught error after a lost peer": Ending(caught_after_failed, (1, -signal.SIGKILL)),
    "sys.exit(7) after a failed collective": Ending(sys_exit_after_failed, (7, 0)),
    "groups left after a failed collective": Ending(left_after_failed, (5, 0)),
    "uncaught error, pending collective": Ending(uncaught_while_pending, (1, None), "ValueError: ('while a coll"),
    "sys.exit(3), pending collectives fail then": Ending(pending_fails_meanwhile, (3, 0)),
    "SIGTERM in a step": Ending(signal_in_a_step, (TERMINATED, TERMINATED)),
    "KeyboardInterrupt among collectives": Ending(interrupt_in_a_collective, (INTERRUPTED, 1), "KeyboardInterrupt"),
}
TRAINING = {
    "training, clean end": Ending(lambda rank: _pretrain(rank, lambda _: None, 4), (0, 0), "step=4"),
    "training, uncaught error on rank 0": Ending(
        lambda rank: _pretrain(rank, _only(_raise_value_error, 0)), (1, 1), "ValueError: an error of one rank alone"
    ),
    "training, lost peer": Ending(
        lambda rank: _pretrain(rank, _only(_signal_self(signal.SIGKILL), 1)),
        (1, -signal.SIGKILL),
        "another rank has ended",
    ),
    "training, SIGTERM": Ending(
        lambda rank: _pretrain(rank, _only(_signal_self(signal.SIGTERM), 0)), (TERMINATED, TERMINATED), "saving step 3"
    ),
    "training, sys.exit(9) on rank 0": Ending(lambda rank: _pretrain(rank, _only(_exit_9, 0)), (9, 1)),
    "training, a wrong option": Ending(lambda rank: _pretrain_wrong(), (2, 2), "error: "),
}


def _pretrain_wrong() -> int:
    from megatron.optimus import pretrain

    return pretrain.main([*_OPTIONS, "--train-iters", "3", "--run-dir", "/proc/none"])  # found when all have met


# ---- processes


def end_once(ending: Ending, folder: Path, *, finalize: bool) -> tuple[list[int | None], str]:
    """Runs both ranks; returns their exit codes, None for a rank that did not end, and what rank 0 printed."""
    port = free_port()
    is_training = ending in TRAINING.values()
    if is_training:
        write_corpus(folder / "corpus")
    pids = [_fork(ending, rank, port, folder, is_training=is_training, finalize=finalize) for rank in range(2)]
    deadline = time.monotonic() + LIMIT_SECONDS
    codes: list[int | None] = [None, None]
    while None in codes and time.monotonic() < deadline:
        for rank, pid in enumerate(pids):
            if codes[rank] is None:
                found, status = os.waitpid(pid, os.WNOHANG)
                codes[rank] = os.waitstatus_to_exitcode(status) if found else None
        if codes[0] is not None and ending.codes[1] is None:
            break
        time.sleep(0.005)
    for rank, pid in enumerate(pids):
        if codes[rank] is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return codes, (folder / "0").read_text(errors="replace")


def _fork(ending: Ending, rank: int, port: int, folder: Path, *, is_training: bool, finalize: bool) -> int:
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    descriptor = os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.chdir(folder)
    os.environ.update(rank_variables(rank, 2, port))
    sys.setswitchinterval(10.0)

    def main() -> int | None:
        if not is_training:
            launch = RankEnvironment(rank, 2, rank, 2, "127.0.0.1", port, Launcher.MPI)
            process_groups.init(launch, torch.device("cpu"), DistributedBackend.AUTO, timedelta(minutes=5))
            dist.all_reduce(torch.ones(1))
        return ending.rank(rank)

    if finalize and rank == 0:
        sys.exit(main())  # an exception likewise passes through this program's callers to the interpreter
    run_program(main)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A temporary folder that only the process which made it removes: forked ranks leave through here as well."""
    made = tempfile.mkdtemp(prefix="process-endings-")
    owner = os.getpid()
    try:
        yield Path(made)
    finally:
        if os.getpid() == owner:
            shutil.rmtree(made)


def wrong(ending: Ending, codes: list[int | None], output: str) -> str | None:
    """What is wrong with how both ranks ended, or None."""
    for rank, (code, expected) in enumerate(zip(codes, ending.codes, strict=True)):
        if expected is not None and code != expected:
            return f"rank {rank} ended with {code}, expected {expected}"
    return None if ending.says in output else f"rank 0 did not print {ending.says!r}"


def campaign(endings: int, *, training: bool, finalize: bool = False) -> dict[str, collections.Counter[str]]:
    """Ends ``endings`` pairs, the ways in turn; for each way: how many there were, and how often what went wrong."""
    ways = ENDINGS | (TRAINING if training else {})
    found: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in ways}
    for count in range(endings):
        name = list(ways)[count % len(ways)]
        with _folder() as folder:
            codes, output = end_once(ways[name], folder, finalize=finalize)
        found[name]["endings"] += 1
        found[name]["aborts"] += sum(code == -signal.SIGABRT for code in codes)
        if (what := wrong(ways[name], codes, output)) is not None:
            found[name][what] += 1
            found[name]["wrong"] += 1
            if not finalize:
                sys.stderr.write(f"{name}: {what}\n{output[-3000:]}\n")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--endings", type=int, default=200, help="pairs of ranks to end (default: 200)")
    parser.add_argument("--finalize", action="store_true", help="end rank 0 as Python programs do, for comparison")
    parser.add_argument("--no-training", action="store_true", help="only the program of collectives")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.no_training:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed  # noqa: F401 - imported once, for all ranks

        import megatron.optimus.training.trainer  # noqa: F401
    found = campaign(args.endings, training=not args.no_training, finalize=args.finalize)
    print(f"{'way':44} endings aborts wrong")
    for name, counts in found.items():
        rest = {what: count for what, count in counts.items() if what not in ("endings", "aborts", "wrong")}
        print(f"{name:44} {counts['endings']:7} {counts['aborts']:6} {counts['wrong']:5} {rest or ''}")
    total = sum(found.values(), collections.Counter())
    print(f"{'all':44} {total['endings']:7} {total['aborts']:6} {total['wrong']:5}")
    return 1 if total["wrong"] or total["aborts"] else 0


if __name__ == "__main__":
    exit_process(main())
