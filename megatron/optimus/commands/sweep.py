"""Run a grid of options, one short run after the other, and compare them in one table and picture.

    optimus sweep --vary lr=1e-3,3e-3,1e-2 --vary optimizer=adam,muon --run-dir sweeps/first -- \\
        --preset mula-tiny --data-path data/corpus_text_document --train-iters 200 --eval-interval 0

Behind -- are options of `optimus pretrain`; --vary NAME=VALUE,VALUE,... gives any of them several values. Each run has
a folder of --run-dir. The same command again repeats no run that has ended, and resumes one that was stopped. A run
that fails is a row of the table. With --print-array the command prints the script of a job array, one job a run; --show
prints the table of what there is. Checkpoints of ended runs are removed unless --keep-checkpoints. See docs/rates.md.

Exit code: 0, 2 after one line that says what is wrong, or 128 + n after signal n.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.optimus.commands.trial import last_error, run_trial
from megatron.optimus.config.load import Parser, load, one_of_names, whole_number
from megatron.optimus.config.options import OPTIONS, did_you_mean, parse, parse_all
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.models.huggingface.config import take_from_hf
from megatron.optimus.platform.exit_codes import NUMERIC_ERROR
from megatron.optimus.platform.files import naming_write_errors, write_atomically
from megatron.optimus.platform.log import printable, prints_errors
from megatron.optimus.report import sweep as report

_OUTCOME = report.OUTCOME
_ARRAYS = {  # scheduler: (lines at the top, index of a job)
    "slurm": (("#SBATCH --job-name=sweep", "#SBATCH --array=0-{last}"), "SLURM_ARRAY_TASK_ID"),
    "pbs": (("#PBS -N sweep", "#PBS -J 0-{last}", 'cd "$PBS_O_WORKDIR" || exit'), "PBS_ARRAY_INDEX"),
}


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    values: dict[str, str]  # by the names of the varied options
    folder: Path
    options: list[str]


@prints_errors(ConfigError)
def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``optimus sweep``; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    own, options = words[:end], words[end + 1 :]
    args = _parser().parse(own)
    trials = _trials(args.vary, args.run_dir, options)
    if args.print_array is not None:
        sys.stdout.write(_array_script(args.print_array, own, options, len(trials)))
        return 0
    if args.index is not None and args.index >= len(trials):
        raise ConfigError(f"--index={args.index} is not one of the {len(trials)} runs; use 0 to {len(trials) - 1}")
    for trial in trials if args.index is None else [trials[args.index]]:
        code = 0 if args.show else _run(trial, args.nproc_per_node, keeps=args.keep_checkpoints)
        if code:
            return code
    if args.index is None:
        rows = [report.read_row(trial.folder, trial.values) for trial in trials]
        sys.stdout.write("\n".join(printable(line) for line in report.table(rows)) + "\n")
        for path in report.write(args.run_dir, rows):
            sys.stdout.write(f"written: {printable(path)}\n")
    return 0


def _parser() -> Parser:
    parser = Parser("sweep", __doc__ or "", usage="optimus sweep --vary NAME=VALUE,... [options] -- [pretrain options]")
    parser.add_argument(
        "--vary", action="append", required=True, metavar="NAME=VALUE,...", help="an option, its values"
    )
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="folder of the sweep")
    ranks = "ranks of each run on this machine, started by `optimus launch` [one process]"
    parser.add_argument("--nproc-per-node", type=whole_number(), metavar="N", help=ranks)
    parser.add_argument("--index", type=whole_number(0), metavar="N", help="only the N-th run of the grid, from 0")
    array = "print the script of a job array, to which resources are to be added: " + ", ".join(_ARRAYS)
    parser.add_argument("--print-array", type=one_of_names(_ARRAYS), metavar="NAME", help=array)
    parser.add_argument("--show", action="store_true", help="start nothing: the table of the runs that there are")
    parser.add_argument("--keep-checkpoints", action="store_true", help="keep those of runs that have ended")
    return parser


def _trials(vary: Sequence[str], run_dir: Path, options: list[str]) -> list[Trial]:
    """All combinations, the last option varying fastest. Raises ConfigError for unknown options and wrong values."""
    axes: dict[str, list[str]] = {}
    for word in vary:
        name, equals, text = word.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if name not in OPTIONS or not equals:
            hint = did_you_mean(name, OPTIONS, "optimus pretrain --help lists all options")
            raise ConfigError(f"--vary={word!r}: {'NAME=VALUE,VALUE is meant' if name in OPTIONS else hint}")
        if name == "run_dir" or name in axes:
            raise ConfigError(f"--vary={word!r}: {name} is {'given twice' if name in axes else 'set by the sweep'}")
        axes[name] = text.split(",")
        for value in axes[name]:
            (
                parse_all(OPTIONS[name], value.split(), word)
                if OPTIONS[name].is_list
                else parse(OPTIONS[name], value, word)
            )
        if len(set(axes[name])) < len(axes[name]):
            raise ConfigError(f"--vary={word!r} names a value twice")
    load(options, "sweep", take_from_hf=take_from_hf)  # what all runs share; each one checks its own values
    trials = []
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        name = re.sub(r"[^\w=.,+-]", "_", ",".join(f"{key}={value}" for key, value in chosen.items()))[:200]
        words = [
            part
            for key, value in chosen.items()
            for part in (OPTIONS[key].flag, *(value.split() if OPTIONS[key].is_list else [value]))
        ]
        folder = run_dir / name
        trials.append(Trial(chosen, folder, [*options, *words, "--run-dir", str(folder)]))
    if len({trial.folder for trial in trials}) < len(trials):
        raise ConfigError("two combinations would have one folder; shorten values, or vary fewer options at once")
    return trials


def _run(trial: Trial, num_ranks: int | None, *, keeps: bool) -> int:
    """Runs a trial unless it has ended. Returns 0, or the code with which to end where this process is to stop.

    Raises ConfigError where the folder holds a run with other options.
    """
    folder, before = trial.folder, report.read_outcome(trial.folder)
    if before is not None and before.options != trial.options:
        raise ConfigError(f"{folder} holds a run with other options; use another --run-dir, or remove the folder")
    if before is not None and before.has_ended:
        sys.stdout.write(f"{folder.name}: has ended before\n")
        return 0
    sys.stdout.write(printable(f"{folder.name}: running\n"))
    sys.stdout.flush()
    began = time.monotonic()
    _note(folder, report.RunOutcome(trial.options, None, 0.0, ""))  # while it runs
    code, was_stopped = run_trial(trial.options, folder, num_ranks)
    seconds = time.monotonic() - began + (before.seconds if before is not None else 0.0)
    error = "" if code == 0 else last_error(folder)
    # A run that a signal ended is resumed; numbers that are not finite would come again.
    _note(folder, report.RunOutcome(trial.options, None if was_stopped or code > 128 else code, seconds, error))
    if code in (0, NUMERIC_ERROR) and not keeps and not was_stopped:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    if was_stopped:
        sys.stdout.write("stopped; the same command goes on\n")
    return code if was_stopped else 0


def _note(folder: Path, outcome: report.RunOutcome) -> None:
    with naming_write_errors(folder, "name another --run-dir"):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / _OUTCOME, json.dumps(outcome.__dict__) + "\n")


def _array_script(scheduler: str, own: Sequence[str], options: Sequence[str], count: int) -> str:
    """A job script each of whose jobs runs one trial. Raises ConfigError for a single run."""
    if count < 2:
        raise ConfigError("--print-array: the grid has one run, which is no array; start it without")
    at = own.index(next(word for word in own if word.partition("=")[0].replace("_", "-") == "--print-array"))
    others = [*own[:at], *own[at + (1 if "=" in own[at] else 2) :]]
    lines, index = _ARRAYS[scheduler]
    command = shlex.join(["optimus", "sweep", *others]) + f' --index "${index}" -- ' + shlex.join(options)
    table = shlex.join(["optimus", "sweep", *others, "--show", "--", *options])
    head = "\n".join(line.format(last=count - 1) for line in lines)
    return f"#!/bin/bash\n{head}\n# Afterwards, for the table: {table}\nexec {command}\n"
