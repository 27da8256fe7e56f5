"""The table of all options, and the conversion of user input into an option's type.

Input is either text (a flag on the command line) or parsed values (YAML, JSON, presets). Both end in ``convert``, so a
value means the same wherever it is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megatron.optimus.config.layer_pattern import parse_integers
from megatron.optimus.config.schema import ConfigError, RunConfig, one_of

SECTIONS: dict[str, type] = typing.get_type_hints(RunConfig)


@dataclass(frozen=True)
class Option:
    """One field of a section of the schema."""

    section: str
    name: str
    type: type  # int, float, bool, str or an Enum; with is_list that of an element
    is_list: bool
    is_optional: bool
    default: Any
    help: str
    words: Mapping[str, int]  # numbers that may be written as a word

    @property
    def flag(self) -> str:
        """The flag on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def expected(self) -> str:
        """The type in words, for error messages."""
        name = {int: "an integer", float: "a number", bool: "true or false", str: "text"}.get(self.type)
        name = name or one_of(member.value for member in self.type)  # type: ignore[attr-defined]
        name = " or ".join([name, *self.words])
        return f"a list of {name}" if self.is_list else f"{name} or none" if self.is_optional else name

    @property
    def default_text(self) -> str:
        """The default as a user would write it."""
        value = self.default
        if isinstance(value, Enum):
            return str(value.value)
        if isinstance(value, bool):
            return str(value).lower()
        return "none" if value is None or value == [] else str(value)


def _options() -> dict[str, Option]:
    table: dict[str, Option] = {}
    for section, cls in SECTIONS.items():
        hints = typing.get_type_hints(cls)
        defaults = cls()
        for field in dataclasses.fields(cls):
            hint = hints[field.name]
            is_list = typing.get_origin(hint) is list
            is_optional = isinstance(hint, types.UnionType)
            inner = typing.get_args(hint)[0] if is_list or is_optional else hint
            assert field.name not in table, f"option {field.name} exists in two sections"
            default = getattr(defaults, field.name)
            table[field.name] = Option(
                *(section, field.name, inner, is_list, is_optional, default),
                **field.metadata,
            )
    return table


OPTIONS: dict[str, Option] = _options()


_NEAR = 0.75  # similarity (difflib's ratio) from which a name is proposed: fewer letters in common mean another word
_SAME = 0.9  # a letter or two amiss


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Returns the candidate that ``name`` may have been meant for; None where no candidate is near.

    Near is one that has all words of ``name`` and is at most twice as long, one that ends with ``name`` after one or
    two other words, and one whose spelling is similar.
    """
    name = _spelling(name)
    words = set(name.split("_"))

    def likeness(candidate: str) -> tuple[bool, bool, int, float, int]:
        spelled = _spelling(candidate)
        shared, ratio = words & set(spelled.split("_")), difflib.SequenceMatcher(None, name, spelled).ratio()
        ends_with = spelled.endswith(f"_{name}") and spelled.count("_") <= name.count("_") + 2
        contains = shared == words and len(spelled) <= 2 * len(name)
        # A letter amiss says more than a word in common: --token is --tokens, not --fim-prefix-token.
        return ends_with or contains or ratio >= _NEAR, ratio >= _SAME, len(shared), ratio, -len(spelled)

    best = max(candidates, key=likeness, default=None)
    return best if best is not None and likeness(best)[0] else None


def _spelling(name: str) -> str:
    return name.lower().replace("-", "_").strip("_")


def did_you_mean(name: str, candidates: Iterable[str], otherwise: str) -> str:
    """Returns "did you mean CANDIDATE?", or ``otherwise`` where none is similar."""
    close = nearest(name, candidates)
    return f"did you mean {close}?" if close else otherwise


def _convert_one(option: Option, value: Any, where: str) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)  # bool is a subclass of int
    if isinstance(value, option.type) and option.type is not float and (option.type is not int or is_number):
        return value
    if issubclass(option.type, Enum):
        names = [str(member.value) for member in option.type]
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                return option.type(value)
        hint = did_you_mean(str(value), names, "")
        raise ConfigError(f"{where}={value!r} is not one of {', '.join(names)}{'; ' * bool(hint)}{hint}")
    # YAML 1.1 reads 1e-4 as text; a whole number is a number too.
    if option.type is float and (is_number or isinstance(value, str)):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise ConfigError(f"{where}={value!r}: expected {option.expected}")


def convert(option: Option, value: Any, where: str) -> Any:
    """Converts a parsed value into the option's type without rounding.

    Args:
        option: the option.
        value: from YAML, JSON or a preset.
        where: what messages call it, such as "run.yaml: model.num_layers".

    Raises:
        ConfigError: for a value of another type.
    """
    if option.is_optional and (value is None or value == "none"):
        return None
    if isinstance(value, str) and value in option.words:
        return option.words[value]
    if option.is_list:
        if not isinstance(value, list):
            raise ConfigError(f"{where}={value!r}: expected {option.expected}")
        return [_convert_one(option, element, where) for element in value]
    return _convert_one(option, value, where)


def parse_all(option: Option, words: list[str], where: str) -> list[Any]:
    """Converts the words of a list option; a word for integers may be a list itself, such as [0]*3+[1]*13."""
    lists = [parse_integers(word) if option.type is int and "[" in word else None for word in words]
    found = [[parse(option, word, where)] if part is None else part for word, part in zip(words, lists, strict=True)]
    return [value for part in found for value in part]


def parse(option: Option, text: str, where: str) -> Any:
    """Converts one word of the command line into the option's (element) type. Raises ConfigError."""
    value: Any = text
    if option.type is int and text != "none" and text not in option.words:
        try:
            value = int(text)
        except ValueError:
            raise ConfigError(f"{where}={text!r}: expected {option.expected}") from None
    elif option.type is bool:
        value = {"true": True, "false": False}.get(text.lower(), text)
    return _convert_one(option, value, where) if option.is_list else convert(option, value, where)


def _shortened(value: Any) -> str:
    """Returns at most 100 characters of a value that may be a whole section."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def read_sections(data: Any, source: str) -> dict[str, Any]:
    """Converts the sections of a file or preset.

    Args:
        data: ``{section: {option: value}}``.
        source: the file or preset, for messages.

    Returns:
        ``{option: converted value}``.

    Raises:
        ConfigError: for unknown sections and options, options in the wrong section, and wrong types.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: expected sections ({', '.join(SECTIONS)}), got {_shortened(data)}")
    result: dict[str, Any] = {}
    for section, values in data.items():
        if section not in SECTIONS:
            if section in OPTIONS:
                raise ConfigError(f"{source}: {section}={values!r} belongs into section {OPTIONS[section].section}")
            hint = did_you_mean(str(section), SECTIONS, f"sections are {', '.join(SECTIONS)}")
            raise ConfigError(f"{source}: unknown section {section!r} (value {_shortened(values)}); {hint}")
        if values is None:  # "model:" with nothing below it
            continue
        if not isinstance(values, Mapping):
            raise ConfigError(f"{source}: section {section} holds options, got {values!r}")
        names = [name for name, option in OPTIONS.items() if option.section == section]
        for name, value in values.items():
            where = f"{source}: {section}.{name}"
            if name not in OPTIONS:
                close = nearest(str(name), names) or nearest(str(name), OPTIONS)
                full = f"{OPTIONS[close].section}.{close}" if close else ""
                hint = f"did you mean {full}?" if close else "optimus pretrain --help lists all options"
                raise ConfigError(f"{where}={value!r}: unknown option; {hint}")
            if name not in names:
                raise ConfigError(f"{where}={value!r} belongs into section {OPTIONS[name].section}")
            result[name] = convert(OPTIONS[name], value, where)
    return result


def build(values: Mapping[str, Any]) -> RunConfig:
    """Builds a run from ``{option: value}`` and the defaults. Raises ConfigError where a section's own checks fail."""
    sections = {
        section: cls(**{name: value for name, value in values.items() if OPTIONS[name].section == section})
        for section, cls in SECTIONS.items()
    }
    return RunConfig(**sections)
