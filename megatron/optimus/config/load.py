"""The command-line parser of every command, and the run that a command line describes: preset < file < flags.

``Parser`` is argparse with these rules: every mistake is a ``ConfigError`` of one line, an unknown flag comes with the
most similar one, flags are never abbreviated, ``--num_layers`` is ``--num-layers``, and of a flag given twice the
last one counts. ``add_run_options`` gives a parser one flag for each option of the schema.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

from megatron.optimus.config.options import (
    OPTIONS,
    SECTIONS,
    Option,
    build,
    did_you_mean,
    parse,
    parse_all,
    read_sections,
)
from megatron.optimus.config.presets import PRESETS
from megatron.optimus.config.schema import ConfigError, RunConfig
from megatron.optimus.config.serialize import read_file

_FLAG_COLUMN = 44
_PRECEDENCE = """A preset is overridden by the file, the file by flags. A switch alone means true, --no-SWITCH means
  false; the word none empties an optional value. [in brackets: the default]"""
_WRONG_COUNT = re.compile(r"argument (\S+): expected (?:one|at least one) argument")
_EXTRA_VALUE = re.compile(r"argument (\S+): ignored explicit argument (.*)")
_WRONG_CHOICE = re.compile(r"argument (\S+): invalid choice: (.*) \(choose from (.*)\)")
_WRONG_VALUE = re.compile(r"^argument (--\S+): (?=')(.*)$", re.DOTALL)


@dataclass(frozen=True)
class CommandLine:
    """What a command line asks for.

    Attributes:
        config: every option of the run, checked section by section.
        preset: name given to ``--preset``.
        dry_run: whether only to print what would run.
        verbose: whether to print every option with it, and to log details.
        given: options named by a flag, not those of a preset or a file.
    """

    config: RunConfig
    preset: str | None
    dry_run: bool
    given: frozenset[str]
    verbose: bool = False


def load(
    argv: Sequence[str] | None = None,
    program: str = "pretrain",
    other_flags: Iterable[str] = (),
    take_from_hf: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> CommandLine:
    """Reads a run from a command line that holds run options only.

    Args:
        argv: the options; None takes those of this process.
        program: the subcommand whose help ``--help`` prints.
        other_flags: flags of the calling program, proposed for misspelt ones.
        take_from_hf: completes ``{option: value}`` by what the folder in ``from_hf`` says; None: it is not supported.

    Raises:
        ConfigError: for anything that is not understood.
        SystemExit: with code 0 after ``--help``.
    """
    parser = Parser(program, "Pretrain a model. Alone, under torchrun, or under mpiexec or srun.", other_flags)
    add_run_options(parser)
    return read_run(parser.parse(argv), take_from_hf)


class Parser(argparse.ArgumentParser):
    """A subcommand's parser.

    Args:
        program: the subcommand, as in ``optimus PROGRAM``.
        description: what it does; printed by ``--help`` as it stands.
        other_flags: flags that another parser has taken, proposed for misspelt ones.
    """

    def __init__(
        self, program: str = "", description: str = "", other_flags: Iterable[str] = (), **options: Any
    ) -> None:
        if program:  # empty for the actions of a subcommand, which argparse names
            options = {"prog": f"optimus {program}", "usage": f"optimus {program} [options]"} | options
        super().__init__(description=description, formatter_class=_Help, allow_abbrev=False, **options)
        self._other_flags = tuple(other_flags)

    @property
    def flags(self) -> tuple[str, ...]:
        """Every flag of this parser, with the two dashes."""
        return tuple(flag for flag in self._option_string_actions if flag.startswith("--"))

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError instead of printing the usage and ending the process."""
        if match := _WRONG_COUNT.search(message):
            raise ConfigError(f"{match[1]} needs a value")
        if match := _EXTRA_VALUE.search(message):
            raise ConfigError(f"{match[1]} takes no value, got {match[2]}")
        if match := _WRONG_CHOICE.search(message):
            raise ConfigError(f"{match[1]}={match[2]} is not one of {match[3]}")
        raise ConfigError(_WRONG_VALUE.sub(r"\1=\2", message).removeprefix("argument "))

    def add_enum(self, *flags: str, members: Iterable[Enum], **options: Any) -> None:
        """Adds an option with one of these members of an enumeration, which a user names by its value."""
        of_value = {member.value: member for member in members}
        value = one_of_names(list(of_value))
        self.add_argument(
            *flags, type=lambda text: of_value[value(text)], metavar="{" + ",".join(of_value) + "}", **options
        )

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parses the command line. Raises ConfigError; SystemExit with code 0 after ``--help``."""
        args, rest = self.parse_known(argv)
        for position, word in enumerate(rest):
            if word.startswith("--") and word != "--":
                flag, _, value = word.partition("=")
                values = [value] if value else rest[position + 1 : position + 2]
                hint = did_you_mean(flag, [*self.flags, *self._other_flags], "--help lists all options")
                raise ConfigError(
                    f"unknown option {flag}" + (f" (value {values[0]!r})" if values else "") + f"; {hint}"
                )
        if rest:
            raise ConfigError(f"unexpected argument {rest[0]!r}; options look like --num-layers 16")
        return args

    def parse_known(self, argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
        """Parses the options of this parser; returns them and all other words in order."""
        words = list(sys.argv[1:] if argv is None else argv)
        if self.add_help and self._subparsers is None and ("--help" in words or "-h" in words):
            self.print_help()
            raise SystemExit(0)
        return self.parse_known_args(_normalized(words))


def _normalized(words: Sequence[str]) -> list[str]:
    """Replaces underscores in flags by dashes and joins negative numbers to flags: argparse takes them for flags."""
    result: list[str] = []
    for word in words:
        flag, equals, value = word.partition("=")
        if word.startswith("--"):
            result.append(flag.replace("_", "-") + equals + value)
        elif re.match(r"-[\d.]", word) and result and re.fullmatch(r"--[^=]+", result[-1]):
            result[-1] += "=" + word
        else:
            result.append(word)
    return result


class _Help(argparse.RawDescriptionHelpFormatter):
    """Prints one line for each option, however long its help, so that ``grep`` finds all of it."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=_FLAG_COLUMN + 2, width=10_000)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        metavar = action.metavar if isinstance(action.metavar, str) else None
        return metavar or super()._format_args(action, default_metavar)


def whole_number(least: int = 1) -> Any:
    """Returns an argparse type that accepts whole numbers of ``least`` or more."""

    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of {least} or more")
        return int(text)

    return convert


def one_of_names(names: Iterable[str]) -> Any:
    """Returns an argparse type that accepts the given names and proposes the most similar one for others."""
    known = list(names)

    def convert(text: str) -> str:
        if text not in known:
            hint = did_you_mean(text, known, "see --help")
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(known)}; {hint}")
        return text

    return convert


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Adds ``--preset``, ``--config``, ``--dry-run``, ``--verbose`` and a flag for every option of the schema."""
    run = parser.add_argument_group("run", _PRECEDENCE)
    run.add_argument("--preset", metavar="NAME", help="start from a named model: " + ", ".join(PRESETS))
    run.add_argument("--config", metavar="FILE", help="sections in a .yaml or .json file; overrides the preset")
    run.add_argument(
        "--dry-run",
        action="store_true",
        help="print model, layout, memory, length, data and output of the run, then stop",
    )
    run.add_argument(
        "--verbose", action="store_true", help="log details; with --dry-run: print every option as resolved, too"
    )
    for section in SECTIONS:
        group = parser.add_argument_group(section)
        for option in OPTIONS.values():
            if option.section == section:
                _add_option(group, option)


def _add_option(group: argparse._ArgumentGroup, option: Option) -> None:
    """Keeps words as text: options.py converts the values of flags and of files."""
    words: dict[str, Any] = {"dest": f"option.{option.name}", "default": argparse.SUPPRESS}
    text = f"{option.help} [{option.default_text}]".replace("%", "%%")
    if option.is_list:
        group.add_argument(option.flag, nargs="*", metavar=_metavar(option), help=text, **words)
    elif option.type is bool:
        group.add_argument(option.flag, nargs="?", const="true", metavar=_metavar(option), help=text, **words)
        no = "--no-" + option.flag[2:]
        group.add_argument(no, action="store_const", const="false", help=argparse.SUPPRESS, **words)
    else:
        group.add_argument(option.flag, metavar=_metavar(option), help=text, **words)


def read_run(
    args: argparse.Namespace, take_from_hf: Callable[[dict[str, Any]], dict[str, Any]] | None = None
) -> CommandLine:
    """Builds the run from the result of a parser with ``add_run_options``; see ``load``. Raises ConfigError."""
    values: dict[str, Any] = {}
    if args.preset is not None:
        if args.preset not in PRESETS:
            hint = did_you_mean(args.preset, PRESETS, "")
            raise ConfigError(f"--preset={args.preset!r} is not one of {', '.join(PRESETS)}{'; ' * bool(hint)}{hint}")
        values.update(read_sections(PRESETS[args.preset], f"preset {args.preset}"))
    if args.config is not None:
        values.update(read_file(args.config))
    words = {key.removeprefix("option."): word for key, word in vars(args).items() if key.startswith("option.")}
    for name, word in words.items():
        option = OPTIONS[name]
        values[name] = (parse_all if option.is_list else parse)(option, word, option.flag)
    if values.get("from_hf") is not None and take_from_hf is not None:
        if args.preset is not None:
            raise ConfigError(
                f"--preset={args.preset} and from_hf={values['from_hf']!r} both name a model; leave one of them out"
            )
        values = take_from_hf(values)
    return CommandLine(build(values), args.preset, args.dry_run, frozenset(words), args.verbose)


def _metavar(option: Option) -> str:
    if issubclass(option.type, Enum):
        return "{" + ",".join(str(member.value) for member in option.type) + "}"
    if option.type is bool:
        return "[true|false]"
    name = {int: "INT", float: "NUMBER", str: "TEXT"}[option.type]
    return f"{name} ..." if option.is_list else name
