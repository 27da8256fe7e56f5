"""Command line and files to one run: preset < file < flags.

Hand-written on the option table instead of argparse: no abbreviations, the same types and messages as in files, and
an unknown flag names its nearest neighbour.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megatron.optimus.config.options import OPTIONS, SECTIONS, Option, build, did_you_mean, overrides, parse, parse_all
from megatron.optimus.config.presets import PRESETS
from megatron.optimus.config.schema import ConfigError, RunConfig
from megatron.optimus.config.serialize import read_file

_META_FLAGS = {
    "preset": ("NAME", "start from a named model: " + ", ".join(PRESETS)),
    "config": ("FILE", "sections in a .yaml or .json file; overrides the preset"),
    "dry_run": ("", "print the resolved configuration, parameter counts and layout, then stop"),
    "help": ("", "print this text"),
}


@dataclass(frozen=True)
class Run:
    config: RunConfig
    preset: str | None
    config_file: str | None
    dry_run: bool


def load(argv: Sequence[str] | None = None, own_flags: Iterable[str] = ()) -> Run:
    """The run that the command line (default: of this process) describes.

    ``own_flags``: those that the calling program has taken out of it, to be proposed for misspelt ones. Raises
    ConfigError for anything it does not understand; ``--help`` writes to stdout and raises SystemExit(0).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if "--help" in words or "-h" in words:
        sys.stdout.write(help_text())
        raise SystemExit(0)
    meta, flags = _parse_words(words, own_flags)
    values: dict[str, Any] = {}
    preset, config_file = meta.get("preset"), meta.get("config")
    if preset is not None:
        if preset not in PRESETS:
            hint = did_you_mean(preset, PRESETS, "")
            raise ConfigError(f"--preset={preset!r} is not one of {', '.join(PRESETS)}{'; ' * bool(hint)}{hint}")
        values.update(overrides(PRESETS[preset], f"preset {preset}"))
    if config_file is not None:
        values.update(read_file(config_file))
    values.update(flags)
    return Run(build(values), preset, config_file, "dry_run" in meta)


def _parse_words(words: list[str], own_flags: Iterable[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Splits the words into (meta flags, option values). A flag given twice counts the last time, as shells expect."""
    meta: dict[str, str] = {}
    flags: dict[str, Any] = {}
    position = 0
    while position < len(words):
        word = words[position]
        if not word.startswith("--") or word == "--":
            raise ConfigError(f"unexpected argument {word!r}; options look like --num-layers 16")
        flag, equals, attached = word.partition("=")
        name = flag[2:].replace("-", "_")
        end = position + 1
        while end < len(words) and not words[end].startswith("--"):
            end += 1
        following = words[position + 1 : end]
        arguments = [attached] if equals else following
        option = OPTIONS.get(name)
        if name == "dry_run":
            taken, meta[name] = _no_value(flag, equals + attached), ""
        elif name in _META_FLAGS:
            taken, meta[name] = 1, _one_value(flag, arguments)
        elif option is not None and option.is_list:
            taken, flags[name] = len(arguments), parse_all(option, arguments, flag)
        elif option is not None and option.type is bool:
            taken, flags[name] = _boolean(option, flag, arguments)
        elif option is not None:
            taken, flags[name] = 1, parse(option, _one_value(flag, arguments), flag)
        elif name.startswith("no_") and name[3:] in OPTIONS and OPTIONS[name[3:]].type is bool:
            taken, flags[name[3:]] = _no_value(flag, equals + attached), False
        else:
            raise _unknown_flag(flag, " ".join(arguments), own_flags)
        position += 1 + (0 if equals else taken)
    return meta, flags


def _one_value(flag: str, arguments: list[str]) -> str:
    if not arguments:
        raise ConfigError(f"{flag} needs a value")
    return arguments[0]


def _no_value(flag: str, attached: str) -> int:
    if attached:
        raise ConfigError(f"{flag} takes no value, got {attached[1:]!r}")
    return 0


def _boolean(option: Option, flag: str, arguments: list[str]) -> tuple[int, bool]:
    """(words taken, value): the flag alone means true."""
    return (1, parse(option, arguments[0], flag)) if arguments else (0, True)


def _all_flags() -> list[str]:
    flags = ["--" + name.replace("_", "-") for name in _META_FLAGS]
    for option in OPTIONS.values():
        flags.append(option.flag)
        if option.type is bool:
            flags.append("--no-" + option.flag[2:])
    return flags


def _unknown_flag(flag: str, value: str, own_flags: Iterable[str]) -> ConfigError:
    hint = did_you_mean(flag, [*_all_flags(), *own_flags], "--help lists all options")
    return ConfigError(f"unknown option {flag}{f' (value {value!r})' if value else ''}; {hint}")


def help_text() -> str:
    """All options, section by section, with types, meaning and defaults."""
    lines = ["python -m megatron.optimus.pretrain [--preset NAME] [--config FILE] [options]", ""]
    lines += ["A preset is overridden by the file, the file by options. [in brackets: the default]"]
    lines += ["A switch alone means true, --no-SWITCH means false; the word none empties an optional value.", "", "run"]
    for name, (metavar, text) in _META_FLAGS.items():
        lines.append(_help_line(f"--{name.replace('_', '-')} {metavar}".rstrip(), text))
    for section in SECTIONS:
        lines += ["", section]
        for option in OPTIONS.values():
            if option.section == section:
                lines.append(_help_line(f"{option.flag} {_metavar(option)}", f"{option.help} [{_default(option)}]"))
    return "\n".join(lines) + "\n"


def _help_line(left: str, right: str) -> str:
    left = "  " + left
    return f"{left:<44} {right}" if len(left) <= 44 else f"{left}\n{'':<44} {right}"


def _metavar(option: Option) -> str:
    if issubclass(option.type, Enum):
        return "{" + ",".join(str(member.value) for member in option.type) + "}"
    if option.type is bool:
        return "[true|false]"
    name = {int: "INT", float: "NUMBER", str: "TEXT"}[option.type]
    return f"{name} ..." if option.is_list else name


def _default(option: Option) -> str:
    value = option.default
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None or value == [] else str(value)
