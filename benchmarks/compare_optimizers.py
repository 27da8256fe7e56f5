"""Every optimizer on the same text and model, each with its own sweep of rates: loss at equal tokens and equal minutes.

    python benchmarks/time_to_loss.py prepare DATA --vocab-size 4096 --files 10                 text, tokenizer, tokens
    python benchmarks/compare_optimizers.py DATA --device cuda --jobs 14 --minutes 9 --work runs/optimizers \\
        --out optimizers.json --picture optimizers.png
    ... DATA --optimizers adam muon soap --models dense --steps 200 --hidden-size 128           fewer and smaller

Runs of an optimizer, each of which is `optimus pretrain` with the options that the result lists:

sweep     three rates, a factor of three apart, around the centre in OPTIMIZERS, for --sweep-steps with a schedule of
          that length. Where the best is at an end, one more rate beyond it, --extend times.
tokens    the best rate for --steps: the loss at equal tokens.
time      --time-steps alone on the device, while no other run is there: tokens/s.
minutes   the best rate for as many steps as fit in the time of adam's --steps, with a schedule of that length: the loss
          at equal minutes. An optimizer within 5% of adam's tokens/s needs none: its run is that of ``tokens``.

Losses are held-out ones at the end of a run. All runs have the same seed, samples and order, warm-up for a tenth of the
steps, then a cosine to a tenth; schedule-free optimizers have their own warm-up and no decay. Rate times weight decay
is the same at every centre, unless a recipe has its own.

--jobs runs are done at once, in processes that fork from one that has imported everything. Results are kept in --work:
the same command goes on where it ended, after --minutes, a signal or a failure. A run whose numbers were not finite is
a result; one that failed for another reason is tried again by the next call.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from provenance import commit  # noqa: E402

FACTOR = 3.0  # from one rate of a sweep to the next
DECAY = 0.1  # of adam at its centre
EVALUATIONS = 10  # in a run
NOT_FINITE = 4  # exit code (platform/exit_codes.py)
HEAD = 32  # width of an attention head


@dataclass(frozen=True)
class Recipe:
    """Where an optimizer's sweep begins."""

    rate: float  # the centre of the sweep
    reason: str
    options: str = ""  # {steps}, {warmup}: those of the run

    @property
    def weight_decay(self) -> float:
        return DECAY * OPTIMIZERS["adam"].rate / self.rate


OPTIMIZERS = {
    "adam": Recipe(3e-3, "usual for models of a few million parameters"),
    "adafactor": Recipe(0.1, "adam's, divided by the root mean square of weights, which its update is multiplied by"),
    "ademamix": Recipe(3e-3, "as adam: alpha grows from 0 over the run", "--ademamix-warmup-iters {steps}"),
    "adopt": Recipe(3e-3, "as adam"),
    "cautious-adamw": Recipe(3e-3, "as adam"),
    "dion": Recipe(1e-2, "orthonormal update, times sqrt(rows / columns); adam's part has the same rate"),
    "galore": Recipe(1e-2, "matrices get a quarter of the rate", "--galore-rank 64 --galore-update-proj-gap 50"),
    "lamb": Recipe(3e-2, "the update's norm is that of the weights, times the rate", "--weight-decay 0.01"),
    "lars": Recipe(
        3.0,
        "norms of weights times 0.01 times the rate, adding up to ten times that by momentum",
        "--lars-trust-coefficient 1e-2 --weight-decay 1e-4",
    ),
    "lion": Recipe(1e-3, "a third of adam's: every element of its update is 1"),
    "mars": Recipe(3e-3, "as adam"),
    "muon": Recipe(1e-2, "three to ten times adam's: an update's root mean square is 0.2 times the rate"),
    "normuon": Recipe(1e-2, "as muon"),
    "schedule-free-adamw": Recipe(
        5e-3,
        "above adam's, for there is no decay of the rate but an average",
        "--lr-decay-style constant --lr-warmup-iters 0 --schedule-free-warmup-iters {warmup} --adam-beta2 0.99",
    ),
    "schedule-free-sgd": Recipe(
        3.0,
        "above sgd's, which adds up ten gradients by momentum",
        "--lr-decay-style constant --lr-warmup-iters 0 --schedule-free-warmup-iters {warmup}",
    ),
    "sgd": Recipe(0.3, "gradients of clipped norm 1 over all elements, adding up to ten times that by momentum"),
    "shampoo": Recipe(3e-3, "as adam, whose norms it takes by grafting"),
    "soap": Recipe(3e-3, "as adam, in the eigenbasis"),
    "sophia": Recipe(1e-3, "between lion's and adam's: elements are clipped to 1", "--sophia-interval 10"),
}


@dataclass(frozen=True)
class Run:
    """One run of the experiment."""

    model: str
    optimizer: str
    kind: str  # sweep, tokens, time or minutes
    rate: float
    steps: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.optimizer}-{self.kind}-{self.rate:.3g}-{self.steps}"


class Experiment:
    """The results that there are, and the runs that are still to be done."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.work, self.found = args, args.work.resolve(), {}
        for path in sorted(self.work.glob("*/result.json")):
            self.found[path.parent.name] = json.loads(path.read_text())

    def result(self, run: Run) -> dict[str, Any] | None:
        """The result of a run that has ended; SystemExit where it was one of other options."""
        one = self.found.get(run.name)
        if one is not None and one["options"] != " ".join(self.words(run)):
            raise SystemExit(f"{self.work / run.name} is a run of other options; give another --work, or remove it")
        return one

    def words(self, run: Run) -> list[str]:
        """The training program's options, but for where the run is kept."""
        args, recipe = self.args, OPTIMIZERS[run.optimizer]
        warmup, hidden = max(1, run.steps // 10), args.hidden_size
        words = f"--hidden-size {hidden} --num-layers {args.num_layers} --num-attention-heads {max(1, hidden // HEAD)} "
        words += f"--vocab-size {args.vocab_size} --seq-length {args.seq_length} --qk-layernorm-scope head "
        if run.model == "moe":
            words += f"--num-experts {args.num_experts} --moe-router-topk 2 --moe-ffn-hidden-size {hidden} "
            words += "--moe-aux-loss-coeff 0.01 "
        else:
            words += f"--ffn-hidden-size {-(-8 * hidden // 96) * 32} "  # 8/3 of it, in whole 32
        words += f"--micro-batch-size {args.batch_size} --global-batch-size {args.batch_size} "
        words += f"--device {args.device} --params-dtype {'fp32' if args.device == 'cpu' else 'bf16'} "
        words += f"--seed {args.seed} --train-iters {run.steps} --lr-warmup-iters {warmup} --clip-grad 1.0 "
        words += f"--optimizer {run.optimizer} --lr {run.rate:.6g} --min-lr {run.rate / 10:.6g} "
        words += f"--weight-decay {recipe.weight_decay:.6g} --split 99,1,0 --save-interval 0 --log-interval 50 "
        words += f"--eval-interval {0 if run.kind == 'time' else max(1, run.steps // EVALUATIONS)} --eval-iters 4 "
        words += recipe.options.format(steps=run.steps, warmup=warmup)
        data = ["--data-path", f"{args.data}/tokens_text_document", "--tokenizer-model", f"{args.data}/tokenizer"]
        return [*words.split(), *data, *args.options]

    def sweep(self, model: str, optimizer: str) -> list[Run]:
        """The sweep's runs as far as they are known: one more rate when the best of all is at an end."""
        centre, steps = OPTIMIZERS[optimizer].rate, self.args.sweep_steps
        at = [-1, 0, 1]
        for _ in range(self.args.extend + 1):
            runs = [Run(model, optimizer, "sweep", centre * FACTOR**power, steps) for power in sorted(at)]
            best = self.best(runs)
            if best is None or best not in (runs[0], runs[-1]):
                break
            at.append(min(at) - 1 if best is runs[0] else max(at) + 1)
        return runs

    def best(self, runs: list[Run]) -> Run | None:
        """The run of the lowest loss; None before all have ended, or where none has a loss."""
        ended = [one for run in runs if (one := self.result(run)) is not None]
        losses = [loss_of(one) for one in ended]
        return None if len(ended) < len(runs) or min(losses) == math.inf else runs[losses.index(min(losses))]

    def speed(self, model: str, optimizer: str) -> float | None:
        """Tokens/s of a run alone on the device."""
        one = self.result(self.timed(model, optimizer))
        return None if one is None else float(one["tokens_per_s"])

    def timed(self, model: str, optimizer: str) -> Run:
        return Run(model, optimizer, "time", OPTIMIZERS[optimizer].rate, self.args.time_steps)

    def long_runs(self, model: str, optimizer: str) -> tuple[Run | None, Run | None]:
        """The runs at equal tokens and at equal minutes; None where it is not known yet what they are."""
        best = self.best(self.sweep(model, optimizer))
        if best is None:
            return None, None
        tokens = Run(model, optimizer, "tokens", best.rate, self.args.steps)
        own, adam = self.speed(model, optimizer), self.speed(model, "adam")
        if not own or not adam:
            return tokens, None
        if abs(own / adam - 1) <= 0.05:
            return tokens, tokens
        unit = 1 if self.args.steps < 10 * EVALUATIONS else EVALUATIONS  # so that the last step is evaluated
        steps = max(unit, round(self.args.steps * min(own / adam, 4.0) / unit) * unit)
        return tokens, Run(model, optimizer, "minutes", best.rate, steps)

    def missing(self) -> list[Run]:
        """The runs that can be done now, in this order."""
        pairs = [(model, optimizer) for model in self.args.models for optimizer in self.args.optimizers]
        runs = [run for pair in pairs for run in self.sweep(*pair)]
        both = [self.long_runs(*pair) for pair in pairs]
        runs += [tokens for tokens, _ in both if tokens] + [self.timed(*pair) for pair in pairs]
        runs += [minutes for _, minutes in both if minutes]
        return [run for run in dict.fromkeys(runs) if self.result(run) is None]

    def train(self, deadline: float) -> bool:
        """Does the missing runs until all are done or the deadline is there; True when nothing is left."""
        context = multiprocessing.get_context("fork")
        flying: dict[Run, multiprocessing.context.ForkProcess] = {}
        failed: set[Run] = set()
        try:
            while time.monotonic() < deadline:
                todo = [run for run in self.missing() if run not in flying and run not in failed]
                # A run is timed while no other one is there.
                shared = [run for run in todo if run.kind != "time"]
                is_timing = any(run.kind == "time" for run in flying)
                if not flying and not shared:
                    shared = todo[:1]
                room = 0 if is_timing else self.args.jobs - len(flying)
                for run in shared[:room]:
                    flying[run] = context.Process(target=train_one, args=(self.words(run), self.work / run.name))
                    flying[run].start()
                if not flying:
                    return not failed
                multiprocessing.connection.wait([one.sentinel for one in flying.values()], timeout=1.0)
                for run in [run for run, process in flying.items() if not process.is_alive()]:
                    code = flying.pop(run).exitcode
                    if not self.keep(run, code):
                        failed.add(run)
            return False
        finally:
            for process in flying.values():
                process.kill()
            for process in flying.values():
                process.join()

    def keep(self, run: Run, code: int | None) -> bool:
        """Writes the result of a run that has ended; False where it failed, for another reason than its numbers."""
        folder = self.work / run.name
        if code not in (0, NOT_FINITE):
            lines = (folder / "log.txt").read_text().splitlines() or ["no output"]
            print(f"{run.name}: failed with exit code {code}: {lines[-1]} ({folder / 'log.txt'})", flush=True)
            return False
        path = folder / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        times = [one["step_time_s"] for one in lines]
        counted = times[len(times) // 6 :]  # kernels are compiled in the first steps
        valid = [[one["consumed_tokens"], one["valid_loss"]] for one in lines if one.get("valid_loss") is not None]
        one = {
            "run": vars(run),
            "exit_code": code,
            "options": " ".join(self.words(run)),
            "loss": [one["loss"] for one in lines],
            "valid": valid,
            "tokens": lines[-1]["consumed_tokens"] if lines else 0,
            "training_s": round(sum(times), 3),
            "tokens_per_s": round(len(counted) * self.tokens_a_step / sum(counted), 1) if counted else 0,
        }
        (folder / "part.json").write_text(json.dumps(one) + "\n")
        os.replace(folder / "part.json", folder / "result.json")
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        self.found[run.name] = one
        loss = "" if run.kind == "time" else f"loss {loss_of(one):.4f}, "
        print(f"{run.name}: {loss}{one['tokens_per_s']:,.0f} tokens/s", flush=True)
        return True

    @property
    def tokens_a_step(self) -> int:
        return int(self.args.batch_size * self.args.seq_length)

    def table(self, model: str) -> str:
        """Markdown: the sweep and the two losses of every optimizer, best at equal tokens first."""
        rows = []
        for optimizer in self.args.optimizers:
            sweep = self.sweep(model, optimizer)
            best, (tokens, minutes) = self.best(sweep), self.long_runs(model, optimizer)
            rates = "; ".join(f"{run.rate:.2g}: {self._loss(run)}" for run in sweep)
            at = f"{best.rate:.2g}" + (" (end)" if best in (sweep[0], sweep[-1]) else "") if best else "-"
            speed, steps = self.speed(model, optimizer), f" ({minutes.steps} steps)" if minutes else ""
            cells = f"{optimizer} | {rates} | {at} | {self._loss(tokens)} | {self._loss(minutes)}{steps} | "
            loss = math.inf if tokens is None or (one := self.result(tokens)) is None else loss_of(one)
            rows.append((loss, f"| {cells}{f'{speed:,.0f}' if speed else '-'} |"))
        adam = self.speed(model, "adam")
        seconds = f"{self.args.steps * self.tokens_a_step / adam:.0f} s" if adam else "adam's time"
        tokens_read = f"{self.args.steps * self.tokens_a_step / 1e6:.2f}M tokens"
        head = [f"{model}: {self.args.steps} steps, {tokens_read}; sweeps of {self.args.sweep_steps} steps.", ""]
        head.append(f"| optimizer | rates: losses | best | loss at {tokens_read} | loss at {seconds} | tokens/s |")
        return "\n".join([*head, "|---|---|---|---|---|---|", *(row for _, row in sorted(rows))]) + "\n"

    def _loss(self, run: Run | None) -> str:
        one = None if run is None else self.result(run)
        return "-" if one is None else "not finite" if loss_of(one) == math.inf else f"{loss_of(one):.4f}"

    def draw(self, path: Path) -> None:
        """Losses over tokens and over minutes (tokens by the tokens/s of the run alone), a row of panels."""
        from megatron.optimus.report import figure

        panels = []
        for model in self.args.models:
            lines: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
            for optimizer in self.args.optimizers:
                speed = self.speed(model, optimizer) or math.nan
                units = (1e6, 60 * speed)
                for drawn, run, unit in zip(lines, self.long_runs(model, optimizer), units, strict=True):
                    one = None if run is None else self.result(run)
                    if one is not None and one["valid"]:
                        drawn[optimizer] = ([at / unit for at, _ in one["valid"]], [loss for _, loss in one["valid"]])
            for drawn, label in zip(lines, ("million tokens", "minutes"), strict=True):
                panels.append(figure.Panel(f"{model}, over {label}", label, "held-out loss", drawn, False, True))
        figure.draw(path, panels)

    def to_json(self) -> dict[str, Any]:
        runs = {run.name: run for run in self._all()}
        return {
            "commit": commit(),
            "device": device_name(self.args.device),
            "jobs": self.args.jobs,
            "tokens_a_step": self.tokens_a_step,
            "recipes": {name: vars(OPTIMIZERS[name]) for name in self.args.optimizers},
            "runs": [self.found[name] for name in sorted(runs) if name in self.found],
        }

    def _all(self) -> list[Run]:
        pairs = [(model, optimizer) for model in self.args.models for optimizer in self.args.optimizers]
        runs = [run for pair in pairs for run in (*self.sweep(*pair), *self.long_runs(*pair), self.timed(*pair))]
        return list(dict.fromkeys(run for run in runs if run is not None))


def loss_of(one: dict[str, Any]) -> float:
    """The held-out loss at a run's end; infinite where its numbers were not finite."""
    at, loss = one["valid"][-1] if one["valid"] else (0, math.inf)  # a loss that is not finite is left out
    return math.inf if one["exit_code"] or at != one["tokens"] else float(loss)


def train_one(words: list[str], folder: Path) -> None:
    """One run, in a process of its own: `optimus pretrain` with its output in log.txt of the folder."""
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was ended
    folder.mkdir(parents=True)
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from megatron.optimus.platform.process_exit import run_program
    from megatron.optimus.pretrain import main

    run_program(lambda: main([*words, "--run-dir", str(folder), "--save", str(folder / "checkpoints")]))


def import_everything(device: str) -> None:
    """What a run imports. Nothing here may touch the device: a process that forks from one that did cannot use it."""
    os.environ["DS_ACCELERATOR"] = device
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import megatron.optimus.pretrain
    import megatron.optimus.training.checkpointing
    import megatron.optimus.training.evaluate
    import megatron.optimus.training.trainer  # noqa: F401


def device_name(device: str) -> str:
    """Asked of another process, as this one forks."""
    if device == "cpu":
        return f"cpu, {os.cpu_count()} cores"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return str(pool.apply(_cuda_name))


def _cuda_name() -> str:
    import torch

    return str(torch.cuda.get_device_name())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder that time_to_loss.py prepare wrote")
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS, metavar="NAME")
    parser.add_argument("--models", nargs="+", default=["dense", "moe"], choices=["dense", "moe"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--minutes", type=float, default=math.inf, help="then end, with the table of what is there")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--sweep-steps", type=int, default=100)
    parser.add_argument("--time-steps", type=int, default=60)
    parser.add_argument("--extend", type=int, default=1, help="rates beyond an end of a sweep that is its best")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--num-experts", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32, help="sequences a step")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--work", type=Path, default=Path("runs/compare_optimizers"), help="keeps the runs")
    parser.add_argument("--out", type=Path, help="JSON with every run's losses and options")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--import-in-runs", action="store_true", help="each run imports for itself: slow, as ever")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="further options of the program, last")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    if "adam" not in args.optimizers:
        args.optimizers.insert(0, "adam")  # whose time the others have
    args.data = args.data.resolve()
    tokenizer = json.loads((args.data / "tokenizer/tokenizer.json").read_text())
    ids = [*tokenizer["model"]["vocab"].values(), *(one["id"] for one in tokenizer["added_tokens"])]
    args.vocab_size = max(ids) + 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the runs too
    os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // args.jobs))
    if not args.import_in_runs:
        import_everything(args.device)
    experiment = Experiment(args)
    try:
        is_done = experiment.train(deadline)
    finally:  # of a call that is ended too
        for model in args.models:
            print(f"\n{experiment.table(model)}", flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(experiment.to_json()) + "\n")
        if args.picture is not None:
            experiment.draw(args.picture)
    if not is_done:
        raise SystemExit("some runs are missing; the same command goes on with them")


if __name__ == "__main__":
    main()
