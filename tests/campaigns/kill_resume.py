"""kill -9 of a random rank at random instants, over and over; every resumed run must end as the unbroken one.

    python -m tests.campaigns.kill_resume --kills 1000 --seed 1 --output benchmarks/results/kill_resume.json

Real ranks (gloo) of the real training program, with an asynchronous save every other step. An instant is either a time
after the start (so that start-up, resuming and loading are hit) or a few steps later plus a few milliseconds (so that
steps, copies, writing, commits and pruning are). The other ranks live on for a random moment, then they are killed too,
as a launcher would. The same command then starts again. Each start must resume from the newest committed checkpoint;
at the end the SHA-256 of weights, moments, generators and the log of losses must be those of the unbroken run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import re
import shutil
import socket
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megatron.optimus.checkpoint import commit, load, load_manifest, store
from megatron.optimus.observe.metrics import read_metrics
from tests.helpers import _CONTEXT
from tests.integration.conftest import write_corpus

OPTIONS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --num-experts 4 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 8 --vocab-size 64 --max-position-embeddings 16 --seq-length 16 --params-dtype fp32 "
    "--micro-batch-size 1 --global-batch-size 4 --lr 3e-3 --min-lr 3e-4 --adam-eps 1e-6 --eval-interval 0 "
    "--save-interval 2 --model-only-save-interval 6 --device cpu --distributed-timeout-minutes 1"
).split()
_RESUMED = re.compile(r"resumed from (\S+): step (\d+)|starting from initial weights")


@dataclass
class Kill:
    """One incident, as the evidence file tells it."""

    run: int
    rank: int
    trigger: str  # "time" after the start, or "progress"
    after_s: float  # from the start of the processes
    resumed_from: int  # step; -1: killed before it said so
    newest_before: int  # committed when the processes started; 0: none
    newest_after: int  # committed when all were dead
    was_saving: bool  # an unfinished directory was left


def _train(rank: int, world: int, port: int, log: str, argv: list[str]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    descriptor = os.open(f"{log}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    from megatron.optimus.pretrain import main

    code = main(argv)
    sys.stdout.flush()
    os._exit(code)  # no clean-up of the test's own process belongs here


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Campaign:
    """One folder with a corpus, the unbroken run, and broken runs one after the other."""

    def __init__(self, folder: Path, *, ranks: int, steps: int, seed: int) -> None:
        self.folder, self.ranks, self.steps = folder, ranks, steps
        self.random = random.Random(seed)
        self.tokens = write_corpus(folder / "corpus")
        self.kills: list[Kill] = []
        self.runs = self.starts = 0
        started = time.monotonic()
        self._finish(self.folder / "unbroken")
        self.run_s = time.monotonic() - started
        self.expected = fingerprint(self.folder / "unbroken", steps)
        log = (self.folder / "unbroken" / "out.log.0").read_text()
        assert "starting from initial weights" in log

    def start(self, run_dir: Path) -> list[BaseProcess]:
        run_dir.mkdir(exist_ok=True)
        argv = [*OPTIONS, "--train-iters", str(self.steps), "--run-dir", str(run_dir), "--data-path", str(self.tokens)]
        argv += ["--expert-model-parallel-size", "2" if self.ranks % 2 == 0 else "1"]
        port, processes = _free_port(), []
        for rank in range(self.ranks):
            args = (rank, self.ranks, port, str(run_dir / "out.log"), argv)
            process = _CONTEXT.Process(target=_train, args=args, daemon=True)
            process.start()
            processes.append(process)
        self.starts += 1
        return processes

    def _finish(self, run_dir: Path) -> None:
        processes = self.start(run_dir)
        for process in processes:
            process.join(240)
        codes = [process.exitcode for process in processes]
        assert codes == [0] * self.ranks, f"{codes}\n" + (run_dir / "out.log.0").read_text()[-3000:]

    def broken_run(self, max_kills: int) -> None:
        """One run, killed until it is done or ``max_kills`` are spent, then finished and compared."""
        self.runs += 1
        run_dir = self.folder / f"broken-{self.runs}"
        for _ in range(max_kills):
            if not self._kill_once(run_dir):
                break
        else:
            newest, log_size = _newest(run_dir), _size(run_dir / "out.log.0")
            self._finish(run_dir)
            assert _resumed(run_dir, log_size) == newest
        found = fingerprint(run_dir, self.steps)
        assert found == self.expected, f"run {self.runs} differs: {found} instead of {self.expected}"
        shutil.rmtree(run_dir)

    def _kill_once(self, run_dir: Path) -> bool:
        """Starts, kills a rank at a random instant, then the others. False if the run ended before."""
        before, log_size = _newest(run_dir), _size(run_dir / "out.log.0")
        trigger = self.random.choice(("time", "progress", "progress"))
        wait_s, steps = self.random.uniform(0, self.run_s), self.random.randint(1, 6)
        jitter_s, victim = self.random.uniform(0, 0.03), self.random.randrange(self.ranks)
        lines = _num_lines(run_dir)
        started = time.monotonic()
        processes = self.start(run_dir)
        while time.monotonic() - started < 240 and processes[0].is_alive():
            if trigger == "time" and time.monotonic() - started >= wait_s:
                break
            resumed = _resumed(run_dir, log_size)
            if trigger == "progress" and resumed >= 0 and _num_lines(run_dir, min(lines, resumed)) >= resumed + steps:
                time.sleep(jitter_s)
                break
            time.sleep(0.002)
        alive = [process.is_alive() for process in processes]
        processes[victim].kill()
        after_s = time.monotonic() - started
        if all(alive):
            time.sleep(self.random.uniform(0, 0.2))  # the others do not know at once
        else:
            processes[victim].join()
            for process in processes:
                process.join(60)
        for process in processes:
            process.kill()
            process.join()
        resumed = _resumed(run_dir, log_size)
        assert resumed in (-1, before), f"resumed from {resumed}, the newest committed step was {before}"
        if not all(alive):
            codes = [process.exitcode for process in processes]
            good = all(code == 0 or (rank == victim and code == -9) for rank, code in enumerate(codes))
            assert good, f"{codes}\n" + (run_dir / "out.log.0").read_text()[-3000:]
            return False
        after = _newest(run_dir)
        assert after >= before
        saving = any(".tmp-" in path.name for path in (run_dir / "checkpoints").glob(".*"))
        self.kills.append(Kill(self.runs, victim, trigger, round(after_s, 3), resumed, before, after, saving))
        return True

    def evidence(self, seed: int, wall_s: float) -> dict[str, Any]:
        kills = self.kills
        return {
            "seed": seed,
            "ranks": self.ranks,
            "steps_per_run": self.steps,
            "kills": len(kills),
            "runs_compared": self.runs,
            "starts": self.starts,
            "kills_while_saving": sum(kill.was_saving for kill in kills),
            "kills_before_the_first_step": sum(kill.resumed_from < 0 for kill in kills),
            "kills_of_rank": [sum(kill.rank == rank for kill in kills) for rank in range(self.ranks)],
            "wrong_resumes": 0,  # an assertion ends the campaign at the first one
            "different_results": 0,
            "sha256": self.expected,
            "wall_s": round(wall_s),
            "host": f"{platform.machine()}, {os.cpu_count()} cores, shared with other work",
            "incidents": [asdict(kill) for kill in kills],
        }


def fingerprint(run_dir: Path, step: int) -> dict[str, str]:
    """SHA-256 of what a finished run leaves: every tensor of the last checkpoint by kind, and its log of losses."""
    path = run_dir / "checkpoints" / commit.Committed(step, 0).name
    manifest = load_manifest(path)
    requests = store.everything(manifest)
    load(path, requests)
    digests: dict[str, Any] = {}
    for request in sorted(requests, key=lambda r: (r.name, r.kind)):
        digest = digests.setdefault(request.kind, hashlib.sha256())
        digest.update(f"{request.name} {request.global_shape} ".encode())
        digest.update(request.tensor.numpy().tobytes())
    keys = ("step", "consumed_tokens", "loss", "aux_loss", "grad_norm", "lr")
    lines = [{key: line[key] for key in keys} for line in read_metrics(run_dir / "metrics.jsonl")]
    assert [line["step"] for line in lines] == list(range(1, step + 1))
    digests["loss log"] = hashlib.sha256(json.dumps(lines).encode())
    return {kind: digest.hexdigest() for kind, digest in digests.items()}


def _newest(run_dir: Path) -> int:
    committed = commit.list_committed(run_dir / "checkpoints")
    return committed[-1].step if committed else 0


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _resumed(run_dir: Path, offset: int) -> int:
    """The step from which the run whose log begins at ``offset`` resumed; -1 while it has not said so."""
    path = run_dir / "out.log.0"
    if not path.exists():
        return -1
    match = _RESUMED.search(path.read_bytes()[offset:].decode(errors="replace"))
    return -1 if match is None else int(match[2] or 0)


def _num_lines(run_dir: Path, default: int = 0) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else default


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this long, with the true count")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60, help="of one run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder), ranks=options.ranks, steps=options.steps, seed=options.seed)
        while len(campaign.kills) < options.kills and time.monotonic() - started < 60 * options.minutes:
            campaign.broken_run(min(25, options.kills - len(campaign.kills)))
            evidence = campaign.evidence(options.seed, time.monotonic() - started)
            options.output.write_text(json.dumps(evidence, indent=1) + "\n")
            print(f"{len(campaign.kills)} kills, {campaign.runs} runs compared", flush=True)


if __name__ == "__main__":
    main()
