"""The command ``optimus`` and its subcommands; ``python -m megatron.optimus`` is the same in a source tree."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron.optimus.platform import signals
from megatron.optimus.platform.output import checked_output
from megatron.optimus.platform.process_exit import run_program

# Subcommand: (module with main(argv), help). A module is imported when it is called, so that --help needs no torch.
COMMANDS = {
    "pretrain": ("megatron.optimus.pretrain", "train a model, as one rank"),
    "launch": ("megatron.optimus.launch", "start the ranks of pretrain, on this machine or in a PBS or SLURM job"),
    "plan": ("megatron.optimus.commands.plan", "predict memory, communication and time of a run, and search layouts"),
    "preprocess": ("megatron.optimus.commands.preprocess", "tokenize JSON lines, parquet or text into .bin/.idx files"),
    "train-tokenizer": ("megatron.optimus.commands.train_tokenizer", "train a byte-level BPE tokenizer"),
    "inspect-data": (
        "megatron.optimus.commands.inspect_data",
        "inspect token files, or the samples that a run reads from them",
    ),
    "convert": ("megatron.optimus.commands.convert", "convert a checkpoint from or to other formats"),
    "average": ("megatron.optimus.commands.average", "average the weights of checkpoints"),
    "generate": ("megatron.optimus.commands.generate", "generate text from a checkpoint, or score given text"),
    "serve": ("megatron.optimus.commands.serve", "serve a checkpoint over an OpenAI-compatible API"),
    "evaluate": ("megatron.optimus.commands.evaluate", "evaluate a checkpoint on tasks of lm-eval's harness"),
    "make-tasks": ("megatron.optimus.commands.make_tasks", "make tasks for evaluate from held-out texts"),
    "report": ("megatron.optimus.commands.report", "make a page of runs: curves, time, experts, configuration"),
    "watch": ("megatron.optimus.commands.watch", "watch a run in the terminal, by the files in its folder"),
    "verify": ("megatron.optimus.commands.verify", "verify, list or compare checkpoints"),
    "expert-balance": (
        "megatron.optimus.commands.expert_balance",
        "report the load of experts, and compute a balanced placement",
    ),
    "lr-find": ("megatron.optimus.commands.lr_find", "find a learning rate by one short run with a rising rate"),
    "sweep": (
        "megatron.optimus.commands.sweep",
        "run a grid of options, and compare the runs in a table and a picture",
    ),
    "coordinate-check": (
        "megatron.optimus.commands.coordinate_check",
        "check a parametrization: the change of activations at several widths and depths",
    ),
    "doctor": ("megatron.optimus.commands.doctor", "check this machine's installation, and say how to mend it"),
    "preflight": ("megatron.optimus.commands.preflight", "check devices, links, folder and versions before a run"),
    "drill": ("megatron.optimus.commands.drill", "inject faults into a small run, and check that it recovers exactly"),
    "tune-kernels": ("megatron.optimus.commands.tune_kernels", "autotune the Triton expert kernels on this GPU"),
}
# A peer that closes its connection would end these by SIGPIPE.
_WITH_SOCKETS = ("pretrain", "launch", "serve", "convert", "evaluate")


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a subcommand and ends the process with its exit code; the entry point of the command ``optimus``."""
    run_program(lambda: main(argv))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand.

    Args:
        argv: the subcommand and its options; None takes those of this process.

    Returns:
        The subcommand's exit code; 2 after one line where there is no such subcommand.
    """
    signals.end_on_sigint()
    words = list(sys.argv[1:] if argv is None else argv)
    trains = words[:1] in (["pretrain"], ["launch"]) and not {"-h", "--help", "--dry-run"} & set(words)
    with checked_output(is_needed=not trains):
        return _run(words)


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(_help())
        return 0 if words else 2
    if words[0] == "--version":
        from megatron.optimus.version import __version__

        sys.stdout.write(f"optimus {__version__}\n")
        return 0
    if words[0] not in COMMANDS:
        from megatron.optimus.config.options import did_you_mean

        hint = did_you_mean(words[0], COMMANDS, f"commands are {', '.join(COMMANDS)}")
        sys.stderr.write(f"error: optimus has no command {words[0]!r}; {hint}\n")
        return 2
    module = importlib.import_module(COMMANDS[words[0]][0])
    if words[0] not in _WITH_SOCKETS:
        signals.end_on_sigpipe()
    signals.raise_on_sigint()
    try:
        return int(module.main(words[1:]))
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130


def _help() -> str:
    lines = ["usage: optimus COMMAND [options]", "", "commands:"]
    lines += [f"  {name:<16} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join([*lines, "", "optimus COMMAND --help lists the options of a command.", ""])
