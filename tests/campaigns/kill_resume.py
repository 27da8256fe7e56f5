"""kill -9 of a random rank at random instants, over and over; every resumed run must end as the unbroken one.

    python -m tests.campaigns.kill_resume --kills 1000 --seed 1 --output benchmarks/results/kill_resume.json

Real ranks (gloo) of the real training program, with an asynchronous save every other step. An instant is uniform over
what the run still has to live (start-up, loading, steps), or a few steps later plus a few milliseconds, or a moment
after a rank has entered a phase drawn by lot (loading, copying, writing, committing, pruning: windows too short to be
hit often by chance). The other ranks live on for a random moment, then they are killed too, as a launcher would. The
same command then starts again. Each start must resume from the newest committed checkpoint; at the end the SHA-256 of
weights, moments, generators and the log of losses must be those of the unbroken run.

Every finished run is written to the evidence file at once. A campaign that was cut goes on where it stopped when it is
started again with the same file; only kills of runs that were finished and compared are in it.
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
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.optimus.checkpoint import commit, load, load_manifest, store
from megatron.optimus.training.metrics import read_metrics
from tests.campaigns.rank_process import ROOT, Marks, Phase, Process, StartMethod
from tests.campaigns.rank_process import start as start_ranks
from tests.integration.conftest import write_corpus

OPTIONS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --num-experts 4 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 8 --vocab-size 64 --max-position-embeddings 16 --seq-length 16 --params-dtype fp32 "
    "--micro-batch-size 1 --global-batch-size 4 --lr 3e-3 --min-lr 3e-4 --adam-eps 1e-6 --eval-interval 0 "
    "--save-interval 2 --model-only-save-interval 6 --device cpu --distributed-timeout-minutes 1"
).split()
TRIGGERS = ("time", "progress", "phase")
AIMED_AT = (Phase.LOAD, Phase.SNAPSHOT, Phase.WRITE, Phase.COMMIT, Phase.PRUNE)
_ONLY_RANK_0 = (Phase.COMMIT, Phase.PRUNE)
_RESUMED = re.compile(r"resumed from (\S+): step (\d+),|starting from initial weights")
_PORT_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
_LIMIT_S = 240.0  # for anything that should take seconds


@dataclass
class Kill:
    """One incident, as the evidence file tells it."""

    run: int
    start: str  # how the processes were started: StartMethod
    rank: int
    pid: int
    exitcode: int  # of the rank that was killed
    trigger: str
    after_s: float  # from the start of the processes
    training: str  # what the training thread of the killed rank was doing when it died: Phase
    writing: str  # and its writing thread
    rank_0_writing: str  # rank 0 commits and prunes; it died at most 0.2 s later
    resumed_from: int  # step; -1: killed before it said so
    newest_before: int  # committed when the processes started; 0: none
    newest_after: int  # committed when all were dead
    was_saving: bool  # an unfinished directory was left

    @property
    def phase(self) -> str:
        """What the killed rank did: its share of a save if it had one in hand."""
        return self.training if self.writing == Phase.IDLE.name else self.writing


class Campaign:
    """One folder with a corpus, the unbroken run, and broken runs one after the other.

    ``first_run``: number of the first broken run; every run has random numbers of its own, drawn from ``seed`` and it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        ranks: int,
        steps: int,
        seed: int,
        method: StartMethod = StartMethod.FORK,
        first_run: int = 1,
    ) -> None:
        self.folder, self.ranks, self.steps, self.seed, self.method = folder, ranks, steps, seed, method
        self.random = random.Random()
        self.tokens = write_corpus(folder / "corpus")
        self.kills: list[Kill] = []  # of runs that were finished and compared
        self.runs = first_run - 1
        self.compared = self.starts = self.taken_ports = 0
        unbroken = self.folder / "unbroken"
        self._finish(unbroken)  # imports once what later starts fork from
        shutil.rmtree(unbroken)
        began = time.monotonic()
        self._finish(unbroken)
        self.run_s = time.monotonic() - began
        self.expected = fingerprint(unbroken, steps)
        lines = list(read_metrics(unbroken / "metrics.jsonl"))
        self.start_s = self.run_s - sum(line["step_time_s"] for line in lines)
        assert "starting from initial weights" in (unbroken / "out.log.0").read_text()

    def start(self, run_dir: Path) -> tuple[list[Process], Marks]:
        run_dir.mkdir(exist_ok=True)
        argv = [*OPTIONS, "--train-iters", str(self.steps), "--run-dir", str(run_dir), "--data-path", str(self.tokens)]
        argv += ["--expert-model-parallel-size", "2" if self.ranks % 2 == 0 else "1"]
        self.starts += 1
        return start_ranks(self.method, self.ranks, run_dir, argv)

    def _finish(self, run_dir: Path) -> None:
        processes, _ = self.start(run_dir)
        for process in processes:
            process.join(_LIMIT_S)
        codes = [process.exitcode for process in processes]
        _kill_all(processes)
        assert codes == [0] * self.ranks, f"{codes}\n{_tail(run_dir)}"

    def broken_run(self, max_kills: int) -> None:
        """One run, killed until it is done or ``max_kills`` are spent, then finished and compared.

        Raises AssertionError when it resumes from anything but the newest committed step or ends differently.
        """
        self.runs += 1
        self.random.seed(f"{self.seed}/{self.runs}")
        run_dir = self.folder / f"broken-{self.runs}"
        kills: list[Kill] = []
        while len(kills) < max_kills:
            kill = self._kill_once(run_dir)
            if kill is None:
                break
            kills.append(kill)
        else:
            newest, log_size = _newest(run_dir), _size(run_dir / "out.log.0")
            self._finish(run_dir)
            assert _resumed(run_dir, log_size) == newest
        found = fingerprint(run_dir, self.steps)
        assert found == self.expected, f"run {self.runs} differs: {found} instead of {self.expected}"
        self.compared += 1
        self.kills += kills
        shutil.rmtree(run_dir)

    def _kill_once(self, run_dir: Path) -> Kill | None:
        """Starts, kills a rank at a random instant, then the others. None if the run ended before."""
        before, log_size = _newest(run_dir), _size(run_dir / "out.log.0")
        trigger = self.random.choice(TRIGGERS)
        victim = self.random.randrange(self.ranks)
        began = time.monotonic()
        processes, marks = self.start(run_dir)
        victim = self._wait(trigger, victim, run_dir, processes, marks, log_size, before, began)
        ended = [process.exitcode for process in processes if not process.is_alive()]
        if any(ended):
            _kill_all(processes)
            assert _PORT_TAKEN.search(_tail(run_dir)), f"ended by itself: {ended}\n{_tail(run_dir)}"
            self.taken_ports += 1
            return self._kill_once(run_dir)
        processes[victim].kill()
        after_s = time.monotonic() - began
        time.sleep(self.random.uniform(0, 0.2))  # the others do not know at once
        for process in processes:
            process.join(20 if ended else 0)  # some may be just about to end as well
        _kill_all(processes)
        resumed = _resumed(run_dir, log_size)
        assert resumed in (-1, before), f"resumed from {resumed}, the newest committed step was {before}"
        if all(process.exitcode == 0 for process in processes):
            return None
        after = _newest(run_dir)
        assert after >= before
        training, writing = marks.of(victim)
        code = processes[victim].exitcode
        assert code is not None
        return Kill(
            run=self.runs,
            start=self.method.value,
            rank=victim,
            pid=processes[victim].pid or 0,
            exitcode=code,
            trigger=trigger,
            after_s=round(after_s, 3),
            training=training.name,
            writing=writing.name,
            rank_0_writing=marks.of(0)[1].name,
            resumed_from=resumed,
            newest_before=before,
            newest_after=after,
            was_saving=any(".tmp-" in path.name for path in (run_dir / "checkpoints").glob(".*")),
        )

    def _wait(
        self,
        trigger: str,
        victim: int,
        run_dir: Path,
        processes: list[Process],
        marks: Marks,
        log_size: int,
        before: int,
        began: float,
    ) -> int:
        """Waits for the instant, or the end of rank 0; returns the rank to kill."""
        life_s = self.start_s + (1 - before / self.steps) * (self.run_s - self.start_s)
        wait_s, steps = self.random.uniform(0, life_s), self.random.randint(1, 6)
        jitter_s, aim = self.random.uniform(0, 0.03), self.random.choice(AIMED_AT)
        if trigger == "phase" and aim in _ONLY_RANK_0:
            victim = 0
        steps = 0 if trigger == "phase" and aim is Phase.LOAD else steps
        lines = _num_lines(run_dir)
        has_progressed = False
        while time.monotonic() - began < _LIMIT_S and processes[0].is_alive():
            if trigger == "time":
                if time.monotonic() - began >= wait_s:
                    return victim
                time.sleep(0.002)
                continue
            if not has_progressed:
                resumed = _resumed(run_dir, log_size)
                made = _num_lines(run_dir, min(lines, resumed)) if resumed >= 0 else -1
                has_progressed = steps == 0 or (resumed >= 0 and made >= resumed + steps)
                time.sleep(0 if has_progressed else 0.002)
            elif trigger == "progress":
                time.sleep(jitter_s)
                return victim
            elif aim in marks.of(victim):
                time.sleep(jitter_s / 10)
                return victim
            else:
                time.sleep(0.0002)
        return victim


class Evidence:
    """The file: every kill of every run that was compared, over all sessions of the campaign."""

    def __init__(self, path: Path, options: dict[str, int]) -> None:
        self.path = path
        self._content: dict[str, Any] = {**options, "sha256": None, "sessions": [], "failures": [], "incidents": []}
        if path.exists():
            self._content = json.loads(path.read_text())
            found = {key: self._content[key] for key in options}
            if found != options:
                raise SystemExit(f"{path} is of another campaign: {found}, not {options}; move it away")
        self._earlier = list(self._content["incidents"])
        self._content["sessions"].append({})

    @property
    def num_kills(self) -> int:
        return len(self._content["incidents"])

    @property
    def last_run(self) -> int:
        runs = [kill["run"] for kill in self._content["incidents"]] + [one["run"] for one in self._content["failures"]]
        return max(runs, default=0)

    def note(self, campaign: Campaign, wall_s: float, failure: str | None = None) -> None:
        content = self._content
        if content["sha256"] not in (None, campaign.expected):
            failure = f"the unbroken run differs from that of the session before: {campaign.expected}"
        content["sha256"] = content["sha256"] or campaign.expected
        if failure is not None:
            content["failures"].append({"run": campaign.runs, "what": failure})
        content["incidents"] = self._earlier + [asdict(kill) | {"phase": kill.phase} for kill in campaign.kills]
        content["sessions"][-1] = {
            "start": campaign.method.value,
            "commit": _commit(),
            "kills": len(campaign.kills),
            "runs_compared": campaign.compared,
            "starts": campaign.starts,
            "ports_found_taken": campaign.taken_ports,
            "wall_s": round(wall_s),
            "host": f"{platform.machine()}, {os.cpu_count()} cores, shared with other work",
        }
        self._write()

    def _write(self) -> None:
        content = dict(self._content)
        kills, sessions = content.pop("incidents"), content["sessions"]
        ranks = range(content["ranks"])
        summary = {
            "kills": len(kills),
            "kills_by_start": Counter(kill["start"] for kill in kills),
            "kills_by_trigger": Counter(kill["trigger"] for kill in kills),
            "kills_by_phase": {phase.name: sum(kill["phase"] == phase.name for kill in kills) for phase in Phase},
            "kills_of_rank": [sum(kill["rank"] == rank for kill in kills) for rank in ranks],
            "kills_that_left_an_unfinished_save": sum(kill["was_saving"] for kill in kills),
            "kills_before_it_said_where_it_resumed": sum(kill["resumed_from"] < 0 for kill in kills),
            "exit_codes": Counter(str(kill["exitcode"]) for kill in kills),
            "runs_compared": sum(session["runs_compared"] for session in sessions),
            "starts": sum(session["starts"] for session in sessions),
            "wall_s": sum(session["wall_s"] for session in sessions),
        }
        del summary["kills_by_phase"][Phase.IDLE.name]
        text = json.dumps(content | summary, indent=1)[:-2]
        lines = ",\n  ".join(json.dumps(kill) for kill in kills)
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.write_text(f'{text},\n "incidents": [\n  {lines}\n ]\n}}\n')
        os.replace(fresh, self.path)


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


def _commit() -> str | None:
    """Of the code that runs; None outside a repository."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _kill_all(processes: list[Process]) -> None:
    for process in processes:
        process.kill()
        process.join()


def _newest(run_dir: Path) -> int:
    committed = commit.list_committed(run_dir / "checkpoints")
    return committed[-1].step if committed else 0


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tail(run_dir: Path) -> str:
    """The ends of what the ranks have said."""
    return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(run_dir.glob("out.log.*")))


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
    parser.add_argument("--kills", type=int, default=1000, help="in the evidence file, earlier sessions' included")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this long, with the true count")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60, help="of one run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=StartMethod, default=StartMethod.FORK, choices=list(StartMethod))
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    began = time.monotonic()
    evidence = Evidence(options.output, {"seed": options.seed, "ranks": options.ranks, "steps_per_run": options.steps})
    folder = Path(tempfile.mkdtemp(prefix="kill-resume-"))
    sizes = {"ranks": options.ranks, "steps": options.steps, "seed": options.seed}
    campaign = Campaign(folder, **sizes, method=options.start, first_run=evidence.last_run + 1)
    has_failed = False
    while evidence.num_kills < options.kills and time.monotonic() - began < 60 * options.minutes:
        failure = None
        try:
            campaign.broken_run(min(25, options.kills - evidence.num_kills))
        except AssertionError as error:
            failure, has_failed = str(error), True
            print(f"run {campaign.runs} failed; it is kept in {folder}: {failure}", flush=True)
        evidence.note(campaign, time.monotonic() - began, failure)
        print(f"{evidence.num_kills} kills, {campaign.compared} runs compared in this session", flush=True)
    if not has_failed:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
