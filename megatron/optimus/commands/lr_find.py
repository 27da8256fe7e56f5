"""Find a learning rate by one short run whose rate rises exponentially (arXiv 1506.01186).

    optimus lr-find --preset mula-tiny --data-path data/corpus_text_document
    optimus lr-find --lr-from 1e-5 --lr-to 1 --train-iters 200 --nproc-per-node 4 --config run.yaml

All options of `optimus pretrain` can follow. The suggestion is the rate at which the smoothed loss falls fastest; for a
long run compare it with its neighbours by `optimus sweep`. The run's checkpoints are in a temporary folder and go with
it. --run-dir gets lr_find.json, metrics.jsonl and, with matplotlib, lr_find.png. See docs/rates.md.

Exit code: 0, 2 after one line that says what is wrong, or that of a run which could not train.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megatron.optimus.commands.trial import last_error, run_trial
from megatron.optimus.config.load import Parser, load, whole_number
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.models.huggingface.config import take_from_hf
from megatron.optimus.platform.exit_codes import NUMERIC_ERROR
from megatron.optimus.platform.files import naming_write_errors
from megatron.optimus.platform.log import print_error, printable, prints_errors
from megatron.optimus.report import figure, plot
from megatron.optimus.report.read import METRICS, read_run

_STEPS = 100  # unless --train-iters says otherwise
_FEWEST = 20  # from which a curve can be smoothed
# What would get in the way of a short run with a rate of its own.
_OWN_OPTIONS = (
    "--lr-decay-style range-test --lr-warmup-iters 0 --lr-warmup-samples none --lr-decay-iters none "
    "--lr-decay-samples none --lr-wsd-decay-iters none --lr-wsd-decay-samples none --eval-interval 0 "
    "--save none --save-local-dir none --save-interval 0 --model-only-save-interval 0 --eval-tasks"
).split()


@dataclass(frozen=True)
class Suggestion:
    """Learning rates read from a curve of losses over rising rates."""

    rate: float  # where the smoothed loss falls fastest
    lowest: float  # where it is lowest
    diverges: float | None  # from where on it is higher than at the start; None: nowhere


@prints_errors(ConfigError)
def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``optimus lr-find``; returns the exit code."""
    parser = Parser("lr-find", __doc__ or "")
    parser.add_argument("--lr-from", type=_rate, default=1e-6, metavar="NUMBER", help="rate of the first step [1e-6]")
    parser.add_argument("--lr-to", type=_rate, default=1.0, metavar="NUMBER", help="rate of the last step [1]")
    ranks = "ranks on this machine, started by `optimus launch` [one process]"
    parser.add_argument("--nproc-per-node", type=whole_number(), metavar="N", help=ranks)
    args, options = parser.parse_known(argv)
    if args.lr_from >= args.lr_to:
        raise ConfigError(f"--lr-from={args.lr_from} must be below --lr-to={args.lr_to}")
    run = load(options, "lr-find", parser.flags, take_from_hf)
    given = run.config.training
    steps = given.train_iters if given.train_iters != type(given)().train_iters else _STEPS
    if steps < _FEWEST:
        raise ConfigError(f"train_iters={steps} are too few for a curve; use {_FEWEST} or more, 100 is usual")
    options += ["--train-iters", str(steps), "--train-samples", "none", *_OWN_OPTIONS]
    options += ["--lr", str(args.lr_to), "--min-lr", str(args.lr_from)]
    load(options, "lr-find", take_from_hf=take_from_hf)
    return _find(options, Path(run.config.logging.run_dir), args)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, such as 1e-4")
    return value


def _find(options: list[str], run_dir: Path, args: argparse.Namespace) -> int:
    """Runs the trial, prints the suggested rate, and writes lr_find.json, metrics.jsonl and the picture."""
    with naming_write_errors(f"run_dir={str(run_dir)!r}", "name another"):
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="lr-find-", dir=run_dir) as folder:
            code, was_stopped = run_trial([*options, "--run-dir", folder], Path(folder), args.nproc_per_node)
            if was_stopped:
                return code
            if code not in (0, NUMERIC_ERROR):  # numbers that are not finite end a rising rate well
                print_error(last_error(Path(folder)))
                return code
            metrics = read_run(Path(folder)).metrics
            rates, losses = metrics.column("lr"), metrics.column("loss")
            found = suggest(rates, losses)
            shutil.copy(Path(folder) / METRICS, run_dir / METRICS)
        curve = {"rates": rates.tolist(), "losses": [one if math.isfinite(one) else None for one in losses.tolist()]}
        (run_dir / "lr_find.json").write_text(json.dumps(asdict(found) | curve) + "\n")
    sys.stdout.write("\n".join(_lines(found, rates, losses)) + "\n")
    if figure.is_drawable():
        path = run_dir / "lr_find.png"
        _draw(path, found, rates, losses)
        sys.stdout.write(f"picture: {printable(path)}\n")
    return 0


def smoothed(losses: np.ndarray) -> np.ndarray:
    """The mean of each step's loss and its neighbours', a twelfth of the steps in all; inf where a loss is NaN."""
    reach = max(1, len(losses) // 24)
    rows = [losses[max(0, at - reach) : at + reach + 1] for at in range(len(losses))]
    means = [
        row[np.isfinite(row)].mean() if math.isfinite(row[min(at, reach)]) else math.inf for at, row in enumerate(rows)
    ]
    return np.array(means)


def suggest(rates: np.ndarray, losses: np.ndarray) -> Suggestion:
    """Suggests a learning rate from a curve of losses over exponentially rising rates.

    Args:
        rates: ascending, float64 [steps].
        losses: of the same steps, in nats; NaN where a loss was not finite.

    Raises:
        ConfigError: the loss falls nowhere, or is still falling at the highest rate.
    """
    if np.isfinite(losses).sum() < _FEWEST:
        raise ConfigError(f"only {np.isfinite(losses).sum()} steps have a finite loss; use a lower --lr-from")
    curve = smoothed(losses)
    lowest = int(curve.argmin())
    early = losses[: max(3, len(losses) // 10)]
    noise = float(np.nanstd(early))
    if curve[0] - curve[lowest] <= max(0.01 * curve[0], 2 * noise):
        raise ConfigError(
            f"the loss falls nowhere between rates {rates[0]:.3g} and {rates[-1]:.3g}: it begins at {curve[0]:.3f} and "
            f"is {curve[lowest]:.3f} at its lowest; use other ends, more --train-iters or larger batches"
        )
    if lowest >= len(rates) - 2:
        raise ConfigError(f"the loss still falls at the highest rate, {rates[-1]:.3g}; use a higher --lr-to than that")
    fall = np.gradient(smoothed(curve[: lowest + 1]), np.log(rates[: lowest + 1]))
    above = np.flatnonzero(curve[lowest:] > curve[0])
    return Suggestion(
        rate=float(rates[int(fall.argmin())]),
        lowest=float(rates[lowest]),
        diverges=float(rates[lowest + above[0]]) if len(above) else None,
    )


def _lines(found: Suggestion, rates: np.ndarray, losses: np.ndarray) -> list[str]:
    curve = smoothed(losses)
    top = 1.1 * curve[0]  # what lies beyond is the divergence
    diverges = "nowhere" if found.diverges is None else f"from {found.diverges:.2g} on"
    return [
        *plot.curve(np.log10(rates), np.where(curve <= top, curve, np.nan), width=72, height=14),
        f"{'log10 of the rate':^72}".rstrip(),
        f"loss falls fastest at {found.rate:.2g}, is lowest at {found.lowest:.2g}, above its start {diverges}",
        f"suggestion: --lr {found.rate:.1e}",
    ]


def _draw(path: Path, found: Suggestion, rates: np.ndarray, losses: np.ndarray) -> None:
    curve = smoothed(losses)
    low, high = float(curve.min()), float(curve[0])
    span = high - low
    panel = figure.Panel(
        "a short run with a rising rate",
        "learning rate",
        "loss (nats per token)",
        {"each step": (rates.tolist(), losses.tolist()), "smoothed": (rates.tolist(), curve.tolist())},
        marks={f"falls fastest: {found.rate:.1e}": found.rate, f"lowest: {found.lowest:.1e}": found.lowest},
        y_range=(low - 0.2 * span, high + 0.5 * span),
    )
    figure.draw(path, [panel])
